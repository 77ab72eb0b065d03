#!/usr/bin/env bash
# ./dev lint [files...]: clang-tidy over these sources, or over all but tests.
source scripts/common.sh
set_up_first requirements-lint.txt
build tessera_core
if [[ $# -eq 0 ]]; then
  mapfile -t files < <(git ls-files 'tessera/*.cpp' 'cli/*.cpp' 'bindings/*.cpp' | grep -v '_test\.cpp$')
else
  files=("$@")
fi
# clang cannot read gcc's precompiled header, and parsing what it holds for each
# file takes longer than what the file itself includes. Nor does it know all of
# gcc's warnings: .clang-tidy says what is asked here.
mkdir -p "$build/lint"
sed -E 's/ -W[^ ]*//g; s/ -include [^ ]*cmake_pch\.hxx//; s/ -fuse-ld=mold//' \
  "$build/compile_commands.json" >"$build/lint/compile_commands.json"
printf '%s\0' "${files[@]}" | xargs -0 -n 1 -P 2 \
  .venv/bin/clang-tidy -p "$build/lint" --quiet
