#!/usr/bin/env bash
# ./dev lint [files...]: clang-tidy over these sources, or over all but tests.
source scripts/common.sh
set_up_first requirements-lint.txt
build tessera_core
python3 scripts/lint.py "$build" "$@"
