#!/usr/bin/env bash
# ./dev build [target...]
source scripts/common.sh
set_up_first
build "$@"
