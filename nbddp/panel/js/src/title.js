// A page in the background: the progress in its tab's title, and a notification when the run is over.

const ENDS = { finished: "✓", failed: "✗", stopped: "■" };
let prefix = ""; // of the page's title, the same for all panels of the page

export class Title {
  constructor(store) {
    this._store = store;
    this._wasGoing = false; // a run that was over before is not news
    this._changed = () => this.update();
    document.addEventListener("visibilitychange", this._changed);
  }

  /** Call after each message: in a page in the background, the browser draws no frames. */
  update() {
    const { head, over } = this._store;
    if (!head) return;
    this._wasGoing ||= !over;
    if (!this._wasGoing) return;
    if (!document.hidden) setPrefix("");
    else if (!over) setPrefix(head.fraction === null ? "… " : `${Math.floor(head.fraction * 100)} % `);
    else {
      setPrefix(`${ENDS[head.state]} `);
      this._notify(head);
    }
    if (over && !document.hidden) this._wasGoing = false;
  }

  dispose() {
    document.removeEventListener("visibilitychange", this._changed);
    if (this._wasGoing) setPrefix("");
  }

  /** Once for all views of a run, and only where the user has allowed it to the page: nbddp does not ask. */
  _notify({ name, state, error, summary }) {
    if (this._store.notified || globalThis.Notification?.permission !== "granted") return;
    this._store.notified = true;
    new Notification(`${name}: ${state}`, { body: error || summary });
  }
}

function setPrefix(text) {
  const bare = prefix && document.title.startsWith(prefix) ? document.title.slice(prefix.length) : document.title;
  prefix = text;
  if (document.title !== text + bare) document.title = text + bare;
}
