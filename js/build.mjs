// Bundles each widget into mlx_nb/static. The result is committed: a rebuild must give the same bytes.
import { build } from "esbuild";
import { fileURLToPath } from "node:url";

const widgets = ["monitor", "batch", "chat", "tokens"];
const styles = { tokens: "tokens_view" }; // tokens.css holds the custom properties of all
const note = "Built by js/build.mjs; do not edit.";

await build({
  absWorkingDir: fileURLToPath(new URL(".", import.meta.url)),
  entryPoints: widgets.flatMap((name) => [
    { in: `src/${name}/index.ts`, out: name },
    { in: `src/styles/${styles[name] ?? name}.css`, out: name },
  ]),
  outdir: "../mlx_nb/static",
  bundle: true,
  format: "esm",
  target: "es2022",
  minify: true,
  charset: "utf8",
  legalComments: "none",
  banner: { js: `// ${note}`, css: `/* ${note} */` },
  logLevel: "info",
});
