#!/usr/bin/env python3
"""What checkpoints take from training: written while it waits, beside it ('checkpoint.async'), and into the host's memory
('checkpoint.local_every').

Usage: bench/checkpoint_bench.py PROGRAM [--nproc 2] [--steps 60] [--every 10] [--rounds 3] [--folder FOLDER]
In every round a run of each kind goes in turn, one of them without checkpoints; a figure is the median over rounds:
seconds of the whole command, and what each checkpoint added to it. The last one, which every run waits for, is among
them. --folder: a folder on the disk that is meant.
"""

import argparse
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from step_bench import configuration

WAYS = {"none": ["--checkpoint.every=0"], "waited for": [], "beside": ["--checkpoint.async=true"],
        "in memory": ["--checkpoint.every=0", "--checkpoint.local_every={every}"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=lambda text: str(Path(text).resolve()))
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as text:
        folder = Path(text)
        flags = [f"--mesh.dp={options.nproc}", "--zero.stage=1", f"--checkpoint.every={options.every}", "--checkpoint.keep=1"]
        path = configuration(folder, flags, options.steps, "fp32")
        times = {way: [] for way in WAYS}
        size = 0
        for _ in range(options.rounds):
            for way, added in WAYS.items():
                more = [flag.format(every=options.every) for flag in added]
                began = time.perf_counter()
                subprocess.run([options.program, "train", str(path), *more], cwd=folder, check=True, capture_output=True)
                times[way].append(time.perf_counter() - began)
                saved = list((folder / "run" / "checkpoints").glob("step-*/*.safetensors"))
                size = sum(each.stat().st_size for each in saved) or size
                shutil.rmtree(folder / "run")
        count = options.steps // options.every
        print(f"{options.nproc} ranks, {count} checkpoints of {size / 2**20:.0f} MiB in {options.steps} steps")
        without = times["none"]
        for way, each in times.items():
            added = statistics.median((one - other) / count for one, other in zip(each, without, strict=True))
            print(f"{way:12} {statistics.median(each):6.2f} s  {added:6.3f} s a checkpoint", flush=True)


if __name__ == "__main__":
    main()
