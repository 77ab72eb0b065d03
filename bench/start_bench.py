#!/usr/bin/env python3
"""What starting the ranks of one host takes: as copies of their launcher ('tessera train --nproc'), and as
programs that load all libraries ('tessera launch -- tessera train').

Usage: bench/start_bench.py PROGRAM [--nproc 2 8] [--rounds 5]
A run is of two small layers and one step. In every round each way runs in turn; a figure is the median over rounds:
seconds of the whole command, and of processor time in all its processes.
"""

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import struct
import subprocess
import tempfile
import time
from pathlib import Path

WAYS = {
    "copies": lambda program, nproc: [program, "train", "run.json", "--nproc", str(nproc)],
    "programs": lambda program, nproc: [program, "launch", "-n", str(nproc), "--", program, "train", "run.json"],
}


def write_run(folder):
    draw = random.Random(1)
    ids = [draw.randrange(61) for _ in range(5000)]
    (folder / "train.bin").write_bytes(struct.pack(f"<{len(ids)}H", *ids))
    (folder / "run.json").write_text(json.dumps({
        "run": {"dir": ".", "name": "run", "steps": 1, "device": "cpu", "threads": 1},
        "model": {"family": "llama", "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 61,
                  "max_seq": 16},
        "data": {"train": "train.bin", "format": "tokens_u16", "seq_len": 16},
        "batch": {"global": 16},
        "checkpoint": {"every": 0},
        "monitor": {"tensorboard": False},
    }))


def processor_time():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measured(command, folder):
    began, before = time.perf_counter(), processor_time()
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    took = time.perf_counter() - began, processor_time() - before
    shutil.rmtree(folder / "run")
    return took


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=lambda text: str(Path(text).resolve()))
    parser.add_argument("--nproc", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        write_run(folder)
        for nproc in options.nproc:
            times = {way: [] for way in WAYS}
            for _ in range(options.rounds):
                for way, command in WAYS.items():
                    times[way].append(measured(command(options.program, nproc), folder))
            for way, each in times.items():
                wall, used = (statistics.median(column) for column in zip(*each, strict=True))
                print(f"{nproc} ranks  {way:9} {wall:.2f} s  {used:.2f} s of processor time", flush=True)


if __name__ == "__main__":
    main()
