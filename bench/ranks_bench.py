#!/usr/bin/env python3
"""Two ranks beside one, each of one thread; and two that mpirun binds to a core each beside two that it does not.

Usage: bench/ranks_bench.py PROGRAM [--rounds 5] [--steps 8] [--dtype fp32 bf16]
The model and its batch are those of step_bench.py. In every round each runs in turn; a figure is the median over
rounds of what a round's median step took.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import step_bench

MPIRUN = ["mpirun", "--allow-run-as-root", "-np", "2", "--bind-to"]
WAYS = {
    "one rank": ([], "1"),
    "two ranks": ([], "2"),
    "two, not bound": ([*MPIRUN, "none"], "2"),
    "two, a core each": ([*MPIRUN, "core"], "2"),
}


def steps_of(program, folder, path, way, flags):
    before, ranks = WAYS[way]
    launched = [] if before else ["--nproc", ranks]
    command = [*before, program, "train", path, *launched, *(flags if ranks == "2" else [])]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    subprocess.run(["rm", "-r", folder / "run"], check=True)
    return statistics.median([line["step_s"] for line in lines][2:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=lambda text: Path(text).resolve())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--dtype", nargs="+", default=["fp32"])
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    for dtype in options.dtype:
        times = {way: [] for way in WAYS}
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            path = step_bench.configuration(folder, [], options.steps, dtype)
            flags = ["--mesh.dp=2", "--batch.micro=4"]
            for _ in range(options.rounds):
                for way in WAYS:
                    times[way].append(steps_of(options.program, folder, path, way, flags))
        for way, each in times.items():
            ratio = statistics.median(a / b for a, b in zip(times["one rank"], each, strict=True))
            print(f"{dtype}  {way:16} {statistics.median(each):.3f} s  {ratio:.3f} of one rank's speed", flush=True)


if __name__ == "__main__":
    sys.exit(main())
