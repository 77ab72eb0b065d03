#!/usr/bin/env python3
"""The loss of fp8 products beside that of bf16: the same model, data and seed, by both.

Usage: bench/fp8_bench.py PROGRAM [--steps 300] [--device cuda] [--json FILE] [--key=value of the configuration]...
On a GPU a Llama of 78 M parameters (11 layers of 768) and 32 samples of 1024 tokens a step, on the CPU, where fp8 is
emulated, one of 3 M and 8 samples of 128. A token is a byte of Python's own library: every twentieth file is held out.
A row has the mean loss of the steps since the row before, the last row what both say of the files that were held out.
"""

import argparse
import json
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROWS = 12
SHAPES = {
    "cuda": ({"layers": 11, "hidden": 768, "heads": 12, "ffn": 2048, "max_seq": 1024}, 32, 6e-4),
    "cpu": ({"layers": 4, "hidden": 256, "heads": 4, "ffn": 688, "max_seq": 128}, 8, 1e-3),
}


def write_tokens(folder):
    """The library's sources as ids of 16 bits: what is trained on, and what is held out."""
    library = Path(sysconfig.get_path("stdlib"))
    sources = sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts)
    files = {}
    for name, chosen in (("train", lambda i: i % 20 != 0), ("valid", lambda i: i % 20 == 0)):
        text = b"".join(path.read_bytes() for i, path in enumerate(sources) if chosen(i))
        ids = bytearray(2 * len(text))
        ids[::2] = text
        files[name] = folder / f"{name}.bin"
        files[name].write_bytes(ids)
    return files


def trained(options, folder, files, products):
    """The lines of metrics.jsonl of a run with such products."""
    model, samples, rate = SHAPES[options.device]
    (folder / "run.json").write_text(json.dumps({
        "run": {"name": products, "dir": str(folder), "steps": options.steps, "device": options.device},
        "model": {**model, "vocab": 256},
        "data": {"train": str(files["train"]), "valid": str(files["valid"]), "format": "tokens_u16",
                 "seq_len": model["max_seq"]},
        "batch": {"global": samples}, "precision": {"compute": "bf16", "products": products},
        "optimizer": {"lr": rate}, "schedule": {"type": "cosine", "warmup": options.steps // 10},
        "validate": {"every": options.steps, "samples": 4 * samples},
        "checkpoint": {"every": 0}, "monitor": {"tensorboard": False}}))
    done = subprocess.run([options.program, "train", folder / "run.json", *options.keys], capture_output=True, text=True,
                          check=False)
    if done.returncode != 0:
        sys.exit(f"{products}: {done.stderr[-3000:]}")
    return [json.loads(line) for line in (folder / products / "metrics.jsonl").read_text().splitlines()]


def seconds_of(lines):
    """Of a step, the median behind the first ones, which compile and choose."""
    return statistics.median([line["step_s"] for line in lines if "step_s" in line][5:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--device", choices=SHAPES, default="cuda")
    parser.add_argument("--json", type=Path)
    options, options.keys = parser.parse_known_args()
    options.program = options.program.resolve()
    found = {}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        files = write_tokens(folder)
        print(f"{files['train'].stat().st_size // 2} tokens to train on, {options.device}", flush=True)
        for name, products in (("bf16", "same"), ("fp8", "fp8")):
            found[name] = trained(options, folder, files, products)
    losses = {name: [line["loss"] for line in lines if "loss" in line] for name, lines in found.items()}
    print("| step | bf16 | fp8 | fp8 over bf16 |\n| --- | --- | --- | --- |")
    every = max(1, options.steps // ROWS)
    for end in range(every, options.steps + 1, every):
        of_bf16, of_fp8 = (statistics.mean(losses[name][end - every:end]) for name in ("bf16", "fp8"))
        print(f"| {end} | {of_bf16:.4f} | {of_fp8:.4f} | {of_fp8 / of_bf16 - 1:+.2%} |")
    of_bf16, of_fp8 = ([line["valid_loss"] for line in found[name] if "valid_loss" in line][-1]
                       for name in ("bf16", "fp8"))
    print(f"| held out | {of_bf16:.4f} | {of_fp8:.4f} | {of_fp8 / of_bf16 - 1:+.2%} |")
    of_bf16, of_fp8 = seconds_of(found["bf16"]), seconds_of(found["fp8"])
    print(f"A step: bf16 {of_bf16:.4f} s, fp8 {of_fp8:.4f} s, {of_fp8 / of_bf16:.2f} of it")
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
