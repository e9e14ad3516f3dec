// An answer as people read it: its text, reward, length and how it ended.

import { exact, h, num } from "./dom.js";

export function answerCard(row, href, { whole = false } = {}) {
  const text = row.response ?? "";
  const cut = whole || text.length <= 600 ? text : `${text.slice(0, 600)} …`;
  return h("a", { class: `answer ${row.failure ? "failed" : ""}`, href },
    h("span", { class: "answer-head" },
      h("b", { title: exact(row.reward) }, row.reward === null || row.reward === undefined ? "no reward" : `reward ${num(row.reward)}`),
      row.advantage !== null && row.advantage !== undefined && h("span", { title: `advantage ${exact(row.advantage)}` }, `adv ${signed(row.advantage)}`),
      h("span", { class: "muted" }, `${num(row.sampled_tokens ?? row.response_tokens)} tokens${row.turns > 1 ? `, ${num(row.turns)} turns` : ""}`),
      (row.failure || row.finish !== "stop") && h("span", { class: "warn" }, row.failure ? "failed" : row.finish)),
    h("code", { class: "text" }, row.failure ? `${row.failure}\n${cut}` : cut));
}

export const signed = (value) => (value > 0 ? `+${num(value)}` : num(value));
