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
  for (const [column, values] of Object.entries(found.columns)) {
    const old = table.columns[column] ?? [];
    table.columns[column] = old.length ? old.concat(values) : values;
  }
  Object.assign(table, { total: found.columns.step.length + (isFresh ? 0 : table.total), words: found.words, flat: null });
  tables.set(name, table);
  return table;
}

export const word = (table, column, row) => table.words[column][table.columns[column][row]];

// Numbers of the rows that a query keeps, in its order. `except` leaves one filter out.
export function select(table, query, except = "") {
  const tests = [];
  const { columns } = table;
  for (const name of ["step", "prompt"]) {
    if (query[name] && except !== name) tests.push(equals(columns[name], Number(query[name])));
  }
  for (const name of ["domain", "teacher", "task", "finish"]) {
    if (query[name] && except !== name) tests.push(equals(columns[name], table.words[name].indexOf(query[name])));
  }
  for (const name of ["reward", "tokens", "advantage"]) {
    if (query[name] && except !== name) tests.push(between(columns[name], query[name]));
  }
  if (query.flat === "1") {
    const flat = flatGroups(table);
    tests.push((row) => flat.has(groupKey(columns, row)));
  }
  const kept = [];
  for (let row = 0; row < table.total; row++) {
    let good = true;
    for (const test of tests) if (!test(row)) { good = false; break; }
    if (good) kept.push(row);
  }
  return sorted(table, kept, query.sort ?? "-step");
}

const equals = (column, value) => (row) => column[row] === value;

function between(column, text) {
  const [low, high] = text.split("..").map(Number);
  return (row) => column[row] !== null && column[row] >= low && column[row] <= high;
}

// Rows in the order of a column; rows without a value come last, equal ones stay as they were.
function sorted(table, rows, sort) {
  const down = sort.startsWith("-");
  const name = down ? sort.slice(1) : sort;
  const column = table.columns[name];
  if (!column) return rows;
  const words = table.words[name];
  const ranks = words && [...words].sort();
  const sign = down ? -1 : 1;
  const keys = new Float64Array(table.total);
  for (const row of rows) {
    const value = ranks ? ranks.indexOf(words[column[row]]) : column[row];
    keys[row] = value === null || value === undefined ? Infinity : sign * value;
  }
  return rows.sort((a, b) => (keys[a] < keys[b] ? -1 : keys[a] > keys[b] ? 1 : a - b));
}

const groupKey = (columns, row) => columns.step[row] * 1e9 + columns.prompt[row];

function flatGroups(table) {
  if (table.flat) return table.flat;
  const { columns } = table;
  const ends = new Map();
  for (let row = 0; row < table.total; row++) {
    const reward = columns.reward[row];
    if (reward === null) continue;
    const key = groupKey(columns, row);
    const end = ends.get(key);
    if (!end) ends.set(key, [reward, reward]);
    else {
      end[0] = Math.min(end[0], reward);
      end[1] = Math.max(end[1], reward);
    }
  }
  table.flat = new Set([...ends].filter(([, [low, high]]) => low === high).map(([key]) => key));
  return table.flat;
}

// Counts of a column in equal bins: {low, high, bins: [{from, to, count}]}; null if it has no numbers.
export function histogram(column, rows, count = 20) {
  let [low, high] = [Infinity, -Infinity];
  for (const row of rows) {
    const value = column[row];
    if (value === null || value === undefined) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return null;
  const whole = high - low <= 40 && rows.every((row) => column[row] === null || Number.isInteger(column[row]));
  const width = whole ? 1 : (high - low) / count || 1;
  const bins = Array.from({ length: low === high ? 1 : whole ? high - low + 1 : count }, (_, at) => ({ from: low + at * width, to: whole ? low + at : low + (at + 1) * width, count: 0 }));
  bins.at(-1).to = high;
  for (const row of rows) {
    const value = column[row];
    if (value !== null && value !== undefined) bins[Math.min(bins.length - 1, Math.floor((value - low) / width))].count++;
  }
  return { low, high, bins };
}

// The steps that have rows, in order.
export const stepsOf = (table) => [...new Set(table.columns.step)].sort((a, b) => a - b);

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
