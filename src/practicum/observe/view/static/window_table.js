// A table of any length: only the rows in view are elements.

import { h } from "./dom.js";

const ROW = 27;
const BEYOND = 8;

// columns: [{name, title, class, width, sort}], draw(row) gives the cells of a row.
export function windowTable({ columns, draw, onopen, onsort, onview, sort }) {
  const head = h("div", { class: "wt-row wt-head", role: "row" });
  const body = h("div", { class: "wt-body" });
  const node = h("div", { class: "wt", role: "table", tabindex: "0" }, h("div", { class: "wt-inner" }, head, body));
  const template = columns.map((column) => column.width).join(" ");
  let rows = [];
  let chosen = -1;
  const cells = columns.map((column) => h("button", { class: `wt-cell ${column.class ?? ""}`, role: "columnheader", title: column.about ?? "",
    onclick: () => column.sort !== false && onsort?.(column.name) }, column.title));
  head.style.gridTemplateColumns = template;
  head.append(...cells);

  function paint() {
    const from = Math.max(0, Math.floor(node.scrollTop / ROW) - BEYOND);
    const to = Math.min(rows.length, Math.ceil((node.scrollTop + node.clientHeight) / ROW) + BEYOND);
    body.style.height = `${rows.length * ROW}px`;
    const shown = [];
    for (let at = from; at < to; at++) {
      const element = h("div", { class: `wt-row ${at === chosen ? "chosen" : ""}`, role: "row", onclick: () => { chosen = at; onopen?.(rows[at]); } }, draw(rows[at]));
      element.style.gridTemplateColumns = template;
      element.style.top = `${at * ROW}px`;
      shown.push(element);
    }
    body.replaceChildren(...shown);
    onview?.(Array.from(rows.slice(from, to)));
  }

  let asked = false;
  const later = () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      paint();
    });
  };
  node.addEventListener("scroll", later);
  const observer = new ResizeObserver(later);
  observer.observe(node);
  const order = (text) => {
    const down = text?.startsWith("-");
    columns.forEach((column, at) => {
      const own = text && column.name === text.replace("-", "");
      cells[at].textContent = own ? `${column.title} ${down ? "↓" : "↑"}` : column.title;
      cells[at].setAttribute("aria-sort", own ? (down ? "descending" : "ascending") : "none");
    });
  };
  order(sort);

  return {
    node,
    paint: later,
    set(next, text) {
      rows = next;
      chosen = Math.min(chosen, rows.length - 1);
      order(text);
      paint();
    },
    move(by) {
      if (!rows.length) return;
      chosen = Math.max(0, Math.min(rows.length - 1, chosen + by));
      const top = chosen * ROW;
      if (top < node.scrollTop) node.scrollTop = top;
      else if (top + 2 * ROW > node.scrollTop + node.clientHeight) node.scrollTop = top + 2 * ROW - node.clientHeight;
      paint();
    },
    open: () => chosen >= 0 && onopen?.(rows[chosen]),
    close: () => observer.disconnect(),
  };
}
