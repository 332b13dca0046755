// Colours in the output of a rank: the terminal's codes as pieces of text with classes.

/* eslint-disable no-control-regex -- these are the terminal's control characters */
const STYLE = /\x1b\[([\d;:]*)m/;
const ESCAPES = /\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])/g;
// Characters that control a terminal, or that reverse the direction of a line; not the codes of styles.
const CONTROLS = /[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]|\x1b(?!\[[\d;:]*m)/g;
/* eslint-enable no-control-regex */
const [BOLD, FAINT, ITALIC, UNDERLINE] = [1, 2, 3, 4];
const SWITCHES = new Map([[BOLD, "bold"], [FAINT, "faint"], [ITALIC, "italic"], [UNDERLINE, "underline"]]);
const ENDS = new Map([[22, ["bold", "faint"]], [23, ["italic"]], [24, ["underline"]]]);
const LONG_COLOR = { 5: 2, 2: 4 }; // 38;5;n and 38;2;r;g;b: how many numbers follow 38

/** The text without the terminal's codes, but for those of colours and styles. */
export function withStyles(text) {
  return text.replace(ESCAPES, (code) => (STYLE.test(code) ? code : "")).replace(CONTROLS, "");
}

/** The text alone. */
export function unstyled(text) {
  return text.includes("\x1b") ? text.replace(ESCAPES, "") : text;
}

/** `[["text", "bold fg1"], ...]`: the pieces of a line, each with its classes. A line starts without any style. */
export function pieces(line) {
  const parts = line.split(STYLE);
  const style = new Map();
  const found = [];
  parts.forEach((part, i) => {
    if (i % 2) apply(style, part.split(/[;:]/).map(Number));
    else if (part) found.push([part, [...style].filter(([, value]) => value).map(([name, value]) => (value === true ? name : name + value)).join(" ")]);
  });
  return found;
}

function apply(style, codes) {
  for (let i = 0; i < codes.length; i++) {
    const code = codes[i];
    if (code === 0) style.clear();
    else if (SWITCHES.has(code)) style.set(SWITCHES.get(code), true);
    else if (ENDS.has(code)) ENDS.get(code).forEach((name) => style.delete(name));
    else if (code === 39) style.delete("fg");
    else if (code === 49) style.delete("bg");
    else if (code === 38 || code === 48) {
      const [kind, index] = codes.slice(i + 1);
      style.set(code === 38 ? "fg" : "bg", kind === 5 && index < 16 ? named(index) : "");
      i += LONG_COLOR[kind] ?? 0;
    } else colored(style, code);
  }
}

/** 31 and 91 are red, 41 and 101 red behind the text. */
function colored(style, code) {
  for (const [name, first] of [["fg", 30], ["fg", 90], ["bg", 40], ["bg", 100]]) {
    if (code >= first && code < first + 8) style.set(name, named(code - first));
  }
}

/** The bright colours are the same as the others: both must be readable on light and on dark. */
function named(index) {
  return String(index % 8);
}
