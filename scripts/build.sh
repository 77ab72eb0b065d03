#!/usr/bin/env bash
# ./dev build [target...], or ./dev build --package [--check]: scripts/package.sh
if [[ ${1:-} == --package ]]; then
  shift
  exec bash scripts/package.sh "$@"
fi
source scripts/common.sh
set_up_first
build "$@"
