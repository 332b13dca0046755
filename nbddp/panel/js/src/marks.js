// Restarts, and where a metric became NaN: a dashed line in a chart, and a text for screen readers.

import { h, setText } from "./dom.js";
import { count } from "./numbers.js";

const MAX_SHOWN = 20; // the newest
const LABEL_PX = 6.2; // the width of a character of a label, about

export class Marks {
  constructor() {
    this.el = h("div", { class: "nbddp-marks" });
  }

  /** Place the marks at their steps in this chart, at its present zoom. */
  draw(u, marks) {
    const shown = within(marks, [u.scales.x.min, u.scales.x.max]);
    while (this.el.children.length > shown.length) this.el.lastChild.remove();
    while (this.el.children.length < shown.length) this.el.append(h("div", { class: "nbddp-mark" }, h("span")));
    shown.forEach((mark, i) => place(this.el.children[i], mark, u.valToPos(mark.step, "x"), u.over.clientWidth));
    if (this.el.parentElement !== u.over) u.over.append(this.el);
  }
}

/** Text for screen readers: ", restart 1 at step 450". */
export function marksText(marks, bounds) {
  return within(marks, bounds)
    .map(({ label, step, family }) => (family ? `, ${label}` : `, ${label} at step ${count(step)}`))
    .join("");
}

/** The marks between two steps, the newest if they are many. */
export function within(marks, [from, to]) {
  return marks.filter(({ step }) => step >= from && step <= to).slice(-MAX_SHOWN);
}

function place(element, { label, text, family }, left, width) {
  element.dataset.broken = Boolean(family);
  const shown = element.firstChild;
  element.style.left = `${left}px`;
  element.dataset.side = left + 10 + LABEL_PX * label.length > width ? "left" : "right";
  setText(shown, label);
  shown.title = text;
}
