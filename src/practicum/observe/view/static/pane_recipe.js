// The recipe as resolved, with the origin of every value; changes of resumed runs; versions.

import { askRun } from "./data.js";
import { empty, h, replace, section } from "./dom.js";

export async function show(place, node, context) {
  const found = await askRun(place.run, "/recipe");
  const field = h("input", { type: "search", placeholder: "search keys, values, origins", value: place.query.q ?? "", "aria-label": "Search the recipe", oninput: () => { context.change({ q: field.value }); } });
  const only = h("input", { type: "checkbox", checked: place.query.set === "1", onchange: () => context.change({ set: only.checked ? "1" : "" }) });
  const body = h("tbody", {});
  const draw = (query) => {
    const words = (query.q ?? "").toLowerCase().split(/\s+/).filter(Boolean);
    const rows = found.leaves.map(([path, value]) => [path, value, found.origins[path] ?? ""])
      .filter(([, , origin]) => query.set !== "1" || !origin.startsWith("default"))
      .filter((row) => words.every((word) => row.join(" ").toLowerCase().includes(word)));
    replace(body, rows.map(([path, value, origin]) => h("tr", { class: origin.startsWith("default") ? "muted" : "" },
      h("td", {}, h("code", {}, path)), h("td", {}, h("code", { class: "text" }, value)), h("td", {}, origin || "not recorded"))));
  };
  draw(place.query);
  if (!found.leaves.length || found.leaves[0][0] === "") node.append(empty("The recipe is not written yet, or can't be read."));
  else {
    node.append(section("Recipe", h("div", { class: "tools" }, field, h("label", {}, only, " only what differs from the defaults")),
      h("div", { class: "scroll" }, h("table", { class: "recipe-table" }, h("thead", {}, h("tr", {}, ["key", "value", "origin"].map((t) => h("th", {}, t)))), body))));
  }
  if (found.changes.length) {
    node.append(section("Changed when it was resumed", h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["key", "old", "new", "from step"].map((t) => h("th", {}, t)))),
      h("tbody", {}, found.changes.map((one) => h("tr", {}, h("td", {}, h("code", {}, one.key)), [one.old, one.new].map((v) => h("td", {}, h("code", {}, JSON.stringify(v)))), h("td", { class: "n" }, one.first_step ?? one.step ?? ""))))))));
  }
  node.append(versions(found.versions));
  return {
    move: (next) => {
      const same = next.run === place.run && next.pane === "recipe";
      if (same) draw(next.query);
      return same;
    },
  };
}

function versions(found) {
  const { starts = [], ...packages } = found;
  const rows = Object.entries(packages).map(([name, version]) => h("tr", {}, h("td", {}, name), h("td", {}, h("code", {}, String(version)))));
  const lines = starts.map((start) => h("tr", {}, h("td", {}, start.started ?? ""), h("td", {}, start.ended ?? "–"), h("td", {}, start.outcome ?? "–"), h("td", { class: "n" }, start.last_step ?? "–"), h("td", {}, h("code", { class: "text" }, start.command ?? ""))));
  return h("div", {}, section("Versions", h("table", { class: "plain" }, h("tbody", {}, rows))),
    starts.length > 0 && section("Starts", h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["started", "ended", "outcome", "last step", "command"].map((t) => h("th", {}, t)))), h("tbody", {}, lines)))));
}
