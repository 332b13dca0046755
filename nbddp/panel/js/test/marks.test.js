import assert from "node:assert/strict";
import { test } from "node:test";
import { marksText } from "../src/marks.js";

test("the text names the restarts in the visible range, and of very many the newest", () => {
  const marks = [10, 50, 90].map((step, i) => ({ step, label: `restart ${i + 1}`, text: "" }));
  assert.equal(marksText(marks, [40, 90]), ", restart 2 at step 50, restart 3 at step 90");
  assert.equal(marksText([], [0, 1]), "");
  const many = Array.from({ length: 100 }, (_, step) => ({ step, label: `restart ${step + 1}`, text: "" }));
  assert.equal(marksText(many, [0, 1000]).split(",").length, 21);
  assert.match(marksText(many, [0, 1000]), /restart 100 at step 99$/);
});
