// A group side by side: the answers to one prompt, with their statistics.

import { askRun } from "./data.js";
import { empty, exact, h, num } from "./dom.js";
import { address, go, kept } from "./place.js";
import { answerCard, signed } from "./answers.js";
import { groupsAround } from "./rows.js";

export async function show(place, node) {
  const kind = place.query.kind === "eval" ? "eval" : "samples";
  const rows = await askRun(place.run, `/group/${place.step}/${place.prompt}?kind=${kind}`);
  const around = await groupsAround(place, kind);
  const to = (session) => address({ ...place, pane: "session", session, query: kept(place) });
  const move = (by) => around.group(by) && go({ ...place, ...around.group(by) });
  const step = (by) => around.step(by) && go({ ...place, ...around.step(by) });
  node.append(h("div", { class: "crumbs" },
    h("button", { onclick: () => move(-1), disabled: !around.group(-1) }, "◀"), h("b", {}, `step ${place.step} · prompt ${place.prompt}`),
    h("button", { onclick: () => move(1), disabled: !around.group(1) }, "▶"),
    h("span", { class: "muted" }, around.text),
    h("a", { href: address({ run: place.run, pane: "step", step: place.step, query: {} }) }, "its step")));
  if (!rows.length) {
    node.append(empty("This group is not recorded.", "track.record sets how many groups of each step are kept; all keeps every one."));
  } else {
    const first = rows[0];
    node.append(statistics(rows), text("prompt", first.prompt),
      first.expected === null || first.expected === undefined ? "" : text("expected", typeof first.expected === "string" ? first.expected : JSON.stringify(first.expected)),
      h("div", { class: "answers side" }, rows.map((row) => answerCard(row, to(row.session), { whole: true }))));
  }
  return { keys: { "[": () => move(-1), "]": () => move(1), h: () => step(-1), l: () => step(1), j: () => rows[0] && go({ ...place, pane: "session", session: rows[0].session }), Enter: () => rows[0] && go({ ...place, pane: "session", session: rows[0].session }) } };
}

const text = (name, value) => h("div", { class: "prompt-line" }, h("span", { class: "muted" }, `${name} `), h("code", { class: "text" }, value ?? ""));

function statistics(rows) {
  const rewards = rows.map((row) => row.reward).filter((value) => value !== null && value !== undefined);
  const tokens = rows.map((row) => row.sampled_tokens ?? row.response_tokens ?? 0);
  const mean = rewards.reduce((a, b) => a + b, 0) / rewards.length;
  const spread = rewards.length > 1 ? Math.sqrt(rewards.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (rewards.length - 1)) : 0;
  const flat = rewards.length > 1 && rewards.every((value) => value === rewards[0]);
  const facts = [
    [`${rows.length} sessions`], [rows[0].domain], rows[0].teacher && [`teacher ${rows[0].teacher}`],
    rewards.length ? [`reward ${num(mean)} ± ${num(spread)}`, `mean ${exact(mean)}, standard deviation ${exact(spread)}`] : ["no rewards"],
    flat && ["flat: all rewards are equal, nothing to compare"],
    rows.some((row) => row.advantage !== null && row.advantage !== undefined) && [`advantages ${rows.map((row) => (row.advantage === null ? "–" : signed(row.advantage))).join(", ")}`],
    [`${num(Math.min(...tokens))} to ${num(Math.max(...tokens))} tokens`],
  ].filter(Boolean);
  return h("p", { class: "stats" }, facts.map(([fact, title]) => h("span", { title: title ?? null }, fact)));
}
