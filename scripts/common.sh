# What the verbs of ./dev share. Sourced, with the project's root as the folder.
set -euo pipefail

preset=${TESSERA_PRESET:-dev}
build=build/$preset
python=.venv/bin/python

fail() {
  echo "$1" >&2
  exit 1
}

# "What is here" for the stamps: a stamp file holds the content that its work
# was done for, so that the work is done again when the content changes.
is_stamped() { [[ -f $1 && "$(<"$1")" == "$2" ]]; }

# Runs "$@" unless `stamp` holds `content`; writes the stamp when it succeeds.
once() {
  local stamp=$1 content=$2
  shift 2
  is_stamped "$stamp" "$content" && return
  "$@"
  mkdir -p "$(dirname "$stamp")"
  printf '%s' "$content" >"$stamp"
}

# Two of us in one folder would overwrite each other's work: they queue.
locked() {
  local lock=$1
  shift
  mkdir -p "$(dirname "$lock")"
  exec {lock_fd}>"$lock"
  flock "$lock_fd"
  "$@"
  exec {lock_fd}>&-
}

# fetch FILE: what a requirements file names, for $python. Where it says so, without
# what those packages need themselves. Its words go to $log.
fetch() {
  local alone=()
  grep -q '^# Without what they need' "$1" && alone=(--no-deps)
  echo "setup: fetching $(grep -v '^[#-]' "$1" | tr '\n' ' ')into ${python%/bin/python}/ (progress in $log)"
  $python -m pip install --retries 2 --disable-pip-version-check "${alone[@]}" -r "$1" \
    >>"$log" 2>&1 ||
    fail "setup: pip could not fetch what $1 names; is there a network? $(grep -m1 '^ERROR' "$log" | cut -c1-160) (all in $log)"
  date_headers
}

# gcc takes headers of the same text, size and time for one (#pragma once). By when
# pip wrote them, what it reads would differ from checkout to checkout, and ccache
# know none of it: each has a time of its own, the same everywhere.
date_headers() {
  $python - <<'EOF'
import os, pathlib, sysconfig
packages = pathlib.Path(sysconfig.get_path("purelib"))
headers = sorted(path for name in ("torch", "nlohmann_json") for path in (packages / name / "include").rglob("*.h*"))
for second, path in enumerate(headers, start=10**9):
    os.utime(path, (second, second))
EOF
}

# What a verb needs before it starts: see scripts/setup.sh.
set_up_first() { bash scripts/setup.sh --quiet "$@"; }

# Whether warnings are errors: as TESSERA_WERROR says, else as the build folder has it.
werror() {
  local given=${TESSERA_WERROR:-}
  [[ -n $given || ! -f $build/CMakeCache.txt ]] ||
    given=$(sed -n 's/^TESSERA_WERROR:BOOL=//p' "$build/CMakeCache.txt")
  echo "${given:-0}"
}

# The compiler, LibTorch and options that a build folder is configured for.
configuration() {
  echo "torch=${TESSERA_TORCH:-.venv} cxx=${CXX:-} werror=$(werror)"
  sha256sum requirements.txt CMakePresets.json
}

configure() {
  cmake --preset "$preset" --fresh -DTESSERA_WERROR="$(werror)" \
    ${TESSERA_TORCH:+-DTESSERA_TORCH="$TESSERA_TORCH"}
}

build_now() {
  once "$build/.configured" "$(configuration)" configure
  python3 cmake/unity_groups.py --check "$build" || cmake "$build"
  cmake --build "$build" ${1:+--target "$@"}
}

# build [target...]
build() {
  locked "$build/.lock" build_now "$@"
}
