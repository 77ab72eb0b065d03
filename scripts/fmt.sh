#!/usr/bin/env bash
# ./dev fmt [files...]: formats these files, or every C++ file of the project.
source scripts/common.sh
set_up_first requirements-lint.txt
if [[ $# -eq 0 ]]; then
  mapfile -t files < <(git ls-files '*.h' '*.cpp')
else
  files=("$@")
fi
.venv/bin/clang-format -i "${files[@]}"
