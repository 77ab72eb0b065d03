#!/usr/bin/env bash
# ./dev clean: removes build/. What was fetched (.venv/) and your runs stay.
source scripts/common.sh
rm -rf build
