#!/usr/bin/env bash
# ./dev build --cuda [target...]: the program, or targets, beside a LibTorch with
# CUDA, into build/cuda. No toolkit and no driver is needed to build: what the program
# links comes with LibTorch's CUDA wheel, into .venv-cuda/ (4.5 GB). TESSERA_TORCH
# names such a LibTorch that is there: none is fetched.
export TESSERA_PRESET=cuda
source scripts/common.sh

fetch_cuda() {
  local log=build/cuda-wheel.log python=.venv-cuda/bin/python
  python3 -m venv --clear .venv-cuda >"$log" 2>&1 ||
    fail "build: python3 -m venv .venv-cuda failed; its words are in $log."
  fetch requirements-cuda.txt
  compgen -G ".venv-cuda/lib/python3*/site-packages/torch/lib/libtorch_cuda.so" >/dev/null ||
    fail "build: pip gave a torch without CUDA: its index (PIP_INDEX_URL, pip config list) has CPU builds. Take another, or name a LibTorch with CUDA in TESSERA_TORCH."
}

set_up_first
if [[ -z ${TESSERA_TORCH:-} ]]; then
  once .venv-cuda/.done "$PWD $(<requirements-cuda.txt)" fetch_cuda
  TESSERA_TORCH=$(echo "$PWD"/.venv-cuda/lib/python3*/site-packages/torch)
  export TESSERA_TORCH
fi
[[ -f $TESSERA_TORCH/lib/libtorch_cuda.so ]] ||
  fail "build: TESSERA_TORCH=$TESSERA_TORCH has no CUDA (lib/libtorch_cuda.so). Leave TESSERA_TORCH out, to have a build that has it fetched."
[[ $# -gt 0 ]] || set -- tessera
build "$@"
