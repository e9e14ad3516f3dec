// The end of log.txt, searchable.

import { askRun } from "./data.js";
import { bytes, empty, h, replace } from "./dom.js";

export async function show(place, node, context) {
  const field = h("input", { type: "search", placeholder: "search the log", value: place.query.q ?? "", "aria-label": "Search the log", oninput: () => context.change({ q: field.value }) });
  const lines = h("div", { class: "log", role: "log" });
  const note = h("p", { class: "muted" });
  let found = await askRun(place.run, "/log");
  let query = place.query;
  const draw = () => {
    const wanted = (query.q ?? "").toLowerCase();
    const shown = found.lines.filter((line) => line.text.toLowerCase().includes(wanted));
    note.textContent = found.left_out ? `The first ${bytes(found.left_out)} of log.txt are left out here.` : "";
    replace(lines, shown.length ? shown.map((line) => h("div", { class: `line ${line.level}` }, h("time", {}, line.time), h("span", {}, line.text)))
      : empty(found.lines.length ? "No line has these words." : "The log is empty: nothing has happened that a run writes down."));
  };
  draw();
  node.append(h("div", { class: "tools" }, field), note, lines);
  return {
    update: async () => {
      found = await askRun(place.run, "/log");
      draw();
    },
    move: (next) => {
      const same = next.run === place.run && next.pane === "log";
      if (same) {
        query = next.query;
        draw();
      }
      return same;
    },
  };
}
