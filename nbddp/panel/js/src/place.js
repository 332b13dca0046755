// Shows the panel of a run in place of its picture. The notebook file contains the picture, which needs no kernel;
// while a kernel runs, the page shows the panel instead. (A widget view would be saved as "model not found".)

export class Place {
  /** `name` is the picture's class; `open(element)` makes a panel in the element. */
  constructor(name, open) {
    this._open = open;
    this._panels = new Map(); // by output: each view of the notebook has one
    this._pictures = document.getElementsByClassName(name); // a live collection: updated by the browser
    this._observer = new MutationObserver(() => this._update());
    this._observer.observe(document.body, { childList: true, subtree: true });
    this._update();
  }

  dispose() {
    this._observer.disconnect();
    for (const output of [...this._panels.keys()]) this._remove(output);
  }

  _update() {
    // Beside the rendered HTML, since its style sheet would change the panel.
    const outputs = new Set([...this._pictures].map((picture) => picture.closest(".jp-OutputArea-output") ?? picture));
    for (const [output, { element }] of this._panels) {
      // A new picture keeps the panel with its zoom; for a moment the output is then empty.
      const shown = outputs.has(output) || isEmpty(output);
      if (!output.isConnected || !element.isConnected || !shown) this._remove(output);
    }
    for (const output of outputs) if (!this._panels.has(output)) this._add(output);
  }

  _add(output) {
    const element = document.createElement("div");
    element.className = "nbddp-place jp-OutputArea-output";
    output.after(element);
    output.classList.add("nbddp-replaced");
    this._panels.set(output, { element, panel: this._open(element) });
  }

  _remove(output) {
    const { element, panel } = this._panels.get(output);
    this._panels.delete(output);
    panel.dispose();
    element.remove();
    output.classList.remove("nbddp-replaced");
  }
}

function isEmpty(output) {
  return !output.textContent && !output.querySelector("img");
}
