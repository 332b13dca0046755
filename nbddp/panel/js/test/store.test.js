import assert from "node:assert/strict";
import { test } from "node:test";
import { Store } from "../src/store.js";

class Model {
  constructor(traits = {}) {
    this.traits = traits;
    this.sent = [];
    this.listeners = {};
  }
  get(name) {
    return this.traits[name];
  }
  on(name, listener) {
    this.listeners[name] = listener;
  }
  off(name) {
    delete this.listeners[name];
  }
  send(content) {
    this.sent.push(content);
  }
  receive(content, values = []) {
    // At an odd offset, as front ends pass it.
    const bytes = new Uint8Array(values.length * 8 + 3);
    bytes.set(new Uint8Array(Float64Array.from(values).buffer), 3);
    this.listeners["msg:custom"](content, [new DataView(bytes.buffer, 3)]);
  }
}

const HEAD = { state: "running", seconds: 1, rows: [] };
const DEF = { index: 0, name: "loss", family: "loss", title: "Loss", label: "loss", tile: "Loss" };
const points = (n, more = {}) => [{ index: 0, points: n, spread: 0, stride: 0, fresh: false, ...more }];
const stored = (t, model) => {
  const store = new Store(model);
  t.after(() => store.dispose());
  return store;
};

test("frames append", (t) => {
  const model = new Model();
  const store = stored(t, model);
  model.receive({ kind: "frame", seq: 0, head: HEAD, defs: [DEF], series: points(2) }, [0, 1, 5, 6]);
  model.receive({ kind: "frame", seq: 1, series: points(1) }, [2, 7]);
  assert.deepEqual(Array.from(store.series[0].column.y.subarray(0, 3)), [5, 6, 7]);
  assert.equal(store.head.state, "running");
});

test("a frame that is already in the snapshot is not appended again", (t) => {
  const model = new Model();
  const store = stored(t, model);
  model.receive({ kind: "snapshot", seq: 4, head: HEAD, defs: [DEF], series: points(2) }, [0, 1, 5, 6]);
  model.receive({ kind: "frame", seq: 4, series: points(1) }, [1, 6]);
  model.receive({ kind: "frame", seq: 5, series: points(1) }, [2, 7]);
  assert.equal(store.series[0].column.n, 3);
});

test("a late script says hello when frames are missing, and a snapshot fills the gap", (t) => {
  const model = new Model();
  const store = stored(t, model);
  assert.deepEqual(model.sent, [{ kind: "hello", seq: -1, page: store._page }]);
  assert.notEqual(store._page, stored(t, new Model())._page, "each load of the page has another name");
  store._helloAt = -1e9;
  model.receive({ kind: "frame", seq: 7, head: HEAD, defs: [DEF], series: points(1) }, [9, 1]);
  assert.equal(model.sent.length, 2);
  model.receive({ kind: "snapshot", seq: 7, head: HEAD, defs: [DEF], series: points(3) }, [7, 8, 9, 3, 2, 1]);
  assert.deepEqual(Array.from(store.series[0].column.y.subarray(0, 3)), [3, 2, 1]);
});

test("frames after a lost frame wait for the snapshot, and an unknown metric throws nothing", (t) => {
  const model = new Model();
  const store = stored(t, model);
  model.receive({ kind: "frame", seq: 0, head: HEAD, defs: [DEF], series: points(1) }, [0, 5]);
  store._helloAt = -1e9;
  const second = [{ index: 1, points: 1, spread: 0, stride: 0, fresh: false }];
  model.receive({ kind: "frame", seq: 2, head: { ...HEAD, seconds: 9 }, series: [...points(1), ...second] }, [2, 7, 2, 8]);
  model.receive({ kind: "frame", seq: 3, series: points(1), logs: [[0, "b\n", false]] }, [3, 8]);
  assert.deepEqual(model.sent.at(-1), { kind: "hello", seq: 0, page: store._page });
  assert.equal(store.series[0].column.n, 1, "no line across the gap");
  assert.equal(store.logs.size, 0);
  assert.equal(store.head.seconds, 9, "the clock and the ranks need no frame before");
  model.receive({ kind: "snapshot", seq: 3, head: HEAD, defs: [DEF], series: points(4) }, [0, 1, 2, 3, 5, 6, 7, 8]);
  model.receive({ kind: "frame", seq: 4, series: points(1) }, [4, 9]);
  assert.deepEqual(Array.from(store.series[0].column.y.subarray(0, 5)), [5, 6, 7, 8, 9]);
});

test("with a kernel that does not answer a hello, the curves continue after a while", (t) => {
  const model = new Model();
  const store = stored(t, model);
  model.receive({ kind: "frame", seq: 0, head: HEAD, defs: [DEF], series: points(1) }, [0, 5]);
  model.receive({ kind: "frame", seq: 2, series: points(1) }, [2, 7]);
  store._gapAt -= 1e6;
  const third = [{ index: 3, points: 1, spread: 1, stride: 0, fresh: false }, ...points(1)];
  model.receive({ kind: "frame", seq: 3, defs: [{ ...DEF, index: 2 }], series: third }, [3, 1, 3, 1, 1, 3, 8]);
  model.receive({ kind: "frame", seq: 4, series: points(1) }, [4, 9]);
  assert.deepEqual(Array.from(store.series[0].column.y.subarray(0, 3)), [5, 8, 9]);
  assert.ok(store.series.every(Boolean));
});

test("an older snapshot does not undo newer frames", (t) => {
  const model = new Model();
  const store = stored(t, model);
  model.receive({ kind: "snapshot", seq: 7, head: HEAD, defs: [DEF], series: points(1) }, [9, 1]);
  model.receive({ kind: "snapshot", seq: 3, head: HEAD, defs: [], series: [] });
  assert.equal(store.series.length, 1);
});

test("another rank's values replace the line; a band has its own points", (t) => {
  const model = new Model();
  const store = stored(t, model);
  model.receive({ kind: "frame", seq: 0, head: HEAD, defs: [DEF], series: points(2) }, [0, 1, 5, 6]);
  model.receive({ kind: "frame", seq: 1, series: points(1, { spread: 2, fresh: true }) }, [0, 4, 0, 1, 3, 3, 8, 9]);
  const { column, low, high } = store.series[0];
  assert.deepEqual([column.n, column.last, low.n, low.last, high.last], [1, 4, 2, 3, 9]);
});

test("logs append, and start again when output was skipped", (t) => {
  const model = new Model();
  const store = stored(t, model);
  model.receive({ kind: "frame", seq: 0, head: HEAD, logs: [[1, "a\n", false]] });
  model.receive({ kind: "frame", seq: 1, logs: [[1, "b\n", false]] });
  assert.deepEqual(store.logs.get(1).all(), ["a", "b"]);
  model.receive({ kind: "frame", seq: 2, logs: [[1, "z\n", true]] });
  assert.deepEqual(store.logs.get(1).all(), ["z"]);
});

test("the report about a hang is kept until the run moves again", (t) => {
  const model = new Model();
  const store = stored(t, model);
  model.receive({ kind: "frame", seq: 0, head: HEAD, hang: ["rank 1 waits", "stack"] });
  model.receive({ kind: "frame", seq: 1, head: HEAD });
  assert.deepEqual(store.hang, ["rank 1 waits", "stack"]);
  model.receive({ kind: "snapshot", seq: 1, head: HEAD, hang: ["rank 1 waits"] });
  assert.deepEqual(store.hang, ["rank 1 waits"]);
  model.receive({ kind: "frame", seq: 2, hang: [] });
  assert.deepEqual(store.hang, []);
});

test("a curve that is sent again after a restart replaces the old one", (t) => {
  const model = new Model();
  const store = stored(t, model);
  model.receive({ kind: "frame", seq: 0, head: HEAD, defs: [DEF], series: points(3, { spread: 3 }) }, [0, 1, 2, 5, 6, 7, 0, 1, 2, 1, 1, 1, 9, 9, 9]);
  model.receive({ kind: "frame", seq: 1, series: points(2, { spread: 0, fresh: true }) }, [0, 1, 5, 8]);
  const { column, low } = store.series[0];
  assert.deepEqual([Array.from(column.y.subarray(0, column.n)), low.n], [[5, 8], 0]);
});

test("the earlier run's points come once after all others, and its value with each new one", (t) => {
  const model = new Model();
  const store = stored(t, model);
  const first = points(2, { spread: 1, before: [1, 9] });
  model.receive({ kind: "frame", seq: 0, head: HEAD, defs: [DEF], series: first, ghosts: [{ index: 0, points: 3 }] }, [0, 1, 5, 6, 0, 4, 7, 0, 1, 2, 8, 9, 10]);
  const [series] = store.series;
  assert.deepEqual([series.ghost.n, series.ghost.last, series.before], [3, 10, [1, 9]]);
  model.receive({ kind: "frame", seq: 1, series: points(1, { before: null }) }, [3, 4]);
  assert.deepEqual([series.ghost.n, series.before], [3, null], "the earlier run ended before step 3");
  model.receive({ kind: "snapshot", seq: 1, head: HEAD, defs: [DEF], series: points(1), ghosts: [] }, [3, 4]);
  assert.equal(store.series[0].ghost, null);
});

test("a file comes in parts, each asked for after the one before", async (t) => {
  const model = new Model({ heard: 0 });
  const store = stored(t, model);
  const file = store.csv();
  const answer = (text) => {
    const { request, start } = model.sent.at(-1);
    model.listeners["msg:custom"]({ kind: "csv", request, size: 10 }, [new DataView(new TextEncoder().encode(text).buffer)]);
    return start;
  };
  assert.equal(answer("step,x"), 0);
  while (model.sent.at(-1).start !== 6) await new Promise((resolve) => setTimeout(resolve, 10));
  assert.equal(answer("\n1,2"), 6);
  assert.equal(await new Blob(await file).text(), "step,x\n1,2");
});

test("without an answer there is no file", async (t) => {
  t.mock.timers.enable({ apis: ["setTimeout"] });
  const store = stored(t, new Model({ heard: 0 }));
  const file = store.csv();
  t.mock.timers.tick(2000);
  assert.equal(await file, null);
});
