// Curves over steps by uPlot: one cursor and one zoom for all charts of a pane, legends that follow the cursor.

import uPlot from "./uplot/uPlot.esm.js";
import { variable } from "./colours.js";
import { exact, h, num } from "./dom.js";

const LINE = 1.6;
const open = new Set();

// Forget the charts of the pane before.
export function closeCharts() {
  for (const one of open) one.destroy();
  open.clear();
}

export function redrawCharts() {
  for (const one of open) one.redraw();
}

// options: title, about, curves [{label, colour, data, dash, fill}], band {low, high}, log, smooth, stacked,
// range [first, last], onpick(step), onzoom(range | null), height, digits, unit
export function chart(options) {
  const legend = h("div", { class: "legend" });
  const holder = h("div", { class: "plot" });
  const note = h("p", { class: "odd" });
  const node = h("figure", { class: "chart" },
    h("figcaption", {}, h("h3", { title: options.about ?? "" }, options.title), options.more ?? null),
    legend, holder, note);
  const one = { node, options, plot: null, width: 0 };
  const observer = new ResizeObserver(() => {
    const width = holder.clientWidth;
    if (!width || width === one.width) return;
    one.width = width;
    if (one.plot) one.plot.setSize({ width, height: height(options) });
    else draw();
  });
  observer.observe(holder);

  function draw() {
    one.plot?.destroy();
    one.plot = null;
    if (!one.width) return;
    const { data, series, bands } = columns(one.options);
    legendOf(one, legend, data, null);
    const odd = one.options.curves.flatMap((c) => (c.data.odd ?? []).map(([s, v]) => `${v} at step ${s}`));
    note.textContent = odd.length ? `Not drawn: ${odd.slice(0, 3).join(", ")}` : "";
    if (!data.slice(1).some((column) => column.some((value) => value !== null))) {
      holder.replaceChildren(h("p", { class: "empty small" }, one.options.log && data[0].length ? "Nothing above zero, which a log scale needs." : one.options.none ?? "Not measured yet."));
      return;
    }
    holder.replaceChildren();
    one.plot = new uPlot(settings(one, legend, data, series, bands), data, holder);
    one.data = data;
  }

  one.redraw = draw;
  one.update = (curves) => {
    one.options.curves = curves;
    draw();
  };
  one.destroy = () => {
    observer.disconnect();
    one.plot?.destroy();
  };
  open.add(one);
  return one;
}

const height = (options) => options.height ?? 150;

function settings(one, legend, data, series, bands) {
  const { options } = one;
  const grid = { stroke: variable("--grid"), width: 1 };
  const axis = { stroke: variable("--muted"), grid, ticks: { show: false }, font: "11px system-ui" };
  return {
    width: one.width,
    height: height(options),
    padding: [6, 14, 0, 0],
    legend: { show: false },
    focus: { alpha: 0.4 },
    cursor: {
      sync: { key: "steps", scales: ["x", null], setSeries: false },
      drag: { x: true, y: false, setScale: false },
      points: { size: 6 },
      y: false,
    },
    scales: {
      x: { time: false, range: () => options.range ?? xRange(data[0]) },
      y: options.log ? { distr: 3, range: (u, low, high) => (low === null ? [0.1, 1] : [low / 1.2, high * 1.2]) } : { range: (u, low, high) => yRange(low, high, options) },
    },
    axes: [
      { ...axis, size: 22, gap: 3, space: 60, values: (u, at) => at.map((v) => (Number.isInteger(v) ? v : "")) },
      { ...axis, size: 46, gap: 4, space: 26, values: (u, at) => at.map((v) => (v === null ? "" : num(v, 3))) },
    ],
    series,
    bands,
    hooks: {
      drawClear: [(u) => shadeBand(u, options.band)],
      setCursor: [(u) => legendOf(one, legend, data, u.cursor.idx)],
      setSelect: [(u) => zoomed(u, options)],
      ready: [(u) => pickable(u, options)],
    },
  };
}

function pickable(u, options) {
  let began = null;
  u.over.addEventListener("mousedown", (event) => (began = event.clientX));
  u.over.addEventListener("mouseup", (event) => {
    const still = began !== null && Math.abs(event.clientX - began) < 4;
    began = null;
    if (still && options.onpick && u.cursor.idx !== null) options.onpick(u.data[0][u.cursor.idx]);
  });
  u.over.addEventListener("dblclick", () => options.onzoom?.(null));
  if (options.onpick) u.over.classList.add("pickable");
}

function zoomed(u, options) {
  if (u.select.width < 5) return;
  const range = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
  u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  options.onzoom?.([Math.floor(range[0]), Math.ceil(range[1])]);
}

function xRange(steps) {
  const [low, high] = [steps[0], steps.at(-1)];
  return low === high ? [low - 1, high + 1] : [low, high];
}

function yRange(low, high, { band, stacked, floor }) {
  if (low === null || low === undefined) return [0, 1];
  const edges = [low, high, band?.low, band?.high].filter((v) => v !== null && v !== undefined);
  let [least, most] = [Math.min(...edges), Math.max(...edges)];
  if (stacked || floor) least = Math.min(0, least);
  const room = (most - least || Math.abs(most) || 1) * 0.06;
  return [stacked || (floor && least === 0) ? least : least - room, most + room];
}

function shadeBand(u, band) {
  if (!band) return;
  const top = band.high === null ? u.bbox.top : u.valToPos(band.high, "y", true);
  const bottom = band.low === null ? u.bbox.top + u.bbox.height : u.valToPos(band.low, "y", true);
  u.ctx.save();
  u.ctx.fillStyle = variable("--band");
  u.ctx.fillRect(u.bbox.left, top, u.bbox.width, bottom - top);
  u.ctx.restore();
}

// The curves on one axis of steps, as uPlot takes them; merged points have a band of least and largest.
function columns(options) {
  const curves = options.curves.filter((curve) => curve.data.steps.length);
  const steps = [...new Set(curves.flatMap((curve) => curve.data.steps))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, at) => [step, at]));
  const data = [steps];
  const series = [{}];
  const bands = [];
  let below = new Array(steps.length).fill(0);
  for (const curve of curves) {
    const spread = (values) => {
      const column = new Array(steps.length).fill(null);
      // A log scale has no place for what is not above zero.
      curve.data.steps.forEach((step, at) => (column[place.get(step)] = options.log && !(values[at] > 0) ? null : values[at]));
      return column;
    };
    let values = spread(smoothed(curve.data.values, options.smooth ?? 0));
    if (options.stacked) {
      values = values.map((value, at) => below[at] + (value ?? 0));
      below = values;
    }
    data.push(values);
    const few = values.filter((v) => v !== null).length;
    series.push({
      label: curve.label,
      stroke: curve.colour,
      width: options.stacked ? 1 : LINE,
      dash: curve.dash,
      fill: options.stacked && data.length === 2 ? alpha(curve.colour, 0.55) : undefined,
      spanGaps: true,
      points: { show: few <= 30 && !options.stacked && !curve.quiet, size: 5, fill: curve.colour },
      curve,
    });
    if (options.stacked && data.length > 2) {
      bands.push({ series: [data.length - 1, data.length - 2], fill: alpha(curve.colour, 0.55) });
    }
    if (!options.stacked && curve.data.low) {
      data.push(spread(curve.data.high), spread(curve.data.low));
      series.push({ ...hidden, curve }, { ...hidden, curve });
      bands.push({ series: [data.length - 2, data.length - 1], fill: alpha(curve.colour, 0.18) });
    }
  }
  return { data, series, bands };
}

const hidden = { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true, quiet: true };

export function smoothed(values, share) {
  if (!share) return values;
  let mean = 0;
  let weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = share * mean + (1 - share) * value;
    weight = share * weight + (1 - share);
    return mean / weight;
  });
}

function legendOf(one, legend, data, at) {
  const { options } = one;
  const curves = options.curves.filter((curve) => curve.data.steps.length && !curve.quiet);
  const step = at === null ? null : data[0][at];
  const items = curves.map((curve) => {
    const place = step === null ? curve.data.steps.length - 1 : lastAt(curve.data.steps, step);
    const value = place < 0 ? null : curve.data.values[place];
    const swatch = h("i", { class: curve.dash ? "swatch dashed" : "swatch", style: { borderColor: curve.colour } });
    return h("span", { class: "key", title: `${curve.label}: ${exact(value)}` },
      swatch, curve.label, " ", h("b", {}, num(value, options.digits ?? 3)), options.unit ? ` ${options.unit}` : "");
  });
  const where = curves.length ? h("span", { class: "where" }, step === null ? "" : `step ${step}`) : null;
  legend.replaceChildren(...items, ...(where ? [where] : []));
}

function lastAt(steps, step) {
  let low = 0;
  let high = steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

function alpha(colour, share) {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return `rgba(${r}, ${g}, ${b}, ${share})`;
}
