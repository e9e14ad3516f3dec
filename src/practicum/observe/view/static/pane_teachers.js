// Each teacher and domain over time: shares against targets, KL, overlap, entropies, seconds; who can do what.

import { chart } from "./charts.js";
import { colourOf, DASHES } from "./colours.js";
import { askRun, series } from "./data.js";
import { empty, h, num, numeric, percent, replace, section } from "./dom.js";
import { address, go } from "./place.js";
import { pick } from "./picking.js";

const CHARTS = [
  ["prompts_share", "share of prompts", ""], ["tokens_share", "share of tokens", ""], ["loss_share", "share of the loss", ""],
  ["gradient_share", "share of the gradient", ""], ["update_share", "share of the update, before clipping", ""], ["kl", "KL(student ‖ teacher)", "nats"], ["overlap", "top-k overlap", ""],
  ["entropy", "student's entropy", "nats"], ["entropy_gap", "entropy gap, student − teacher", "nats"], ["loss", "loss", ""],
  ["reward", "reward", ""], ["seconds", "seconds of scoring", "s"], ["wakes", "wakes", ""],
];
const LEDGER = [
  ["prompts_share", "prompts", percent], ["tokens_share", "tokens", percent], ["loss_share", "of loss", percent], ["gradient_share", "of gradient", percent], ["update_share", "of update", percent],
  ["target", "target", percent], ["kl", "KL", num], ["overlap", "overlap", num], ["entropy", "entropy", num], ["entropy_gap", "entropy gap", num], ["reward", "reward", num], ["seconds", "seconds", num], ["wakes", "wakes", num],
];

export async function show(place, node, context) {
  const head = h("div", {});
  const grid = h("div", { class: "grid" });
  const charts = new Map();
  const kind = place.query.by === "domain" ? "domain" : "teacher";

  async function draw() {
    const info = context.info;
    const names = kind === "domain" ? info.domains : info.teachers;
    const about = await askRun(place.run, "/teachers");
    if (!info.teachers.length) {
      const why = Object.keys(about.teachers).length ? "No step with teachers is done yet." : "This recipe has no teachers: it learns from rewards or demonstrations.";
      replace(head, empty(why, "teachers, route and distill of a recipe bring them; domains are in Metrics."), matrix(about.scores));
      return;
    }
    const choice = h("div", { class: "tools" }, ["teacher", "domain"].map((one) => h("button", {
      class: one === kind ? "active" : "", onclick: () => context.change({ by: one === "teacher" ? "" : one }) }, `by ${one}`)),
    h("span", { class: "muted" }, about.set ? "targets are route.shares" : "targets are the shares of prompts: route.shares sets others"));
    replace(head, choice, h("div", { class: "tables" }, ledger(kind, names, info, about, place), cosines(info), matrix(about.scores)), rest(info));
    const ids = context.compared();
    const wanted = CHARTS.flatMap(([what]) => names.map((name) => `${kind}/${name}/${what}`)).filter((name) => info.names.includes(name));
    const found = await Promise.all(ids.map((id) => series(id, wanted)));
    for (const [what, title, unit] of CHARTS) {
      const curves = ids.flatMap((id, run) => names.map((name) => [name, found[run][`${kind}/${name}/${what}`]])
        .filter(([, data]) => data?.steps.length)
        .map(([name, data]) => ({ label: run ? `${name} · ${id}` : name, colour: colourOf(name), dash: DASHES[run], data })));
      if (!curves.length) continue;
      if (what.endsWith("_share") && kind === "teacher") curves.push(...targets(about.targets, curves, what));
      if (charts.has(what)) charts.get(what).update(curves);
      else {
        const made = chart({ title: curves.some((curve) => curve.quiet) ? `${title}, targets dotted` : title, unit, curves, floor: what !== "kl" && what !== "entropy_gap", onpick: (step) => go(pick(place, `${kind}/${names[0]}/${what}`, step)) });
        charts.set(what, made);
        grid.append(made.node);
      }
    }
  }

  node.append(head, grid);
  await draw();
  return { update: draw };
}

// Dotted lines at the targets, where they differ from what is drawn.
function targets(wanted, curves, what) {
  if (what !== "gradient_share" && what !== "loss_share") return [];
  return Object.entries(wanted).flatMap(([name, target]) => {
    const own = curves.find((curve) => curve.label === name);
    if (!own) return [];
    const ends = [own.data.steps[0], own.data.steps.at(-1)];
    return [{ quiet: true, label: `${name} target`, colour: colourOf(name), dash: [1, 5], data: { steps: [...new Set(ends)], values: [...new Set(ends)].map(() => target), low: null, high: null } }];
  });
}

function ledger(kind, names, info, about, place) {
  const known = LEDGER.filter(([what]) => what === "target" ? kind === "teacher" : names.some((name) => info.names.includes(`${kind}/${name}/${what}`)));
  const asked = info.teachers.reduce((sum, name) => sum + (info.last[`teacher/${name}/update_share`] ?? 0), 0);
  const clipped = asked ? 1 + (info.last["update/clipping"] ?? 0) / asked : 1;
  const rows = names.map((name) => h("tr", {}, h("td", {}, h("i", { class: "swatch", style: { borderColor: colourOf(name) } }),
    h("a", { href: address({ run: place.run, pane: "rollouts", query: { [kind]: name } }) }, name)),
  known.map(([what, , form]) => {
    const found = what === "target" ? about.targets[name] : info.last[`${kind}/${name}/${what}`];
    const value = what === "update_share" && found != null ? found * clipped : found;
    return numeric(value ?? null, value === undefined || value === null ? "–" : form(value));
  }), kind === "teacher" && h("td", { class: "source" }, h("code", {}, about.teachers[name] ?? ""))));
  const titles = [h("th", {}, kind), known.map(([, title]) => h("th", { class: "n" }, title)), kind === "teacher" && h("th", {}, "what it is")];
  return section("Newest step", h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, titles)), h("tbody", {}, rows))));
}

// Cosines between the gradients of teachers in the newest measured step.
function cosines(info) {
  const at = (one, other) => one === other ? 1 : info.last[`cosine/${one}/${other}`] ?? info.last[`cosine/${other}/${one}`];
  const names = info.teachers.filter((one) => info.teachers.some((other) => other !== one && at(one, other) !== undefined));
  if (!names.length) return null;
  const rows = names.map((one) => h("tr", {}, h("td", {}, one), names.map((other) => numeric(at(one, other) ?? null))));
  return section("Cosines of gradients", h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, h("th", {}), names.map((name) => h("th", { class: "n" }, name)))), h("tbody", {}, rows))));
}

// The parts of the newest measured update that belong to no teacher.
function rest(info) {
  const parts = Object.entries(info.last).filter(([name]) => name.startsWith("update/") && name !== "update/clipping").map(([name, value]) => `${name.slice(7)} ${percent(value)}`);
  return parts.length ? h("p", { class: "muted" }, `Rest of the update: ${parts.join(", ")}`) : null;
}

function matrix(scores) {
  const domains = [...new Set(Object.values(scores).flatMap(Object.keys))].sort();
  if (!domains.length) return null;
  const rows = Object.entries(scores).map(([name, row]) => h("tr", {}, h("td", {}, name), domains.map((domain) => {
    const value = row[domain] ?? null;
    const cell = numeric(value);
    if (value !== null) cell.style.background = `rgba(var(--sequential), ${Math.max(0, Math.min(1, value)) * 0.35})`;
    return cell;
  })));
  return section("Who can do what: mean greedy score on held-out prompts", h("div", { class: "scroll" }, h("table", { class: "matrix" },
    h("thead", {}, h("tr", {}, h("th", {}), domains.map((d) => h("th", { class: "n" }, h("i", { class: "swatch", style: { borderColor: colourOf(d) } }), d)))), h("tbody", {}, rows))));
}
