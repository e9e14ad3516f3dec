// A session as people read it: prompt, turns, tool results; the tree of its trajectories and what each weighs.

import { askRun } from "./data.js";
import { counted, empty, exact, h, num, percent, section } from "./dom.js";
import { address, go, kept } from "./place.js";
import { signed } from "./answers.js";
import { groupsAround } from "./rows.js";

const CALL = /(<tool_call>[\s\S]*?(?:<\/tool_call>|$))/;

export async function show(place, node) {
  const kind = place.query.kind === "eval" ? "eval" : "samples";
  const { line, group, trajectories } = await askRun(place.run, `/session/${place.step}/${place.prompt}/${place.session}?kind=${kind}`);
  const at = group.indexOf(place.session);
  const move = (by) => group[at + by] !== undefined && go({ ...place, session: group[at + by] });
  const tokens = (trajectory) => address({ ...place, pane: "tokens", query: { ...kept(place), ...(trajectory ? { trajectory } : {}) } });
  node.append(h("div", { class: "crumbs" },
    h("button", { onclick: () => move(-1), disabled: at <= 0 }, "◀"), h("b", {}, `step ${place.step} · prompt ${place.prompt} · session ${place.session}`),
    h("button", { onclick: () => move(1), disabled: at + 1 >= group.length }, "▶"),
    h("a", { href: address({ ...place, pane: "group", query: kept(place) }) }, "its group"),
    kind === "samples" && h("a", { href: tokens(0), class: "to-tokens" }, "tokens")));
  if (!line) {
    node.append(empty("This session is not recorded.", "track.record sets how many groups of each step are kept; all keeps every one."));
    return { keys: {} };
  }
  if (line.failure) node.append(h("p", { class: "notice died" }, `failed: ${line.failure}`));
  node.append(facts(line), conversation(line));
  if (trajectories.length) node.append(section(trajectories.length === 1 ? "Trajectory" : "Trajectories", tree(trajectories, tokens)));
  if (line.requests) node.append(section("Requests", h("ol", { class: "requests" }, line.requests.map((request) => h("li", {}, h("code", {}, request))))));
  const open = () => go({ ...place, pane: "tokens", query: kept(place) });
  const around = await groupsAround(place, kind);
  return { keys: { j: () => move(1), k: () => move(-1), Enter: open, ...aroundKeys(around, place) } };
}

// [ and ] go to the group before and after, h and l to the step before and after.
export function aroundKeys(around, place) {
  const to = (next) => next && go({ ...place, ...next, query: { ...place.query, trajectory: "" } });
  return { "[": () => to(around.group(-1)), "]": () => to(around.group(1)), h: () => to(around.step(-1)), l: () => to(around.step(1)) };
}

function facts(line) {
  const parts = Object.entries(line.parts ?? {}).map(([name, value]) => `${name} ${num(value)}`);
  const all = [
    [line.domain], line.teacher && [`teacher ${line.teacher}`],
    [line.reward === null || line.reward === undefined ? "no reward" : `reward ${num(line.reward)}`, exact(line.reward)], parts.length > 1 && [parts.join(" · ")],
    line.advantage !== null && line.advantage !== undefined && [`advantage ${signed(line.advantage)}`, exact(line.advantage)],
    [`${num(line.prompt_tokens)} + ${num(line.response_tokens)} tokens`, `${exact(line.sampled_tokens)} sampled`], [`ended by ${line.finish}`],
    line.turns > 1 && [`${line.turns} turns`], line.tool_calls > 0 && [`${counted(line.tool_calls, "tool call")}, ${counted(line.tool_errors ?? 0, "error")}`],
    line.version && [`weight version ${[...new Set(line.version)].join(" to ")}`], line.greedy && ["greedy"],
  ].filter(Boolean);
  return h("p", { class: "stats" }, all.map(([fact, title]) => h("span", { title: title ?? null }, fact)));
}

function conversation(line) {
  const expected = line.expected === null || line.expected === undefined ? null
    : h("div", { class: "turn expected" }, h("span", { class: "who" }, "expected"), h("div", { class: "text" }, typeof line.expected === "string" ? line.expected : JSON.stringify(line.expected, null, 1)));
  if (!line.trajectories) {
    return h("div", { class: "conversation" }, turn("prompt", line.prompt, "given"), turn("model", line.response, "sampled"), expected);
  }
  return h("div", { class: "conversation" }, line.trajectories.map((one, number) => [
    line.trajectories.length > 1 && h("h3", {}, `context ${number + 1} of ${line.trajectories.length}, ended by ${one.finish}`),
    turn("prompt", one.prompt, "given"),
    one.spans.map((span) => turn(span.sampled ? "model" : "tool or template", span.text, span.sampled ? "sampled" : "given", span.tokens)),
  ]), expected);
}

function turn(who, text, kind, tokens = null) {
  const parts = (text ?? "").split(CALL).filter((part) => part !== "");
  return h("div", { class: `turn ${kind}` }, h("span", { class: "who" }, who, tokens !== null && h("small", {}, ` ${num(tokens)} tokens`)),
    h("div", { class: "text" }, parts.map((part) => (part.startsWith("<tool_call>") && kind === "sampled" ? h("span", { class: "call" }, part) : part))));
}

function tree(rows, tokens) {
  const depth = new Map();
  for (const row of rows) depth.set(row.trajectory, row.parent === null ? 0 : (depth.get(row.parent) ?? 0) + 1);
  const head = ["trajectory", "shares", "tokens", "sampled", "advantage", "of the step's loss", "ended by"];
  return h("div", { class: "scroll" }, h("table", { class: "tree" }, h("thead", {}, h("tr", {}, head.map((title, at) => h("th", { class: at > 1 && at < 6 ? "n" : "" }, title)))),
    h("tbody", {}, rows.map((row) => h("tr", {},
      h("td", { style: { paddingLeft: `${8 + 18 * depth.get(row.trajectory)}px` } }, depth.get(row.trajectory) ? "└ " : "", h("a", { href: tokens(row.trajectory) }, `trajectory ${row.trajectory}`)),
      h("td", {}, row.parent === null ? "–" : `${num(row.shared)} tokens with ${row.parent}`),
      h("td", { class: "n" }, num(row.prompt_tokens + row.response_tokens)), h("td", { class: "n" }, num(row.sampled_tokens)),
      h("td", { class: "n", title: exact(row.advantage) }, row.advantage === null ? "–" : signed(row.advantage)),
      h("td", { class: "n", title: exact(row.share) }, row.share === null ? "–" : percent(row.share, 2)),
      h("td", {}, row.failure ?? row.finish))))));
}
