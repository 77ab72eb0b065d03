#!/usr/bin/env python3
"""What overlap is worth: hosts that are network namespaces, a link slowed until communication takes
about as long as compute.

Usage: bench/overlap_bench.py PROGRAM [--steps 6] [--rounds 3] [--share 0.9] [--only NAME]
Of each kind of parallelism on two hosts of one rank: the seconds of a step over a fast link (compute
alone), and over the slowed one with what overlaps and without (passes; of experts their dispatch in
chunks), alternating. Communication alone is what a rank sends at the link's rate. Losses must be the same bits. Needs root, ip and tc.
"""

import argparse
import json
import os
import random
import statistics
import struct
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "parity"))
from hosts import Hosts, end_of, start_ranks  # noqa: E402

FAST = "100gbit"
PASSES = "prefetch,reductions,messages"
EXPERTS = ["--mesh.dp=2", "--mesh.ep=2", "--batch.micro=4", "--model.family=mixtral", "--model.moe.experts=16",
           "--model.moe.ffn=256"]
KINDS = {
    "ddp": ["--mesh.dp=2"],
    "zero1": ["--mesh.dp=2", "--zero.stage=1"],
    "zero2": ["--mesh.dp=2", "--zero.stage=2"],
    "zero3": ["--mesh.dp=2", "--zero.stage=3", "--zero.prefetch=2"],
    "1f1b": ["--mesh.pp=2", "--batch.micro=1"],
    "eager_1f1b": ["--mesh.pp=2", "--batch.micro=1", "--pipeline.schedule=eager_1f1b"],
    "experts": EXPERTS,
    "experts, shared": [*EXPERTS, "--model.moe.shared_experts=2"],
    "experts, 4 chunks": [*EXPERTS, "--expert.dispatch_chunks=4"],
}


def configuration(folder, kind, steps):
    tokens = folder / "tokens.bin"
    rng = random.Random(1)
    tokens.write_bytes(struct.pack("<60000H", *(rng.randrange(256) for _ in range(60000))))
    path = folder / "run.json"
    path.write_text(json.dumps({
        "run": {"name": "run", "steps": steps, "device": "cpu", "threads": 1},
        "model": {"layers": 8, "hidden": 256, "heads": 8, "vocab": 256, "max_seq": 256},
        "data": {"train": str(tokens), "format": "tokens_u16", "seq_len": 256},
        "batch": {"global": 16},
        "checkpoint": {"every": 0},
        "monitor": {"tensorboard": False},
    }))
    return path


def measure(options, kind, rate, overlaps=True):
    """Seconds of each step but the first two, bytes out of a host a step, and the losses."""
    os.environ["TESSERA_WITHOUT_PASSES"] = "" if overlaps or "experts" in kind else PASSES
    at_once = ["--expert.dispatch_chunks=0"] if "experts" in kind and not overlaps else []
    with tempfile.TemporaryDirectory() as name, Hosts(2, rate) as hosts:
        folder = Path(name)
        path = configuration(folder, kind, options.steps)
        for code, errors in end_of(start_ranks(hosts, options.program, [1, 1], path, f"--run.dir={folder}",
                                               *KINDS[kind], *at_once)):
            if code != 0:
                sys.exit(errors)
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        sent = sum(hosts.sent(host) for host in range(2)) / 2 / options.steps
        return [line["step_s"] for line in lines][2:], sent, [line["loss"] for line in lines]


def row(options, kind):
    compute, sent, losses = measure(options, kind, FAST)
    mbit = max(1, round(sent * 8 / (options.share * statistics.median(compute)) / 1e6))
    rate = f"{mbit}mbit"
    seconds = {True: [], False: []}
    for _ in range(options.rounds):
        compute += measure(options, kind, FAST)[0]
        for overlaps, times in seconds.items():
            more, _, same = measure(options, kind, rate, overlaps)
            times += more
            if same != losses:
                sys.exit(f"{kind}: other losses with{'' if overlaps else 'out'} overlap")
    alone = statistics.median(compute)
    off, on = statistics.median(seconds[False]), statistics.median(seconds[True])
    communication = sent * 8 / mbit / 1e6
    longer = max(alone, communication)
    print(f"| {kind} | {rate} | {alone:.3f} | {communication:.3f} | {off:.3f} | {on:.3f} | {on / longer:.2f} |",
          flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", type=Path)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.9, help="of communication in compute")
    parser.add_argument("--only", choices=KINDS)
    options = parser.parse_args()
    print("| kind | link | compute alone, s | communication alone | without overlap | with | with / the longer |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for kind in [options.only] if options.only else KINDS:
        row(options, kind)


if __name__ == "__main__":
    main()
