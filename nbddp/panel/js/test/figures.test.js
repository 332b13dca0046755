import assert from "node:assert/strict";
import { test } from "node:test";
import { Album } from "../src/figures.js";

/** A message with these images, at an odd offset, as front ends pass it. */
function receive(album, steps, images) {
  const texts = images.map(([, , , text]) => text).join("");
  const bytes = new Uint8Array(3 + texts.length);
  new TextEncoder().encodeInto(texts, bytes.subarray(3));
  const entries = images.map(([name, step, kind, text]) => [name, step, kind, text.length]);
  album.receive({ steps, images: entries }, new DataView(bytes.buffer, 3));
}

function texts(album, name) {
  return [...album.names.get(name)].map(([step, { bytes }]) => [step, new TextDecoder().decode(bytes)]);
}

test("images follow each other in one block of bytes", () => {
  const album = new Album();
  receive(album, [["a", [1]], ["b", [2]]], [["a", 1, "image/png", "first"], ["b", 2, "text/html", "<b>second</b>"]]);
  assert.deepEqual(texts(album, "a"), [[1, "first"]]);
  assert.equal(album.names.get("b").get(2).text, "<b>second</b>");
  album.dispose();
});

test("steps that the kernel no longer keeps are dropped", () => {
  const album = new Album();
  receive(album, [["a", [1, 2, 3]]], [1, 2, 3].map((step) => ["a", step, "image/png", `image ${step}`]));
  receive(album, [["a", [1, 3]]], []);
  assert.deepEqual(texts(album, "a"), [[1, "image 1"], [3, "image 3"]]);
  album.dispose();
});

test("an image that comes again stays, and another one of its step takes its place", () => {
  const album = new Album();
  receive(album, [["a", [1]]], [["a", 1, "image/png", "one"]]);
  const first = album.names.get("a").get(1);
  receive(album, [["a", [1]]], [["a", 1, "image/png", "one"]]);
  assert.equal(album.names.get("a").get(1), first);
  receive(album, [["a", [1]]], [["a", 1, "image/png", "two"]]);
  assert.deepEqual(texts(album, "a"), [[1, "two"]]);
  album.dispose();
});
