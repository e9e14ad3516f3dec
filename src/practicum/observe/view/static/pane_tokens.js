// An answer token by token: coloured by any column, all columns of a token on hover, both top-k beside it.

import { tokenColour } from "./colours.js";
import { askRun } from "./data.js";
import { empty, exact, h, num, replace, visible } from "./dom.js";
import { address, go, kept } from "./place.js";
import { aroundKeys } from "./pane_session.js";
import { groupsAround } from "./rows.js";

const AT_ONCE = 3000;
const NAMES = {
  advantages: "advantage", teacher_kl: "KL to the teacher", rollout_logprobs: "logprob, engine", plain_logprobs: "logprob, engine at T = 1", old_logprobs: "logprob before the update",
  learner_logprobs: "logprob, learner", ref_logprobs: "logprob, reference", teacher_logprobs: "logprob, teacher", share: "share of the step's loss", loss: "loss", teacher_loss: "divergence from the teacher", teacher_overlap: "top-k overlap", teacher_entropy_gap: "entropy gap, student − teacher", kl: "KL to the reference", mismatch_weight: "weight against the mismatch", reward_tokens: "reward", values: "value, critic",
  returns: "return", version: "weight version", ratio: "ratio", weight: "weight after clipping", entropy: "entropy",
};
const FIRST = ["advantages", "teacher_kl", "ratio", "entropy", "share", "weight", "loss", "teacher_loss", "teacher_overlap", "learner_logprobs"];
const DIVERGING = ["advantages", "teacher_kl", "ratio", "values", "returns", "reward_tokens", "loss", "kl"];
const nameOf = (column) => NAMES[column] ?? column.replaceAll("_", " ");

export async function show(place, node, context) {
  const trajectory = Number(place.query.trajectory ?? 0);
  const [page, session] = await Promise.all([
    askRun(place.run, `/tokens/${place.step}/${place.prompt}/${place.session}/${trajectory}`),
    askRun(place.run, `/session/${place.step}/${place.prompt}/${place.session}?kind=samples`)]);
  const at = session.group.indexOf(place.session);
  const move = (by) => session.group[at + by] !== undefined && go({ ...place, session: session.group[at + by], query: { ...place.query, trajectory: "" } });
  const crumbs = h("div", { class: "crumbs" },
    h("button", { onclick: () => move(-1), disabled: at <= 0 }, "◀"), h("b", {}, `row ${at + 1}/${session.group.length}`), h("button", { onclick: () => move(1), disabled: at + 1 >= session.group.length }, "▶"),
    h("span", {}, `step ${place.step} · prompt ${place.prompt} · session ${place.session}`),
    session.trajectories.length > 1 && session.trajectories.map((one) => h("a", { class: one.trajectory === trajectory ? "active" : "", href: address({ ...place, query: { ...place.query, trajectory: one.trajectory || "" } }) }, `trajectory ${one.trajectory}`)),
    h("a", { href: address({ ...place, pane: "session", query: kept(place) }) }, "its session"), !page.missing && h("span", { class: "muted" }, learnt(page.summary)));
  node.append(crumbs);
  const around = await groupsAround(place, "samples");
  const keys = { j: () => move(1), k: () => move(-1), ...aroundKeys(around, place) };
  if (page.missing) {
    node.append(empty(page.missing));
    return { keys };
  }
  const names = Object.keys(page.columns).sort((a, b) => rank(a) - rank(b));
  const columnOf = ({ colour: wanted }) => names.find((name) => wanted && [wanted, `${wanted}s`].includes(name)) ?? names[0];
  let colour = columnOf(place.query);
  let chosen = page.tokens.findIndex((_, i) => page.mask[i]);
  let limit = AT_ONCE;
  const choice = h("select", { "aria-label": "Colour by", onchange: () => context.change({ colour: choice.value }) }, names.map((name) => h("option", { value: name, selected: name === colour }, nameOf(name))));
  const scale = h("span", { class: "scale" });
  const flow = h("div", { class: "flow" });
  const side = h("aside", { class: "token-side" });
  const rules = removedBy(page.rules);

  function drawFlow() {
    const scaled = scaleOf(colour, page.columns[colour] ?? [], page.mask);
    replace(scale, scaled.text);
    const prompt = page.prompt.map((token) => h("span", { class: `token prompt ${token.special ? "special" : ""}`, title: `prompt, id ${token.id}` }, visible(token.text), breaks(token.text)));
    const shown = page.tokens.slice(0, limit).map((token, i) => tokenNode(token, i, scaled));
    const more = page.tokens.length > limit && h("button", { onclick: () => { limit = Infinity; drawFlow(); } }, `show all ${num(page.tokens.length)} tokens`);
    replace(flow, prompt, shown, more || null);
  }

  function tokenNode(token, i, scaled) {
    const given = !page.mask[i];
    const removed = rules.get(i);
    const share = given ? null : scaled.share(i);
    const classes = ["token", given && "given", token.special && "special", removed && "removed", i === chosen && "chosen", scaled.diverging && share > 0 && "plus", scaled.diverging && share < 0 && "minus"].filter(Boolean).join(" ");
    const bar = h("i", { class: "bar" });
    if (share !== null && share !== undefined) {
      const tall = Math.max(1, Math.abs(share) * 9);
      Object.assign(bar.style, { height: `${tall}px`, background: tokenColour(Math.sign(share) || 1, scaled.diverging) });
      if (scaled.diverging && share < 0) bar.classList.add("down");
    }
    const text = h("span", { class: "glyph" }, visible(token.text));
    if (share !== null && share !== undefined) text.style.background = tokenColour(share, scaled.diverging);
    const node = h("span", { class: classes, "data-i": i, onmouseenter: () => select(i), onclick: () => select(i) }, text, removed && h("sup", {}, removed.join(", ")), bar);
    return [node, breaks(token.text)];
  }

  function select(i) {
    if (i < 0 || i >= page.tokens.length) return;
    chosen = i;
    flow.querySelector(".chosen")?.classList.remove("chosen");
    flow.querySelector(`[data-i="${i}"]`)?.classList.add("chosen");
    drawSide();
  }

  function drawSide() {
    const token = page.tokens[chosen];
    if (!token) return replace(side, empty("No tokens."));
    const rows = names.map((name) => h("tr", { class: name === colour ? "active" : "", onclick: () => context.change({ colour: name }) },
      h("td", { title: page.about[name] || null }, nameOf(name)), h("td", { class: "n", title: exact(page.columns[name][chosen]) }, num(page.columns[name][chosen], 4))));
    replace(side, h("div", { class: "token-name" }, h("span", { class: `glyph ${token.special ? "special" : ""}` }, visible(token.text)), h("span", { class: "muted" }, ` id ${token.id} · place ${chosen + 1} of ${page.tokens.length}`)),
      h("p", { class: "muted" }, page.mask[chosen] ? "sampled by the student" : "given by a tool or template: not trained on"),
      rules.get(chosen) && h("p", { class: "warn" }, `removed by ${rules.get(chosen).join(", ")}`),
      h("table", { class: "plain" }, h("tbody", {}, rows)),
      h("div", { class: "top-ks" }, ["teacher", "student"].map((who) => topK(who, page, chosen))));
  }

  drawFlow();
  drawSide();
  const legend = h("p", { class: "muted token-legend" }, h("span", { class: "token prompt" }, "prompt"), h("span", { class: "token given" }, h("span", { class: "glyph" }, "given")), h("span", { class: "token removed" }, h("span", { class: "glyph" }, "removed"), h("sup", {}, "rule")));
  node.append(h("div", { class: "tools" }, h("label", {}, "colour by ", choice), scale, legend), h("div", { class: "token-view" }, flow, side));
  return {
    keys: { ...keys, c: () => context.change({ colour: names[(names.indexOf(colour) + 1) % names.length] }), ArrowRight: () => select(chosen + 1), ArrowLeft: () => select(chosen - 1) },
    themed: drawFlow,
    move: (next) => {
      const same = ["run", "pane", "step", "prompt", "session"].every((name) => next[name] === place[name]) && Number(next.query.trajectory ?? 0) === trajectory;
      if (same) {
        colour = columnOf(next.query);
        choice.value = colour;
        drawFlow();
        drawSide();
      }
      return same;
    },
  };
}

function learnt({ trained, update }) {
  if (trained === null) return "not learnt from";
  return update > 1 ? `learnt from in step ${trained}, update ${update}` : `learnt from in step ${trained}`;
}

function rank(name) {
  const at = FIRST.indexOf(name);
  return at < 0 ? FIRST.length : at;
}

const breaks = (text) => (text.includes("\n") ? h("br") : null);

function removedBy(rules) {
  const found = new Map();
  for (const [rule, places] of Object.entries(rules)) for (const i of places) found.set(i, [...(found.get(i) ?? []), rule]);
  return found;
}

// How a column is coloured: each token's share of the largest, and the scale in words.
function scaleOf(name, values, mask) {
  const read = name === "ratio" ? (v) => Math.log(v) : name.endsWith("logprobs") ? (v) => -v : (v) => v;
  const sampled = values.map((v, i) => (v === null || v === undefined || !mask[i] ? null : read(v)));
  const known = sampled.filter((v) => v !== null && Number.isFinite(v));
  const diverging = DIVERGING.includes(name) && (known.some((v) => v < 0) || name === "ratio");
  if (name === "version") {
    const [low, high] = [Math.min(...known), Math.max(...known)];
    const span = high - low || 1;
    return { diverging: false, share: (i) => (sampled[i] === null ? null : 0.2 + (0.8 * (sampled[i] - low)) / span), text: !known.length ? "" : low === high ? `version ${low}` : `versions ${low} to ${high}` };
  }
  if (known.length && known.every((v) => v === 0)) return { diverging: false, share: () => null, text: name === "ratio" ? "all ratios are 1" : "all are 0" };
  const most = Math.max(...known.map(Math.abs), 0) || 1;
  const swatch = (share) => h("i", { class: "shade", style: { background: tokenColour(share, diverging) } });
  const what = name === "ratio" ? "log-ratio " : name.endsWith("logprobs") ? "−logprob " : "";
  const text = diverging ? [what, num(-most), swatch(-1), swatch(-0.4), swatch(0.02), swatch(0.4), swatch(1), `+${num(most)}`] : [what, "0", swatch(0.05), swatch(0.4), swatch(1), num(most)];
  return { diverging, share: (i) => (sampled[i] === null || !Number.isFinite(sampled[i]) ? null : sampled[i] / most), text: known.length ? text : "not recorded for this row" };
}

function topK(who, page, at) {
  const found = page.top_k[who]?.[at];
  const title = who === "teacher" && page.summary.teacher ? `teacher “${page.summary.teacher}” top-k` : `${who} top-k`;
  if (!found?.length) {
    const taught = page.summary.teacher ? "Not recorded: distill.signal top_k and full bring it." : "No teacher corrects this row.";
    const why = who === "teacher" ? taught : "Not recorded.";
    return page.top_k.teacher || page.top_k.student ? h("div", { class: "top-k" }, h("h3", {}, title), h("p", { class: "muted" }, why)) : null;
  }
  const own = page.tokens[at].id;
  return h("div", { class: "top-k" }, h("h3", {}, title), h("table", { class: "plain" }, h("tbody", {}, found.map((one) => {
    const share = Math.exp(one.logprob);
    return h("tr", { class: one.id === own ? "active" : "", title: `id ${one.id}, logprob ${exact(one.logprob)}` }, h("td", {}, h("span", { class: `glyph ${one.special ? "special" : ""}` }, visible(one.text)), one.id === own ? " ◂" : ""),
      h("td", { class: "n" }, `${(100 * share).toFixed(1)} %`), h("td", { class: "share" }, h("i", { style: { width: `${Math.round(32 * share)}px` } })));
  }))));
}
