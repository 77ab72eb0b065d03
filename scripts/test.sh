#!/usr/bin/env bash
# ./dev test [--fast] [--sanitize]: builds, runs what checks the project, and
# ends with 'N passed, N failed'. --fast: house rules and the fast tests alone.
# --sanitize adds the tests of core, mesh and comm under ASan, UBSan and TSan.
source scripts/common.sh

fast= sanitize=
for argument in "$@"; do
  case $argument in
    --fast) fast=yes ;;
    --sanitize) sanitize=yes ;;
    *) echo "usage: ./dev test [--fast] [--sanitize]" >&2; exit 2 ;;
  esac
done

results=$build/test-results
rm -rf "$results"
mkdir -p "$results"

# step NAME COMMAND...: one check; its words are shown when it fails. The || ends
# set -e within it: a check of several commands joins them by && itself.
step() {
  local name=$1 started=$SECONDS verdict=ok
  shift
  "$@" >"$results/$name.log" 2>&1 </dev/null || verdict=FAILED
  printf '%-7s %-28s %4d s\n' "$verdict" "$name" $((SECONDS - started))
  echo "$verdict $name" >>"$results/steps.txt"
  [[ $verdict == ok ]] || tail -n 60 "$results/$name.log"
}

# More than cores: ranks wait for each other.
tests_labelled() { ctest --test-dir "$build" -L "$1" -j "${2:-3}" --output-on-failure --no-tests=error; }

room_check() { python3 scripts/check_rooms.py && python3 scripts/check_docs.py && python3 -m unittest discover -s tests/scripts; }

format_check() {
  git ls-files '*.h' '*.cpp' | xargs -r -n 100 -P 2 .venv/bin/clang-format --dry-run --Werror &&
    git ls-files | xargs -r .venv/bin/codespell
}

# Two files at a time: ranks wait for each other, and leave cores without work.
parity() {
  TESSERA_PROGRAM=$build/cli/tessera $python -m pytest tests/parity -q \
    -n 2 --dist loadfile -p no:cacheprovider --junitxml="$results/parity.xml"
}

consumer() { bash scripts/check_install.sh "$build" "$build/consumer"; }

# ThreadSanitizer follows the ranks that are threads, over shm: it does not see
# into Gloo, and not beyond a fork.
under_sanitizer() {
  TESSERA_PRESET=$1 ./dev build core_test mesh_test comm_test comm_slow_test checkpoint_test || return
  [[ $1 != tsan ]] || export GTEST_FILTER='-*processes*:*Process*:*gloo*:*Gloo*:*Killed*:*Died*:*NoPidfds:Verdict*:LostRank*'
  TSAN_OPTIONS=suppressions=$PWD/tests/sanitizers/tsan.supp \
    UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
    ctest --test-dir "build/$1" -R '^(core|mesh|comm|comm_slow|checkpoint)_test(_2)?$' --output-on-failure --no-tests=error
}

if [[ -n $fast ]]; then
  set_up_first requirements-lint.txt
else
  set_up_first requirements-lint.txt requirements-test.txt requirements-templates.txt
fi
./dev build || { echo "The build failed: no test ran."; echo "0 passed, 1 failed"; exit 1; }

step rooms room_check
step format format_check
step fast tests_labelled fast 5
if [[ -z $fast ]]; then
  step slow tests_labelled slow 4
  step examples tests_labelled example
  step bench-smoke tests_labelled bench
  step parity parity
  step install-and-consumer consumer
  step tidy bash scripts/lint.sh
fi
if [[ -n $sanitize ]]; then
  step asan under_sanitizer asan
  step tsan under_sanitizer tsan
fi
python3 scripts/summarize_tests.py "$results" tests/allowed_skips.txt
