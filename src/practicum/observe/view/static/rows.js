// The recorded sessions in columns: filters, sorts and histograms over 100,000 of them without a server.

import { askRun } from "./data.js";

const tables = new Map();
const reading = new Map();

// The table of a run, read on as it grows; one reading waits for the other.
export function rowTable(run, kind) {
  const name = `${kind}|${run}`;
  const next = (reading.get(name) ?? Promise.resolve()).catch(() => {}).then(() => readOn(name, run, kind));
  reading.set(name, next);
  return next;
}

async function readOn(name, run, kind) {
  let table = tables.get(name);
  const found = await askRun(run, `/rows?kind=${kind}&after=${table?.total ?? 0}`);
  const isFresh = !table || found.generation !== table.generation || found.from > table.total;
  if (isFresh && found.from > 0) {
    tables.delete(name);
    return readOn(name, run, kind);
  }
  if (isFresh) table = { run, kind, total: 0, generation: found.generation, columns: {} };
  const more = found.rows;
  for (const [column, sent] of Object.entries(found.columns)) {
    table.columns[column] = (table.columns[column] ?? []).concat(sent);
  }
  if (more || isFresh) Object.assign(table, { total: table.total + more, words: found.words, made: new Map() });
  tables.set(name, table);
  return table;
}

export const word = (table, column, row) => table.words[column][table.columns[column][row]];

// What is made of a table stays until it grows.
function once(table, name, make) {
  if (!table.made.has(name)) table.made.set(name, make());
  return table.made.get(name);
}

// A column as numbers, NaN where a row has none.
export const numbers = (table, name) => once(table, name, () => {
  if (name === "flat") return flatGroups(table);
  return filled(table.total, (row) => table.columns[name][row] ?? NaN);
});

// Quicker than Float64Array.from, which walks through an iterator.
function filled(length, value) {
  const made = new Float64Array(length);
  for (let at = 0; at < length; at++) made[at] = value(at);
  return made;
}

// Numbers of the rows that a query keeps, in its order. `except` leaves one filter out, `among` has 1 for rows that are looked at.
export function select(table, query, except = "", among = null) {
  const keeps = among?.slice() ?? new Uint8Array(table.total).fill(1);
  for (const [name, low, high] of limits(table, query)) {
    if (name === except) continue;
    const column = numbers(table, name);
    for (let row = 0; row < keeps.length; row++) keeps[row] &= column[row] >= low && column[row] <= high;
  }
  const order = orderOf(table, query.sort ?? "-step");
  const rows = new Uint32Array(table.total);
  let count = 0;
  for (let at = 0; at < order.length; at++) {
    rows[count] = order[at];
    count += keeps[order[at]];
  }
  return rows.subarray(0, count);
}

// The filters of a query: [column, least, largest].
function limits(table, query) {
  const found = [];
  for (const name of ["step", "prompt"]) if (query[name]) found.push([name, Number(query[name]), Number(query[name])]);
  for (const name of ["domain", "teacher", "task", "finish"]) {
    const at = query[name] ? table.words[name].indexOf(query[name]) : null;
    if (at !== null) found.push([name, at, at]);
  }
  for (const name of ["reward", "tokens", "advantage"]) {
    if (query[name]) found.push([name, ...query[name].split("..").map(Number)]);
  }
  if (query.flat === "1") found.push(["flat", 1, 1]);
  return found;
}

// All rows in the order of a column, such as "-reward"; rows without a value come last, equal ones stay as they were.
const orderOf = (table, sort) => once(table, `order ${sort}`, () => {
  const sign = sort.startsWith("-") ? -1 : 1;
  const name = sort.replace("-", "");
  if (!table.columns[name]) return counted(table.total);
  const column = numbers(table, name);
  const words = table.words[name];
  const sorted = words && [...words].sort();
  const ranks = words?.map((one) => sorted.indexOf(one));
  const key = (row) => sign * (ranks ? ranks[column[row]] : column[row]);
  return ascending(filled(table.total, (row) => (Number.isNaN(column[row]) ? NaN : key(row))));
});

// Places of numbers from the least to the largest, NaN last: a radix sort, sixteen bits at a time, by which equal ones keep their order.
export function ascending(values) {
  const bits = new Uint32Array(values.buffer, values.byteOffset, 2 * values.length);
  for (let at = 1; at < bits.length; at += 2) { // of negative numbers all bits are turned, of others the sign
    if (bits[at] >>> 31) {
      bits[at] = ~bits[at];
      bits[at - 1] = ~bits[at - 1];
    } else bits[at] |= 0x80000000;
  }
  let order = counted(values.length);
  let next = new Uint32Array(values.length);
  const counts = new Uint32Array(65537);
  for (const [half, shift] of [[0, 0], [0, 16], [1, 0], [1, 16]]) {
    counts.fill(0);
    for (let at = half; at < bits.length; at += 2) counts[((bits[at] >>> shift) & 0xffff) + 1]++;
    if (counts.includes(values.length)) continue;
    for (let at = 1; at < counts.length; at++) counts[at] += counts[at - 1];
    for (let at = 0; at < order.length; at++) next[counts[(bits[2 * order[at] + half] >>> shift) & 0xffff]++] = order[at];
    [order, next] = [next, order];
  }
  return order;
}

function counted(length) {
  const made = new Uint32Array(length);
  for (let at = 0; at < length; at++) made[at] = at;
  return made;
}

// 1 for rows of groups whose rewards are all equal.
function flatGroups({ columns, total }) {
  const key = (row) => columns.step[row] * 1e9 + columns.prompt[row];
  const ends = new Map();
  for (let row = 0; row < total; row++) {
    const reward = columns.reward[row];
    if (reward === null) continue;
    const end = ends.get(key(row));
    if (!end) ends.set(key(row), [reward, reward]);
    else {
      end[0] = Math.min(end[0], reward);
      end[1] = Math.max(end[1], reward);
    }
  }
  return filled(total, (row) => {
    const end = ends.get(key(row));
    return end && end[0] === end[1] ? 1 : 0;
  });
}

// Counts of a column's numbers in equal bins: {low, high, bins: [{from, to, count}]}; null if it has no numbers.
export function histogram(column, rows, count = 20) {
  let [low, high, whole] = [Infinity, -Infinity, true];
  for (const row of rows) {
    const value = column[row];
    if (value < low) low = value;
    if (value > high) high = value;
    whole &&= Number.isNaN(value) || Number.isInteger(value);
  }
  if (low > high) return null;
  whole &&= high - low <= 40;
  const width = whole ? 1 : (high - low) / count || 1;
  const bins = Array.from({ length: low === high ? 1 : whole ? high - low + 1 : count }, (_, at) => ({ from: low + at * width, to: whole ? low + at : low + (at + 1) * width, count: 0 }));
  bins.at(-1).to = high;
  for (const row of rows) {
    const value = column[row];
    if (!Number.isNaN(value)) bins[Math.min(bins.length - 1, Math.floor((value - low) / width))].count++;
  }
  return { low, high, bins };
}

// The steps that have rows, in order.
export const stepsOf = (table) => once(table, "steps", () => [...new Set(table.columns.step)].sort((a, b) => a - b));

// The groups before and after a place: group(by) and step(by) give the step, prompt and session to go to, or null.
export async function groupsAround(place, kind) {
  const { columns, total } = await rowTable(place.run, kind);
  const list = [];
  let at = -1;
  for (let row = 0; row < total; row++) {
    const [step, prompt, session] = [columns.step[row], columns.prompt[row], columns.session[row]];
    const last = list.at(-1);
    if (last?.step !== step || last.prompt !== prompt) list.push({ step, prompt, session });
    if (step === place.step && prompt === place.prompt) at = list.length - 1;
  }
  const steps = (by) => (by > 0 ? list.slice(at + 1) : list.slice(0, Math.max(0, at)).reverse());
  return {
    text: at < 0 ? "" : `group ${at + 1} of ${list.length}`,
    group: (by) => (at < 0 ? null : list[at + by] ?? null),
    step: (by) => steps(by).find((one) => one.step !== place.step) ?? null,
  };
}
