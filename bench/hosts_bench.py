#!/usr/bin/env python3
"""Training on hosts that are network namespaces with slow links: hierarchical beside flat.

Usage: bench/hosts_bench.py PROGRAM [--hosts 2] [--ranks 2] [--rate 200mbit] [--steps 8] [--rounds 2]
Runs the same training with each way of communicating, in turns, and prints the bytes that left a
host in a step and the median time of a step. Needs root, ip and tc.
"""

import argparse
import json
import random
import statistics
import struct
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "parity"))
from hosts import Hosts, end_of, start_ranks  # noqa: E402

WAYS = {
    "hierarchical (auto)": [],
    "flat, gloo's own": ["--comm.backend=gloo"],
    "flat, ring": ["--comm.algorithm=ring"],
    "flat, recursive doubling": ["--comm.algorithm=recursive_doubling"],
}


def configuration(folder, steps):
    tokens = folder / "tokens.bin"
    rng = random.Random(1)
    tokens.write_bytes(struct.pack("<5000H", *(rng.randrange(61) for _ in range(5000))))
    path = folder / "run.json"
    path.write_text(json.dumps({
        "run": {"name": "run", "steps": steps, "device": "cpu", "threads": 1},
        "model": {"layers": 4, "hidden": 256, "heads": 4, "ffn": 512, "vocab": 61, "max_seq": 16},
        "data": {"train": str(tokens), "format": "tokens_u16", "seq_len": 16},
        "batch": {"global": 12},
        "checkpoint": {"every": 0},
        "monitor": {"tensorboard": False},
    }))
    return path


def measure(options, arguments):
    """Bytes out of a host a step, and the seconds of each step but the first two."""
    with tempfile.TemporaryDirectory() as name, Hosts(options.hosts, options.rate) as hosts:
        folder = Path(name)
        path = configuration(folder, options.steps)
        per_host = [options.ranks] * options.hosts
        for code, errors in end_of(start_ranks(hosts, options.program, per_host, path, f"--run.dir={folder}",
                                               f"--mesh.dp={sum(per_host)}", *arguments)):
            if code != 0:
                sys.exit(errors)
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
        sent = sum(hosts.sent(host) for host in range(options.hosts)) / options.hosts / options.steps
        return sent, [json.loads(line)["step_s"] for line in lines][2:]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", type=Path)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    sent, times = {}, {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way, arguments in WAYS.items():
            sent[way], seconds = measure(options, arguments)
            times[way] += seconds
    first = statistics.median(next(iter(times.values())))
    print(f"{options.hosts} hosts of {options.ranks} ranks, links of {options.rate}")
    print("| way | MB out of a host, a step | s a step (median) | against the first |")
    print("| --- | --- | --- | --- |")
    for way in WAYS:
        step = statistics.median(times[way])
        print(f"| {way} | {sent[way] / 1e6:.2f} | {step:.3f} | {step / first:.2f} |")


if __name__ == "__main__":
    main()
