// The end of log.txt, searchable.

import { askRun } from "./data.js";
import { bytes, empty, h, replace } from "./dom.js";

// Lines with their time and level; the first one is cut where the beginning is left out.
async function read(run) {
  const { text, left_out } = await askRun(run, "/log");
  const lines = text.split("\n").slice(left_out ? 1 : 0).filter(Boolean).map((line) => {
    const [, time, said] = line.match(/^(\d{4}-\S+ \S{8}) (.*)$/) ?? [null, "", line];
    const level = /^(stopped by|traceback|Traceback)/.test(said) ? "error" : /^(warning:|check )/.test(said) ? "warning" : "plain";
    return { time, text: said, level };
  });
  return { lines, left_out };
}

export async function show(place, node, context) {
  const field = h("input", { type: "search", placeholder: "search the log", value: place.query.q ?? "", "aria-label": "Search the log", oninput: () => context.change({ q: field.value }) });
  const lines = h("div", { class: "log", role: "log" });
  const note = h("p", { class: "muted" });
  let found = await read(place.run);
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
      found = await read(place.run);
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
