#!/usr/bin/env python3
"""fully_shard() around a GPT-2 of plain torch::nn beside FSDP2 around the same in PyTorch, and DDP beside DDP;
around the GPT-2 that `tessera train` has beside that trainer's own ZeRO 3.

Usage: bench/own_module_bench.py BUILD [--rounds 5] [--steps 6] [--dtype fp32 bf16] [--case NAME]... [--json FILE]
BUILD is a build folder. The model has 8 layers of 512, 8 heads and a vocabulary of 8192 that head and embedding share
(30 M parameters), its batch is 8 samples of 256 tokens, on two ranks of one thread. Both use the products and attention
that LibTorch has, and an AdamW of one pass (FusedAdamW, fused=True): what differs is who shards. Ours are
started by `tessera launch`, PyTorch's by torchrun. In every round each program runs in turn; a figure is the median
over rounds of what a round's median step took, without its first two.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

import step_bench

FLAGS = ["--model.family=gpt2", "--model.ffn=2048", "--mesh.dp=2", "--zero.stage=3"]
CASES = [("fully_shard", "fsdp2"), ("ddp", "pytorch ddp"), ("decoder", "trainer")]
SHAPE = ["8", "512", "8", "8192", "256", "4"]


def of_tessera(options, kind, folder, dtype):
    command = [options.program, "launch", "-n", "2", "--", options.build / "bench" / "own_module", kind,
               str(options.steps), *SHAPE, dtype]
    out, most = step_bench.measured(command, folder)
    return json.loads(out.splitlines()[-1])["step_s"][2:], most


def one(options, who, is_ours, folder, path, dtype):
    if is_ours:
        return of_tessera(options, who, folder, dtype)
    if who == "trainer":
        return step_bench.of_tessera(options, folder, 2, path)[:2]
    return step_bench.of_torch(who.split()[-1], folder, 2, path)[:2]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=lambda text: Path(text).resolve())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--dtype", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--case", action="append", help=", ".join(ours for ours, _ in CASES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    options.program = options.build / "cli" / "tessera"
    rows = []
    for dtype in options.dtype:
        for ours, theirs in CASES:
            if (options.case and ours not in options.case) or (ours == "ddp" and dtype != "fp32"):
                continue
            times, most = {ours: [], theirs: []}, {ours: 0, theirs: 0}
            with tempfile.TemporaryDirectory() as text:
                folder = Path(text)
                path = step_bench.configuration(folder, FLAGS, options.steps, dtype)
                for _ in range(options.rounds):
                    for who in (ours, theirs):
                        steps, peak = one(options, who, who == ours, folder, path, dtype)
                        times[who].append(statistics.median(steps))
                        most[who] = max(most[who], peak)
            ratio = statistics.median(b / a for a, b in zip(times[ours], times[theirs], strict=True))
            rows.append({"case": ours, "beside": theirs, "dtype": dtype, "rounds": times, "bytes": most, "over": ratio})
            print(f"{dtype}  {ours:12} {statistics.median(times[ours]):.3f} s, {most[ours] / 2**20:.0f} MiB; "
                  f"{theirs} {statistics.median(times[theirs]):.3f} s ({ratio:.2f}x), {most[theirs] / 2**20:.0f} MiB",
                  flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    sys.exit(main())
