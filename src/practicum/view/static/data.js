// Where the page's data come from: the server, or the file that the page was exported into.

const inFile = document.getElementById("exported-data");
const exported = inFile ? JSON.parse(inFile.textContent) : null;

export const isExport = exported !== null;
export const exportNote = exported?.note ?? null;

export class Refusal extends Error {}

export async function ask(path, asked = null) {
  if (exported) return fromFile(path);
  let response;
  try {
    response = await (asked ?? fetch(path));
  } catch {
    throw new Refusal("practicum view has ended: start it again, and open the address that it prints.");
  }
  const body = await response.json().catch(() => ({ error: `${response.status} ${response.statusText}` }));
  if (!response.ok) throw new Refusal(body.error ?? "The server could not answer.");
  return body;
}

// All runs by name, and what is known of the one that the address names, or of the first: early.js has asked already.
export async function first(run) {
  if (!exported) return ask("", window.firstAnswer);
  const runs = fromFile("api/runs");
  const shown = runs.find((one) => one.id === run) ?? runs[0];
  return { runs, info: fromFile(`api/run/${encodeURIComponent(shown.id)}`) };
}

export const askRun = (run, path = "") => ask(`api/run/${encodeURIComponent(run)}${path}`);

export function series(run, names, range = null) {
  if (!names.length) return Promise.resolve({});
  const query = new URLSearchParams(names.map((name) => ["name", name]));
  if (range) {
    query.set("first", Math.floor(range[0]));
    query.set("last", Math.ceil(range[1]));
  }
  return askRun(run, `/series?${query}`);
}

function fromFile(path) {
  const [place, query = ""] = path.split("?");
  const asked = new URLSearchParams(query);
  if (place.endsWith("/series")) {
    const all = exported.answers[place] ?? {};
    return Object.fromEntries(asked.getAll("name").map((name) => [name, all[name] ?? nothing()]));
  }
  if (place.endsWith("/texts")) {
    const all = exported.answers[asked.get("kind") === "eval" ? `${place}?kind=eval` : place] ?? {};
    return Object.fromEntries(asked.getAll("row").map((row) => [row, all[row]]));
  }
  if (place.endsWith("/search")) {
    const texts = exported.answers[asked.get("kind") === "eval" ? place.replace(/search$/, "texts?kind=eval") : place.replace(/search$/, "texts")] ?? {};
    const words = asked.get("q").toLowerCase();
    return Object.keys(texts).map(Number).filter((row) => Object.values(texts[row]).some((text) => text.toLowerCase().includes(words)));
  }
  asked.delete("after");
  const whole = asked.size ? `${place}?${asked}` : place;
  const found = exported.answers[whole];
  if (found === undefined) throw new Refusal("This was left out of the file, to keep it small. " + (exported.note ?? ""));
  return structuredClone(found);
}

const nothing = () => ({ steps: [], values: [], low: null, high: null, odd: [] });

// Calls `heard(run)` whenever a run has changed, and `online(true | false)` when the server comes or goes.
export function listen(heard, online) {
  if (exported) return;
  const source = new EventSource("api/events");
  source.onmessage = (event) => heard(JSON.parse(event.data).run);
  source.onopen = () => online(true);
  source.onerror = () => online(false);
  source.addEventListener("end", () => {
    source.close();
    online(false);
  });
}
