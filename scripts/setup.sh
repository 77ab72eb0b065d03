#!/usr/bin/env bash
# ./dev setup [requirements file...]: Debian packages that are missing, LibTorch
# in .venv/, and what the files name. Run again, it does nothing. TESSERA_TORCH
# names a LibTorch that is there: none is fetched.
# --quiet: no word when all was there. --with 'PACKAGE PROGRAM': one package more.
source scripts/common.sh

log=build/setup.log

# Of the Python that .venv/ is made with: the backend for Python needs it.
python_header() {
  python3 -c 'import sysconfig; print(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null ||
    echo /usr/include/python3/Python.h
}

# Package, and the program or file by which it is recognised.
packages=(
  "g++ ${CXX:-g++}"
  "cmake cmake"
  "ninja-build ninja"
  "ccache ccache"
  "mold mold"
  "libgtest-dev /usr/include/gtest/gtest.h"
  "libgmock-dev /usr/include/gmock/gmock.h"
  "libbenchmark-dev /usr/include/benchmark/benchmark.h"
  "libcli11-dev /usr/include/CLI/CLI.hpp"
  "libpcre2-dev /usr/include/pcre2.h"
  "libxxhash-dev /usr/include/xxhash.h"
  "libutf8proc-dev /usr/include/utf8proc.h"
  "libsodium-dev /usr/include/sodium.h"
  "zlib1g-dev /usr/include/zlib.h"
  "libzstd-dev /usr/include/zstd.h"
  "libopenmpi-dev mpicxx"
  "openmpi-bin mpirun"
  "pkg-config pkg-config"
  "groff-base groff"
  "zsh zsh"
  "fish fish"
  "iproute2 /usr/sbin/tc"
  "python3-dev $(python_header)"
)

missing_packages() {
  local entry name probe
  for entry in "${packages[@]}"; do
    read -r name probe <<<"$entry"
    [[ -e $probe ]] || command -v "$probe" >/dev/null || echo "$name"
  done
  [[ -x $python ]] || python3 -c 'import ensurepip, venv' 2>/dev/null ||
    printf '%s\n' python3 python3-venv
}

install_packages() {
  local missing root=() advice
  missing=$(missing_packages | xargs)
  [[ -z $missing ]] && return
  advice="as root: apt-get install -y --no-install-recommends $missing"
  command -v apt-get >/dev/null ||
    fail "setup: some packages are missing and there is no apt-get here; by their Debian names: $missing"
  if [[ $(id -u) != 0 ]]; then
    sudo -n true 2>/dev/null ||
      fail "setup: some Debian packages are missing and this user may not install them; $advice"
    root=(sudo -n)
  fi
  echo "setup: installing Debian packages: $missing"
  # shellcheck disable=SC2086 # packages are words
  { "${root[@]}" apt-get update && "${root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y --no-install-recommends $missing; } >>"$log" 2>&1 ||
    fail "setup: apt-get could not install what is missing; is there a network? Its words are in $log; by hand, $advice"
}

make_venv() {
  # A folder that was left half made, or was moved, is made anew.
  [[ -f .venv/.made ]] && [[ "$(<.venv/.made)" == "$PWD" ]] && return
  $python -m pip --version >/dev/null 2>&1 ||
    python3 -m venv --clear .venv >>"$log" 2>&1 ||
    fail "setup: python3 -m venv .venv failed; its words are in $log."
  echo "$PWD" >.venv/.made
}

fetch_once() {
  once ".venv/.done-$(basename "$1")" "$(cat requirements.txt "$1"; readlink -f $python)" fetch "$1"
}

set_up() {
  mkdir -p build
  : >"$log"
  install_packages
  make_venv
  if [[ -n ${TESSERA_TORCH:-} ]]; then
    [[ -f $TESSERA_TORCH/include/ATen/ATen.h ]] ||
      fail "setup: TESSERA_TORCH=$TESSERA_TORCH holds no include/ATen/ATen.h; name the folder with LibTorch's include/ and lib/."
    grep -v '^torch==' requirements.txt >build/requirements-without-torch.txt
    fetch_once build/requirements-without-torch.txt
  else
    fetch_once requirements.txt
  fi
  local file
  for file in "$@"; do
    fetch_once "$file"
  done
}

quiet= files=()
while [[ $# -gt 0 ]]; do
  case $1 in
    --quiet) quiet=yes ;;
    --with) packages+=("$2"); shift ;;
    requirements*.txt) files+=("$1") ;;
    *) echo "usage: ./dev setup [requirements-test.txt] [requirements-templates.txt] [requirements-lint.txt]" >&2; exit 2 ;;
  esac
  shift
done
locked build/.setup.lock set_up "${files[@]}"
[[ -n $quiet ]] || echo "setup: done"
