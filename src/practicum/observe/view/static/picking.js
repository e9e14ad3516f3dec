// From a point of a curve to the rows behind it: that step's rollouts, sorted by what the curve shows.

import { kept } from "./place.js";

export function pick(place, metric, step) {
  const query = { ...kept(place), step: String(step), sort: sortOf(metric) };
  if (metric.startsWith("eval")) query.kind = "eval";
  else delete query.kind;
  const named = metric.match(/^(teacher|domain)\/(.+)\/[^/]+$/);
  if (named) query[named[1]] = named[2];
  const domain = metric.match(/^(?:reward\/mean|eval\/[^/]+)\/(.+)$/);
  if (domain) query.domain = domain[1];
  return { run: place.run, pane: "rollouts", query };
}

function sortOf(metric) {
  if (/reward|eval|groups/.test(metric)) return "reward";
  if (/tokens|truncated|length/.test(metric)) return "-tokens";
  if (/advantage|loss|ratio|kl|clip|grad/.test(metric)) return "-advantage";
  return "reward";
}
