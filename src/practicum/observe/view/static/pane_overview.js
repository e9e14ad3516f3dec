// Is it learning, and what to look at next.

import { chart } from "./charts.js";
import { colourOf, DASHES, nth } from "./colours.js";
import { askRun, series } from "./data.js";
import { counted, duration, empty, h, num, percent, replace, section } from "./dom.js";
import { address, go, kept } from "./place.js";
import { answerCard } from "./answers.js";
import { pick } from "./picking.js";

const NOT_STAGES = ["time/step", "time/eval", "time/checkpoint"];
const STAGES_SHOWN = 7;

export async function show(place, node, context) {
  const advice = h("div", { class: "advice" });
  const grid = h("div", { class: "grid" });
  const facts = h("div", { class: "columns" });
  const newest = h("div", {});
  node.append(advice, grid, newest, facts);

  async function draw() {
    const info = context.info;
    replace(advice, info.advisories.map((one) => advisory(one, place)));
    if (!info.names.length) {
      replace(grid, empty(info.state.kind === "waiting" ? info.state.sentence : "No step is done yet.",
        "Curves appear here after the first evaluation."));
      return;
    }
    const drawn = await curves(place, context);
    for (const one of drawn) {
      const known = charts.get(one.title);
      if (known) {
        known.options.band = one.band;
        known.update(one.curves);
      } else {
        const made = chart(one);
        charts.set(one.title, made);
        grid.append(made.node);
      }
    }
    replace(facts, checks(info, place), speed(info));
  }

  // What is below the curves, after they are shown.
  async function drawRest() {
    if (!context.info.names.length) return;
    replace(newest, newestGroup(await askRun(place.run, "/newest"), place, context.info));
  }

  const charts = new Map();
  const rest = () => drawRest().catch((error) => replace(newest, empty(error.message)));
  await draw();
  requestAnimationFrame(() => setTimeout(rest));
  return {
    update: async () => {
      await draw();
      await rest();
    },
  };
}

function advisory(one, place) {
  const rows = { ...place, pane: "rollouts", query: { ...kept(place), ...Object.fromEntries(new URLSearchParams(one.rows)) } };
  const to = (pane, q) => address({ run: place.run, pane, query: { ...kept(place), q } });
  return h("div", { class: `advisory ${one.level}` },
    h("span", { class: "mark", "aria-label": one.level }, one.level === "alarm" ? "✗" : "⚠"), h("span", { class: "said" }, one.sentence),
    one.level === "alarm" ? h("a", { href: to("log", one.kind) }, "log") : h("a", { href: address(rows) }, "rows"),
    h("a", { href: to("metrics", one.metric) }, "curve"));
}

async function curves(place, context) {
  const ids = context.compared();
  const range = place.query.range?.split("-").map(Number) ?? null;
  const common = {
    range,
    onzoom: (to) => context.change({ range: to ? to.join("-") : "" }),
  };
  const wanted = ids.map((id) => namesOf(context.runs.get(id)));
  const found = await Promise.all(ids.map((id, at) => series(id, [...new Set(Object.values(wanted[at]).flat()), "reward/std"], range)));
  found.forEach(addSpread);
  const lines = (which, label) => ids.flatMap((id, run) => wanted[run][which].map((name) => {
    const word = label(name);
    const plain = word === "" ? (ids.length > 1 ? id : "all") : word;
    return {
      label: ids.length > 1 && word !== "" ? `${word} · ${id}` : plain,
      colour: word === "" ? nth(7) : colourOf(word),
      dash: DASHES[run % DASHES.length], data: found[run][name], name,
    };
  }));
  const score = wanted[0].score;
  const info = context.info;
  const expected = info.expected.metric ? `expected: ${info.expected.metric} at least ${num(info.expected.at_least)}` : null;
  const onpick = (name) => (step) => go(pick(place, name, step));
  return [
    { ...common, title: `${wanted[0].metric || "evaluation"} by domain`, about: "held-out prompts; the shaded band is what the recipe expects",
      curves: lines("score", (name) => name.slice(wanted[0].metric.length + 1)), band: expected && { low: info.expected.at_least, high: null }, floor: true,
      more: expected && h("span", { class: "muted more" }, expected),
      none: "No evaluation yet (eval.every, eval.greedy).", onpick: onpick(score[0] ?? "eval") },
    ...(wanted[0].reward.length || !wanted[0].other.length ? [{ ...common, title: "reward, mean ± spread", about: "mean of the rolled-out sessions, with the standard deviation of all", curves: lines("reward", (name) => name.slice("reward/mean/".length)), floor: true,
      none: "Answers are not judged in this recipe (reward.weight is 0; reward.log_only judges them all the same).", onpick: onpick("reward/mean") }] : [{ ...common, title: "train/loss", curves: lines("loss", () => ""), onpick: onpick("train/loss") }]),
    ...(wanted[0].kl.length ? [{ ...common, title: "KL to teachers", unit: "nats", about: "k1 estimate of KL(student ‖ teacher), mean over tokens", curves: lines("kl", (name) => name.split("/").slice(1, -1).join("/")),
      onpick: onpick("kl") }] : []),
    ...(wanted[0].stale.length ? [{ ...common, title: "sample size of stale rows", about: "effective sample size of the ratios student / sampling policy: 1 if nothing has moved (rollout.lag)", curves: lines("stale", () => ""), onpick: onpick("train/ratio") }] : []),
    ...(wanted[0].kl.length || wanted[0].stale.length ? [] : [{ ...common, title: wanted[0].other[0] ?? "train/loss", curves: lines("other", () => ""), onpick: onpick("train/loss") }]),
    { ...common, title: wanted[0].stale.length ? "seconds of the stages, which overlap" : "where a step's time goes", unit: "s", stacked: true, about: "seconds of each stage",
      curves: lines("time", (name) => name.slice("time/".length)).filter((line) => !line.dash).map((line, at) => ({ ...line, colour: nth(at) })),
      onpick: (step) => go({ run: place.run, pane: "step", step, query: kept(place) }) },
  ];
}

// The spread of the rewards around their mean, as a band.
function addSpread(curves) {
  const [mean, spread] = [curves["reward/mean"], curves["reward/std"]];
  if (!mean || mean.values.length !== spread.values.length) return;
  const side = (sign) => mean.values.map((value, at) => (value === null ? null : value + sign * (spread.values[at] ?? 0)));
  Object.assign(mean, { low: side(-1), high: side(1) });
}

function namesOf(info) {
  const metric = ["eval/greedy", ...info.names.filter((n) => /^eval\/(mean|pass)@\d+$/.test(n))].find((n) => info.names.includes(n)) ?? "";
  const below = (prefix) => info.names.filter((name) => name.startsWith(`${prefix}/`));
  const score = metric ? [...below(metric), ...(below(metric).length === 1 ? [] : [metric])] : [];
  const domains = below("reward/mean");
  const reward = info.names.includes("reward/mean") ? [...(domains.length > 1 ? domains : []), "reward/mean"] : [];
  const kl = info.names.filter((name) => /^teacher\/.+\/kl$/.test(name));
  const times = info.names.filter((name) => name.startsWith("time/") && !NOT_STAGES.includes(name));
  times.sort((a, b) => (info.last[b] ?? 0) - (info.last[a] ?? 0));
  const other = ["train/kl", "advantage/kl_reward", "train/approx_kl", "train/loss"].filter((n) => info.names.includes(n) && info.last[n]).slice(0, 1);
  return { metric, score, reward, kl, time: times.slice(0, STAGES_SHOWN), other, loss: info.names.filter((n) => n === "train/loss"), stale: info.names.filter((n) => n === "train/sample_size") };
}

const FIRED = { error: "else the run ends", warn: "else a warning", off: "" };

function checks(info, place) {
  const rows = info.checks.map((check) => {
    const off = check.level === "off";
    const state = off ? "off" : check.fired ? `fired ${num(check.fired)}×` : "holds";
    return h("tr", { class: off ? "muted" : check.fired ? "bad" : "" },
      h("td", {}, off ? "·" : check.fired ? "✗" : "✓"), h("td", {}, check.name), h("td", {}, state),
      h("td", { class: "n", title: "in all steps" }, check.in_all ? h("a", { href: address({ run: place.run, pane: "log", query: { ...kept(place), q: `check ${check.name}` } }) }, `${num(check.in_all)}× in all`) : ""),
      h("td", { class: "muted" }, FIRED[check.level] ?? check.level));
  });
  const body = rows.length ? h("table", { class: "plain" }, h("tbody", {}, rows)) : h("p", { class: "muted" }, "The recipe names no checks.");
  return section(`Checks after step ${num(info.step)}`, body);
}

function speed(info) {
  const rows = [
    ["one step", duration(info.seconds_per_step)],
    ["left", info.state.kind === "live" ? duration(info.seconds_left) : "–"],
    ["rollout", info.last["rollout/tokens_per_second"] ? `${num(info.last["rollout/tokens_per_second"])} tokens/s` : "–"],
    ["answers", info.last["rollout/response_tokens"] ? `${num(info.last["rollout/response_tokens"])} tokens` : "–"],
    ...stale(info),
  ];
  const table = h("table", { class: "plain" }, h("tbody", {}, rows.map(([what, value]) => h("tr", {}, h("td", {}, what), h("td", { class: "n" }, value)))));
  return section("Speed", table);
}

// With a lag: how old the weights are that sampled what is learnt from.
function stale({ last }) {
  if (last["async/staleness"] === undefined) return [];
  const steps = (count) => counted(count, "step");
  return [
    ["weights that sampled", `${steps(last["async/staleness"])} old`],
    ["the oldest of them", `${steps(last["async/staleness_max"] ?? last["async/staleness"])} old`],
    ["effective sample size", last["train/sample_size"] === undefined ? "–" : percent(last["train/sample_size"], 1)],
    ["learner waits for rollouts", duration(last["time/waited"])],
  ];
}

function newestGroup(rows, place, info) {
  if (!rows.length) {
    return section("Newest group", empty("No answers are recorded.", info.step ? "track.record sets how many groups of each step are written; it is none here, or no step is done." : "They come with the first step."));
  }
  const first = rows[0];
  const to = (pane, row) => address({ ...place, pane, step: first.step, prompt: row.group, session: row.session, query: kept(place) });
  return section("Newest group",
    h("p", { class: "muted" }, h("a", { href: to("group", first) }, `step ${first.step}, prompt ${first.group}`), ` · ${first.domain}`,
      first.teacher ? ` · teacher ${first.teacher}` : ""),
    h("div", { class: "prompt-line" }, h("span", { class: "muted" }, "prompt "), h("code", { class: "text" }, first.prompt)),
    first.expected !== null && first.expected !== undefined && h("div", { class: "prompt-line" }, h("span", { class: "muted" }, "expected "), h("code", { class: "text" }, typeof first.expected === "string" ? first.expected : JSON.stringify(first.expected))),
    h("div", { class: "answers" }, rows.slice(0, 8).map((row) => answerCard(row, to("session", row)))));
}
