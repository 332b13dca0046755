// The points that the page has as a CSV file, written as Python writes it. The kernel's file has all points.

/** One line per step, one column per metric; a missing value is an empty field. */
export function csv(series) {
  const rows = new Map();
  series.forEach(({ column }, at) => {
    for (let i = 0; i < column.n; i++) {
      if (!rows.has(column.x[i])) rows.set(column.x[i], new Array(series.length).fill(""));
      rows.get(column.x[i])[at] = float(column.y[i]);
    }
  });
  const steps = [...rows.keys()].sort((a, b) => a - b);
  const lines = steps.map((step) => [step, ...rows.get(step)].join(","));
  return ["step", ...series.map(({ name }) => field(name))].join(",") + "\r\n" + lines.map((line) => `${line}\r\n`).join("");
}

/** A number as Python's `repr` writes it: 0.1, 1.0, 1e-05, 1e+16, nan. */
export function float(value) {
  if (Number.isNaN(value)) return "nan";
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
  const [digits, power] = value.toExponential().split("e");
  const exponent = Number(power);
  if (value !== 0 && (exponent < -4 || exponent >= 16)) {
    return `${digits}e${exponent < 0 ? "-" : "+"}${String(Math.abs(exponent)).padStart(2, "0")}`;
  }
  const plain = Object.is(value, -0) ? "-0" : String(value); // without an exponent from 1e-6 to 1e21
  return plain.includes(".") ? plain : `${plain}.0`;
}

function field(text) {
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
