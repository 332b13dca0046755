// The live panel of one run. anywidget calls initialize once per model and render once per view.

import "uplot/dist/uPlot.min.css";
import "./panel.css";
import "./figures.css";
import { Chart } from "./chart.js";
import { h, passCommandKeys, setText, show } from "./dom.js";
import { Figures } from "./figures.js";
import { Logs } from "./logs.js";
import { Notices } from "./notices.js";
import { count, duration } from "./numbers.js";
import { Place } from "./place.js";
import { Save } from "./save.js";
import { Stop } from "./stop.js";
import { SILENT_S, Store } from "./store.js";
import { RankTable } from "./table.js";
import { isDark, isForced, palette, watchTheme } from "./theme.js";
import { Tiles, spoken } from "./tiles.js";
import { Title } from "./title.js";

const MAX_CHARTS = 6; // a button shows the charts of the other families
const BRIEF_MS = 900; // a run without metrics is a line for so long, and for ever if it ends before
const CLOCK_MS = 1000;
const [SMOOTHING, MAX_SMOOTHING] = [0.02, 0.2]; // the share of the points in view over which a mean reaches
const SAY_MS = 10_000; // between two announcements for screen readers
const LOST_S = 15; // after this time without a message the kernel counts as lost
let panels = 0;

class Panel {
  constructor(root, store) {
    this._store = store;
    this.key = `nbddp-${(panels += 1)}`;
    this.smoothing = SMOOTHING;
    this.log = false;
    this.zoom = null;
    this.scale = 1;
    this.earlier = true; // show the earlier run, if there is one
    this._cutAt = 0; // when the front end closed the connection to the kernel
    this._charts = new Map();
    this._all = false;
    this._made = performance.now();
    this._said = { at: -Infinity, about: null };
    this._brief = true;
    this._stop = new Stop(store, () => this.update());
    this._logs = new Logs(store);
    this._table = new RankTable();
    this._notices = new Notices();
    this._figures = new Figures(store.figures);
    this._save = new Save(this, store);
    this._tiles = new Tiles();
    this._title = new Title(store);
    this._build();
    root.append(this.el);
    this._updateTheme();
    this._cleanups = this._watch();
    this.update();
  }

  dispose() {
    this._cleanups.forEach((end) => end());
    this._charts.forEach((chart) => chart.destroy());
    this._logs.dispose();
    this._stop.dispose();
    this._title.dispose();
    this.el.remove();
  }

  /** Call after any change: everything is drawn once, with the next frame of the browser. */
  update() {
    this._title.update();
    this._frame ??= requestAnimationFrame(() => {
      this._frame = null;
      this._draw();
    });
  }

  // ---------------------------------------------------------------- the interface for charts

  onCursor(step) {
    setText(this._step, step === null ? "" : `step ${count(step)}`);
  }

  get marks() {
    return this._store.head?.marks ?? [];
  }

  /** To screen readers, which hear no change of a chart's label. */
  say(text) {
    setText(this._live, text);
  }

  setCursor(x) {
    this._charts.forEach((chart) => chart.setCursor(x));
  }

  onZoom(zoom) {
    this.zoom = zoom;
    show(this._unzoom, zoom !== null);
    this._drawCharts();
  }

  // ---------------------------------------------------------------- building

  _build() {
    this.el = h("section", { class: "nbddp", "aria-label": "Training run" });
    this._error = h("p", { class: "nbddp-error", role: "alert", hidden: true });
    this._names = h("dl", { class: "nbddp-names", "aria-label": "Names on the failing line", hidden: true });
    this._heldNames = h("dl", { class: "nbddp-names" });
    this._held = h("details", { class: "nbddp-held", hidden: true }, h("summary", {}, "Names on rank 0"), this._heldNames);
    this._fill = h("i");
    this._bar = h("div", { class: "nbddp-progress", role: "progressbar", "aria-label": "Progress" }, this._fill);
    this._wasInDebugger = false;
    this._waiting = h("p", { class: "nbddp-waiting" }, "Curves of what log() gets appear here");
    this._grid = h("div", { class: "nbddp-charts" }, this._waiting);
    this._more = h("button", { type: "button", class: "nbddp-button", hidden: true });
    this._more.addEventListener("click", () => this._showAll());
    const ranks = h("div", { class: "nbddp-scroll" }, this._table.el);
    this.el.append(this._header(), this._bar, this._error, this._names, ...this._notices.els);
    this.el.append(this._tiles.el, this._grid, this._more, this._tools(), this._figures.el, ranks);
    this._live = h("p", { class: "nbddp-live", "aria-live": "polite" });
    this.el.append(this._live, this._logs.el, this._held);
    this.el.append(this._notices.remark, this._save.remark); // what comes at the end pushes nothing down
  }

  _header() {
    this._state = h("span", { role: "status" });
    this._chip = h("span", { class: "nbddp-chip" }, h("i", { class: "nbddp-dot", "aria-hidden": "true" }), this._state);
    this._name = h("strong", { class: "nbddp-name" });
    this._summary = h("span", { class: "nbddp-summary" });
    this._hint = h("span", { class: "nbddp-hint", role: "status" });
    this._stopText = h("span", {}, "Stop");
    this._stopButton = h("button", { type: "button", class: "nbddp-stop" }, h("i", { "aria-hidden": "true" }));
    this._stopButton.append(this._stopText);
    this._stopButton.addEventListener("click", () => this._stop.press());
    this._details = h("button", { type: "button", class: "nbddp-button nbddp-details", hidden: true }, "Details");
    this._details.addEventListener("click", () => this._open());
    return h("header", {}, this._chip, this._name, this._summary, this._hint, this._details, this._stopButton);
  }

  _tools() {
    this._slider = h("input", { type: "range", min: 0, max: MAX_SMOOTHING, step: 0.005, value: SMOOTHING });
    this._slider.addEventListener("input", () => {
      this.smoothing = Number(this._slider.value);
      this._paintSlider();
      this._drawCharts();
    });
    this._logButton = h("button", { type: "button", class: "nbddp-button", "aria-pressed": "false" }, "Log scale");
    this._logButton.addEventListener("click", () => {
      this.log = !this.log;
      this._logButton.setAttribute("aria-pressed", String(this.log));
      this._drawCharts();
    });
    this._earlierName = h("span", {}, "Earlier run");
    this._earlierButton = h("button", { type: "button", class: "nbddp-button nbddp-earlier", "aria-pressed": "true", hidden: true });
    this._earlierButton.append(h("i", { class: "nbddp-dash", "aria-hidden": "true" }), this._earlierName);
    this._earlierButton.addEventListener("click", () => {
      this.earlier = !this.earlier;
      this._earlierButton.setAttribute("aria-pressed", String(this.earlier));
      this._drawTiles();
      this._drawCharts();
    });
    this._unzoom = h("button", { type: "button", class: "nbddp-button", hidden: true }, "Reset zoom");
    this._unzoom.addEventListener("click", () => this.onZoom(null));
    this._step = h("span", { class: "nbddp-step" });
    const smoothing = h("label", {}, "Smoothing", this._slider);
    this._paintSlider();
    this._toolbar = h("div", { class: "nbddp-tools" }, smoothing, this._logButton, this._earlierButton, this._unzoom);
    this._toolbar.append(h("span", { class: "nbddp-end" }, this._step, this._save.el));
    return this._toolbar;
  }

  _paintSlider() {
    this._slider.style.setProperty("--filled", `${(this.smoothing / MAX_SMOOTHING) * 100}%`);
  }

  _watch() {
    const resized = new ResizeObserver(() => {
      this._updateTheme(); // the first time, the element has just entered the page
      if (this._store.head) this._drawTiles();
      this._drawCharts();
    });
    resized.observe(this._grid);
    resized.observe(this.el);
    const clock = setInterval(() => {
      this._updateTheme(); // a theme's style sheet may come later than any event tells
      this._drawHeader();
    }, CLOCK_MS);
    const opening = setTimeout(() => this.update(), BRIEF_MS);
    const model = this._store.model;
    const changed = () => this.update();
    model.on("change:stopping", changed);
    model.on("change:heard", changed);
    const cut = () => this._disconnected();
    model.on("comm_live_update", cut); // the front end has restarted the kernel
    return [
      this._store.subscribe(this),
      watchTheme(() => this._updateTheme()),
      passCommandKeys(this.el),
      () => resized.disconnect(),
      () => clearInterval(clock),
      () => clearTimeout(opening),
      () => cancelAnimationFrame(this._frame),
      () => model.off("change:stopping", changed),
      () => model.off("change:heard", changed),
      () => model.off("comm_live_update", cut),
    ];
  }

  _updateTheme() {
    const dark = isDark(this.el.parentElement);
    const forced = isForced();
    if (dark === this._dark && forced === this._forced) return;
    [this._dark, this._forced] = [dark, forced];
    this.el.dataset.theme = dark ? "dark" : "light";
    this.colors = palette(dark, forced);
    this._charts.forEach((chart) => {
      chart.rebuild();
      chart.draw();
    });
  }

  // ---------------------------------------------------------------- drawing

  _draw() {
    if (!this._store.head) return;
    this._brief &&= this._isShort;
    this.el.dataset.brief = this._brief;
    this._drawHeader();
    this._drawTiles();
    this._drawCharts();
    this._figures.update();
    this._announce();
    const { rows, hosts, failed_rank: failed } = this._store.head;
    this._table.update(rows, hosts ?? []);
    this._logs.update(rows);
    if (failed !== null && !this._failureShown) {
      this._failureShown = true;
      this._logs.mark(failed);
      this._logs.open(failed);
    }
  }

  /** Whether nothing but the first line is of interest: there are no metrics, and the run has just begun or was short. */
  get _isShort() {
    const { head, over, seconds, series } = this._store;
    if (head.error || !this._figures.empty || series.some(({ column }) => column.n) || seconds * 1000 > BRIEF_MS) return false;
    return over || performance.now() - this._made < BRIEF_MS;
  }

  _open() {
    this._brief = false;
    this._draw();
    this._logs.el.querySelector("summary").focus(); // the button that had the focus is gone
  }

  _drawHeader() {
    const { head } = this._store;
    if (!head) return;
    const state = this.shownState;
    if (state !== this.el.dataset.state) this._drawTiles(); // the time left depends on it
    this.el.dataset.state = state;
    setText(this._state, state[0].toUpperCase() + state.slice(1));
    setText(this._name, head.name);
    this.el.dataset.earlier = Boolean(head.earlier); // the tiles have a line for the differences from the start
    setText(this._summary, `${head.summary} · ${duration(state === "lost" ? head.seconds : this._store.seconds)}`);
    setText(this._error, head.error);
    show(this._error, Boolean(head.error));
    drawNames(this._names, head.names ?? []);
    show(this._names, Boolean(head.names?.length));
    drawNames(this._heldNames, head.held ?? []);
    show(this._held, Boolean(head.held?.length));
    if (head.earlier) this._nameEarlier(head.earlier);
    this._notices.update(head.restarted ?? "", this._store.hang, head.remark ?? "");
    this._drawStop(state);
    show(this._details, this._brief && this._store.over);
    const { fraction } = head;
    this._bar.dataset.known = fraction !== null;
    this._fill.style.width = fraction === null ? "" : `${fraction * 100}%`;
    if (fraction === null) this._bar.removeAttribute("aria-valuenow");
    else this._bar.setAttribute("aria-valuenow", Math.round(fraction * 100));
  }

  _nameEarlier({ name, began }) {
    setText(this._earlierName, name === this._store.head.name ? "Earlier run" : `Earlier run: ${name}`);
    this._earlierButton.title = `${name}, started ${new Date(began * 1000).toLocaleString()}`;
  }

  /** The run's state, or what the page knows better: "stopping" or "lost". */
  get shownState() {
    const { head, model, over } = this._store;
    if (over) return head.state;
    if (this.lost) return "lost";
    return model.get("stopping") ? "stopping" : head.state;
  }

  /** Whether the kernel has restarted, died or fallen silent. Any later message shows that it has not. */
  get lost() {
    const { headAt, silence } = this._store;
    return silence > LOST_S || this._cutAt > headAt;
  }

  _disconnected() {
    this._cutAt = performance.now();
    this.update();
  }

  _drawStop(state) {
    const can = this._stop.possible && state !== "lost";
    show(this._stopButton, can);
    this._stopButton.disabled = this._store.over || state === "stopping" || this._stop.asked;
    setText(this._stopText, !this._store.over && (state === "stopping" || this._stop.asked) ? "Stopping" : "Stop");
    const { silence } = this._store;
    const silent = silence > SILENT_S ? `no message from the kernel for ${duration(silence)}` : "";
    const lost = state === "lost" ? "these are the last numbers that arrived" : "";
    const hint = lost || silent || this._stop.problem || (can ? "" : "to stop, use ■ in the toolbar");
    setText(this._hint, this._store.over ? "" : hint);
  }

  _drawTiles() {
    const going = !this._store.over && !this.lost;
    this._tiles.draw(this._store, this.el.clientWidth, going, this.earlier);
  }

  /** The metrics by chart, in the order of the charts. */
  _byFamily() {
    const families = new Map();
    for (const series of this._store.series) {
      if (!series.column.n) continue;
      if (!families.has(series.family)) families.set(series.family, []);
      families.get(series.family).push(series);
    }
    return families;
  }

  /** The metrics of each chart that is shown. */
  get families() {
    const families = this._byFamily();
    return [...families].slice(0, this._all ? families.size : MAX_CHARTS);
  }

  _drawCharts() {
    const [families, shown] = [this._byFamily(), this.families];
    for (const [family, series] of shown) this._chart(family).update(series);
    const undrawn = families.size - shown.length;
    setText(this._more, `Show ${undrawn} more chart${undrawn === 1 ? "" : "s"}`);
    show(this._more, undrawn > 0);
    show(this._waiting, families.size === 0);
    // Space for them is reserved, unless a rank has stopped in the debugger: its prompt is below the panel.
    this._wasInDebugger ||= Boolean(this._store.head?.in_debugger);
    const expected = families.size > 0 || !(this._store.over || this._wasInDebugger);
    show(this._grid, expected);
    show(this._toolbar, expected);
    this._toolbar.dataset.empty = families.size === 0;
    const earlier = this._store.head?.earlier && (families.size === 0 || this._store.series.some(({ ghost }) => ghost));
    show(this._earlierButton, Boolean(earlier)); // from the start, since the tools may need a second line for it
  }

  /** Say the newest values when an epoch or a tenth of the run is over, but not too often. */
  _announce() {
    const { head, over, series } = this._store;
    const about = `${head.outer} ${Math.floor((head.fraction ?? 0) * 10)} ${over}`;
    const now = performance.now();
    if (about === this._said.about || (now - this._said.at < SAY_MS && !over)) return;
    this._said = { at: now, about };
    const values = spoken(series);
    if (values.length) this.say(`Step ${head.step === null ? "unknown" : count(head.step)}: ${values.join(", ")}`);
  }

  _chart(family) {
    if (!this._charts.has(family)) {
      const chart = new Chart(this, family);
      this._charts.set(family, chart);
      this._grid.append(chart.el);
    }
    return this._charts.get(family);
  }

  _showAll() {
    this._all = true;
    this._drawCharts();
  }
}

/** Names, and what they stand for; they never change. */
function drawNames(list, names) {
  if (list.childElementCount === 2 * names.length) return;
  list.replaceChildren(...names.flatMap(([name, text]) => [h("dt", {}, name), h("dd", {}, text)]));
}

export default () => {
  let store = null; // one per model; made in render by front ends that do not call initialize
  return {
    initialize({ model }) {
      store = new Store(model);
      const name = model.get("place");
      const place = name ? new Place(name, (el) => new Panel(el, store)) : null;
      return () => {
        place?.dispose();
        store.dispose();
      };
    },
    render({ model, el }) {
      store ??= new Store(model);
      const panel = new Panel(el, store);
      return () => panel.dispose();
    },
  };
};
