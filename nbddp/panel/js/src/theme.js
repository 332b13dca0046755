// Light or dark theme, detected from the page's actual colours, and its changes.

const SETTLE_MS = [0, 120, 600]; // colours may be animated

/** Whether the background behind this element is dark. An element outside the page has no colour: then the page's. */
export function isDark(element) {
  if (isForced()) return matchMedia("(prefers-color-scheme: dark)").matches; // as the browser sets it for such colours
  for (let node = element.isConnected ? element : document.body; node; node = node.parentElement) {
    const [r, g, b, a = 1] = (getComputedStyle(node).backgroundColor.match(/[\d.]+/g) ?? []).map(Number);
    if (a > 0.5) return 0.2126 * r + 0.7152 * g + 0.0722 * b < 128;
  }
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

/** Whether the page's colours are the user's own (Windows' high contrast). */
export function isForced() {
  return matchMedia("(forced-colors: active)").matches;
}

/** Call back whenever the theme may have changed. Returns a function that ends this. */
export function watchTheme(callback) {
  let timers = [];
  const later = () => {
    timers.forEach(clearTimeout);
    timers = SETTLE_MS.map((ms) => setTimeout(callback, ms));
  };
  const observer = new MutationObserver(later);
  const attributeFilter = ["class", "style", "data-jp-theme-light", "data-jp-theme-name", "data-theme"];
  for (const node of [document.documentElement, document.body]) observer.observe(node, { attributeFilter });
  const queries = ["(prefers-color-scheme: dark)", "(forced-colors: active)"].map((query) => matchMedia(query));
  queries.forEach((query) => query.addEventListener("change", later));
  // JupyterLab sets the attribute before the style sheet has loaded; "load" does not bubble, hence the capture.
  document.addEventListener("load", later, true);
  return () => {
    timers.forEach(clearTimeout);
    observer.disconnect();
    queries.forEach((query) => query.removeEventListener("change", later));
    document.removeEventListener("load", later, true);
  };
}

const LIGHT = ["#2563eb", "#d9480f", "#15803d", "#9333ea", "#0891b2", "#be185d", "#a16207", "#4b5563"];
const DARK = ["#7aa2ff", "#ffa657", "#5fd38d", "#c99bff", "#4fd1e8", "#ff8ab8", "#e3c34d", "#a8b1bf"];
// A Map: an object would also have the keys "constructor" and "__proto__".
const STAGE_COLORS = new Map(Object.entries({ train: 0, val: 1, valid: 1, validation: 1, eval: 1, dev: 1, test: 2 }));

/** The index of each line's colour: train, val and test have the same in every chart. */
export function colorIndices(labels) {
  const taken = new Set();
  const free = () => LIGHT.findIndex((_, i) => !taken.has(i));
  let beyond = 0;
  const preferred = labels.map((label) => STAGE_COLORS.get(label.toLowerCase()));
  const result = preferred.map((index) => {
    if (index === undefined || taken.has(index)) return undefined;
    taken.add(index);
    return index;
  });
  return result.map((index) => {
    if (index !== undefined) return index;
    const next = free();
    if (next < 0) return beyond++ % LIGHT.length;
    taken.add(next);
    return next;
  });
}

export function palette(dark, forced) {
  if (forced) return { lines: dark ? DARK : LIGHT, grid: "GrayText", text: "CanvasText", surface: "Canvas", ghost: "GrayText" };
  return {
    lines: dark ? DARK : LIGHT,
    grid: dark ? "rgba(255,255,255,0.13)" : "rgba(0,0,0,0.10)",
    text: dark ? "#a3a3a3" : "#6b6b6b",
    surface: dark ? "#212121" : "#ffffff",
    ghost: dark ? "#8a8a8a" : "#8f8f8f",
  };
}

/** `#rrggbb` with an opacity. */
export function faint(color, opacity) {
  return color + Math.round(opacity * 255).toString(16).padStart(2, "0");
}
