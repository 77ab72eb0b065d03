#!/usr/bin/env bash
# ./dev docs: writes the reference of commands and keys from the program itself.
source scripts/common.sh
set_up_first
build tessera
out=docs/reference
mkdir -p "$out"
"$build/cli/tessera" schema --markdown >"$build/configuration.md"
"$build/cli/tessera" schema >"$build/run.schema.json"
mv "$build/configuration.md" "$build/run.schema.json" "$out/"
echo "docs: wrote $out/configuration.md and $out/run.schema.json"
