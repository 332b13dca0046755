// Makes and updates elements. Text is never parsed as HTML.

// Elements that take the keyboard. With this attribute on the focused element, JupyterLab executes no shortcut: "d d" on
// a focused button would delete the cell.
const FOCUSABLE = ["button", "input", "summary"];
const NO_SHORTCUTS = "data-lm-suppress-shortcuts";

/** `h("div", { class: "x", onclick: f }, "text", child)` */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(key, value);
  }
  if (FOCUSABLE.includes(tag) || "tabindex" in attributes) element.setAttribute(NO_SHORTCUTS, "");
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** Set the text only if it differs, which avoids layout work and repeated screen reader output. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Let the notebook have the keys with Ctrl or ⌘ (save) that are typed in `root`. Returns a function that ends this. */
export function passCommandKeys(root) {
  const listener = ({ target, ctrlKey, metaKey }) => {
    const holder = root.contains(target) ? target.closest("button, input, summary, [tabindex]") : null;
    if (root.contains(holder)) holder.toggleAttribute(NO_SHORTCUTS, !(ctrlKey || metaKey));
  };
  window.addEventListener("keydown", listener, true); // the notebook listens to the document, which is next
  return () => window.removeEventListener("keydown", listener, true);
}

export function show(element, visible) {
  if (element.hidden === visible) element.hidden = !visible;
}
