// The output of the ranks: a tab for each rank, search, follow.

import { pieces, unstyled } from "./ansi.js";
import { h, setText, show } from "./dom.js";
import { count } from "./numbers.js";

const REDRAW_MS = 250;
const SHOWN = 2000; // lines in the page; run.logs() has all
let made = 0;

export class Logs {
  constructor(store) {
    this._store = store;
    this._rank = 0;
    this._tabs = [];
    this._drawn = "";
    this._timer = null;
    this._id = `nbddp-logs-${(made += 1)}`;
    this._tablist = h("div", { role: "tablist", "aria-label": "Rank", class: "nbddp-tabs" });
    this._tablist.addEventListener("keydown", (event) => this._key(event));
    this._search = h("input", { type: "search", placeholder: "Search", "aria-label": "Search in this rank's output" });
    this._search.addEventListener("input", () => this._draw());
    this._follow = h("input", { type: "checkbox", checked: true });
    this._follow.addEventListener("change", () => this._draw());
    this._found = h("span", { class: "nbddp-found", role: "status" });
    const follow = h("label", { class: "nbddp-follow" }, this._follow, "Follow");
    const tools = h("div", { class: "nbddp-logtools" }, this._tablist, this._search, this._found, follow);
    this._text = h("pre", { id: this._id, role: "tabpanel", tabindex: 0, "aria-label": "Output" });
    this._text.addEventListener("scroll", () => this._scrolled());
    this._count = h("span", { class: "nbddp-count" });
    this.el = h("details", { class: "nbddp-logs" }, h("summary", {}, "Worker logs", this._count), tools, this._text);
    this.el.addEventListener("toggle", () => this._draw());
  }

  /** Call after new output. Draws a few times a second, and only while the element is open. */
  update(rows) {
    while (this._tabs.length < rows.length) this._addTab(this._tabs.length);
    this._tabs.forEach((tab, rank) => {
      tab.dataset.empty = this._store.logs.get(rank)?.empty ?? true;
      tab.title = rows[rank]?.host ? `on ${rows[rank].host}` : "";
    });
    const lines = [...this._store.logs.values()].reduce((sum, log) => sum + log.all().length + log.dropped, 0);
    const none = this._store.over ? "no output" : "no output yet";
    setText(this._count, lines ? `${count(lines)} line${lines === 1 ? "" : "s"}` : none);
    this._timer ??= setTimeout(() => {
      this._timer = null;
      this._draw();
    }, REDRAW_MS);
  }

  /** Open the output of this rank. */
  open(rank) {
    this.el.open = true;
    this._choose(rank);
  }

  mark(rank) {
    this._tabs.forEach((tab, i) => (tab.dataset.failed = i === rank));
  }

  dispose() {
    clearTimeout(this._timer);
  }

  _addTab(rank) {
    const chosen = rank === this._rank;
    const tab = h(
      "button",
      { role: "tab", type: "button", "aria-controls": this._id, "aria-selected": String(chosen), tabindex: chosen ? 0 : -1 },
      `Rank ${rank}`,
    );
    tab.addEventListener("click", () => this._choose(rank));
    this._tabs.push(tab);
    this._tablist.append(tab);
  }

  _choose(rank) {
    this._rank = rank;
    this._tabs.forEach((tab, i) => {
      tab.setAttribute("aria-selected", String(i === rank));
      tab.tabIndex = i === rank ? 0 : -1;
    });
    this._drawn = "";
    this._draw();
  }

  _key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    event.stopPropagation();
    this._choose((this._rank + step + this._tabs.length) % this._tabs.length);
    this._tabs[this._rank].focus();
  }

  _draw() {
    if (!this.el.open) return;
    const log = this._store.logs.get(this._rank);
    const term = this._search.value.toLowerCase();
    const key = `${this._rank}/${log?.version}/${term}`;
    if (key !== this._drawn) {
      this._drawn = key;
      this._fill(log, term);
    }
    if (this._follow.checked) this._text.scrollTop = this._text.scrollHeight;
  }

  _fill(log, term) {
    const all = log?.all() ?? [];
    const lines = term ? all.filter((line) => unstyled(line).toLowerCase().includes(term)) : all;
    setText(this._found, term ? `${count(lines.length)} of ${count(all.length)}` : "");
    show(this._found, Boolean(term));
    const left = (log?.dropped ?? 0) + Math.max(0, lines.length - SHOWN);
    const header = left && !term ? [`[${count(left)} older lines: run.logs(${this._rank})]`] : [];
    const nothing = term ? "Nothing found." : "This rank has printed nothing.";
    this._text.replaceChildren(...styled([...header, ...lines.slice(-SHOWN)].join("\n") || nothing));
  }

  _scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this._text;
    const atEnd = scrollHeight - scrollTop - clientHeight < 24;
    if (!atEnd && this._follow.checked && this._text.matches(":hover, :focus")) this._follow.checked = false;
  }
}

/** The text as nodes: plain text, and a span for each piece with a colour or a style. */
function styled(text) {
  if (!text.includes("\x1b")) return [text];
  return text.split("\n").flatMap((line, i) => {
    const nodes = pieces(line).map(([piece, style]) => (style ? h("span", { class: classes(style) }, piece) : piece));
    return i ? ["\n", ...nodes] : nodes;
  });
}

function classes(style) {
  return style.split(" ").map((name) => `nbddp-ansi-${name}`).join(" ");
}
