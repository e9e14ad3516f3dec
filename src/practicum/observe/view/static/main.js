// The frame of the page: header, tabs, keys, live updates; each pane is a module with show(place, context).

import { closeCharts, redrawCharts } from "./charts.js";
import { know } from "./colours.js";
import { askRun, first, listen, Refusal } from "./data.js";
import { duration, empty, h, num, replace } from "./dom.js";
import { address, go, kept, PANES, parse } from "./place.js";
import * as overview from "./pane_overview.js";

// What most people see first is loaded with the page, other panes when it is drawn.
const modules = {
  overview: () => overview,
  metrics: () => import("./pane_metrics.js"),
  teachers: () => import("./pane_teachers.js"),
  rollouts: () => import("./pane_rollouts.js"),
  group: () => import("./pane_group.js"),
  session: () => import("./pane_session.js"),
  tokens: () => import("./pane_tokens.js"),
  step: () => import("./pane_step.js"),
  diff: () => import("./pane_diff.js"),
  recipe: () => import("./pane_recipe.js"),
  log: () => import("./pane_log.js"),
};
const TAB_OF = { group: "rollouts", session: "rollouts", tokens: "rollouts" };
const AGAIN_MS = 700;
const KEYS = [
  ["j  k", "next, previous row"], ["h  l", "previous, next step"], ["[  ]", "previous, next group"],
  ["Enter", "open the row"], ["Esc", "one level up"], ["/", "search"],
  ["g o", "Overview"], ["g m", "Metrics"], ["g t", "Teachers"], ["g r", "Rollouts"], ["g s", "Step"],
  ["g d", "Diff"], ["g e", "Recipe"], ["g l", "Log"], ["c", "next colour of tokens"], ["?", "these keys"],
];
const GOES = { o: "overview", m: "metrics", t: "teachers", r: "rollouts", s: "step", d: "diff", e: "recipe", l: "log" };

const runs = new Map();
const header = document.getElementById("header");
const tabs = document.getElementById("tabs");
const notices = document.getElementById("notices");
const pane = document.getElementById("pane");
let current = null;
let place = null;
let online = true;
let showing = 0;

const context = {
  runs,
  get info() { return runs.get(place.run); },
  // The run of the place and those compared with it.
  compared() {
    const others = (place.query.with ?? "").split(",").filter((id) => runs.has(id) && id !== place.run);
    return [place.run, ...others];
  },
  change(query, options = { replace: true }) {
    go({ ...place, query: { ...place.query, ...query } }, options);
  },
};

async function show() {
  const number = ++showing;
  const next = parse(location.hash);
  if (next.run === null || !runs.has(next.run)) {
    const wrong = next.run;
    if (runs.size && wrong === null) return go({ run: runs.keys().next().value, pane: "overview", query: {} }, { replace: true });
    drawFrame(next);
    const links = [...runs.keys()].map((id) => h("li", {}, h("a", { href: address({ run: id, pane: "overview", query: {} }) }, id)));
    return replace(pane, empty(`No run “${wrong}” is open here. These are:`), h("ul", { class: "open-runs" }, links));
  }
  place = next;
  try {
    await Promise.all(context.compared().filter((id) => !runs.get(id).state).map(async (id) => remember(await askRun(id))));
  } catch (error) {
    return replace(pane, empty(error.message));
  }
  if (number !== showing) return;
  drawFrame(place);
  await paint(number);
}

async function paint(number) {
  const name = place.pane;
  if (current?.name === name && current.result?.move && (await current.result.move(place))) return;
  closeCharts();
  current?.result?.close?.();
  current = { name, result: null };
  const node = h("div", { class: `pane ${place.pane}` });
  try {
    if (place.unknown) throw new Refusal(`There is no pane “${place.unknown}”.`);
    const module = await modules[name]();
    const result = await module.show(place, node, context);
    if (number !== showing) return result?.close?.();
    current.result = result;
  } catch (error) {
    if (number !== showing) return;
    if (!(error instanceof Refusal)) console.error(error);
    replace(node, empty(error.message));
  }
  pane.replaceChildren(node);
  pane.dataset.shown = address(place);
  loadAll();
}

let loaded = false;
function loadAll() {
  if (loaded) return;
  loaded = true;
  requestAnimationFrame(() => setTimeout(() => Object.values(modules).forEach((load) => load())));
}

function drawFrame(at) {
  const info = runs.get(at.run);
  document.title = info ? `${info.id} · practicum` : "practicum";
  replace(header, h("a", { class: "brand", href: "#/" }, "practicum"), runChoice(at), h("span", { class: "gap" }),
    info?.state && facts(info), themeButton());
  const active = TAB_OF[at.pane] ?? at.pane;
  replace(tabs, PANES.map((name) => h("a", {
    href: address({ run: at.run, pane: name, query: at.query.with ? { with: at.query.with } : {} }),
    class: name === active ? "active" : "", "aria-current": name === active ? "page" : null,
  }, name[0].toUpperCase() + name.slice(1))), h("span", { class: "gap" }),
  h("button", { class: "quiet", onclick: search }, "/ search"), h("button", { class: "quiet", onclick: showKeys }, "? keys"));
  const tab = tabs.querySelector(".active");
  if (tab) tabs.scrollLeft = tab.offsetLeft + tab.offsetWidth / 2 - tabs.clientWidth / 2;
  drawNotices(info);
}

function runChoice(at) {
  const choice = h("select", { "aria-label": "Run", onchange: (event) => go({ ...parse(location.hash), run: event.target.value }) },
    !runs.has(at.run) && h("option", { value: "", selected: true, disabled: true }, "choose a run"),
    [...runs.values()].map((info) => h("option", { value: info.id, selected: info.id === at.run }, info.id)));
  const others = (at.query.with ?? "").split(",").filter(Boolean);
  const free = [...runs.values()].filter((info) => info.id !== at.run && !others.includes(info.id));
  const compared = others.map((id) => h("button", {
    class: "chip", title: "Remove from the comparison",
    onclick: () => context.change({ with: others.filter((o) => o !== id).join(",") }),
  }, `${id} ×`));
  const add = free.length && h("select", {
    "aria-label": "Compare with", class: "add",
    onchange: (event) => context.change({ with: [...others, event.target.value].join(",") }),
  }, h("option", { value: "" }, "+ compare"), free.map((info) => h("option", { value: info.id }, info.id)));
  return h("span", { class: "runs" }, choice, compared, add || null);
}

function facts(info) {
  const { kind, sentence } = info.state;
  const words = { live: "live", done: "done", interrupted: "stopped", died: "died", lost: "lost", waiting: "waiting" };
  const on = info.checks.filter((check) => check.level !== "off");
  const good = on.filter((check) => !check.fired).length;
  return h("span", { class: "facts" },
    h("span", { class: `state ${kind}`, title: sentence }, h("b", {}, `step ${num(info.step)}${info.steps ? `/${num(info.steps)}` : ""}`),
      " ", h("i", { class: "dot" }), words[kind]),
    info.seconds_per_step !== null && h("span", { title: "mean of the last 20 steps" }, `${num(info.seconds_per_step)} s/step`),
    kind === "live" && info.seconds_left !== null && h("span", {}, `left ${duration(info.seconds_left)}`),
    on.length > 0 && h("span", { class: good === on.length ? "good" : "bad", title: "checks that hold in the newest step" },
      `checks ${good}/${on.length} ${good === on.length ? "✓" : "✗"}`));
}

function drawNotices(info) {
  const sentences = [];
  if (!online) sentences.push(["lost", "practicum view has ended. What is shown stays; start it again for more."]);
  if (["died", "lost"].includes(info?.state?.kind)) sentences.push(["died", info.state.sentence]);
  for (const sentence of info?.problems ?? []) sentences.push(["plain", sentence]);
  replace(notices, sentences.filter(([, text]) => text).map(([kind, text]) => h("p", { class: `notice ${kind}` }, text)));
}

function themeButton() {
  return h("button", { class: "quiet theme", title: "Dark or light", "aria-label": "Dark or light", onclick: () => {
    const dark = getComputedStyle(document.documentElement).colorScheme.startsWith("dark");
    setTheme(dark ? "light" : "dark");
    redrawCharts();
    current?.result?.themed?.();
  } }, "◐");
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  try { localStorage.setItem("practicum-theme", name); } catch { /* a browser may forbid it */ }
}

function search() {
  const field = pane.querySelector("input[type=search]");
  if (field) return field.focus();
  go({ run: place.run, pane: "metrics", query: kept(place) });
  setTimeout(() => pane.querySelector("input[type=search]")?.focus(), 200);
}

function showKeys() {
  const dialog = document.getElementById("keys");
  replace(dialog, h("h2", {}, "Keys"), h("dl", {}, KEYS.map(([key, what]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)])),
    h("button", { onclick: () => dialog.close() }, "Close"));
  if (!dialog.open) dialog.showModal();
}

let before = "";
function onKey(event) {
  if (!place || event.ctrlKey || event.metaKey || event.altKey || document.getElementById("keys").open) return;
  if (event.target.closest?.("input, select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const { key } = event;
  const began = before;
  before = key === "g" ? "g" : "";
  if (began === "g" && GOES[key]) {
    go({ run: place.run, pane: GOES[key], step: place.step, query: kept(place) });
  } else if (key === "/") {
    event.preventDefault();
    search();
  } else if (key === "?") showKeys();
  else if (key === "Escape") up();
  else if (current?.result?.keys?.[key]) {
    event.preventDefault();
    current.result.keys[key]();
  }
}

function up() {
  const above = { tokens: "session", session: "group", group: "rollouts" }[place.pane];
  if (above) go({ ...place, pane: above, query: above === "rollouts" ? { ...kept(place), step: place.step } : kept(place) });
}

const waiting = new Map();
async function heard(id) {
  if (waiting.has(id)) return;
  waiting.set(id, setTimeout(() => refresh(id), AGAIN_MS));
}

async function refresh(id) {
  waiting.delete(id);
  if (!online || !place || !runs.get(id)?.state) return;
  try {
    remember(await askRun(id));
  } catch { return; }
  drawFrame(place);
  if (context.compared().includes(id)) await current?.result?.update?.();
}

function remember(info) {
  runs.set(info.id, info);
  if (info.state) know([...info.teachers, ...info.domains]);
}

async function start() {
  try {
    const kept = localStorage.getItem("practicum-theme");
    if (kept) document.documentElement.dataset.theme = kept;
  } catch { /* a browser may forbid it */ }
  if (location.search) history.replaceState(null, "", location.pathname + location.hash);
  try {
    const found = await first();
    for (const id of found.runs) remember({ id });
    remember(found.info);
  } catch (error) {
    return replace(pane, empty(error.message));
  }
  window.addEventListener("hashchange", show);
  window.addEventListener("keydown", onKey);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawCharts);
  await show();
  listen(heard, (now) => {
    if (now !== online) {
      online = now;
      drawNotices(place && runs.get(place.run));
    }
  });
}

start();
