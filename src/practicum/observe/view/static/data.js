// Where the page's data come from: the server.

export class Refusal extends Error {}

export async function ask(path, asked = null) {
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
export const first = () => ask("", window.firstAnswer);

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

// Calls `heard(run)` whenever a run has changed, and `online(true | false)` when the server comes or goes.
export function listen(heard, online) {
  const source = new EventSource("api/events");
  source.onmessage = (event) => heard(JSON.parse(event.data).run);
  source.onopen = () => online(true);
  source.onerror = () => online(false);
  source.addEventListener("end", () => {
    source.close();
    online(false);
  });
}
