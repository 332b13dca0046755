// The Stop button: sends a message to the kernel, or has the server interrupt the kernel, or shows the user what works.

const ACK_MS = 1500;

export class Stop {
  /** Calls `onChange` when the button's text may have changed. */
  constructor(store, onChange) {
    this._store = store;
    this._onChange = onChange;
    this._timer = null;
    this.asked = false;
    this.problem = "";
  }

  /** Whether the button can work. Without a Jupyter server, this is known only after the kernel has answered. */
  get possible() {
    const { head, model } = this._store;
    if (!head) return false;
    return !head.blocking || model.get("heard") > 0 || canInterrupt(model);
  }

  press() {
    const { model } = this._store;
    this.asked = true;
    this.problem = "";
    this._store.send({ kind: "stop" });
    // If the kernel receives no messages while a cell runs, do not wait for an answer.
    const unreachable = this._store.head.blocking && !model.get("heard") && canInterrupt(model);
    this._timer = setTimeout(() => this._unanswered(), unreachable ? 0 : ACK_MS);
    this._onChange();
  }

  dispose() {
    clearTimeout(this._timer);
  }

  async _unanswered() {
    const { model, head, over } = this._store;
    if (over || model.get("stopping")) return;
    // Interrupt only a cell that waits for this run, and no other cell.
    const done = head.blocking && canInterrupt(model) && (await interrupt(model));
    if (!done) {
      this.asked = false;
      this.problem = head.blocking ? "use ■ in the toolbar" : "the kernel is busy; the run stops when the kernel is free";
    }
    this._onChange();
  }
}

function canInterrupt(model) {
  return Boolean(model.get("kernel_id") && server());
}

/** Base address and token of the Jupyter server that this page comes from, or null. */
function server() {
  const element = document.getElementById("jupyter-config-data");
  if (!element) return null;
  try {
    const { baseUrl, token } = JSON.parse(element.textContent);
    return baseUrl ? { baseUrl, token } : null;
  } catch {
    return null;
  }
}

async function interrupt(model) {
  const { baseUrl, token } = server();
  const url = new URL(`${baseUrl}api/kernels/${encodeURIComponent(model.get("kernel_id"))}/interrupt`, location.href);
  if (url.origin !== location.origin) return false;
  const headers = {};
  const xsrf = document.cookie.match(/(?:^|;\s*)_xsrf=([^;]*)/);
  if (xsrf) headers["X-XSRFToken"] = decodeURIComponent(xsrf[1]);
  if (token) headers.Authorization = `token ${token}`;
  try {
    const answer = await fetch(url, { method: "POST", headers, credentials: "same-origin" });
    return answer.ok;
  } catch {
    return false; // the server is gone
  }
}
