// Bundles the panel's script and style to ../static, with the licence of uPlot, which is bundled.
import { copyFile } from "node:fs/promises";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = (path) => fileURLToPath(new URL(path, import.meta.url));
const out = process.argv[2] ?? here("../static");

await build({
  entryPoints: [here("src/panel.js")],
  outdir: out,
  bundle: true,
  format: "esm",
  minify: true,
  target: "es2021",
  legalComments: "none", // uPlot's licence is shipped in a file
  charset: "utf8",
});
await copyFile(here("node_modules/uplot/LICENSE"), `${out}/LICENSE-uplot.txt`);
