#!/usr/bin/env bash
# Installs what is built and uses it as others would: by find_package, by
# pkg-config, and as a subdirectory.
# Usage: check_install.sh BUILD_FOLDER SCRATCH_FOLDER
set -euo pipefail
build=$1 scratch=$2
project=examples/external_project
expected="1 + 2 = 3"

rm -rf "$scratch"
mkdir -p "$scratch"
cmake --install "$build" --prefix "$scratch/prefix" >"$scratch/install.log"
if find "$scratch/prefix/include" -path '*detail*' -o -name '*_test*' | grep .; then
  echo "these headers are not public" >&2
  exit 1
fi
if grep -rE '#include *<(nlohmann|CLI|pcre2|sodium|xxhash|utf8proc|zlib|zstd|fmt|gtest|gloo|mpi)' "$scratch/prefix/include"; then
  echo "these public headers show third-party types" >&2
  exit 1
fi

# What the program tells of itself.
gzip -dc "$scratch/prefix/share/man/man1/tessera.1.gz" | grep '^.SH CONFIGURATION'
(. "$scratch/prefix/share/bash-completion/completions/tessera" && complete -p tessera)
test -s "$scratch/prefix/share/fish/vendor_completions.d/tessera.fish"
test -s "$scratch/prefix/share/zsh/site-functions/_tessera"

# Where LibTorch is not, the way out is told.
cmake -S "$project" -B "$scratch/no_torch" -G Ninja -DTESSERA_TORCH=/none \
  -DCMAKE_PREFIX_PATH="$PWD/$scratch/prefix" 2>&1 | tr -s '\n ' '  ' >"$scratch/no_torch.log" || true
grep -F "(TESSERA_TORCH='/none'). Install it (pip install torch==" "$scratch/no_torch.log"

cmake -S "$project" -B "$scratch/package" -G Ninja -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_PREFIX_PATH="$PWD/$scratch/prefix"
cmake --build "$scratch/package"
"$scratch/package/uses_tessera" | tee /dev/stderr | grep -qF "$expected"

# An empty entry of RUNPATH is the folder in which a program is started.
if readelf -d "$scratch/prefix/bin/tessera" | grep -E 'R(UN)?PATH.*(\[:|::|:\])'; then
  echo "the installed program looks for libraries where it is started" >&2
  exit 1
fi

export PKG_CONFIG_PATH="$scratch/prefix/lib/pkgconfig"
object=$(find "$scratch/package" -name 'main.cpp.o')
# shellcheck disable=SC2046 # flags are words
"${CXX:-g++}" "$object" $(pkg-config --libs tessera) -o "$scratch/by_pkg_config"
"$scratch/by_pkg_config" | grep -qF "$expected"
# shellcheck disable=SC2046
"${CXX:-g++}" $(pkg-config --cflags tessera) -fsyntax-only "$project/main.cpp"

# As a subdirectory it configures, and its first room builds.
cmake -S "$project" -B "$scratch/subdirectory" -G Ninja -DTESSERA_SOURCE="$PWD"
cmake --build "$scratch/subdirectory" --target tessera_core
