#!/usr/bin/env bash
# ./dev bench [NAME] [google-benchmark flags...]: builds the benches in Release
# and runs those whose name begins with NAME. Results: bench/results/README.md.
export TESSERA_PRESET=${TESSERA_PRESET:-release}
source scripts/common.sh
set_up_first
build
name=
if [[ $# -gt 0 && $1 != --* ]]; then
  name=$1
  shift
fi
for program in "$build"/bench/"$name"*_bench; do
  [[ -x $program ]] || fail "bench: no bench begins with '$name'."
  "$program" "$@"
done
