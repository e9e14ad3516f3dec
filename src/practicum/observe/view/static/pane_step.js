// A step: the timeline of its stages on every process, the plan with reads and writes, skipped stages with the reason.

import { nth } from "./colours.js";
import { askRun } from "./data.js";
import { duration, empty, exact, h, num, section, svg } from "./dom.js";
import { address, go, kept } from "./place.js";

const LANE = 22;
const LETTER = 7.4; // pixels of a letter of the timeline, about
const WIDE = 1000;

export async function show(place, node) {
  const wanted = place.step === "last" || place.step === undefined ? 0 : place.step;
  const page = await askRun(place.run, `/step/${wanted}`);
  const [first, last] = page.steps ?? [1, 0];
  const move = (by) => page.step + by >= first && page.step + by <= last && go({ ...place, step: page.step + by });
  const rows = address({ run: place.run, pane: "rollouts", query: { ...kept(place), step: page.step } });
  node.append(h("div", { class: "crumbs" }, h("button", { onclick: () => move(-1), disabled: page.step <= first }, "◀"), h("b", {}, `step ${page.step}`),
    h("button", { onclick: () => move(1), disabled: page.step >= last }, "▶"), h("span", { class: "muted" }, last ? `of ${num(first)} to ${num(last)}` : ""), h("a", { href: rows }, "its rollouts")));
  const order = page.plan?.stages.map((stage) => stage.name) ?? [...new Set(page.spans.map((span) => span.stage))];
  const colourOf = (name) => nth(Math.max(0, order.indexOf(name)));
  if (page.spans.length) node.append(section("Timeline", timeline(page.step, page.spans, colourOf)));
  else node.append(section("Timeline", noSpans(page)));
  node.append(section("Plan", page.plan ? planGraph(page.plan, colourOf) : empty("This run wrote no plan: an earlier version of practicum made it.")));
  node.append(section("Metrics of this step", metricsTable(page.metrics, place)));
  return { keys: { h: () => move(-1), l: () => move(1) }, themed: () => {} };
}

function noSpans(page) {
  const times = Object.entries(page.metrics).filter(([name]) => name.startsWith("time/")).sort((a, b) => b[1] - a[1]);
  if (!times.length) return empty("No step is done yet.");
  return h("div", {}, h("p", { class: "muted" }, "The timeline of this step is not recorded (track.record is none, or an earlier version made the run). Seconds by stage:"),
    h("table", { class: "plain" }, h("tbody", {}, times.map(([name, value]) => h("tr", {}, h("td", {}, name.slice(5)), h("td", { class: "n", title: exact(value) }, duration(value)))))));
}

// A lane for each process, teacher and reward model; what overlaps in a lane, such as the steps of a lag, is drawn below each other.
function timeline(step, spans, colourOf) {
  const own = spans.filter((span) => span.step === step);
  const start = Math.min(...own.map((span) => span.began));
  const end = Math.max(...own.map((span) => span.began + span.seconds));
  const whole = end - start || 1e-9;
  const lanes = lanesOf(spans, whole / 500);
  const label = Math.min(300, 16 + LETTER * Math.max(...lanes.map((lane) => lane.name.length)));
  const tall = 20 + lanes.reduce((sum, lane) => sum + lane.tracks.length, 0) * LANE;
  const inside = (time) => Math.min(end, Math.max(start, time));
  const x = (time) => label + ((inside(time) - start) / whole) * (WIDE - label - 10);
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((share) => {
    const at = x(start + share * whole);
    return [svg("line", { x1: at, x2: at, y1: 16, y2: tall, class: "tick" }), svg("text", { x: at, y: 11, class: "tick-text", "text-anchor": share === 1 ? "end" : share ? "middle" : "start" }, duration(share * whole))];
  });
  let y = 20;
  const rows = lanes.map((lane) => {
    const title = svg("text", { x: 4, y: y + 14, class: "lane" }, lane.name);
    const bars = lane.tracks.map((track, at) => track.map((span) => bar(span, y + at * LANE)));
    y += lane.tracks.length * LANE;
    return [title, bars];
  });
  function bar(span, top) {
    const wide = Math.max(1.5, x(span.began + span.seconds) - x(span.began));
    const name = span.part ? `${span.stage} · ${span.part}` : span.stage;
    const shown = (span.step === step ? [name, span.stage] : [`${name} of step ${span.step}`, `step ${span.step}`]).find((text) => wide > LETTER * text.length);
    const told = `${name} of step ${span.step} on ${span.role} ${span.number}: ${duration(span.seconds)}, ${num(span.rows)} rows, ${num(span.calls)} calls`;
    return svg("g", { class: span.step === step ? "span" : "span other" }, svg("title", {}, told), svg("rect", { x: x(span.began), y: top + 2, width: wide, height: LANE - 5, rx: 2, fill: colourOf(span.stage) }),
      shown && svg("text", { x: x(span.began) + 5, y: top + 14 }, shown));
  }
  const others = spans.length > own.length && h("p", { class: "muted" }, "Pale: other steps, at work at the same time (rollout.lag).");
  return h("div", {}, h("div", { class: "scroll" }, svg("svg", { class: "timeline", viewBox: `0 0 ${WIDE} ${tall + 6}`, role: "img" }, ticks, rows)), others);
}

function lanesOf(spans, least) {
  const lanes = new Map();
  const alone = (role) => new Set(spans.filter((span) => span.role === role).map((span) => span.number)).size === 1;
  for (const span of [...spans].sort((a, b) => a.began - b.began)) {
    const process = alone(span.role) ? span.role : `${span.role} ${span.number}`;
    const name = span.part ? `${process} · ${span.part}` : process;
    if (!lanes.has(name)) lanes.set(name, []);
    const tracks = lanes.get(name);
    const free = tracks.find((track) => track.at(-1).began + track.at(-1).seconds <= span.began + least);
    if (free) free.push(span);
    else tracks.push([span]);
  }
  return [...lanes].map(([name, tracks]) => ({ name, tracks })).sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
}

function planGraph(plan, colourOf) {
  const tall = 46;
  const gutter = 120;
  const names = plan.stages.map((stage) => stage.name);
  const arcs = plan.stages.flatMap((stage, to) => [...new Set(Object.values(stage.reads))].map((writer) => {
    const from = names.indexOf(writer);
    const [y1, y2] = [from * tall + 26, to * tall + 14];
    const out = gutter - 14 - Math.min(96, 12 * (to - from));
    const fields = Object.entries(stage.reads).filter(([, by]) => by === writer).map(([field]) => field);
    return svg("path", { d: `M ${gutter - 6} ${y1} C ${out} ${y1}, ${out} ${y2}, ${gutter - 6} ${y2}`, class: "arc", stroke: colourOf(writer), "data-from": writer, "data-to": stage.name }, svg("title", {}, `${writer} → ${stage.name}: ${fields.join(", ")}`));
  }));
  const boxes = plan.stages.map((stage, at) => h("div", { class: "stage", style: { top: `${at * tall}px`, left: `${gutter}px`, borderColor: colourOf(stage.name) } },
    h("span", {}, h("b", {}, `${at + 1}. ${stage.name}`), " ", h("span", { class: "muted" }, stage.about)),
    h("span", { class: "fields" }, Object.keys(stage.reads).length > 0 && ["reads ", Object.entries(stage.reads).map(([field, by], i) => [i ? ", " : "", h("code", { title: `from ${by}` }, field)])],
      Object.keys(stage.reads).length > 0 && stage.writes.length > 0 && " · ", stage.writes.length > 0 && ["writes ", stage.writes.map((field, i) => [i ? ", " : "", h("code", {}, field)])])));
  const graph = h("div", { class: "plan", style: { height: `${names.length * tall}px` } }, svg("svg", { width: gutter, height: names.length * tall, class: "arcs" }, arcs), boxes);
  const skipped = plan.skipped.map((stage) => h("tr", { class: "muted" }, h("td", {}, stage.name), h("td", {}, stage.about), h("td", {}, stage.why)));
  return h("div", {}, h("div", { class: "scroll" }, graph), skipped.length > 0 && h("div", { class: "scroll" }, h("table", { class: "skipped" }, h("thead", {}, h("tr", {}, ["skipped", "what it would do", "why it is not run"].map((t) => h("th", {}, t)))), h("tbody", {}, skipped))));
}

function metricsTable(metrics, place) {
  const rows = Object.entries(metrics).sort((a, b) => a[0].localeCompare(b[0]));
  if (!rows.length) return empty("Nothing was measured in this step.");
  return h("div", { class: "metric-list" }, rows.map(([name, value]) => h("div", { class: "metric" }, h("a", { href: address({ run: place.run, pane: "metrics", query: { ...kept(place), q: name } }) }, name), h("b", { title: exact(value) }, num(value)))));
}
