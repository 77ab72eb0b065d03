#!/usr/bin/env python3
"""Two builds of the program beside each other: seconds of a step on each mesh, and from start to first step.

Usage: bench/programs_bench.py PROGRAM OTHER [--rounds 3] [--steps 6] [--only NAME]
The two take turns, and so does which goes first. Of a step the median of all rounds, the first two steps
left out; the last column is the median of the rounds' ratios. Losses are compared: the same bits or not.
"""

import argparse
import json
import os
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODEL = {"layers": 8, "hidden": 256, "heads": 8, "ffn": 704, "vocab": 4096, "max_seq": 256}
KINDS = {
    "one rank": [],
    "one rank, recomputed": ["--recompute.mode=block"],
    "one rank, micro-batches of 2": ["--batch.micro=2"],
    "ddp 2": ["--mesh.dp=2"],
    "zero 1": ["--mesh.dp=2", "--zero.stage=1"],
    "zero 2": ["--mesh.dp=2", "--zero.stage=2"],
    "zero 3": ["--mesh.dp=2", "--zero.stage=3"],
    "tp 2": ["--mesh.tp=2"],
    "cp 2": ["--mesh.cp=2"],
    "pp 2": ["--mesh.pp=2", "--batch.micro=2"],
    "pp 2 x 2 chunks": ["--mesh.pp=2", "--batch.micro=2", "--pipeline.schedule=interleaved", "--pipeline.chunks=2"],
    "dp 2 x tp 2": ["--mesh.dp=2", "--mesh.tp=2"],
}


def configuration(folder, steps):
    tokens = folder / "tokens.bin"
    rng = random.Random(1)
    tokens.write_bytes(struct.pack("<60000H", *(rng.randrange(MODEL["vocab"]) for _ in range(60000))))
    path = folder / "run.json"
    path.write_text(json.dumps({
        "run": {"name": "run", "steps": steps, "device": "cpu", "threads": 1},
        "model": MODEL,
        "data": {"train": str(tokens), "format": "tokens_u16", "seq_len": 256},
        "batch": {"global": 8},
        "checkpoint": {"every": 0},
        "monitor": {"tensorboard": False},
    }))
    return path


def ranks_of(arguments):
    sizes = [int(argument.split("=")[1]) for argument in arguments if argument.startswith("--mesh.")]
    product = 1
    for size in sizes:
        product *= size
    return product


def measure(program, steps, arguments):
    """Seconds until the first step is written, of each later one but the second, and the losses."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        metrics = folder / "run" / "metrics.jsonl"
        command = [program, "train", configuration(folder, steps), f"--run.dir={folder}", *arguments]
        if (ranks := ranks_of(arguments)) > 1:
            command.append(f"--nproc={ranks}")
        begin = time.monotonic()
        with (folder / "errors").open("w") as errors:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
            while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
                time.sleep(0.002)
            first = time.monotonic() - begin
            if process.wait() != 0:
                sys.exit((folder / "errors").read_text())
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        return first - lines[0]["step_s"], [line["step_s"] for line in lines][2:], [line["loss"] for line in lines]


def row(options, kind):
    steps, starts, ratios = ([], []), ([], []), []
    for turn in range(options.rounds):
        median, losses = [0.0, 0.0], [None, None]
        for side in (0, 1) if turn % 2 == 0 else (1, 0):
            start, seconds, losses[side] = measure(options.programs[side], options.steps, KINDS[kind])
            starts[side].append(start)
            steps[side].extend(seconds)
            median[side] = statistics.median(seconds)
        ratios.append(median[0] / median[1])
    one, other = (statistics.median(times) for times in steps)
    start, other_start = (statistics.median(times) for times in starts)
    bits = "same" if losses[0] == losses[1] else "other"
    print(f"| {kind} | {start:.2f} | {other_start:.2f} | {one:.3f} | {other:.3f} | "
          f"{statistics.median(ratios):.3f} | {bits} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("programs", type=Path, nargs=2, metavar="PROGRAM")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=KINDS)
    options = parser.parse_args()
    options.programs = [program.resolve() for program in options.programs]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print("| mesh | before its first step, s | other | a step, s | other | ratio | bits of losses |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for kind in [options.only] if options.only else KINDS:
        row(options, kind)


if __name__ == "__main__":
    main()
