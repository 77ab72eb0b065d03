#!/usr/bin/env bash
# ./dev build [target...], or ./dev build --package [--check]: scripts/package.sh, or
# ./dev build --cuda [target...]: scripts/cuda.sh
if [[ ${1:-} == --package ]]; then
  shift
  exec bash scripts/package.sh "$@"
fi
if [[ ${1:-} == --cuda ]]; then
  shift
  exec bash scripts/cuda.sh "$@"
fi
source scripts/common.sh
set_up_first
build "$@"
