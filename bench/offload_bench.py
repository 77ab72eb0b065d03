#!/usr/bin/env python3
"""What states in files cost a step, beside what the disk does with as many bytes.

offload_bench.py [PROGRAM] [--rounds N] [--folder FOLDER] [--tokens N]: one rank, one thread; `tessera bench step`
without and with zero.offload, in turns. Before each turn the folder's disk writes and reads the bytes that the step
moves, past the system's memory. Where that takes longer than a step, the disk is the bound.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

MODEL = {"family": "llama", "layers": 6, "hidden": 512, "heads": 8, "ffn": 1408, "vocab": 512, "max_seq": 512}
WAYS = ["none", "optimizer", "all"]
BLOCK = 1 << 22


def measure(program, folder, way, tokens):
    config = folder / "run.json"
    config.write_text(json.dumps({
        "run": {"device": "cpu", "threads": 1}, "model": MODEL, "data": {"seq_len": 512},
        "batch": {"global": tokens // 512, "micro": tokens // 512},
        "zero": {"offload": way, "offload_folder": str(folder)}}))
    subprocess.run([program, "bench", "step", config, "--rounds", "3", "--json", folder / "step.json"], check=True,
                   capture_output=True)
    return json.loads((folder / "step.json").read_text())


def disk(folder, size):
    """Seconds in which it writes and reads so many bytes."""
    path, block = folder / "disk", os.urandom(BLOCK)
    begin = time.perf_counter()
    with open(path, "wb") as file:
        for _ in range(size // BLOCK):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter()
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with open(path, "rb") as file:
        while file.read(BLOCK):
            pass
    done = time.perf_counter()
    path.unlink()
    return written - begin, done - written


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", nargs="?", default="build/dev/cli/tessera")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="on the disk to measure; the one for temporary files")
    parser.add_argument("--tokens", type=int, default=4096, help="of a step")
    options = parser.parse_args()
    steps, held = {way: [] for way in WAYS}, {}
    writes, reads = [], []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder, size = Path(name), 0
        for _ in range(options.rounds):
            for way in WAYS:
                found = measure(options.program, folder, way, options.tokens)
                steps[way].append(found["step_s"]["median"])
                held[way] = found["bytes"]
            size = held["none"]["optimizer"] - held["optimizer"]["optimizer"]
            wrote, read = disk(folder, size)
            writes.append(wrote)
            reads.append(read)
    alone = statistics.median(steps["none"])
    print(f"disk: {size / 2**20:.0f} MiB of optimizer states: written in {statistics.median(writes):.2f} s, "
          f"read in {statistics.median(reads):.2f} s\n")
    print("| zero.offload | s a step | over none | tensors at most, MiB | parameters | gradients | optimizer |\n"
          "| --- | --- | --- | --- | --- | --- | --- |")
    for way in WAYS:
        middle = statistics.median(steps[way])
        mib = [f"{held[way][key] / 2**20:.0f}" for key in ("at_most", "parameters", "gradients", "optimizer")]
        print(f"| {way} | {middle:.2f} | {100 * (middle / alone - 1):+.1f}% | {' | '.join(mib)} |")


if __name__ == "__main__":
    main()
