#!/usr/bin/env bash
# ./dev gpu-check [--pack]: builds with CUDA, packs into build/gpu-check, and runs
# what is packed on this machine's GPU: tests beside the CPU, runs of several ranks,
# steps beside PyTorch's. One report: build/gpu-check/report.md. --pack: no further
# than that; the folder then runs elsewhere, as bash FOLDER/run, beside the
# LibTorch 2.11 with CUDA of the python3 there, without a network.
set -euo pipefail

# is_brought LIBRARY: by every Linux, or by LibTorch.
is_brought() {
  case $1 in
    */torch/lib/* | */nvidia/* | */libc.so* | */libm.so* | */libstdc++* | */libgcc_s* | */ld-linux* | \
      */libpthread* | */libdl.so* | */librt.so* | */libutil.so*) return 0 ;;
  esac
  return 1
}

pack() {
  local folder=$1 each library
  ./dev build --cuda tessera device_slow_test
  rm -rf "$folder"
  mkdir -p "$folder/lib"
  for each in cli/tessera tests/device_slow_test; do
    cp "build/cuda/$each" "$folder/"
    while read -r library; do
      is_brought "$library" || cp -L "$library" "$folder/lib/"
    done < <(ldd "build/cuda/$each" | awk '$3 ~ /^\// { print $3 }')
  done
  cp bench/{fp8_bench,step_bench,torch_step}.py "$folder/"
  mkdir "$folder/parity"
  cp tests/parity/{conftest.py,runs.py,pytest.ini,test_transformers_on_meshes.py} "$folder/parity/"
  cp "${BASH_SOURCE[0]}" "$folder/run"
  echo "gpu-check: packed into $folder ($(du -sh "$folder" | cut -f1))"
}

find_gpu() {
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader ||
    { echo "gpu-check: nvidia-smi finds no GPU; what needs one was not run." >&2; exit 69; }
}

# check NAME COMMAND...: one part of the report, with the command's last words; all
# of them are in logs/.
check() {
  local name=$1 log="$here/logs/${1//[^a-zA-Z0-9]/_}" started=$SECONDS verdict=ok
  shift
  timeout 200 "$@" >"$log" 2>&1 </dev/null || verdict=$([[ $? == 124 ]] && echo "LATE, ended" || echo FAILED) failed=yes
  { echo "## $name: $verdict, $((SECONDS - started)) s"; echo '```'; tail -n 45 "$log"; echo '```'; } >>"$report"
  printf '%-7s %-32s %4d s\n' "$verdict" "$name" $((SECONDS - started))
}

# Ten steps of so many ranks on the CPU and on others: their last losses.
same_losses() {
  local ranks=$1 devices=$2 folder device
  shift 2
  folder=$(mktemp -d)
  trap "rm -rf '$folder'" EXIT
  python3 -c "import struct; open('$folder/tokens', 'wb').write(struct.pack('<9000H', *(i * i % 251 for i in range(9000))))"
  for device in cpu "$devices"; do
    cat >"$folder/$device.json" <<JSON
{"run": {"name": "$device", "dir": "$folder", "steps": 10, "device": "$device"},
 "model": {"layers": 4, "hidden": 128, "heads": 4, "vocab": 256, "max_seq": 64},
 "data": {"train": "$folder/tokens", "format": "tokens_u16", "seq_len": 64},
 "batch": {"global": 8}, "precision": {"compute": "fp32"}, "monitor": {"tensorboard": false}}
JSON
    "$here/tessera" train "$folder/$device.json" --nproc "$ranks" "$@"
  done
  python3 - "$folder" "$devices" <<'PYTHON'
import json, sys
last = [json.loads(open(f"{sys.argv[1]}/{device}/metrics.jsonl").readlines()[-1])["loss"] for device in ("cpu", sys.argv[2])]
print("cpu", last[0], sys.argv[2], last[1])
sys.exit(abs(last[0] - last[1]) > 1e-3 * last[0])
PYTHON
}

# where_it_goes CASE: of step_bench.py's.
where_it_goes() {
  local folder
  folder=$(mktemp -d)
  trap "rm -rf '$folder'" EXIT
  python3 - "$here" "$folder" "$1" <<'PYTHON'
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import step_bench
step_bench.configuration(Path(sys.argv[2]), step_bench.CASES[sys.argv[3]][1], 5, "bf16")
PYTHON
  "$here/tessera" bench step "$folder/run.json" --rounds 5 --json "$here/logs/${1// /_}.json"
}

run() {
  here=$1
  report=$1/report.md failed=
  local torch each same
  torch=$(python3 -c 'import os, torch; print(os.path.dirname(torch.__file__))') ||
    { echo "gpu-check: python3 has no torch; put one with CUDA first in PATH." >&2; exit 69; }
  export here LD_LIBRARY_PATH=$here/lib:$torch/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  for each in "$torch"/../nvidia/*/lib; do
    LD_LIBRARY_PATH+=:$each  # NVRTC's, which LibTorch looks for by itself
  done
  rm -rf "$here/logs"
  mkdir "$here/logs"
  { echo "# $("$here/tessera" --version)"; find_gpu; echo "$(nproc) cores"; } >"$report"
  export -f same_losses where_it_goes
  same=(bash -euo pipefail -c 'same_losses "$@"' same_losses)
  check "a device beside the CPU" "$here/device_slow_test"
  check "1 rank" "${same[@]}" 1 auto
  check "2 ranks, dp" "${same[@]}" 2 cuda --mesh.dp=2
  check "4 ranks, tp 2 x pp 2" "${same[@]}" 4 cuda --mesh.tp=2 --mesh.pp=2 --batch.micro=2
  check "2 stages, on the GPU and on the CPU" "${same[@]}" 2 cuda,cpu --mesh.pp=2 --batch.micro=2
  check "1 rank, weights and states in files" "${same[@]}" 1 cuda --zero.stage=3 --zero.offload=all --zero.offload_folder="$here/logs"
  echo '{}' >"$here/logs/verify.json"
  check "a mesh of the GPU beside one rank of the CPU" "$here/tessera" verify "$here/logs/verify.json" --shrink \
    --mesh.dp=2 --mesh.tp=2 --zero.stage=2 --run.device=cuda
  check "meshes beside transformers" env TESSERA_DEVICE=cuda TESSERA_PROGRAM="$here/tessera" \
    python3 -m pytest "$here/parity" -q -n 8 -p no:cacheprovider -k "test_eight_steps and not auxiliary and not 16 and (tp or pp or zero or ep)"
  check "fp8 products beside bf16" python3 "$here/fp8_bench.py" "$here/tessera" --json "$here/logs/fp8.json"
  local -a cases=("gpt2 gpu" "1 b gpu" "mixtral gpu")
  for each in "${cases[@]}"; do
    check "where a step of $each goes" bash -euo pipefail -c 'where_it_goes "$@"' where_it_goes "$each"
  done
  for each in "${cases[@]}"; do
    check "$each beside PyTorch" python3 "$here/step_bench.py" "$here/tessera" --rounds 1 --steps 7 --case "$each" --dtype bf16
  done
  echo "gpu-check: $report"
  [[ -z $failed ]]
}

if [[ $(basename "${BASH_SOURCE[0]}") == run ]]; then
  run "$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
  exit
fi
case ${1:-} in
  '') find_gpu ;;
  --pack) ;;
  *) echo "usage: ./dev gpu-check [--pack]" >&2; exit 2 ;;
esac
pack build/gpu-check
[[ ${1:-} == --pack ]] || PATH=$PWD/.venv-cuda/bin:$PATH run "$PWD/build/gpu-check"
