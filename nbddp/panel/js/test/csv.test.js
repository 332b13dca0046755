import assert from "node:assert/strict";
import { test } from "node:test";
import { csv, float } from "../src/csv.js";
import { Column } from "../src/numbers.js";

const series = (name, xs, ys) => {
  const column = new Column();
  column.append(xs, ys);
  return { name, column };
};

test("numbers are written as Python's repr writes them", () => {
  const cases = [
    [0, "0.0"], [-0, "-0.0"], [1, "1.0"], [0.1, "0.1"], [-2.5, "-2.5"], [123456789, "123456789.0"], [1e15, "1000000000000000.0"],
    [1e16, "1e+16"], [1.5e300, "1.5e+300"], [1e-4, "0.0001"], [1e-5, "1e-05"], [2.5e-7, "2.5e-07"], [5e-324, "5e-324"],
    [NaN, "nan"], [Infinity, "inf"], [-Infinity, "-inf"], [0.1 + 0.2, "0.30000000000000004"],
  ];
  for (const [value, text] of cases) assert.equal(float(value), text);
});

test("a line per step, a column per metric, and names in quotes where they need them", () => {
  const text = csv([series("loss", [0, 2], [1, 0.5]), series('a,"b"', [1, 2], [3, 4])]);
  assert.equal(text, 'step,loss,"a,""b"""\r\n0,1.0,\r\n1,,3.0\r\n2,0.5,4.0\r\n');
});
