// The table of ranks: a row per rank, with slow, silent and failed ranks marked by colour and text; grouped by host.

import { h, setText, show } from "./dom.js";
import { bytes, count, ranksText, stepTime } from "./numbers.js";

const HEADINGS = ["Rank", "Device", "State", "Step", "Step time", "Memory"];
const FEW = 16; // with more ranks, only hosts that failed or that the user opens show their ranks

export class RankTable {
  constructor() {
    this._rows = [];
    this._groups = new Map(); // by host
    this._layout = null;
    this._head = h("thead", {}, h("tr", {}, ...HEADINGS.map((text) => h("th", { scope: "col" }, text))));
    this.el = h("table", { class: "nbddp-ranks", "aria-label": "Ranks" });
  }

  update(rows, hosts) {
    while (this._rows.length < rows.length) this._rows.push(new Row());
    rows.forEach((row, i) => this._rows[i].update(row));
    const groups = hosts.length ? hosts : [{ name: "", ranks: rows.map((_, i) => i) }];
    this._arrange(groups);
    for (const group of groups) this._groups.get(group.name).update(group, rows.length);
    this.el.dataset.hosts = hosts.length > 0;
    this.el.dataset.memory = rows.some((row) => row.memory_bytes !== null || row.gpu_bytes !== null);
  }

  /** Put the ranks under their hosts, which changes only when the ranks are restarted. */
  _arrange(groups) {
    const layout = JSON.stringify(groups.map(({ name, ranks }) => [name, ranks]));
    if (layout === this._layout) return;
    this._layout = layout;
    const before = this._groups;
    this._groups = new Map(groups.map(({ name }) => [name, before.get(name) ?? new Group(name)]));
    for (const { name, ranks } of groups) this._groups.get(name).fill(ranks.map((rank) => this._rows[rank].el));
    this.el.replaceChildren(this._head, ...[...this._groups.values()].map(({ el }) => el));
  }
}

/** A host's heading, which folds and unfolds the host's ranks. Without a name: all ranks, on one machine. */
class Group {
  constructor(name) {
    this._name = name;
    this._chosen = null; // true or false once the user has folded or unfolded it
    this._rows = [];
    const arrow = h("i", { class: "nbddp-arrow", "aria-hidden": "true" }, "▸");
    this._button = h("button", { type: "button", class: "nbddp-fold" }, arrow, h("strong", {}, name));
    this._button.addEventListener("click", () => this._choose(!this._open));
    this._ranks = h("span", { class: "nbddp-facts" });
    this._stateText = h("span");
    this._state = h("span", { class: "nbddp-state" }, h("i", { class: "nbddp-dot", "aria-hidden": "true" }), this._stateText);
    this._step = h("span", { class: "nbddp-facts" });
    this._note = h("span", { class: "nbddp-note" });
    const line = h("div", {}, this._button, this._ranks, this._state, this._step, this._note);
    this._heading = h("tr", { class: "nbddp-host" }, h("th", { scope: "rowgroup", colspan: HEADINGS.length }, line));
    this.el = h("tbody");
  }

  fill(rows) {
    this._rows = rows;
    this.el.replaceChildren(...(this._name ? [this._heading] : []), ...rows);
  }

  update(host, all) {
    this._default = !this._name || all <= FEW || host.state === "failed";
    this._show();
    if (!this._name) return;
    this._heading.dataset.state = host.state;
    this._heading.dataset.mark = host.note;
    setText(this._ranks, `${host.ranks.length} rank${host.ranks.length === 1 ? "" : "s"}`);
    this._ranks.title = ranksText(host.ranks);
    setText(this._stateText, host.state);
    setText(this._step, host.step === null ? "" : `step ${count(host.step)}`);
    setText(this._note, host.note);
  }

  get _open() {
    return this._chosen ?? this._default;
  }

  _choose(open) {
    this._chosen = open;
    this._show();
  }

  _show() {
    this._button.setAttribute("aria-expanded", String(this._open));
    for (const row of this._rows) show(row, this._open);
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
    setText(this._rank, String(row.rank));
    setText(this._device, row.device);
    setText(this._stateText, row.state);
    setText(this._note, row.note);
    setText(this._step, row.step === null ? "–" : count(row.step));
    setText(this._time, stepTime(row.step_seconds));
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
    setText(this._text, text);
    this.el.title = this._of === "GPU" ? "Memory in use on this GPU" : "Memory of this rank's process";
  }
}
