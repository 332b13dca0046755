// What the ranks have shown: the newest image of each name, and a slider over the steps that were kept.

import { h, setText, show } from "./dom.js";
import { count } from "./numbers.js";

const HTML = "text/html";
const SMALL_PX = 180; // an image with fewer pixels on its longer side is drawn larger, pixel by pixel
const MAX_HEIGHT_PX = 280;
const TABLES = "table { border-collapse: collapse } table, td, th { border: 0 } td, th { padding: 3px 12px 3px 0; text-align: right }";

/** The images of one run by name and step, shared by all views of a model. */
export class Album {
  constructor() {
    this.names = new Map(); // to a map from step to { kind, bytes, url or text }
  }

  /** A message: the steps that the kernel keeps, and images, whose bytes follow each other in `data`. */
  receive({ steps, images }, data) {
    const view = data instanceof ArrayBuffer ? new DataView(data) : data;
    let at = view ? view.byteOffset : 0;
    for (const [name, step, kind, size] of images) {
      this._add(name, step, kind, new Uint8Array(view.buffer.slice(at, at + size)));
      at += size;
    }
    for (const [name, kept] of steps) {
      const shown = this.names.get(name);
      for (const step of [...(shown?.keys() ?? [])]) if (!kept.includes(step)) this._drop(shown, step);
    }
  }

  dispose() {
    for (const shown of this.names.values()) for (const step of [...shown.keys()]) this._drop(shown, step);
  }

  _add(name, step, kind, bytes) {
    if (!this.names.has(name)) this.names.set(name, new Map());
    const shown = this.names.get(name);
    if (same(shown.get(step)?.bytes, bytes)) return; // sent again, for another page
    this._drop(shown, step);
    const content = kind === HTML ? { text: new TextDecoder().decode(bytes) } : { url: URL.createObjectURL(new Blob([bytes], { type: kind })) };
    shown.set(step, { kind, bytes, ...content });
  }

  _drop(shown, step) {
    const url = shown.get(step)?.url;
    if (url) URL.revokeObjectURL(url);
    shown.delete(step);
  }
}

function same(a, b) {
  return a?.length === b.length && a.every((byte, i) => byte === b[i]);
}

/** The figures of a panel. */
export class Figures {
  constructor(album) {
    this._album = album;
    this._cards = new Map();
    this.el = h("div", { class: "nbddp-figures", hidden: true });
  }

  get empty() {
    return this._album.names.size === 0;
  }

  update() {
    for (const [name, shown] of this._album.names) {
      if (!shown.size) continue;
      if (!this._cards.has(name)) {
        const card = new Card(name);
        this._cards.set(name, card);
        this.el.append(card.el);
      }
      this._cards.get(name).update(shown);
    }
    show(this.el, this._cards.size > 0);
  }
}

/** The images of one name. At its right end, the slider follows the newest image. */
class Card {
  constructor(name) {
    this._name = name;
    this._steps = [];
    this._chosen = null; // a step; null: the newest
    this._drawn = this._theme = null;
    this._stage = h("div", { class: "nbddp-stage" });
    this._step = h("span", { class: "nbddp-figure-step" });
    this._slider = h("input", { type: "range", min: 0, step: 1, "aria-label": `Step of ${name}` });
    this._slider.addEventListener("input", () => this._choose(Number(this._slider.value)));
    const title = h("figcaption", {}, h("strong", { class: "nbddp-family" }, name), this._step);
    this.el = h("figure", { class: "nbddp-figure" }, title, this._stage, this._slider);
  }

  update(shown) {
    this._shown = shown;
    this._steps = [...shown.keys()].sort((a, b) => a - b);
    this._slider.max = this._steps.length - 1;
    this._slider.disabled = this._steps.length < 2;
    this._draw();
  }

  _choose(index) {
    this._chosen = index === this._steps.length - 1 ? null : this._steps[index];
    this._draw();
  }

  _draw() {
    const last = this._steps.length - 1;
    // A step that the kernel no longer keeps: the one before it.
    const index = this._chosen === null ? last : Math.max(0, this._steps.findLastIndex((step) => step <= this._chosen));
    const step = this._steps[index];
    this._slider.value = index;
    this._slider.style.setProperty("--filled", `${(100 * index) / Math.max(1, last)}%`);
    const text = `step ${count(step)}`;
    this._slider.setAttribute("aria-valuetext", text);
    setText(this._step, index === last ? text : `${text}, newest ${count(this._steps[last])}`);
    const image = this._shown.get(step);
    const theme = image.kind === HTML && this.el.closest("[data-theme]")?.dataset.theme;
    if (image === this._drawn && theme === this._theme) return;
    [this._drawn, this._theme] = [image, theme];
    if (image.kind === HTML) this._drawHtml(image.text);
    else this._drawImage(image.url, `${this._name}, ${text}`);
  }

  _drawImage(url, alt) {
    const image = h("img", { src: url, alt });
    image.decode().then(
      () => this._drawn?.url === url && this._put(image),
      () => this._drawn?.url === url && this._stage.replaceChildren(h("span", {}, "This image cannot be shown")),
    );
  }

  /** Show a decoded image. The stage has the shape of the first one, so that no later image moves the page. */
  _put(image) {
    const [width, height] = [image.naturalWidth || 300, image.naturalHeight || 150];
    const times = Math.max(1, Math.floor(SMALL_PX / Math.max(width, height)));
    image.dataset.small = times > 1;
    this._stage.replaceChildren(image);
    if (this._stage.style.aspectRatio) return;
    this._stage.style.aspectRatio = `${width} / ${height}`;
    this._stage.style.width = `${Math.min(width * times, (MAX_HEIGHT_PX * width) / height)}px`;
  }

  /** In a frame where no script runs and no style of the page applies. */
  _drawHtml(text) {
    const frame = h("iframe", { sandbox: "allow-same-origin", tabindex: -1, title: this._name });
    const { color, fontFamily } = getComputedStyle(this.el);
    frame.srcdoc = `<!doctype html><style>body { margin: 0; color: ${color}; font: 13px/1.4 ${fontFamily} } ${TABLES}</style>${text}`;
    frame.style.height = this._stage.firstChild?.style.height ?? "0";
    frame.addEventListener("load", () => {
      const height = frame.contentDocument?.body.scrollHeight ?? MAX_HEIGHT_PX;
      frame.style.height = `${Math.min(height, MAX_HEIGHT_PX)}px`;
    });
    this.el.dataset.html = true;
    this._stage.replaceChildren(frame);
  }
}
