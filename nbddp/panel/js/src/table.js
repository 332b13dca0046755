// The ranks: one row each, what is slow or stuck or failed marked in words as well as colour.

import { h, say, show } from "./dom.js";
import { bytes, count, stepTime } from "./numbers.js";

const HEADINGS = ["Rank", "Device", "State", "Step", "Step time", "Memory"];

export class RankTable {
  constructor() {
    this._rows = [];
    this._body = h("tbody");
    const head = h("thead", {}, h("tr", {}, ...HEADINGS.map((text) => h("th", { scope: "col" }, text))));
    this.el = h("table", { class: "nbddp-ranks", "aria-label": "Ranks" }, head, this._body);
  }

  update(rows) {
    while (this._rows.length < rows.length) {
      const row = new Row();
      this._rows.push(row);
      this._body.append(row.el);
    }
    rows.forEach((row, i) => this._rows[i].update(row));
    this.el.dataset.memory = rows.some((row) => row.memory_bytes !== null || row.gpu_bytes !== null);
  }
}

class Row {
  constructor() {
    this._rank = h("th", { scope: "row" });
    this._device = h("td");
    this._stateText = h("span");
    this._note = h("span", { class: "nbddp-note" });
    const state = h("td", { class: "nbddp-state" }, h("i", { class: "nbddp-dot", "aria-hidden": "true" }));
    state.append(this._stateText, this._note);
    this._step = h("td");
    this._time = h("td");
    this._process = new Memory("process");
    this._gpu = new Memory("GPU");
    const memory = h("td", { class: "nbddp-memory" }, this._gpu.el, this._process.el);
    this.el = h("tr", {}, this._rank, this._device, state, this._step, this._time, memory);
  }

  update(row) {
    this.el.dataset.state = row.state;
    this.el.dataset.mark = row.note;
    say(this._rank, String(row.rank));
    say(this._device, row.device);
    say(this._stateText, row.state);
    say(this._note, row.note);
    say(this._step, row.step === null ? "–" : count(row.step));
    say(this._time, stepTime(row.step_seconds));
    this._gpu.update(row.gpu_bytes, row.gpu_total);
    this._process.update(row.memory_bytes, row.memory_total);
  }
}

class Memory {
  constructor(of) {
    this._of = of;
    this._fill = h("i");
    this._text = h("span");
    this._bar = h("span", { class: "nbddp-bar", "aria-hidden": "true" }, this._fill);
    this.el = h("span", { class: "nbddp-gauge", hidden: true }, this._bar, this._text);
  }

  update(used, total) {
    show(this.el, used !== null);
    if (used === null) return;
    const whole = bytes(total ?? used);
    const part = bytes(used, total ?? used);
    show(this._bar, Boolean(total));
    const share = total ? Math.min(1, used / total) : 0;
    this._fill.style.width = `${(share * 100).toFixed(1)}%`;
    this._fill.dataset.full = share > 0.92;
    const own = bytes(used);
    const text = this._of === "GPU" ? `${part.number} / ${whole.number.replace(/\.0$/, "")} ${whole.unit}` : `${own.number} ${own.unit}`;
    say(this._text, text);
    this.el.title = this._of === "GPU" ? "Memory in use on this GPU" : "Memory of this rank's process";
  }
}
