// Where the ranks have begun again: a dashed line in a chart, in words too.

import { h, say } from "./dom.js";
import { count } from "./numbers.js";

const SHOWN = 20; // the newest
const TURN = 0.75; // of the chart's width: from here on the words stand left of the line

export class Marks {
  constructor() {
    this.el = h("div", { class: "nbddp-marks" });
    this._shown = [];
  }

  /** Put them where they belong in this chart, as it is drawn now. */
  draw(u, marks) {
    const { min, max } = u.scales.x;
    this._shown = marks.filter(({ step }) => step >= min && step <= max).slice(-SHOWN);
    while (this.el.children.length > this._shown.length) this.el.lastChild.remove();
    while (this.el.children.length < this._shown.length) this.el.append(h("div", { class: "nbddp-mark" }, h("span")));
    this._shown.forEach((mark, i) => place(this.el.children[i], mark, u.valToPos(mark.step, "x"), u.over.clientWidth));
    if (this.el.parentElement !== u.over) u.over.append(this.el);
  }

  /** For who does not see them. */
  get words() {
    return this._shown.map(({ label, step }) => `, ${label} at step ${count(step)}`).join("");
  }
}

function place(element, { label, text }, left, width) {
  const words = element.firstChild;
  element.style.left = `${left}px`;
  element.dataset.side = left > width * TURN ? "left" : "right";
  say(words, label);
  words.title = text;
}
