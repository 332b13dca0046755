// The Stop button. The kernel hears a message, or the server interrupts the kernel, or we say what does work.

const ACK_MS = 1500;

export class Stop {
  /** `onChange` is told when the words on the button may be others. */
  constructor(store, onChange) {
    this._store = store;
    this._onChange = onChange;
    this._timer = null;
    this.asked = false;
    this.problem = "";
  }

  /** Can a press do anything? Known only once the kernel has answered, where there is no server to ask. */
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
    // A kernel that hears nothing while a cell runs need not be waited for.
    const deaf = this._store.head.blocking && !model.get("heard") && canInterrupt(model);
    this._timer = setTimeout(() => this._unanswered(), deaf ? 0 : ACK_MS);
    this._onChange();
  }

  dispose() {
    clearTimeout(this._timer);
  }

  async _unanswered() {
    const { model, head, over } = this._store;
    if (over || model.get("stopping")) return;
    // Only a cell that waits for this very run may be interrupted; another cell is none of our business.
    const done = head.blocking && canInterrupt(model) && (await interrupt(model));
    if (!done) {
      this.asked = false;
      this.problem = head.blocking ? "use ■ in the toolbar" : "the kernel is busy; it stops when it is free";
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
