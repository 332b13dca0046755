import assert from "node:assert/strict";
import { test } from "node:test";
import { words } from "../src/marks.js";

test("only restarts within the part that is shown are told, the newest of very many", () => {
  const marks = [10, 50, 90].map((step, i) => ({ step, label: `restart ${i + 1}`, text: "" }));
  assert.equal(words(marks, [40, 90]), ", restart 2 at step 50, restart 3 at step 90");
  assert.equal(words([], [0, 1]), "");
  const many = Array.from({ length: 100 }, (_, step) => ({ step, label: `restart ${step + 1}`, text: "" }));
  assert.equal(words(many, [0, 1000]).split(",").length, 21);
  assert.match(words(many, [0, 1000]), /restart 100 at step 99$/);
});
