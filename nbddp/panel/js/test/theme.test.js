import assert from "node:assert/strict";
import { test } from "node:test";
import { colorIndices } from "../src/theme.js";

test("more lines than colours share all of them", () => {
  const labels = Array.from({ length: 24 }, (_, i) => `layer${i}`);
  const counts = new Array(8).fill(0);
  for (const place of colorIndices(labels)) counts[place] += 1;
  assert.deepEqual(counts, new Array(8).fill(3));
  assert.deepEqual(colorIndices(["x", "val", "train"]), [2, 1, 0]);
});

test("lines named like the properties of every object get different colours", () => {
  const labels = ["constructor", "__proto__", "toString", "hasOwnProperty", "train"];
  assert.deepEqual(colorIndices(labels), [1, 2, 3, 4, 0]);
});
