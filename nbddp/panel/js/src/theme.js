// Light or dark, from the colours the page really has, and when that changes.

const SETTLE_MS = [0, 120, 600]; // colours may be animated

/** Is the background behind this element dark? */
export function isDark(element) {
  for (let node = element; node; node = node.parentElement) {
    const [r, g, b, a = 1] = (getComputedStyle(node).backgroundColor.match(/[\d.]+/g) ?? []).map(Number);
    if (a > 0.5) return 0.2126 * r + 0.7152 * g + 0.0722 * b < 128;
  }
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

/** Call back whenever the theme may have changed. Returns what ends that. */
export function watchTheme(callback) {
  let timers = [];
  const later = () => {
    timers.forEach(clearTimeout);
    timers = SETTLE_MS.map((ms) => setTimeout(callback, ms));
  };
  const observer = new MutationObserver(later);
  const attributeFilter = ["class", "style", "data-jp-theme-light", "data-jp-theme-name", "data-theme"];
  for (const node of [document.documentElement, document.body]) observer.observe(node, { attributeFilter });
  const query = matchMedia("(prefers-color-scheme: dark)");
  query.addEventListener("change", later);
  // JupyterLab sets its attribute first, and the style sheet comes when it comes; "load" does not bubble.
  document.addEventListener("load", later, true);
  return () => {
    timers.forEach(clearTimeout);
    observer.disconnect();
    query.removeEventListener("change", later);
    document.removeEventListener("load", later, true);
  };
}

const LIGHT = ["#2563eb", "#d9480f", "#15803d", "#9333ea", "#0891b2", "#be185d", "#a16207", "#4b5563"];
const DARK = ["#7aa2ff", "#ffa657", "#5fd38d", "#c99bff", "#4fd1e8", "#ff8ab8", "#e3c34d", "#a8b1bf"];
// A Map: of an object, "constructor" and "__proto__" would be there, too.
const PLACES = new Map(Object.entries({ train: 0, val: 1, valid: 1, validation: 1, eval: 1, dev: 1, test: 2 }));

/** Which colour each line of a chart gets: train and val the same in every chart. */
export function places(labels) {
  const taken = new Set();
  const free = () => LIGHT.findIndex((_, i) => !taken.has(i));
  let beyond = 0;
  const wished = labels.map((label) => PLACES.get(label.toLowerCase()));
  const result = wished.map((place) => {
    if (place === undefined || taken.has(place)) return undefined;
    taken.add(place);
    return place;
  });
  return result.map((place) => {
    if (place !== undefined) return place;
    const next = free();
    if (next < 0) return beyond++ % LIGHT.length;
    taken.add(next);
    return next;
  });
}

export function palette(dark) {
  return {
    lines: dark ? DARK : LIGHT,
    grid: dark ? "rgba(255,255,255,0.13)" : "rgba(0,0,0,0.10)",
    text: dark ? "#a3a3a3" : "#6b6b6b",
    surface: dark ? "#212121" : "#ffffff",
  };
}

/** `#rrggbb` with an opacity. */
export function faint(color, opacity) {
  return color + Math.round(opacity * 255).toString(16).padStart(2, "0");
}
