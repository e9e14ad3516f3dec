// Two runs: recipe keys that differ, and the first step, row and field whose numbers do.

import { ask } from "./data.js";
import { empty, exact, h, num, section } from "./dom.js";
import { address, go } from "./place.js";

export async function show(place, node, context) {
  const others = [...context.runs.values()].filter((info) => info.id !== place.run);
  if (!others.length) {
    node.append(empty("A diff needs two runs.", "Open both: practicum view RUN RUN. In a terminal: practicum diff RUN RUN."));
    return {};
  }
  const chosen = context.compared()[1] ?? others[0].id;
  const choice = h("select", { "aria-label": "Compare with", onchange: () => context.change({ with: choice.value }) }, others.map((info) => h("option", { value: info.id, selected: info.id === chosen }, info.id)));
  node.append(h("div", { class: "tools" }, h("b", {}, place.run), " against ", choice, h("button", { onclick: () => go({ ...place, run: chosen, query: { with: place.run } }) }, "⇄")));
  const found = await ask(`api/diff?${new URLSearchParams({ a: place.run, b: chosen })}`);
  node.append(h("div", {}, h("p", { class: `verdict ${found.first ? "bad" : "good"}` }, found.sentence), first(found, place, chosen),
    found.notes.map((note) => h("p", { class: "muted" }, note)), keys(found, place.run, chosen)));
  return {};
}

function first(found, place, chosen) {
  const { first: one } = found;
  if (!one) return null;
  const to = (run) => {
    if (!one.key) return address({ run, pane: "step", step: one.step, query: { with: run === place.run ? chosen : place.run } });
    const [prompt, session, trajectory] = one.key;
    return address({ run, pane: "tokens", step: one.step, prompt, session, query: { ...(trajectory ? { trajectory } : {}) } });
  };
  const side = (run, value) => h("tr", {}, h("td", {}, h("a", { href: to(run) }, run)), h("td", { class: "n", title: exact(value) }, h("code", {}, typeof value === "number" ? exact(value) : JSON.stringify(value))));
  return section("First difference", h("p", {}, `${one.field}${one.key ? ` of prompt ${one.key[0]}, session ${one.key[1]}` : ""}${one.token === null ? "" : `, token ${one.token + 1} of the answer`}`), h("table", { class: "plain" }, h("tbody", {}, side(place.run, one.one), side(chosen, one.two))),
    found.also.length > 0 && h("p", { class: "muted" }, `Metrics of this step that differ: ${found.also.slice(0, 12).join(", ")}${found.also.length > 12 ? ` and ${found.also.length - 12} more` : ""}`));
}

// Of a section that only one recipe has, what is not set says nothing.
const set = (_, value) => value ?? undefined;

function keys(found, a, b) {
  const differing = Object.entries(found.recipe);
  if (!differing.length) return section("Recipe", h("p", { class: "muted" }, "No key of the recipes differs."));
  const value = (one) => h("td", {}, h("code", { class: "text" }, one === null || one === undefined ? "–" : typeof one === "string" ? one : JSON.stringify(one, set)));
  return section(`Recipe: ${num(differing.length)} keys differ`, h("div", { class: "scroll" }, h("table", { class: "diff" }, h("thead", {}, h("tr", {}, ["key", a, b].map((t) => h("th", {}, t)))),
    h("tbody", {}, differing.map(([key, values]) => h("tr", {}, h("td", {}, h("code", {}, key)), values.map(value)))))));
}
