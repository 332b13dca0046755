// One chart: the metrics of one family over steps, with faint raw values, smoothed lines and a band for the ranks; behind
// them, the curves of an earlier run as thin grey lines.

import uPlot from "uplot";
import { h, setText, show } from "./dom.js";
import { Marks, marksText, within } from "./marks.js";
import { count, extent, join, logSplits, logTicks, lowerBound, metric, padded, ticks, widened } from "./numbers.js";
import { colorIndices, faint } from "./theme.js";

const HEIGHT_PX = 180;
const GUTTER_PX = 61; // for the labels of the values: seven characters have space without a jump
export const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
const PER_LINE = 4; // columns for each line in uPlot's table: raw, line, high, low
const MAX_LINES = 8; // the number of colours; a button shows the other lines
const WHOLE = [1, 2, 5].flatMap((digit) => Array.from({ length: 16 }, (_, power) => digit * 10 ** power)).sort((a, b) => a - b);
const SPARSE = 30; // with fewer points, or under a fifth of the densest line's, a line is dots without smoothing

export class Chart {
  /** Reads from `panel`: smoothing, log, zoom, colors, key, marks, earlier (whether to show the earlier run),
   * scale (of everything that is drawn, 1 on the screen). Calls: onCursor(x), onZoom([from, to] | null). */
  constructor(panel, family) {
    this.panel = panel;
    this.series = [];
    this.title = h("span", { class: "nbddp-family" });
    this.legend = h("span", { class: "nbddp-legend" });
    this.plot = h("div", { class: "nbddp-plot", tabindex: 0, role: "img" });
    this._empty = h("p", { class: "nbddp-nothing", hidden: true }, "every value is NaN or infinite");
    this._caption = h("figcaption", {}, this.title, this.legend);
    this.el = h("figure", { class: "nbddp-chart" }, this._caption, this.plot, this._empty);
    this.plot.addEventListener("keydown", (event) => this._key(event));
    this.family = family;
    this.cursorX = null;
    this._u = null;
    this._marks = new Marks();
    this._all = false;
    this._undrawn = 0; // number of series that are not drawn
    this._gutter = GUTTER_PX; // only grows
    this._button = h("button", { type: "button", class: "nbddp-rest" });
    this._button.addEventListener("click", () => this._toggle());
  }

  /** Show the present points of these series. */
  update(all) {
    const series = this._all ? all : all.slice(0, MAX_LINES);
    const undrawn = all.length - series.length;
    if (undrawn !== this._undrawn || series.length !== this.series.length || series.some((s, i) => s !== this.series[i])) {
      this.series = series;
      this._undrawn = undrawn;
      this._colorIndices = colorIndices(series.map((s) => s.label));
      setText(this.title, series[0].title);
      this._rebuildLegend();
      this.rebuild();
    }
    this.draw();
  }

  /** Build the plot again after a change of the lines, the type of scale or the colours. */
  rebuild() {
    this._u?.destroy();
    this._u = null;
    this._log = this.log;
    this._earlier = this.panel.earlier;
    this._recolor();
  }

  get _height() {
    return HEIGHT_PX * this.panel.scale;
  }

  get log() {
    return this.panel.log && this.series.some(({ column }) => hasPositive(column));
  }

  draw() {
    const width = this.plot.clientWidth;
    if (!width) return;
    if (this._log !== this.log || this._earlier !== this.panel.earlier) {
      this._rebuildLegend();
      this.rebuild();
    }
    const data = this._table(width);
    if (this._u === null) this._u = new uPlot(this._options(width), data, this.plot);
    else {
      if (this._u.width !== width) this._u.setSize({ width, height: this._height });
      this._u.setData(data);
    }
    this._updateValues();
  }

  destroy() {
    this._u?.destroy();
    this.el.remove();
  }

  setCursor(x) {
    if (!this._u) return;
    const left = x === null ? -10 : this._u.valToPos(x, "x");
    this._u.setCursor({ left, top: x === null ? -10 : HEIGHT_PX / 3 });
  }

  /** The marks of all charts, and those of this family. */
  get _ownMarks() {
    return this.panel.marks.filter(({ family }) => !family || family === this.family);
  }

  // ---------------------------------------------------------------- data

  get bounds() {
    if (this.panel.zoom) return this.panel.zoom;
    const used = this.series.filter(({ column }) => column.n);
    if (!used.length) return [0, 1];
    const low = Math.min(...used.map(({ column }) => column.x[0]));
    const high = Math.max(...used.map(({ column }) => column.x[column.n - 1]));
    return low < high ? [low, high] : [low - 0.5, high + 0.5];
  }

  _table(width) {
    const [from, to] = this.bounds;
    const densest = Math.max(...this.series.map(({ column }) => column.n));
    const lines = [];
    this.sparse = this.series.map(({ column }) => column.n < Math.max(SPARSE, densest / 5));
    const share = this.panel.smoothing;
    this._reach = this.series.map(({ column }, i) => (this.sparse[i] ? 0 : column.reach(from, to, share)));
    this.series.forEach(({ column, low, high }, i) => {
      const indices = column.visible(from, to, width / 2);
      const x = indices.map((k) => column.x[k]);
      const raw = indices.map((k) => column.y[k]);
      const reach = this._reach[i];
      lines.push({ x: reach ? x : [], y: raw });
      lines.push({ x, y: reach ? indices.map((k) => column.mean(k, reach)) : raw });
      lines.push(pick(high, high.visible(from, to, width / 2)));
      lines.push(pick(low, low.visible(from, to, width / 2)));
    });
    const all = [...this._ghosts().map(([series, i]) => this._ghostLine(series.ghost, i, width)), ...lines];
    return join(this._log ? all.map(positive) : all);
  }

  /** The series with a curve of the earlier run to show, each with its index. */
  _ghosts() {
    return this._earlier ? this.series.flatMap((series, i) => (series.ghost ? [[series, i]] : [])) : [];
  }

  get _hasBefore() {
    return this.panel.earlier && this.series.some(({ ghost }) => ghost);
  }

  /** The curve of the earlier run, as smooth as the new one's may be. */
  _ghostLine(ghost, i, width) {
    const [from, to] = this.bounds;
    const reach = this.sparse[i] ? 0 : ghost.reach(from, to, this.panel.smoothing);
    const indices = ghost.visible(from, to, width / 2);
    return { x: indices.map((k) => ghost.x[k]), y: indices.map((k) => (reach ? ghost.mean(k, reach) : ghost.y[k])) };
  }

  /** The last value as it was logged; with a cursor, the nearest point's, the mean that the line shows, and the one before. */
  _valueText(i, x) {
    const { column, ghost } = this.series[i];
    if (x === null || !column.n) return metric(column.last);
    const index = nearest(column, x);
    const mean = this._reach?.[i] ? [`mean ${metric(column.mean(index, this._reach[i]))}`] : [];
    const before = ghost && this._earlier && reaches(ghost, x) ? [`before ${metric(ghost.y[nearest(ghost, x)])}`] : [];
    const more = [...mean, ...before].join(", ");
    return metric(column.y[index]) + (more && ` (${more})`);
  }

  // ---------------------------------------------------------------- uPlot

  _options(width) {
    const { colors, scale } = this.panel;
    const values = { size: (u, texts) => this._widest(texts), space: 34 * scale, ...this._logAxis() };
    return {
      width,
      height: this._height,
      padding: [8 * scale, 10 * scale, 0, 0],
      legend: { show: false },
      scales: {
        x: { time: false, range: () => this.bounds },
        y: { distr: this._log ? 3 : 1, range: (u) => this._yRange(u) },
      },
      axes: [axis(colors, scale, { size: 26 * scale, space: 60 * scale, incrs: WHOLE }), axis(colors, scale, values)],
      series: [{}, ...this._ghosts().map(() => this._ghostStyle()), ...this.series.flatMap((_, i) => this._lines(i))],
      bands: this.series.map((_, i) => ({
        series: [this._first + i * PER_LINE + 2, this._first + i * PER_LINE + 3],
        fill: faint(this._color(i), 0.18),
      })),
      cursor: this._cursor(),
      hooks: {
        setCursor: [(u) => this._moved(u)],
        setSelect: [(u) => this._selected(u)],
        draw: [(u) => this._marks.draw(u, this._ownMarks)],
      },
    };
  }

  _logAxis() {
    if (!this._log) return {};
    const splits = (u, at, low, high) => {
      const found = logSplits(low, high, 5);
      return found.length > 1 ? found : [low, high];
    };
    return { splits, filter: (u, values) => values, values: (u, values) => logTicks(values) };
  }

  _widest(values) {
    const chars = Math.max(1, ...(values ?? []).map((text) => text.length));
    this._gutter = Math.max(this._gutter, 14 + 6.6 * chars);
    return this._gutter * this.panel.scale;
  }

  /** The index in uPlot's table of the first column that belongs to a line of this run. */
  get _first() {
    return 1 + this._ghosts().length;
  }

  _ghostStyle() {
    return { stroke: this.panel.colors.ghost, width: 1.25 * this.panel.scale, spanGaps: true, points: { show: false } };
  }

  _lines(i) {
    const color = this._color(i);
    const { scale, colors } = this.panel;
    const hidden = { spanGaps: true, points: { show: false }, width: 0 };
    return [
      { ...hidden, stroke: faint(color, 0.38), width: scale },
      {
        stroke: color,
        width: 2 * scale,
        spanGaps: true,
        points: { show: () => this.sparse[i], size: 6 * scale, width: 1.5 * scale, stroke: color, fill: colors.surface },
      },
      { ...hidden, stroke: "transparent" },
      { ...hidden, stroke: "transparent" },
    ];
  }

  _cursor() {
    return {
      y: false,
      drag: { x: true, y: false, setScale: false },
      sync: { key: this.panel.key, scales: ["x", null] },
      bind: {
        dblclick: () => () => {
          this.panel.onZoom(null);
          return null;
        },
      },
      points: {
        show: (u, at) => (at > this._first && (at - this._first) % PER_LINE === 1 ? h("div", { class: "u-cursor-pt" }) : null),
        size: 9,
        width: 1.5,
        stroke: () => this.panel.colors.surface,
        fill: (u, at) => this._color((at - this._first - 1) / PER_LINE),
      },
      dataIdx: (u, at, index) => nearestFilled(u.data[at], index),
    };
  }

  _yRange(u) {
    const [own, all] = [this._first, 1].map((from) => extent(u.data.slice(from), this._log));
    if (this._log) {
      const [low, high] = widened(own.map(Math.log), all.map(Math.log)).map(Math.exp);
      const margin = high > low ? (high / low) ** 0.06 : Math.sqrt(10);
      return [low / margin, high * margin];
    }
    return padded(widened(own, all));
  }

  _moved(u) {
    const before = this.cursorX;
    this.cursorX = u.cursor.left >= 0 ? u.posToVal(u.cursor.left, "x") : null;
    // The legend of a point is longer: it may cover a little of the plot, which must not move under the cursor.
    if (before === null && this.cursorX !== null) this._caption.style.height = `${this._caption.offsetHeight}px`;
    if (this.cursorX === null) this._caption.style.height = "";
    this._updateValues();
    this.panel.onCursor(this.cursorX === null ? null : this._stepAt(this.cursorX));
  }

  _selected(u) {
    const { left, width } = u.select;
    if (width < 6) return;
    const zoom = [u.posToVal(left, "x"), u.posToVal(left + width, "x")];
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.panel.onZoom(zoom);
  }

  _stepAt(x) {
    const dense = this.series.reduce((a, b) => (b.column.n > a.column.n ? b : a));
    return dense.column.n ? dense.column.x[nearest(dense.column, x)] : null;
  }

  _key(event) {
    const [from, to] = this.bounds;
    const moves = { ArrowLeft: -0.01, ArrowRight: 0.01, PageUp: -0.1, PageDown: 0.1 };
    if (event.key in moves) {
      const x = (this.cursorX ?? to) + moves[event.key] * (to - from);
      this.panel.setCursor(Math.min(to, Math.max(from, x)));
      setTimeout(() => this.panel.say(this.plot.getAttribute("aria-label"))); // uPlot moves its cursor a moment later
    } else if (event.key === "Escape") {
      this.panel.setCursor(null);
      this.panel.onZoom(null);
    } else return;
    event.preventDefault();
    event.stopPropagation(); // the notebook would also handle the arrow keys
  }

  // ---------------------------------------------------------------- text

  _color(i) {
    return this.panel.colors.lines[this._colorIndices[i]];
  }

  _rebuildLegend() {
    const alone = this.series.length === 1 && this.series[0].label.toLowerCase() === this.family;
    this._values = this.series.map(() => h("span", { class: "nbddp-value" }));
    this._dashes = this.series.map(() => h("i", { class: "nbddp-dash", "aria-hidden": "true" }));
    const keys = this.series.map((s, i) => {
      const label = h("span", { class: "nbddp-label" }, s.label);
      show(label, !alone);
      return h("span", { class: "nbddp-key", title: s.name }, this._dashes[i], label, this._values[i]);
    });
    this.legend.replaceChildren(...keys);
    if (this._hasBefore) this.legend.append(beforeKey());
    if (this._undrawn || this._all) this.legend.append(this._button);
    this._button.setAttribute("aria-expanded", String(this._all));
    setText(this._button, this._all ? `only ${MAX_LINES}` : `and ${this._undrawn} more`);
    this.legend.dataset.all = this._all;
  }

  /** What the legend says, for a picture: for each line its color and a text, and the text's tone: "", "soft" or "bad". */
  keys() {
    const alone = this.series.length === 1 && this.series[0].label.toLowerCase() === this.family;
    const text = (s, i) => `${alone ? "" : `${s.label} `}${this._valueText(i, null)}`;
    const tone = ({ column }) => (Number.isFinite(column.last) ? "" : "bad");
    const own = this.series.map((s, i) => ({ color: this._color(i), text: text(s, i), tone: tone(s) }));
    return this._hasBefore ? [...own, { color: this.panel.colors.ghost, text: "before", tone: "soft" }] : own;
  }

  /** Why no line can be seen; "" if one can. */
  get empty() {
    return this.series.every(({ column }) => column.n && !hasFinite(column)) ? this._empty.textContent : "";
  }

  /** The canvas, and the marks on it with their places in its pixels. */
  image() {
    const { ctx, scales, bbox } = this._u;
    const marks = within(this._ownMarks, [scales.x.min, scales.x.max]);
    return { canvas: ctx.canvas, box: bbox, marks: marks.map((mark) => ({ ...mark, x: this._u.valToPos(mark.step, "x", true) })) };
  }

  _toggle() {
    this._all = !this._all;
    this.panel.update();
  }

  _recolor() {
    this._dashes.forEach((dash, i) => (dash.style.background = this._color(i)));
  }

  _updateValues() {
    this._values.forEach((element, i) => {
      setText(element, this._valueText(i, this.cursorX));
      element.dataset.finite = this.cursorX !== null || Number.isFinite(this.series[i].column.last ?? 0);
    });
    show(this._empty, Boolean(this.empty));
    const parts = this.series.slice(0, MAX_LINES).map((s, i) => `${s.label} ${this._valueText(i, this.cursorX)}`);
    const where = this.cursorX === null ? "" : ` at step ${count(this._stepAt(this.cursorX))}`;
    const all = `Chart of ${this.series[0].title}${where}: ${parts.join(", ")}`;
    this.plot.setAttribute("aria-label", all + marksText(this._ownMarks, this.bounds));
  }
}

/** In the legend, the key of the earlier run's curves. */
function beforeKey() {
  const dash = h("i", { class: "nbddp-dash", "aria-hidden": "true" });
  return h("span", { class: "nbddp-key nbddp-before", title: "the earlier run" }, dash, "before");
}

function pick(column, indices) {
  return { x: indices.map((k) => column.x[k]), y: indices.map((k) => column.y[k]) };
}

/** Without the values that a logarithmic axis cannot show. */
function positive({ x, y }) {
  return { x, y: y.map((value) => (value > 0 ? value : null)) };
}

function hasPositive(column) {
  return column.y.subarray(0, column.n).some((value) => value > 0 && value < Infinity);
}

function hasFinite(column) {
  return column.y.subarray(0, column.n).some(Number.isFinite);
}

function reaches(column, x) {
  return column.n > 0 && x >= column.x[0] && x <= column.x[column.n - 1];
}

function nearest(column, x) {
  const i = lowerBound(column.x, column.n, x);
  if (i === 0) return 0;
  if (i === column.n) return column.n - 1;
  return x - column.x[i - 1] <= column.x[i] - x ? i - 1 : i;
}

function nearestFilled(column, index) {
  for (let d = 0; d < column.length; d++) {
    if (column[index - d] != null) return index - d; // eslint-disable-line eqeqeq
    if (column[index + d] != null) return index + d; // eslint-disable-line eqeqeq
  }
  return index;
}

function axis(colors, scale, options) {
  const line = { stroke: colors.grid, width: scale };
  return {
    stroke: colors.text,
    font: `${Math.round(11 * scale)}px ${FONT}`, // uPlot reads whole numbers only
    gap: 6 * scale,
    ticks: { show: false },
    grid: line,
    border: { show: true, ...line },
    values: (u, values) => ticks(values),
    ...options,
  };
}
