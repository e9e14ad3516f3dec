// Places of the page as addresses: #/RUN/PANE, #/RUN/step/53/prompt/40/session/2/tokens?colour=advantage

export const PANES = ["overview", "metrics", "teachers", "rollouts", "step", "diff", "recipe", "log"];

export function parse(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(decode);
  const place = { run: parts[0] ?? null, pane: "overview", query: Object.fromEntries(new URLSearchParams(query)) };
  if (parts[1] === "step") {
    place.pane = "step";
    for (let at = 1; at < parts.length; at += 2) {
      if (["step", "prompt", "session"].includes(parts[at]) && parts[at + 1] !== undefined) {
        place[parts[at]] = parts[at + 1] === "last" ? "last" : Number(parts[at + 1]);
        place.pane = { step: "step", prompt: "group", session: "session" }[parts[at]];
      } else if (parts[at] === "tokens") place.pane = "tokens";
    }
  } else if (PANES.includes(parts[1])) place.pane = parts[1];
  else if (parts[1] !== undefined) place.unknown = parts[1];
  return place;
}

export function address(place) {
  const run = encodeURIComponent(place.run ?? "");
  let path = `#/${run}/${place.pane}`;
  if (["step", "group", "session", "tokens"].includes(place.pane)) {
    path = `#/${run}/step/${place.step ?? "last"}`;
    if (place.pane !== "step") path += `/prompt/${place.prompt}`;
    if (["session", "tokens"].includes(place.pane)) path += `/session/${place.session}`;
    if (place.pane === "tokens") path += "/tokens";
  }
  const query = Object.entries(place.query ?? {}).filter(([, v]) => v !== null && v !== undefined && v !== "");
  return query.length ? `${path}?${new URLSearchParams(query)}` : path;
}

export function go(place, { replace = false } = {}) {
  const hash = address(place);
  if (replace) {
    history.replaceState(null, "", hash);
    window.dispatchEvent(new HashChangeEvent("hashchange"));
  } else location.hash = hash;
}

// The queries that stay when one moves on: the runs that are compared, and which answers are shown.
export function kept(place) {
  const { with: others, kind } = place.query;
  return { ...(others && { with: others }), ...(kind && { kind }) };
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
