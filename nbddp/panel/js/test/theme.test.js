import assert from "node:assert/strict";
import { test } from "node:test";
import { places } from "../src/theme.js";

test("more lines than colours share all of them", () => {
  const labels = Array.from({ length: 24 }, (_, i) => `layer${i}`);
  const counts = new Array(8).fill(0);
  for (const place of places(labels)) counts[place] += 1;
  assert.deepEqual(counts, new Array(8).fill(3));
  assert.deepEqual(places(["x", "val", "train"]), [2, 1, 0]);
});

test("lines named like what every object has get colours of their own", () => {
  const labels = ["constructor", "__proto__", "toString", "hasOwnProperty", "train"];
  assert.deepEqual(places(labels), [1, 2, 3, 4, 0]);
});
