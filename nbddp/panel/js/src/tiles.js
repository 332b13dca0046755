// The row of tiles: steps, epochs, the newest values with their difference to the earlier run, throughput, time left.

import { h, setText, show } from "./dom.js";
import { change, count, duration, metric } from "./numbers.js";

const [TILE_PX, MIN_TILES, MAX_TILES] = [114, 6, 8]; // tiles keep their places: their number depends on the width alone
const [PADDING_PX, TWO_COLUMNS_PX] = [28, 390]; // in a panel that is narrower, tiles are in two columns
const WIDE_TILE = 1.45; // the first one, and the last but one: those with a unit
const THROUGHPUT_CHARS = 5; // have a place from the start

export class Tiles {
  constructor() {
    this.el = h("div", { class: "nbddp-tiles", role: "list" });
  }

  /** `width`: of the panel; `going`: the run is not over, as far as the page knows; `earlier`: show the differences. */
  draw(store, width, going, earlier) {
    const places = this._arrange(width);
    const [first, last] = content(store, going, earlier, places);
    const free = Array.from({ length: Math.max(0, places - first.length - last.length) }, () => null);
    const tiles = [...first, ...free, ...last];
    while (this.el.children.length > tiles.length) this.el.lastChild.remove();
    while (this.el.children.length < tiles.length) this.el.append(element());
    tiles.forEach((tile, i) => fill(this.el.children[i], tile));
    show(this.el, free.length < places || !store.over);
  }

  /** Arrange the places of the tiles for the present width; their number. */
  _arrange(panelWidth) {
    const width = panelWidth - PADDING_PX;
    const fitting = Math.min(MAX_TILES, Math.floor(width / TILE_PX));
    const oneRow = fitting > MIN_TILES - 2;
    const columns = oneRow ? fitting : width < TWO_COLUMNS_PX ? 2 : 3;
    const shares = Array.from({ length: columns }, (_, i) => (oneRow && (i === 0 || i === columns - 2) ? WIDE_TILE : 1));
    this.el.style.gridTemplateColumns = shares.map((share) => `minmax(0, ${share}fr)`).join(" ");
    return oneRow ? columns : MIN_TILES;
  }
}

/** What the tiles say, as two lists: those at the start, and those at the end of the row. */
export function content(store, going, earlier, places = MAX_TILES) {
  const { head } = store;
  const first = [];
  const last = [];
  if (head.step !== null || going) first.push(counted(head.step_label, head.step, head.steps));
  if (head.outer !== null) first.push(counted(head.outer_label, head.outer, head.outers));
  const rate = { label: "Throughput", value: count(head.throughput), unit: "samples/s", chars: THROUGHPUT_CHARS };
  if (head.throughput) last.push(rate);
  const left = going && head.left !== null ? duration(head.left) : "–";
  if (head.left !== null || going) last.push({ label: "Time left", value: left });
  const metrics = newest(store.series).slice(0, Math.max(0, places - first.length - last.length));
  return [[...first, ...metrics.map((series) => valueTile(series, earlier))], last];
}

/** The metrics in the order of the tiles: first one of each family, and of later families the validation metric. */
export function newest(series) {
  const used = series.filter(({ column }) => column.n);
  const families = new Map();
  for (const each of used) families.set(each.family, [...(families.get(each.family) ?? []), each]);
  const heads = [...families.values()].map((family, i) => (i && family.find(({ label }) => /^val/.test(label))) || family[0]);
  return [...heads, ...used.filter((each) => !heads.includes(each))];
}

/** "Train loss 0.2003", said by a screen reader. */
export function spoken(series) {
  return newest(series).slice(0, MAX_TILES).map(({ tile, column }) => `${tile} ${metric(column.last)}`);
}

/** The tile of a loop; the number has space for as many digits as the total. */
function counted(label, done, total) {
  const value = done === null ? "–" : count(done);
  return total ? { label, value, unit: `of ${count(total)}`, chars: count(total).length } : { label, value };
}

function valueTile({ tile, column, before }, earlier) {
  const shown = { label: tile, value: metric(column.last) };
  if (!before || !earlier) return shown;
  const [step, value] = before;
  return { ...shown, ...change(column.last, value), title: `${metric(value)} at step ${count(step)} of the earlier run` };
}

function element() {
  const difference = h("span", { class: "nbddp-change", role: "img" });
  return h("div", { role: "listitem" }, h("span"), h("div", {}, h("b"), h("small")), difference);
}

function fill(tile, content) {
  const { label = "", value = "", unit = "", chars = 0, text = "", words = "", title = "" } = content ?? {};
  const [name, line, difference] = tile.children;
  const [number, after] = line.children;
  tile.dataset.free = content === null;
  tile.ariaHidden = String(content === null);
  setText(name, label);
  name.title = label;
  setText(number, value);
  number.style.minWidth = unit ? `${chars}ch` : "";
  setText(after, unit);
  setText(difference, text);
  show(difference, Boolean(text));
  difference.title = title;
  difference.ariaLabel = words;
}
