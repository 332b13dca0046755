// The notices above the curves: a restart, where a run hangs, and remarks about its metrics.

import { h, setText, show } from "./dom.js";

export class Notices {
  constructor() {
    this._restarted = h("p", { class: "nbddp-notice", role: "status", hidden: true });
    this._first = h("strong");
    this._stacks = h("pre", { tabindex: 0, "aria-label": "Where each rank is" });
    this._details = h("details", {}, h("summary", {}, "Where each rank is"), this._stacks);
    this._close = h("button", { type: "button", class: "nbddp-close", "aria-label": "Close", title: "Close" }, "✕");
    this._close.addEventListener("click", () => this._dismiss());
    this._hang = h("div", { class: "nbddp-notice nbddp-hang", role: "status", hidden: true });
    this._hang.append(this._first, this._close, this._details);
    this._dismissed = false; // until the run makes progress again
    this.remark = h("p", { class: "nbddp-remark", role: "status", hidden: true });
    this.els = [this._restarted, this._hang];
  }

  update(restarted, hang, remark) {
    setText(this._restarted, restarted);
    show(this._restarted, Boolean(restarted));
    setText(this.remark, remark);
    show(this.remark, Boolean(remark));
    if (!hang.length) this._dismissed = false;
    const [first = "", ...rest] = hang;
    setText(this._first, first);
    setText(this._stacks, rest.join("\n").trim());
    show(this._details, rest.some((line) => line.trim()));
    show(this._hang, hang.length > 0 && !this._dismissed);
  }

  _dismiss() {
    this._dismissed = true;
    show(this._hang, false);
  }
}
