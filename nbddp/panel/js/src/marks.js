// Where the ranks have begun again: a dashed line in a chart, in words too.

import { h, say } from "./dom.js";
import { count } from "./numbers.js";

const SHOWN = 20; // the newest
const TURN = 0.75; // of the chart's width: from here on the words stand left of the line

export class Marks {
  constructor() {
    this.el = h("div", { class: "nbddp-marks" });
  }

  /** Put them where they belong in this chart, as it is drawn now. */
  draw(u, marks) {
    const shown = within(marks, [u.scales.x.min, u.scales.x.max]);
    while (this.el.children.length > shown.length) this.el.lastChild.remove();
    while (this.el.children.length < shown.length) this.el.append(h("div", { class: "nbddp-mark" }, h("span")));
    shown.forEach((mark, i) => place(this.el.children[i], mark, u.valToPos(mark.step, "x"), u.over.clientWidth));
    if (this.el.parentElement !== u.over) u.over.append(this.el);
  }
}

/** For who does not see them: ", restart 1 at step 450". */
export function words(marks, bounds) {
  return within(marks, bounds)
    .map(({ label, step }) => `, ${label} at step ${count(step)}`)
    .join("");
}

function within(marks, [from, to]) {
  return marks.filter(({ step }) => step >= from && step <= to).slice(-SHOWN);
}

function place(element, { label, text }, left, width) {
  const shown = element.firstChild;
  element.style.left = `${left}px`;
  element.dataset.side = left > width * TURN ? "left" : "right";
  say(shown, label);
  shown.title = text;
}
