// The panel's computations: thinning for the screen, smoothing, and numbers as text. Uses no page.

import { withStyles } from "./ansi.js";

/** The first index whose x is not below `value`. `x` ascends; only its first `n` elements are used. */
export function lowerBound(x, n, value) {
  let lo = 0;
  let hi = n;
  while (lo < hi) {
    const mid = (lo + hi) >> 1;
    if (x[mid] < value) lo = mid + 1;
    else hi = mid;
  }
  return lo;
}

const LARGEST = 1e300; // larger values are clipped, so that the difference of two values is finite
const FLAT = 1e-12; // relative to the values; a smaller range is drawn as a flat line
const BLOCK = 64;
const MIN_SMOOTHED = 100; // points in view; a line with fewer is not smoothed
const ROUGH_POINTS = 2000; // the newest points in view, which decide whether a line is smooth already
const ROUGH = 0.25; // of noise, two thirds of the points turn; of a schedule or of values per epoch, hardly any

/** Whether the values go up and down, so that a mean shows more than they do. */
export function isRough(values) {
  let [turns, before] = [0, 0];
  for (let i = 1; i < values.length; i++) {
    const change = values[i] - values[i - 1];
    if (!change || !Number.isFinite(change)) continue;
    if (change * before < 0) turns += 1;
    before = Math.sign(change);
  }
  return turns > values.length * ROUGH;
}

/** Points of one line, ascending in x. A point with a lower x (a new epoch) replaces all points from that x on. */
export class Column {
  constructor() {
    this.n = 0;
    this.x = new Float64Array(256);
    this.y = new Float64Array(256);
    this.stride = 0; // the usual distance in x, 0 if not known
    this._lows = []; // for each full block of 64 points, the indices of the smallest and the largest y
    this._highs = [];
    this._sums = []; // for each full block, the sum and the number of its finite values
    this._counts = [];
  }

  get last() {
    return this.n ? this.y[this.n - 1] : undefined;
  }

  append(xs, ys) {
    this._reserve(this.n + xs.length);
    for (let i = 0; i < xs.length; i++) {
      if (this.n && xs[i] <= this.x[this.n - 1]) this._cut(lowerBound(this.x, this.n, xs[i]));
      this.x[this.n] = xs[i];
      this.y[this.n] = ys[i];
      this.n += 1;
      if (this.n % BLOCK === 0) this._closeBlock();
    }
    if (!this.stride && this.n > 1) this.stride = this.x[1] - this.x[0];
  }

  /** How many points a mean reaches to each side: `fraction` of the points between two x; 0 for no smoothing. */
  reach(from, to, fraction) {
    const start = lowerBound(this.x, this.n, from);
    const end = Math.min(this.n, lowerBound(this.x, this.n, to) + 1);
    if (end - start < MIN_SMOOTHED || !isRough(this.y.subarray(Math.max(start, end - ROUGH_POINTS), end))) return 0;
    return Math.round(((end - start) * fraction) / 2);
  }

  /** The mean of the finite values from `reach` points before this point to `reach` after it; NaN if it is not finite. */
  mean(index, reach) {
    if (!Number.isFinite(this.y[index])) return NaN;
    const to = Math.min(this.n, index + reach + 1);
    let [sum, count] = [0, 0];
    for (let i = Math.max(0, index - reach); i < to; ) {
      const block = i / BLOCK;
      const whole = i % BLOCK === 0 && i + BLOCK <= to && block < this._sums.length;
      if (whole) [sum, count] = [sum + this._sums[block], count + this._counts[block]];
      else if (Number.isFinite(this.y[i])) [sum, count] = [sum + this.y[i], count + 1];
      i += whole ? BLOCK : 1;
    }
    return sum / count;
  }

  /** Indices to draw between two x: all if they are few, otherwise each bucket's lowest and highest point. */
  visible(from, to, buckets) {
    const start = Math.max(0, lowerBound(this.x, this.n, from) - 1);
    const end = Math.min(this.n, lowerBound(this.x, this.n, to) + 2);
    if (end - start <= buckets * 4) return range(start, end);
    const kept = [start];
    const width = (end - start) / buckets;
    for (let b = 0; b < buckets; b++) {
      const [low, high] = this._extremes(start + Math.floor(b * width), start + Math.floor((b + 1) * width));
      for (const i of low < high ? [low, high] : [high, low]) if (i > kept[kept.length - 1]) kept.push(i);
    }
    if (kept[kept.length - 1] !== end - 1) kept.push(end - 1);
    return kept;
  }

  _extremes(from, to) {
    let low = from;
    let high = from;
    let i = from;
    const compare = (a, b) => {
      // Every comparison with NaN is false, so a NaN in the first place must be replaced.
      if (this.y[a] < this.y[low] || Number.isNaN(this.y[low])) low = a;
      if (this.y[b] > this.y[high] || Number.isNaN(this.y[high])) high = b;
    };
    while (i < to) {
      const block = i / BLOCK;
      if (i % BLOCK === 0 && i + BLOCK <= to && block < this._lows.length) {
        compare(this._lows[block], this._highs[block]);
        i += BLOCK;
      } else {
        compare(i, i);
        i += 1;
      }
    }
    return [low, high];
  }

  _closeBlock() {
    const start = this.n - BLOCK;
    this._keepBlocks(start / BLOCK);
    const [low, high] = this._extremes(start, this.n);
    const finite = this.y.subarray(start, this.n).filter(Number.isFinite);
    this._lows.push(low);
    this._highs.push(high);
    this._sums.push(finite.reduce((sum, value) => sum + value, 0));
    this._counts.push(finite.length);
  }

  _cut(n) {
    this.n = n;
    this._keepBlocks(Math.min(this._lows.length, Math.floor(n / BLOCK)));
  }

  _keepBlocks(n) {
    for (const column of [this._lows, this._highs, this._sums, this._counts]) column.length = n;
  }

  _reserve(n) {
    if (n <= this.x.length) return;
    const size = Math.max(n, this.x.length * 2);
    this.x = grown(this.x, size);
    this.y = grown(this.y, size);
  }
}

function grown(array, size) {
  const bigger = new Float64Array(size);
  bigger.set(array);
  return bigger;
}

function range(start, end) {
  return Array.from({ length: end - start }, (_, i) => start + i);
}

/** Lines with different x as one table for uPlot: the union of all x, null where a line has no point. */
export function join(lines) {
  const all = new Set();
  for (const { x } of lines) for (const value of x) all.add(value);
  const xs = Float64Array.from(all).sort();
  const columns = lines.map(({ x, y }) => {
    const column = new Array(xs.length).fill(null);
    let at = 0;
    for (let i = 0; i < x.length; i++) {
      while (xs[at] < x[i]) at += 1;
      column[at] = Number.isFinite(y[i]) ? Math.max(-LARGEST, Math.min(LARGEST, y[i])) : null;
    }
    return column;
  });
  return [xs, ...columns];
}

/** The lowest and highest value that can be drawn; with `positive`, on a log scale. */
export function extent(columns, positive = false) {
  let low = Infinity;
  let high = -Infinity;
  for (const column of columns) {
    for (const value of column) {
      if (value === null || (positive && value < 1 / LARGEST)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  return low <= high ? [low, high] : [positive ? 0.1 : 0, 1];
}

/** The range with a margin around the data; the lower edge is zero if the data come close to it. */
export function padded([low, high]) {
  if (high - low <= Math.max(FLAT * Math.max(Math.abs(low), Math.abs(high)), 1 / LARGEST)) {
    const margin = Math.abs(low) * 0.1;
    return margin > 1 / LARGEST ? [low - margin, high + margin] : [low - 1, high + 1];
  }
  const margin = (high - low) * 0.06;
  const bottom = low >= 0 && low < (high - low) * 0.25 ? 0 : low - margin;
  return [bottom, high + margin];
}

/** A range for data in which `other` data are shown, too, as far as they take twice the height above and below. */
export function widened([low, high], [otherLow, otherHigh]) {
  const room = 2 * (high - low) || Math.abs(high) || 1;
  return [Math.max(Math.min(low, otherLow), low - room), Math.min(Math.max(high, otherHigh), high + room)];
}

/** How a value differs from the one before, without a judgement: "▼ 0.0412", and in words. */
export function change(value, before) {
  const difference = value - before;
  if (!Number.isFinite(difference)) return { text: "", words: "" };
  if (difference === 0) return { text: "= before", words: "as before" };
  const size = metric(Math.abs(difference));
  const [sign, word] = difference > 0 ? ["▲", "higher"] : ["▼", "lower"];
  return { text: `${sign} ${size}`, words: `${size} ${word} than before` };
}

/** A metric's value: about five digits, with an exponent only for very small and very large values. */
export function metric(value) {
  if (value === undefined || value === null) return "–";
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (size !== 0 && (size < SMALLEST || size >= BIGGEST)) return exponent(value, 2);
  if (Number.isInteger(value)) return count(value);
  if (size >= 1000) return count(Math.round(value));
  return value.toFixed(size >= 100 ? 1 : size >= 10 ? 2 : 4);
}

const [SMALLEST, BIGGEST] = [1e-3, 1e7]; // beyond, a number is written with an exponent
const DIGITS = 12; // that are looked at to tell two ticks apart
const TICK_CHARS = 9; // of a tick without an exponent

/** The labels of an axis: as few digits as tell its values apart and give each of them exactly. */
export function ticks(values) {
  const size = Math.max(0, ...values.map(Math.abs));
  if (size === 0) return values.map(() => "0");
  if (values.every(Number.isInteger) && size < BIGGEST) return values.map((value) => wholeTick(value, values, size));
  const same = (text, value) => Math.abs(Number(text) - value) <= size * 1e-9;
  const needed = (format) => {
    for (let d = 0; d < DIGITS; d++) if (values.every((value) => same(format(value, d), value))) return d;
    return DIGITS;
  };
  const fixed = needed((value, d) => value.toFixed(d));
  const plain = values.map((value) => (value || 0).toFixed(fixed));
  if (size >= SMALLEST && size < BIGGEST && Math.max(...plain.map((text) => text.length)) <= TICK_CHARS) return plain;
  const digits = needed((value, d) => value.toExponential(d));
  return values.map((value) => (value ? exponent(value, digits) : "0"));
}

/** 200, 20k, 1.5M: all ticks of an axis in one unit. */
function wholeTick(value, values, size) {
  for (const [unit, name] of [[1e6, "M"], [1e3, "k"]]) {
    const fits = size >= Math.max(unit, 1e4) && values.every((each) => each % (unit / 1000) === 0);
    if (fits) return value ? `${Number((value / unit).toFixed(3))}${name}` : "0";
  }
  return String(value || 0);
}

/** The labels of a logarithmic axis, each by itself: 0.001, 1, 1e9. */
export function logTicks(values) {
  return values.map((value) => ticks([value])[0]);
}

/** About `count` round numbers between two positive numbers on a logarithmic axis; [] if they are too close for it. */
export function logSplits(low, high, count) {
  const [from, to] = [Math.log10(low), Math.log10(high)];
  const found = [];
  if (to - from >= 2) {
    const step = Math.ceil((to - from) / count);
    for (let power = Math.ceil(from - 1e-9); power <= to + 1e-9; power += step) found.push(10 ** power);
    return found;
  }
  for (let power = Math.floor(from); power <= to; power++) for (const digit of [1, 2, 5]) found.push(digit * 10 ** power);
  return found.filter((value) => value >= low && value <= high);
}

function exponent(value, digits) {
  return value.toExponential(digits).replace("e+", "e");
}

export function count(value) {
  return (Math.round(value) || 0).toLocaleString("en-US"); // || 0: -0 is shown as 0
}

/** `rank 3`, `ranks 0 to 7`: the numbers of a host's ranks are consecutive. */
export function ranksText(ranks) {
  return ranks.length === 1 ? `rank ${ranks[0]}` : `ranks ${ranks[0]} to ${ranks.at(-1)}`;
}

/** 00:38, 01:02, 2:03:04. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const whole = Math.max(0, Math.floor(seconds));
  const [h, m, s] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (n) => String(n).padStart(2, "0");
  return h ? `${h}:${two(m)}:${two(s)}` : `${two(m)}:${two(s)}`;
}

/** The time of one step: 41.2 ms, 3.4 s. */
export function stepTime(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds >= 1) return `${seconds.toFixed(seconds >= 10 ? 0 : 1)} s`;
  const ms = seconds * 1000;
  return `${ms.toFixed(ms >= 100 ? 0 : ms >= 1 ? 1 : 2)} ms`;
}

const UNITS = ["B", "KB", "MB", "GB", "TB"];

/** Bytes in the unit of `of`, so that "9.1 / 16 GB" needs only one unit. */
export function bytes(value, of = value) {
  let unit = 0;
  for (let rest = of; rest >= 1024 && unit < UNITS.length - 1; rest /= 1024) unit += 1;
  const scaled = value / 1024 ** unit;
  return { number: scaled >= 100 || unit < 2 ? scaled.toFixed(0) : scaled.toFixed(1), unit: UNITS[unit] };
}

/** The newest lines of one rank's output, as a terminal would show them. */
export class Lines {
  constructor(limit = 5000) {
    this.limit = limit;
    this.dropped = 0;
    this.version = 0;
    this.lines = [];
    this._open = ""; // the last line, which has no newline yet
  }

  append(text) {
    const parts = (this._open + text).split("\n");
    this._open = parts.pop();
    for (const part of parts) this.lines.push(fold(part));
    const surplus = this.lines.length - this.limit;
    if (surplus > 0) {
      this.lines.splice(0, surplus);
      this.dropped += surplus;
    }
    if (this._open.length > 65536) this._open = fold(this._open).slice(-65536);
    this.version += 1;
  }

  all() {
    return this._open ? [...this.lines, fold(this._open)] : this.lines;
  }

  get empty() {
    return !this.lines.length && !this._open;
  }
}

function fold(line) {
  const shown = line.includes("\r") ? line.replace(/\r+$/, "").split("\r").pop() : line;
  return withStyles(shown);
}
