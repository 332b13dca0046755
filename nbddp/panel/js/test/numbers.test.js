import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { pieces, unstyled } from "../src/ansi.js";
import {
  Column,
  Lines,
  bytes,
  change,
  duration,
  extent,
  join,
  logSplits,
  logTicks,
  lowerBound,
  metric,
  padded,
  stepTime,
  ticks,
  widened,
} from "../src/numbers.js";

// The cases of nbddp/panel/numbers.py, too: panel, picture and text write numbers alike.
const CASES = JSON.parse(readFileSync(new URL("../../../../tests/panel/numbers.json", import.meta.url)));
const number = (value) => (typeof value === "string" ? Number(value.replace("inf", "Infinity")) : value);
const noise = (i) => Math.sin(i * 12.9898) * 43758.5453 - Math.floor(Math.sin(i * 12.9898) * 43758.5453);

const column = (n, y = (i) => i) => {
  const made = new Column();
  made.append(
    Array.from({ length: n }, (_, i) => i),
    Array.from({ length: n }, (_, i) => y(i)),
  );
  return made;
};

test("a few points are all drawn", () => {
  assert.deepEqual(column(100).visible(0, 99, 300), Array.from({ length: 100 }, (_, i) => i));
});

test("thinning keeps a single spike among a million points, the first and the last", () => {
  const made = column(1_000_000, (i) => (i === 777_777 ? 100 : Math.sin(i)));
  const kept = made.visible(0, 1_000_000, 400);
  assert.ok(kept.length <= 804, `${kept.length}`);
  assert.ok(kept.includes(777_777));
  assert.equal(kept[0], 0);
  assert.equal(kept.at(-1), 999_999);
  assert.deepEqual(kept, [...new Set(kept)].sort((a, b) => a - b));
});

test("block summaries agree with the scan of every point", () => {
  const made = column(100_000, noise);
  for (const [from, to] of [[0, 100_000], [17, 66_000], [64, 128], [99_900, 100_000]]) {
    const [low, high] = made._extremes(from, to);
    const ys = Array.from(made.y.subarray(from, to));
    assert.equal(made.y[low], Math.min(...ys));
    assert.equal(made.y[high], Math.max(...ys));
  }
});

test("zooming in shows every point, and one beyond each edge", () => {
  const kept = column(1_000_000).visible(500, 510, 400);
  assert.equal(kept[0], 499);
  assert.equal(kept.at(-1), 511);
  assert.equal(kept.length, 13);
});

test("NaN is never the lowest nor the highest while there is a number", () => {
  const made = column(10_000, (i) => (i % 3 === 0 ? NaN : i));
  const kept = made.visible(0, 10_000, 100).slice(1, -1);
  assert.ok(kept.every((i) => !Number.isNaN(made.y[i])));
});

test("a step that was passed already replaces the points after it", () => {
  const made = column(1000);
  made.append([500, 501], [7, 8]);
  assert.equal(made.n, 502);
  assert.deepEqual([made.y[499], made.y[500], made.y[501]], [499, 7, 8]);
  assert.equal(made.mean(501, 1), 7.5);
  assert.equal(made._sums.length, 7);
  assert.equal(made._lows.length, 7);
});

test("a mean is over the points around it, and passes over NaN", () => {
  const made = column(1000, (i) => (i === 500 ? NaN : i));
  assert.equal(made.mean(300, 100), 300);
  assert.equal(made.mean(0, 2), 1);
  assert.equal(made.mean(999, 2), 998);
  assert.equal(made.mean(500, 100), NaN);
  assert.ok(Math.abs(made.mean(501, 200) - (501 * 401 - 500) / 400) < 1e-9);
});

test("a value of 1e200 long ago does not spoil a mean", () => {
  const made = column(1000, (i) => (i === 10 ? 1e200 : 3));
  assert.equal(made.mean(800, 100), 3);
});

test("smoothing is 2 % of what is visible, and none of few points or of smooth data", () => {
  const rough = column(10_000, noise);
  assert.equal(rough.reach(0, 9999, 0.02), 100);
  assert.equal(rough.reach(0, 999, 0.02), 10);
  assert.equal(rough.reach(0, 98, 0.02), 0, "99 points");
  assert.equal(rough.reach(0, 9999, 0), 0);
  assert.equal(column(10_000, (i) => Math.cos(i / 1000)).reach(0, 9999, 0.02), 0, "a schedule");
  assert.equal(column(10_000, (i) => noise(Math.floor(i / 100))).reach(0, 9999, 0.02), 0, "a value per epoch");
});

test("lines with different x are joined on the union", () => {
  const [x, a, b] = join([
    { x: [1, 3], y: [10, NaN] },
    { x: [2, 3], y: [20, 30] },
  ]);
  assert.deepEqual(Array.from(x), [1, 2, 3]);
  assert.deepEqual(a, [10, null, null]);
  assert.deepEqual(b, [null, 20, 30]);
});

test("ranges have a margin, and start at zero if the data are close to it", () => {
  assert.deepEqual(extent([[null, 1, 3], [2]]), [1, 3]);
  assert.deepEqual(extent([[-1, 0, 5]], true), [5, 5]);
  assert.deepEqual(extent([[]]), [0, 1]);
  assert.equal(padded([0.1, 3])[0], 0);
  assert.ok(padded([2.9, 3])[0] < 2.9);
  assert.deepEqual(padded([0, 0]), [-1, 1]);
});

test("no value makes a range without numbers or without width", () => {
  const lines = [[1e308, -1e308], [1.7e308, -Infinity], [0, 5e-324], [5e-324, 5e-324], [1, 1 + 2 ** -52], [1e16, 1e16 + 2]];
  for (const y of lines) {
    const [, column] = join([{ x: [0, 1], y }]);
    const [low, high] = padded(extent([column]));
    assert.ok(high - low > 1e-300 && Number.isFinite(high - low), `${y}: ${low} to ${high}`);
    assert.ok(high - low > 1e-13 * Math.max(Math.abs(low), Math.abs(high)), `${y}: ${low} to ${high}`);
    assert.ok(extent([column], true)[0] > 0 && Number.isFinite(10 * extent([column], true)[1]));
  }
});

test("lowerBound finds the first not below", () => {
  assert.equal(lowerBound([1, 2, 2, 5], 4, 2), 1);
  assert.equal(lowerBound([1, 2, 2, 5], 4, 9), 4);
  assert.equal(lowerBound([], 0, 1), 0);
});

test("numbers are formatted for reading", () => {
  for (const [value, text] of CASES.metric) assert.equal(metric(number(value)), text);
  for (const [values, texts] of CASES.ticks) assert.deepEqual(ticks(values), texts);
  for (const [values, texts] of CASES.log_ticks) assert.deepEqual(logTicks(values), texts);
  for (const [[low, high], places] of CASES.log_places) {
    assert.deepEqual(logSplits(low, high, 5).map((value) => Number(value.toPrecision(9))), places);
  }
  assert.equal(metric(undefined), "–");
  assert.deepEqual([4, 38, 62, 7384, null].map(duration), ["00:04", "00:38", "01:02", "2:03:04", "–"]);
  assert.deepEqual([0.0412, 0.00012, 3.44, 0.5, null].map(stepTime), ["41.2 ms", "0.12 ms", "3.4 s", "500 ms", "–"]);
  assert.deepEqual(bytes(9.1 * 2 ** 30, 16 * 2 ** 30), { number: "9.1", unit: "GB" });
});

test("of a line with carriage returns the last state is kept", () => {
  const lines = new Lines();
  lines.append("start\n 10%|#\r 50%|##");
  lines.append("\r100%|###\nend");
  assert.deepEqual(lines.all(), ["start", "100%|###", "end"]);
});

test("control characters are dropped, colours and text stay", () => {
  const lines = new Lines();
  lines.append("\x1b[31mred\x1b[0m \x07<b>bold</b>\t1\n");
  lines.append("a\u202egnp.exe\u2066 \x9b2J עברית\n");
  lines.append("\x1b[2J\x1b]0;title\x07x\x1b(\x1b\x1b[1\n");
  assert.deepEqual(lines.all(), ["\x1b[31mred\x1b[0m <b>bold</b>\t1", "agnp.exe 2J עברית", "x([1"]);
  assert.deepEqual(lines.all().map(unstyled).slice(0, 2), ["red <b>bold</b>\t1", "agnp.exe 2J עברית"]);
});

test("a line with colours is taken apart into pieces with classes", () => {
  assert.deepEqual(pieces("plain"), [["plain", ""]]);
  assert.deepEqual(pieces("\x1b[1;31mE\x1b[22m r\x1b[39m.\x1b[m!"), [["E", "bold fg1"], [" r", "fg1"], [".", ""], ["!", ""]]);
  assert.deepEqual(pieces("\x1b[92mok\x1b[0;4;3m u\x1b[24;23;45m b\x1b[49m."), [["ok", "fg2"], [" u", "underline italic"], [" b", "bg5"], [".", ""]]);
  assert.deepEqual(pieces("\x1b[38;5;9mred\x1b[38;5;123;1mno name\x1b[38;2;1;31;41mrgb"), [["red", "fg1"], ["no name", "bold"], ["rgb", "bold"]]);
});

test("output is kept up to a limit, and dropped lines are counted", () => {
  const lines = new Lines(100);
  for (let i = 0; i < 1000; i++) lines.append(`line ${i}\n`);
  assert.equal(lines.all().length, 100);
  assert.equal(lines.dropped, 900);
  lines.append("x".repeat(1_000_000));
  assert.ok(lines.all().at(-1).length <= 65536);
});

test("other data widen a range until the own data have a fifth of it", () => {
  assert.deepEqual(widened([1, 2], [0.5, 3]), [0.5, 3]);
  assert.deepEqual(widened([1, 2], [1.2, 1.4]), [1, 2]);
  assert.deepEqual(widened([1, 2], [-1e9, 1e9]), [-1, 4]);
  assert.deepEqual(widened([3, 3], [0, 100]), [0, 6], "of a constant");
  assert.deepEqual(widened([0, 0], [-9, 9]), [-1, 1]);
});

test("a difference says up or down, and not better or worse", () => {
  assert.deepEqual(change(0.31, 0.35), { text: "▼ 0.0400", words: "0.0400 lower than before" });
  assert.deepEqual(change(1500, 250), { text: "▲ 1,250", words: "1,250 higher than before" });
  assert.deepEqual(change(0.5, 0.5), { text: "= before", words: "as before" });
  assert.deepEqual(change(NaN, 0.5), { text: "", words: "" });
});
