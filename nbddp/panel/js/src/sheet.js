// The panel as a picture of its own: state, tiles and charts on white, at twice the size of the screen's pixels.

import { Chart, FONT } from "./chart.js";
import { h } from "./dom.js";
import { duration } from "./numbers.js";
import { palette } from "./theme.js";
import { content } from "./tiles.js";

const SCALE = 2;
const [WIDTH, PADDING, GAP] = [744, 16, 20];
const INNER = WIDTH - 2 * PADDING;
const [PLOT, LINE, TILE] = [180, 18, 58]; // heights
const MAX_CHARTS = 24;
const [TEXT, SOFT, RULE, RED, AMBER] = ["#111111", "#6b6b6b", "#e0e0e0", "#d32f2f", "#b45309"];
const TONES = { "": TEXT, soft: SOFT, bad: RED };
const STATES = { finished: "#16a34a", failed: RED, stopped: AMBER, stopping: AMBER, starting: AMBER, lost: SOFT };

/** A canvas with what the panel shows now: its charts, zoom, smoothing and scale. */
export async function drawSheet(panel, store) {
  const host = h("div", { class: "nbddp-sheet", "aria-hidden": "true" });
  document.body.append(host);
  const charts = chartsOf(panel, host);
  await new Promise((resolve) => setTimeout(resolve)); // uPlot draws a moment later
  try {
    return composed(panel, store, charts);
  } finally {
    charts.forEach(({ chart }) => chart.destroy());
    host.remove();
  }
}

/** The panel's charts again, two in a row, larger by what the screen's pixels lack. */
function chartsOf(panel, host) {
  const ignored = () => {};
  const settings = { smoothing: panel.smoothing, log: panel.log, zoom: panel.zoom, marks: panel.marks, earlier: panel.earlier };
  const scale = SCALE / devicePixelRatio;
  const sheet = { ...settings, scale, colors: palette(false, false), key: `${panel.key}-sheet`, onCursor: ignored };
  const families = panel.families.slice(0, MAX_CHARTS);
  return families.map(([family, series], i) => {
    const wide = i === families.length - 1 && i % 2 === 0;
    const width = wide ? INNER : (INNER - GAP) / 2;
    const chart = new Chart(sheet, family);
    chart.plot.style.width = `${width * scale}px`;
    host.append(chart.el);
    chart.update(series);
    return { chart, width, column: i % 2 };
  });
}

function composed(panel, store, charts) {
  const canvas = document.createElement("canvas");
  const pen = new Pen(canvas.getContext("2d"));
  const draw = () => {
    let y = PADDING + heading(pen, panel, store);
    y += tiles(pen, store, panel, y);
    for (let i = 0; i < charts.length; i += 2) y += row(pen, charts.slice(i, i + 2), y);
    return y + PADDING / 2;
  };
  const height = draw(); // once for the height, on a canvas without size
  canvas.width = WIDTH * SCALE;
  canvas.height = Math.ceil(height) * SCALE;
  pen.begin(WIDTH, height);
  draw();
  return canvas;
}

/** Draws in the picture's own units. */
class Pen {
  constructor(context) {
    this.context = context;
  }

  begin(width, height) {
    this.context.scale(SCALE, SCALE);
    this.context.fillStyle = "#ffffff";
    this.context.fillRect(0, 0, width, height);
  }

  /** Write at the baseline `y`, cut to `room`; returns the width. */
  text(text, x, y, { size = 13, weight = 400, color = TEXT, room = Infinity } = {}) {
    this.context.font = `${weight} ${size}px ${FONT}`;
    this.context.fillStyle = color;
    const shown = this._cut(text, room);
    this.context.fillText(shown, x, y);
    return this.context.measureText(shown).width;
  }

  width(text, { size = 13, weight = 400 } = {}) {
    this.context.font = `${weight} ${size}px ${FONT}`;
    return this.context.measureText(text).width;
  }

  rectangle(x, y, width, height, color) {
    this.context.fillStyle = color;
    this.context.fillRect(x, y, width, height);
  }

  _cut(text, room) {
    let shown = text;
    while (shown.length > 1 && this.context.measureText(shown).width > room) shown = `${shown.slice(0, -2)}…`;
    return shown;
  }
}

/** The first line, and the error if there is one; returns their height. */
function heading(pen, panel, store) {
  const { head, seconds } = store;
  const state = panel.shownState;
  const y = PADDING + 14;
  pen.context.fillStyle = STATES[state] ?? "#2563eb";
  pen.context.beginPath();
  pen.context.arc(PADDING + 4, y - 4.5, 4, 0, 2 * Math.PI);
  pen.context.fill();
  let x = PADDING + 15;
  x += 12 + pen.text(state[0].toUpperCase() + state.slice(1), x, y, { weight: 600, color: STATES[state] ?? "#2563eb" });
  x += 12 + pen.text(head.name, x, y, { size: 14, weight: 700, room: INNER / 2 });
  const clock = duration(state === "lost" ? head.seconds : seconds);
  pen.text(`${head.summary} · ${clock}`, x, y, { color: SOFT, room: WIDTH - PADDING - x });
  if (!head.error) return 28;
  pen.text(head.error, PADDING, y + 22, { color: RED, room: INNER });
  return 50;
}

/** The tiles, as many in a line as fit; returns their height. */
function tiles(pen, store, panel, top) {
  const all = content(store, false, panel.earlier).flat().filter(({ value }) => value !== "–");
  const differences = all.some(({ text }) => text);
  let [x, y] = [PADDING, top];
  for (const { label, value, unit = "", text = "" } of all) {
    const below = text ? pen.width(text, { size: 11 }) : 0;
    const number = pen.width(value, { size: 18, weight: 700 }) + (unit ? 5 + pen.width(unit, { size: 11 }) : 0);
    const width = Math.min(INNER, Math.max(pen.width(label, { size: 11 }), number, below));
    if (x > PADDING && x + width > WIDTH - PADDING) [x, y] = [PADDING, y + TILE];
    if (x > PADDING) pen.rectangle(x - 15, y, 1, differences ? 52 : 38, RULE);
    pen.text(label, x, y + 11, { size: 11, color: SOFT, room: width });
    const after = x + pen.text(value, x, y + 31, { size: 18, weight: 700 }) + 5;
    pen.text(unit, after, y + 31, { size: 11, color: SOFT });
    pen.text(text, x, y + 48, { size: 11, color: SOFT });
    x += width + 30;
  }
  return all.length ? y - top + (differences ? TILE + 8 : TILE - 6) : 0;
}

/** One or two charts beside each other, their plots at one height; returns the height. */
function row(pen, charts, top) {
  const left = ({ column, width }) => PADDING + column * (width + GAP);
  const captions = charts.map((each) => caption(pen, each, left(each), top));
  const height = Math.max(...captions);
  charts.forEach((each) => plot(pen, each, left(each), top + height));
  return height + PLOT + 12;
}

/** Title and legend, in as many lines as they need; returns their height. */
function caption(pen, { chart, width }, left, top) {
  let [x, y] = [left, top + 13];
  x += pen.text(chart.title.textContent, x, y, { weight: 700, room: width }) + 12;
  for (const { color, text, tone } of chart.keys()) {
    if (x > left && x + 17 + pen.width(text) > left + width) [x, y] = [left, y + LINE];
    pen.rectangle(x, y - 5.5, 12, 2, color);
    x += 17 + pen.text(text, x + 17, y, { color: TONES[tone], room: left + width - x - 17 }) + 12;
  }
  return y - top + 7;
}

function plot(pen, { chart, width }, left, top) {
  const { canvas, box, marks } = chart.image();
  pen.context.drawImage(canvas, left, top, width, PLOT);
  const unit = canvas.width / width;
  const [y, end] = [top + box.top / unit, left + (box.left + box.width) / unit];
  for (const { x, label, family } of marks) mark(pen, left + x / unit, y, box.height / unit, end, label, family ? RED : AMBER);
  if (chart.empty) pen.text(chart.empty, left + width / 2 - pen.width(chart.empty) / 2, top + PLOT / 2, { color: RED });
}

/** A restart, or where a metric became NaN: a dashed line, and its label on the side that has space for it. */
function mark(pen, x, top, height, end, label, color) {
  const { context } = pen;
  context.strokeStyle = color;
  context.setLineDash([4, 3]);
  context.beginPath();
  context.moveTo(x, top);
  context.lineTo(x, top + height);
  context.stroke();
  context.setLineDash([]);
  const width = pen.width(label, { size: 11 });
  pen.text(label, x + 10 + width > end ? x - 5 - width : x + 5, top + 11, { size: 11, color });
}
