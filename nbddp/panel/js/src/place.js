// Shows the panel of a finished run in place of its picture. The notebook file contains the picture, which needs no
// kernel; while a kernel runs, the page shows the panel instead. (A widget view would be saved as "model not found".)

export class Place {
  /** `name` is the picture's class; `open(element)` makes a panel in the element. */
  constructor(name, open) {
    this._open = open;
    this._panels = new Map(); // by picture: each view of the notebook has one
    this._pictures = document.getElementsByClassName(name); // a live collection: updated by the browser
    this._observer = new MutationObserver(() => this._update());
    this._observer.observe(document.body, { childList: true, subtree: true });
    this._update();
  }

  dispose() {
    this._observer.disconnect();
    for (const picture of [...this._panels.keys()]) this._remove(picture);
  }

  _update() {
    for (const [picture, { element }] of this._panels) {
      if (!picture.isConnected || !element.isConnected) this._remove(picture);
    }
    for (const picture of this._pictures) if (!this._panels.has(picture)) this._add(picture);
  }

  _add(picture) {
    // Beside the rendered HTML, since its style sheet would change the panel.
    const output = picture.closest(".jp-OutputArea-output") ?? picture;
    const element = document.createElement("div");
    element.className = "nbddp-place jp-OutputArea-output";
    output.after(element);
    output.classList.add("nbddp-replaced");
    this._panels.set(picture, { element, output, panel: this._open(element) });
  }

  _remove(picture) {
    const { element, output, panel } = this._panels.get(picture);
    this._panels.delete(picture);
    panel.dispose();
    element.remove();
    output.classList.remove("nbddp-replaced");
  }
}
