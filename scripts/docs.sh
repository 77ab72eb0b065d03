#!/usr/bin/env bash
# ./dev docs: writes the reference of commands and keys from the program itself.
source scripts/common.sh
set_up_first
build tessera
out=docs/reference
mkdir -p "$out"
"$build/cli/tessera" schema --manual >"$out/configuration.md"
"$build/cli/tessera" schema >"$out/run.schema.json"
echo "docs: wrote $out/configuration.md and $out/run.schema.json"
