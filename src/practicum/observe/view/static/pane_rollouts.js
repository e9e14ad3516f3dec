// The recorded sessions: filters, sort, histograms whose bins can be clicked.

import { colourOf } from "./colours.js";
import { askRun } from "./data.js";
import { empty, exact, h, num, replace, svg } from "./dom.js";
import { address, go, kept } from "./place.js";
import { histogram, numbers, rowTable, select, stepsOf, word } from "./rows.js";
import { signed } from "./answers.js";
import { windowTable } from "./window_table.js";

const NARROW = 760;
const TYPING_MS = 150;
const FILTERS = ["domain", "teacher", "task", "finish"];

export async function show(place, node, context) {
  const kind = place.query.kind === "eval" ? "eval" : "samples";
  let table = await rowTable(place.run, kind);
  let at = place;
  let rows = [];
  const texts = new Map();
  const tools = h("span", { class: "inline" });
  const field = h("input", { type: "search", placeholder: "text of prompts and answers", value: place.query.q ?? "", "aria-label": "Search prompts and answers",
    oninput: () => {
      clearTimeout(typing);
      typing = setTimeout(() => context.change({ q: field.value }), TYPING_MS);
    } });
  let typing = null;
  let hits = { q: "", total: 0, keeps: null };
  const bars = h("div", { class: "histograms" });
  const count = h("span", { class: "muted" });
  const none = h("div", {});
  const columns = columnsOf(table);
  const view = windowTable({
    columns, sort: at.query.sort ?? "-step", draw,
    onopen: (row) => go({ run: at.run, pane: "session", ...keyOf(row), query: kept(at) }),
    onsort: (name) => {
      const now = at.query.sort ?? "-step";
      context.change({ sort: now === name ? `-${name}` : now === `-${name}` ? name : ["reward", "tokens", "advantage", "step"].includes(name) ? `-${name}` : name });
    },
    onview: load,
  });

  const keyOf = (row) => ({ step: table.columns.step[row], prompt: table.columns.prompt[row], session: table.columns.session[row] });

  function draw(row) {
    const found = texts.get(row);
    return columns.map(({ name }) => {
      const [content, title] = CELLS[name](table, row, { found, at, key: keyOf(row) });
      return h("span", { class: `wt-cell ${CLASS[name] ?? ""}`, role: "cell", title: title ?? null }, content);
    });
  }

  async function load(shown) {
    const missing = shown.filter((row) => !texts.has(row));
    if (!missing.length) return;
    missing.forEach((row) => texts.set(row, null));
    const found = await askRun(at.run, `/texts?${new URLSearchParams([["kind", kind], ...missing.map((row) => ["row", row])])}`);
    for (const [row, text] of Object.entries(found)) texts.set(Number(row), text ?? { prompt: "left out", response: "" });
    view.paint();
  }

  // Texts are on the server: rows that have the words come as their numbers.
  async function search() {
    const q = at.query.q ?? "";
    if (q === hits.q && (!q || hits.total === table.total)) return;
    hits = { q, total: table.total, keeps: null };
    if (!q) return update();
    const found = await askRun(at.run, `/search?${new URLSearchParams({ kind, q })}`);
    if ((at.query.q ?? "") !== q) return;
    hits.keeps = new Uint8Array(table.total);
    for (const row of found) hits.keeps[row] = 1;
    update();
  }

  function update() {
    search();
    rows = select(table, at.query, "", hits.keeps);
    count.textContent = hits.q && !hits.keeps ? "searching …" : `${num(rows.length)} of ${num(table.total)} recorded sessions`;
    replace(tools, filters(table, at, context, kind), count);
    replace(bars, histogramOf("reward", "reward"), histogramOf("tokens", "tokens"));
    replace(none, table.total ? (rows.length ? null : empty("No recorded session passes these filters.", nearest())) : nothing(context.info, kind));
    view.node.hidden = !rows.length;
    view.set(rows, at.query.sort ?? "-step");
  }

  function nearest() {
    const steps = stepsOf(table);
    if (!at.query.step || steps.includes(Number(at.query.step))) return null;
    const wanted = Number(at.query.step);
    const best = steps.reduce((a, b) => (Math.abs(b - wanted) < Math.abs(a - wanted) ? b : a));
    return h("button", { onclick: () => context.change({ step: String(best) }) }, `Step ${wanted} has no recorded rows; step ${best} has.`);
  }

  function histogramOf(name, title) {
    const counted = at.query[name] ? select(table, { ...at.query, sort: "" }, name, hits.keeps) : rows;
    const found = histogram(numbers(table, name), counted);
    return found && drawHistogram(found, title, at.query[name], (bin) => context.change({ [name]: bin }));
  }

  function stepBy(by) {
    const steps = stepsOf(table);
    const now = at.query.step ? steps.indexOf(Number(at.query.step)) : by > 0 ? -1 : steps.length;
    const next = steps[Math.max(0, Math.min(steps.length - 1, now + by))];
    if (next !== undefined) context.change({ step: String(next) });
  }

  node.append(h("div", { class: "tools" }, field, tools), bars, none, view.node);
  requestAnimationFrame(update);
  update();
  return {
    update: async () => {
      const before = table;
      table = await rowTable(place.run, kind);
      if (table !== before) texts.clear();
      update();
    },
    move: (next) => {
      const same = next.run === at.run && next.pane === "rollouts" && (next.query.kind === "eval" ? "eval" : "samples") === kind;
      if (same) {
        at = next;
        if (document.activeElement !== field) field.value = next.query.q ?? "";
        update();
      }
      return same;
    },
    keys: { j: () => view.move(1), k: () => view.move(-1), Enter: () => view.open(), h: () => stepBy(-1), l: () => stepBy(1) },
    close: () => view.close(),
    themed: update,
  };
}

const number = (name) => (table, row) => [num(table.columns[name][row]), exact(table.columns[name][row])];
const named = (name) => (table, row) => {
  const text = word(table, name, row);
  return [text ? [h("i", { class: "swatch", style: { borderColor: colourOf(text) } }), text] : "–"];
};
// What a cell shows, and its title.
const CELLS = {
  step: number("step"), reward: number("reward"), tokens: number("tokens"), version: number("version"), turns: number("turns"), tool_calls: number("tool_calls"),
  prompt: ({ columns }, row, { at, key }) => [h("a", { href: address({ run: at.run, pane: "group", ...key, query: kept(at) }), title: "its group side by side", onclick: (event) => event.stopPropagation() }, String(columns.prompt[row]))],
  session: ({ columns }, row) => [String(columns.session[row])],
  domain: named("domain"), teacher: named("teacher"),
  advantage: ({ columns }, row) => [columns.advantage[row] === null ? "–" : signed(columns.advantage[row]), exact(columns.advantage[row])],
  finish: (table, row) => [word(table, "finish", row)],
  prompt_text: (table, row, { found }) => [found ? found.prompt : "…", found?.prompt],
  answer: (table, row, { found }) => [found ? found.failure || found.response : "…", found?.failure || found?.response],
};
const NUMBERS = ["step", "prompt", "session", "reward", "advantage", "tokens", "turns", "tool_calls", "version"];
const CLASS = { ...Object.fromEntries(NUMBERS.map((name) => [name, "n"])), prompt_text: "text", answer: "text" };
const COLUMNS = [
  ["step", "step", "64px"], ["prompt", "prompt", "70px"], ["session", "session", "76px"], ["domain", "domain", "104px"], ["teacher", "teacher", "104px"],
  ["reward", "reward", "76px"], ["advantage", "advantage", "96px"], ["tokens", "tokens", "72px"], ["turns", "turns", "62px"], ["tool_calls", "calls", "60px", "tool calls"],
  ["version", "version", "74px", "the oldest weights that sampled it, as their number of updates"], ["finish", "finish", "72px"],
].map(([name, title, width, about]) => ({ name, title, width, about, class: CLASS[name] })).concat([
  { name: "prompt_text", title: "prompt", width: "minmax(150px, 1fr)", class: "text", sort: false },
  { name: "answer", title: "answer", width: "minmax(220px, 2fr)", class: "text", sort: false },
]);

// Columns that would say the same of every row are left out; what matters most is in view on a narrow page.
function columnsOf({ words, columns }) {
  const most = (name) => columns[name].reduce((a, b) => Math.max(a, b ?? 0), 0);
  const any = (name) => columns[name].some((value) => value !== null);
  const has = { teacher: words.teacher.some(Boolean), reward: any("reward"), advantage: any("advantage"), version: any("version"), turns: most("turns") > 1, tool_calls: most("tool_calls") > 0 };
  const shown = COLUMNS.filter(({ name }) => has[name] ?? true);
  if (innerWidth >= NARROW) return shown;
  const first = ["step", "prompt", "reward", "answer"];
  return [...first.flatMap((name) => shown.filter((one) => one.name === name)), ...shown.filter(({ name }) => !first.includes(name))];
}

function filters(table, at, context, kind) {
  const choices = FILTERS.map((name) => {
    const words = table.words[name].filter(Boolean).sort();
    if (words.length < 2 && !at.query[name]) return null;
    return h("select", { "aria-label": name, onchange: (event) => context.change({ [name]: event.target.value }) },
      h("option", { value: "" }, `any ${name}`), words.map((one) => h("option", { value: one, selected: at.query[name] === one }, one)));
  });
  const step = h("input", { type: "number", min: "0", placeholder: "step", class: "short", value: at.query.step ?? "", "aria-label": "Step", onchange: (event) => context.change({ step: event.target.value }) });
  const flat = h("label", {}, h("input", { type: "checkbox", checked: at.query.flat === "1", onchange: (event) => context.change({ flat: event.target.checked ? "1" : "" }) }), " flat groups");
  const source = h("select", { "aria-label": "Answers of", onchange: (event) => context.change({ kind: event.target.value, step: "" }) },
    h("option", { value: "", selected: kind === "samples" }, "training"), h("option", { value: "eval", selected: kind === "eval" }, "evaluation"));
  const chips = ["reward", "tokens", "advantage", "prompt"].filter((name) => at.query[name]).map((name) => h("button", { class: "chip", onclick: () => context.change({ [name]: "" }) }, `${name} ${chipText(at.query[name])} ×`));
  return [source, step, choices, flat, chips];
}

const chipText = (text) => [...new Set(text.split("..").map((part) => num(Number(part))))].join(" to ");

function nothing(info, kind) {
  if (kind === "eval") return empty("No answers of evaluations are recorded.", "track.eval_prompts sets how many prompts are written.");
  if (info.record === "none" || info.record === "0") return empty("This run records no rows: track.record is none.", "track.record: 2 keeps two whole groups of each step, all keeps every row.");
  return empty("No rows are recorded yet.", "They come with the first step.");
}

function drawHistogram(found, title, chosen, onpick) {
  const width = 240;
  const height = 44;
  const most = Math.max(...found.bins.map((bin) => bin.count));
  const each = width / found.bins.length;
  const bars = found.bins.map((bin, at) => {
    const tall = bin.count ? Math.max(2, (bin.count / most) * height) : 0;
    const range = `${bin.from}..${bin.to}`;
    return svg("g", { class: `bin ${chosen === range ? "chosen" : ""}`, onclick: () => onpick(chosen === range ? "" : range), tabindex: "0", role: "button" },
      svg("title", {}, `${title} ${bin.from === bin.to ? num(bin.from) : `${num(bin.from)} to ${num(bin.to)}`}: ${num(bin.count)}`),
      svg("rect", { x: at * each, y: 0, width: each, height, class: "hit" }),
      svg("rect", { x: at * each + 0.5, y: height - tall, width: Math.max(1, each - 1), height: tall, class: "bar" }));
  });
  return h("figure", { class: "histogram" }, h("figcaption", {}, title), svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none" }, bars),
    h("span", { class: "ends" }, h("span", {}, num(found.low)), h("span", {}, num(found.high))));
}
