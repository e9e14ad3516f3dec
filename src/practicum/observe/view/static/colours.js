// Colours that carry meaning: one for each teacher and domain everywhere, one scale for sizes, one around zero.

const PALETTE = 8;
const STRONGEST = 0.55; // text on it stays readable in both themes
const names = [];

// Names of teachers and domains get their colours in the order of all names known, so equal names look equal.
export function know(list) {
  for (const name of [...list].sort()) if (!names.includes(name)) names.push(name);
}

export const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const nth = (index) => variable(`--series-${index % PALETTE}`);

export function colourOf(name) {
  const at = names.indexOf(name);
  return nth(at < 0 ? hash(name) : at);
}

// Runs that are compared: the first as it is, others by dashes.
export const DASHES = [undefined, [6, 4], [2, 3], [8, 3, 2, 3]];

// A token's background: `share` is -1 … 1 around zero, or 0 … 1 for a size.
export function tokenColour(share, diverging) {
  const strength = Math.min(1, Math.abs(share)) ** 0.7 * STRONGEST;
  if (!diverging) return `rgba(${variable("--sequential")}, ${strength})`;
  return `rgba(${variable(share < 0 ? "--negative" : "--positive")}, ${strength})`;
}

function hash(text) {
  let sum = 0;
  for (const c of text) sum = (sum * 31 + c.codePointAt(0)) % 9973;
  return sum;
}
