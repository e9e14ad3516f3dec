// Elements and numbers. Text of models and users goes through textContent alone: nothing is ever parsed as HTML.

export function h(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else if (name === "style") Object.assign(node.style, value);
    else if (name in node && typeof value === "boolean") node[name] = value;
    else node.setAttribute(name, value);
  }
  fill(node, children);
  return node;
}

export function svg(tag, props = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  fill(node, children);
  return node;
}

function fill(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

export function replace(node, ...children) {
  node.replaceChildren();
  fill(node, children);
}

// A number rounded to what matters; `exact` is for the title.
export function num(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  let text;
  if (Number.isInteger(value) && size < 1e7) text = value.toLocaleString("en-US");
  else if (size >= 1e6 || size < 1e-4) text = value.toExponential(digits - 1);
  else if (size >= 1000) text = Math.round(value).toLocaleString("en-US");
  else text = value.toPrecision(digits).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
  return text.replace("-", "−").replace("e−", "e-").replace("e+", "e");
}

export const exact = (value) => (value === null || value === undefined ? "not measured" : String(value));
export const counted = (count, what) => `${num(count)} ${what}${count === 1 ? "" : "s"}`;
export const percent = (value, digits = 0) =>
  value === null || value === undefined ? "–" : `${(100 * value).toFixed(digits)} %`;

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds > 0 && seconds < 0.0995) return `${num(1000 * seconds, 2)} ms`;
  if (seconds < 10) return `${num(seconds, seconds < 1 ? 2 : 3)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}

export function bytes(count) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (count >= size) return `${num(count / size)} ${unit}`;
  }
  return `${count} B`;
}

// A right-aligned number with its exact value on hover.
export const numeric = (value, text = num(value)) => h("td", { class: "n", title: exact(value) }, text);

export function empty(sentence, more = null) {
  return h("div", { class: "empty" }, h("p", {}, sentence), more && h("p", { class: "muted" }, more));
}

export function section(title, ...children) {
  return h("section", {}, h("h2", {}, title), ...children);
}

// Whitespace and odd bytes of a token, made visible.
export function visible(text) {
  return text
    .replaceAll(" ", "␣")
    .replaceAll("\n", "⏎")
    .replaceAll("\t", "⇥")
    .replace(/[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufffd]/g, (c) =>
      `<0x${c.codePointAt(0).toString(16).toUpperCase().padStart(2, "0")}>`);
}
