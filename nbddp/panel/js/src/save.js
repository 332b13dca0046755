// "Save as PNG / CSV": files that the browser downloads, without a server.

import { csv } from "./csv.js";
import { h, setText, show } from "./dom.js";
import { count } from "./numbers.js";
import { drawSheet } from "./sheet.js";

const KEEP_MS = 60_000; // the browser may read a file a while after the click
const NAME_CHARS = 80;

export class Save {
  constructor(panel, store) {
    this._panel = panel;
    this._store = store;
    this._png = this._button("PNG", () => this._savePicture());
    this._csv = this._button("CSV", () => this._saveMetrics());
    this.el = h("span", { class: "nbddp-save", role: "group", "aria-label": "Save" }, "Save as", this._png, this._csv);
    this.remark = h("p", { class: "nbddp-remark", role: "status", hidden: true });
  }

  _button(kind, save) {
    const button = h("button", { type: "button", "aria-label": `Save as ${kind}` }, kind);
    button.addEventListener("click", async () => {
      button.disabled = true;
      this._say("");
      try {
        await save();
      } finally {
        button.disabled = false;
      }
    });
    return button;
  }

  async _savePicture() {
    const canvas = await drawSheet(this._panel, this._store);
    const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
    if (blob) download(blob, `${this._name}.png`);
    else this._say("The browser cannot make a picture of this size.");
  }

  async _saveMetrics() {
    const parts = this._panel.lost ? null : await this._store.csv();
    const name = parts ? `${this._name}.csv` : `${this._name}-thinned.csv`;
    download(new Blob(parts ?? [csv(this._store.series)], { type: "text/csv" }), name);
    if (parts) return;
    const points = this._store.series.reduce((sum, { column }) => sum + column.n, 0);
    this._say(`The kernel did not answer, so ${name} has only the ${count(points)} points that this page has.`);
  }

  get _name() {
    return this._store.head.name.replace(/[^\p{L}\p{N}.=_-]+/gu, "_").slice(0, NAME_CHARS).replace(/^\.+/, "") || "run";
  }

  _say(text) {
    setText(this.remark, text);
    show(this.remark, Boolean(text));
  }
}

function download(blob, name) {
  const url = URL.createObjectURL(blob);
  const link = h("a", { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), KEEP_MS);
}
