#!/usr/bin/env bash
# ./dev examples: builds every example and runs it.
source scripts/common.sh
set_up_first
build all
ctest --test-dir "$build" -L example --output-on-failure --no-tests=error
