import assert from "node:assert/strict";
import { test } from "node:test";
import { RankTable } from "../src/table.js";

/** The part of a page that the table needs; anything else fails. */
class Element {
  constructor(tag) {
    Object.assign(this, { tag, attributes: {}, dataset: {}, style: {}, children: [], listeners: {}, hidden: false, text: "" });
  }
  setAttribute(name, value) {
    if (name === "hidden") this.hidden = true;
    this.attributes[name] = String(value);
  }
  addEventListener(name, listener) {
    this.listeners[name] = listener;
  }
  append(...children) {
    this.children.push(...children);
  }
  replaceChildren(...children) {
    this.children = children;
  }
  get textContent() {
    return this.text + this.children.map((child) => child.textContent ?? child).join("");
  }
  set textContent(text) {
    Object.assign(this, { text, children: [] });
  }
  all(tag) {
    const below = this.children.flatMap((child) => (child instanceof Element ? child.all(tag) : []));
    return this.tag === tag ? [this, ...below] : below;
  }
}
globalThis.document = { createElement: (tag) => new Element(tag) };

const row = (rank, host, more = {}) => ({
  ...{ rank, host, device: "cuda:0", state: "running", note: "", step: 5, step_seconds: 0.1, memory_bytes: 1, gpu_bytes: null, gpu_total: null },
  ...more,
});
const host = (name, ranks, more = {}) => ({ name, ranks, state: "running", step: 5, note: "", ...more });
const cluster = (hosts, each, more = {}) => {
  const named = Array.from({ length: hosts }, (_, i) => `gpu${i}`);
  const ranks = named.map((_, i) => Array.from({ length: each }, (_, j) => i * each + j));
  const rows = named.flatMap((name, i) => ranks[i].map((rank) => row(rank, name)));
  return [rows, named.map((name, i) => host(name, ranks[i], more[name] ?? {}))];
};
const groups = (table) => table.el.children.filter((child) => child.tag === "tbody");
const shown = (group) => group.children.slice(1).filter((each) => !each.hidden).map((each) => each.all("th")[0].textContent);

test("ranks on one machine have no heading", () => {
  const table = new RankTable();
  table.update([row(0, ""), row(1, "")], []);
  const [only, ...others] = groups(table);
  assert.equal(others.length, 0);
  assert.deepEqual(only.children.map((each) => each.all("th")[0].textContent), ["0", "1"]);
  assert.equal(table.el.dataset.hosts, false);
});

test("each host's ranks are under its heading, which shows their worst state", () => {
  const table = new RankTable();
  const [rows, hosts] = cluster(2, 2, { gpu1: { state: "failed", note: "rank 3 slow" } });
  table.update(rows, hosts);
  assert.deepEqual(groups(table).map(shown), [["0", "1"], ["2", "3"]]);
  const heading = groups(table)[1].children[0];
  assert.equal(heading.all("th")[0].attributes.scope, "rowgroup");
  assert.match(heading.textContent, /gpu1.*2 ranks.*failed.*step 5.*rank 3 slow/);
  assert.equal(heading.dataset.state, "failed");
  assert.equal(heading.all("button")[0].attributes["aria-expanded"], "true");
});

test("of many ranks, only those of failed hosts and of opened hosts are shown", () => {
  const table = new RankTable();
  const [rows, hosts] = cluster(8, 8);
  table.update(rows, hosts);
  assert.deepEqual(groups(table).map((group) => shown(group).length), [0, 0, 0, 0, 0, 0, 0, 0]);
  const button = groups(table)[2].children[0].all("button")[0];
  button.listeners.click();
  assert.equal(button.attributes["aria-expanded"], "true");
  hosts[5].state = "failed";
  table.update(rows, hosts);
  assert.deepEqual(groups(table).map((group) => shown(group).length), [0, 0, 8, 0, 0, 8, 0, 0]);
  button.listeners.click();
  table.update(rows, hosts);
  assert.equal(shown(groups(table)[2]).length, 0, "what somebody closed stays closed");
});

test("after a restart without a host, the ranks are under their new hosts", () => {
  const table = new RankTable();
  table.update(...cluster(3, 1));
  const second = groups(table)[1];
  table.update([row(0, "gpu0"), row(1, "gpu2"), row(2, "", { state: "stopped" })], [host("gpu0", [0]), host("gpu2", [1]), host("lost", [2], { state: "stopped" })]);
  assert.deepEqual(groups(table).map((group) => group.all("strong")[0].textContent), ["gpu0", "gpu2", "lost"]);
  assert.deepEqual(groups(table).map(shown), [["0"], ["1"], ["2"]]);
  assert.ok(!groups(table).includes(second));
});

test("a host's name is shown as text, even if it looks like HTML", () => {
  const table = new RankTable();
  table.update([row(0, "<img src=x>")], [host("<img src=x>", [0])]);
  assert.equal(table.el.all("img").length, 0);
  assert.equal(groups(table)[0].all("strong")[0].textContent, "<img src=x>");
});
