#!/usr/bin/env bash
# ./dev fuzz [--count N] [--seed FIRST] [--experts]: random models, meshes, schedules and
# batches beside one rank, by `tessera verify`; see scripts/fuzz.py.
source scripts/common.sh
set_up_first
build tessera
python3 scripts/fuzz.py --program "$build/cli/tessera" "$@"
