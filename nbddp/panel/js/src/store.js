// The data of one run: appends the kernel's frames to columns and logs. Shared by all views of a model.

import { Album } from "./figures.js";
import { Column, Lines } from "./numbers.js";

const HELLO_EVERY_MS = 300;
const GAP_TIMEOUT_MS = 5000; // a kernel that receives nothing sends no snapshot; then accept a gap in the curves
// JupyterLab opens its connection to a busy kernel (a subshell) shortly after the model; earlier messages wait.
const HELLO_AGAIN_MS = [400, 1200, 3000];

const PART_MS = 700; // between two parts of a file: a Jupyter server drops messages beyond 1 MB a second
const ANSWER_MS = 2000; // after this time without any answer, none will come
const WRITE_MS = 60_000; // the kernel has the request, and writes the file

/** The kernel sends every second; after this time without a message it is gone, or very busy. */
export const SILENT_S = 5;

export class Store {
  constructor(model) {
    this.model = model;
    this.head = null;
    this.headAt = 0;
    // { name, label, family, title, column, low, high }; of the earlier run: its points in `ghost`, and in `before` its step
    // and value that are nearest to the last step of `column`; null without them.
    this.series = [];
    this.logs = new Map();
    this.figures = new Album();
    this.hang = []; // lines of the report about a run that hangs
    this.version = 0; // of the curves
    this.notified = false; // a notification has said that the run is over
    this._page = Math.random().toString(36).slice(2); // a reloaded page gets a new one
    this._byIndex = new Map();
    this._seq = -1;
    this._gapAt = null; // since when frames are missing
    this._views = new Set();
    this._asked = new Map(); // by request, what waits for the kernel's answer
    this._helloAt = 0;
    this._onMessage = (content, buffers) => this._receive(content, buffers?.[0]);
    this._onSnapshot = () => this._readSnapshot();
    model.on("msg:custom", this._onMessage);
    model.on("change:snapshot", this._onSnapshot);
    this._readSnapshot();
    this._hello();
    this._timers = HELLO_AGAIN_MS.map((ms) => setTimeout(() => model.get("heard") || this._hello(), ms));
  }

  dispose() {
    this._timers.forEach(clearTimeout);
    this.model.off("msg:custom", this._onMessage);
    this.model.off("change:snapshot", this._onSnapshot);
    this._views.clear();
    this.figures.dispose();
  }

  subscribe(view) {
    this._views.add(view);
    return () => this._views.delete(view);
  }

  /** Seconds since the kernel's last message; 0 if the run is over, since no more messages are expected. */
  get silence() {
    return this.over ? 0 : (performance.now() - this.headAt) / 1000;
  }

  /** Seconds since the run's start by the kernel's clock, continued for a moment by the page's clock. */
  get seconds() {
    return this.head ? this.head.seconds + Math.min(this.silence, SILENT_S) : 0;
  }

  get over() {
    return ["finished", "failed", "stopped"].includes(this.head?.state);
  }

  /** The metrics as a CSV file in parts, from the kernel; null if it does not answer. */
  async csv() {
    const request = Math.random().toString(36).slice(2);
    const parts = [];
    for (let [start, size] = [0, 1]; start < size; ) {
      if (start) await new Promise((resolve) => setTimeout(resolve, PART_MS));
      const part = await this._ask({ kind: "csv", request, start });
      if (!part?.size) return null;
      parts.push(part.bytes);
      [start, size] = [start + part.bytes.byteLength, part.size];
    }
    return parts;
  }

  /** Send a request and wait for the kernel's answer; null if none comes. */
  _ask(content) {
    const heard = this.model.get("heard");
    const giveUp = () => this._answer(content.request, null);
    return new Promise((resolve) => {
      const waiting = { resolve };
      waiting.timer = setTimeout(() => {
        if (this.model.get("heard") === heard) giveUp();
        else waiting.timer = setTimeout(giveUp, WRITE_MS);
      }, ANSWER_MS);
      this._asked.set(content.request, waiting);
      this.send(content);
    });
  }

  _answer(request, answer) {
    const waiting = this._asked.get(request);
    if (!waiting) return;
    clearTimeout(waiting.timer);
    this._asked.delete(request);
    waiting.resolve(answer);
  }

  send(content) {
    this.model.send(content);
  }

  _readSnapshot() {
    const snapshot = this.model.get("snapshot");
    if (snapshot?.content) this._receive(snapshot.content, snapshot.data);
  }

  _receive(content, data) {
    if (content.kind === "csv") {
      this._answer(content.request, { size: content.size, bytes: data });
      return;
    }
    if (content.kind === "figures") this.figures.receive(content, data);
    else this._receiveRun(content, data);
    for (const view of this._views) view.update();
  }

  _receiveRun(content, data) {
    if (content.kind === "snapshot") {
      if (content.seq < this._seq) return;
      this._begin();
    } else if (content.kind !== "frame" || content.seq <= this._seq) {
      return;
    }
    if (content.head) this._setHead(content.head);
    if (content.kind === "snapshot" || this._follows(content.seq)) this._apply(content, data);
  }

  /** Whether this frame can be appended. If frames before it are missing, requests a snapshot from the kernel. */
  _follows(seq) {
    if (seq === this._seq + 1) return true;
    this._hello();
    this._gapAt ??= performance.now();
    return performance.now() - this._gapAt > GAP_TIMEOUT_MS;
  }

  _apply(content, data) {
    this._seq = content.seq;
    this._gapAt = null;
    if (content.hang) this.hang = content.hang;
    this._define(content.defs ?? []);
    this._append(content.series ?? [], content.ghosts ?? [], data ? numbers(data) : []);
    for (const [rank, text, fresh] of content.logs ?? []) this._log(rank, text, fresh);
  }

  _begin() {
    this._byIndex = new Map();
    this.series = [];
    this.logs = new Map();
  }

  _setHead(head) {
    this.head = head;
    this.headAt = performance.now();
  }

  _define(defs) {
    for (const { index, ...def } of defs) {
      const series = { ...def, column: new Column(), low: new Column(), high: new Column(), ghost: null, before: null };
      this._byIndex.set(index, series);
      this.series.push(series);
    }
  }

  _append(entries, ghosts, values) {
    let at = 0;
    const next = (n) => values.subarray(at, (at += n));
    for (const { index, points, spread, stride, fresh, before } of entries) {
      const series = this._byIndex.get(index);
      if (!series) {
        at += 2 * points + 3 * spread; // the definition was in a lost frame
        continue;
      }
      if (fresh) Object.assign(series, { column: new Column(), low: new Column(), high: new Column() });
      if (stride) series.column.stride = stride;
      if (points) series.before = before ?? null;
      series.column.append(next(points), next(points));
      const steps = next(spread);
      series.low.append(steps, next(spread));
      series.high.append(steps, next(spread));
    }
    for (const { index, points } of ghosts) {
      const ghost = new Column();
      ghost.append(next(points), next(points));
      this._byIndex.get(index).ghost = ghost;
    }
    this.version += 1;
  }

  _log(rank, text, fresh) {
    if (fresh || !this.logs.has(rank)) this.logs.set(rank, new Lines());
    this.logs.get(rank).append(text);
  }

  /** Tell the kernel that a page is open, and the number of its last frame. The kernel answers with a snapshot. */
  _hello() {
    const now = performance.now();
    if (this._helloAt && now - this._helloAt < HELLO_EVERY_MS) return;
    this._helloAt = now;
    this.send({ kind: "hello", seq: this._seq, page: this._page });
  }
}

function numbers(data) {
  // Front ends pass a DataView or an ArrayBuffer, at any offset; Float64Array needs multiples of 8.
  const view = data instanceof ArrayBuffer ? new DataView(data) : data;
  return new Float64Array(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));
}
