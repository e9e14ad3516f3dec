// All metrics: search, smoothing, log scale, several runs overlaid; one cursor and one zoom.

import { chart } from "./charts.js";
import { DASHES, nth } from "./colours.js";
import { series } from "./data.js";
import { empty, h, replace } from "./dom.js";
import { go } from "./place.js";
import { pick } from "./picking.js";

const AT_ONCE = 24;

export async function show(place, node, context) {
  const grid = h("div", { class: "grid small-charts" });
  const count = h("span", { class: "muted" });
  const field = h("input", { type: "search", placeholder: "search: words of a name, such as teacher kl", value: place.query.q ?? "", "aria-label": "Search metrics",
    oninput: () => context.change({ q: field.value }) });
  const smooth = h("input", { type: "range", min: "0", max: "0.98", step: "0.02", value: place.query.smooth ?? "0", "aria-label": "Smoothing",
    oninput: () => context.change({ smooth: smooth.value === "0" ? "" : smooth.value }) });
  const log = h("input", { type: "checkbox", checked: place.query.log === "1", onchange: () => context.change({ log: log.checked ? "1" : "" }) });
  const reset = h("button", { onclick: () => context.change({ range: "" }) }, "all steps");
  node.append(h("div", { class: "tools" }, field, h("label", {}, "smoothing ", smooth), h("label", {}, log, " log scale"), reset, count), grid);
  const charts = new Map();
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) load(entry.target.dataset.name);
  }, { rootMargin: "400px" });
  let at = place;
  let loading = new Set();

  function names() {
    const words = (at.query.q ?? "").toLowerCase().split(/\s+/).filter(Boolean);
    const all = new Set(context.compared().flatMap((id) => context.runs.get(id).names));
    return [...all].filter((name) => words.every((word) => name.toLowerCase().includes(word))).sort(order);
  }

  function draw() {
    const shown = names();
    const total = new Set(context.compared().flatMap((id) => context.runs.get(id).names)).size;
    count.textContent = `${shown.length} of ${total}`;
    reset.hidden = !at.query.range;
    seen.disconnect();
    if (!shown.length) {
      replace(grid, empty(total ? "No metric has these words in its name." : "No step is done yet."));
      return;
    }
    grid.replaceChildren(...shown.map((name) => {
      const slot = slotOf(name);
      seen.observe(slot.node);
      return slot.node;
    }));
    loading = new Set();
    for (const name of shown.slice(0, AT_ONCE)) wanted.add(name);
    flush();
  }

  function slotOf(name) {
    if (!charts.has(name)) {
      const made = chart({ title: name, about: context.info.about[name], curves: [], height: 130, none: " ",
        onpick: (step) => go(pick(at, name, step)), onzoom: (to) => context.change({ range: to ? to.join("-") : "" }) });
      made.node.dataset.name = name;
      charts.set(name, made);
    }
    return charts.get(name);
  }

  // Curves that come into view within one frame are asked for together.
  const wanted = new Set();
  function load(name) {
    if (loading.has(name)) return;
    wanted.add(name);
    requestAnimationFrame(flush);
  }

  async function flush() {
    const batch = [...wanted].filter((name) => !loading.has(name));
    wanted.clear();
    if (!batch.length) return;
    batch.forEach((name) => loading.add(name));
    const ids = context.compared();
    const range = at.query.range?.split("-").map(Number) ?? null;
    const found = await Promise.all(ids.map((id) => series(id, batch, range)));
    for (const name of batch) {
      const made = slotOf(name);
      Object.assign(made.options, { smooth: Number(at.query.smooth ?? 0), log: at.query.log === "1", range });
      made.update(ids.map((id, run) => ({ label: ids.length > 1 ? id : "", colour: nth(run), dash: DASHES[run % DASHES.length], data: found[run][name], name })));
    }
  }

  draw();
  return {
    update: draw,
    close: () => seen.disconnect(),
    move: (next) => {
      const same = next.run === at.run && next.pane === "metrics";
      if (same) {
        at = next;
        if (document.activeElement !== field) field.value = next.query.q ?? "";
        draw();
      }
      return same;
    },
  };
}

const FIRST = ["eval", "reward", "train", "rollout", "groups", "teacher", "domain", "advantage", "critic", "checks", "time"];
function order(a, b) {
  const rank = (name) => {
    const at = FIRST.indexOf(name.split("/")[0]);
    return at < 0 ? FIRST.length : at;
  };
  return rank(a) - rank(b) || a.localeCompare(b, "en", { numeric: true });
}
