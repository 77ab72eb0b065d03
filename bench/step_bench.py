#!/usr/bin/env python3
"""A step of training beside PyTorch's and beside its matrix products alone.

Usage: bench/step_bench.py PROGRAM [--rounds 5] [--steps 6] [--case NAME]... [--peers NAME...] [--dtype fp32 bf16]
                           [--json FILE]
The model is a Llama of 34 M parameters (8 layers of 512, 8 heads, ffn 1408, vocabulary 8192), its batch 8
samples of 256 tokens, on two cores: one rank of two threads, or two ranks of one. In every round each of the
programs runs in turn; a figure is the median over rounds of what a round's median step took. Of one rank also
the floor: the step's matrix products alone, of the same shapes and threads, each by the fastest call there is
(at::mm, or oneDNN as LibTorch has it). PyTorch trains the same model with flash attention, AdamW (fused) and
clipping; its pipeline has the split of the file, or as many layers in either half. Memory is the most that all
processes had resident together.
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

HERE = Path(__file__).resolve().parent
CASES = {
    # name: (ranks, flags of Tessera, the kinds of bench/torch_step.py beside it)
    "one rank": (1, [], ["floor", "eager", "compile"]),
    "ddp": (2, ["--mesh.dp=2"], ["ddp"]),
    "zero 3": (2, ["--mesh.dp=2", "--zero.stage=3"], ["fsdp2"]),
    "tp": (2, ["--mesh.tp=2"], ["tp"]),
    "pp": (2, ["--mesh.pp=2", "--batch.micro=1"], ["pp"]),
    "pp 5,3": (2, ["--mesh.pp=2", "--batch.micro=1", "--pipeline.split=5,3"], ["pp"]),
    "pp by facts": (2, ["--mesh.pp=2", "--batch.micro=1", "--pipeline.cut=facts"], ["pp"]),
    "quickstart": (2, ["--mesh.dp=2", "--model.layers=6", "--model.hidden=320", "--model.heads=5",
                       "--model.ffn=864"], ["ddp"]),
    "long": (1, ["--data.seq_len=8192", "--model.max_seq=8192", "--batch.global=1", "--batch.micro=1"],
             ["floor", "eager", "compile"]),
    "gpt2": (1, ["--model.family=gpt2", "--model.layers=12", "--model.hidden=768", "--model.heads=12",
                 "--model.ffn=3072", "--model.vocab=50257", "--batch.global=4", "--batch.micro=4"], ["eager", "compile"]),
    # Those of a GPU, for who asks for them by name. The vocabulary is nanoGPT's, a multiple of 64; eager has no
    # room for the 64 samples in 80 GB.
    "gpt2 gpu": (1, ["--run.device=cuda", "--model.family=gpt2", "--model.layers=12", "--model.hidden=768",
                     "--model.heads=12", "--model.ffn=3072", "--model.vocab=50304", "--model.max_seq=1024",
                     "--data.seq_len=1024", "--batch.global=64", "--batch.micro=32"], ["eager", "compile"]),
    "1 b gpu": (1, ["--run.device=cuda", "--model.layers=16", "--model.hidden=2048", "--model.heads=16",
                    "--model.ffn=5632", "--model.vocab=32000", "--model.max_seq=4096", "--data.seq_len=4096",
                    "--batch.global=4", "--batch.micro=4"], ["eager", "compile"]),
    "mixtral gpu": (1, ["--run.device=cuda", "--model.family=mixtral", "--model.layers=12", "--model.hidden=768",
                        "--model.heads=12", "--model.kv_heads=4", "--model.ffn=2560", "--model.vocab=32000",
                        "--model.max_seq=1024", "--model.moe.experts=8", "--model.moe.top_k=2", "--data.seq_len=1024",
                        "--batch.global=16", "--batch.micro=16"], ["eager"]),
    "small batch": (1, ["--data.seq_len=128", "--batch.global=1", "--batch.micro=1"], ["floor", "eager", "compile"]),
}
BY_DEFAULT = [name for name in CASES if not name.endswith("gpu")]


def configuration(folder, flags, steps, dtype):
    """run.json of a case, and what it says to PyTorch."""
    model = {"layers": 8, "hidden": 512, "heads": 8, "ffn": 1408, "vocab": 8192, "max_seq": 256}
    sections = {
        "run": {"name": "run", "dir": str(folder), "steps": steps, "device": "cpu"}, "model": model,
        "data": {"train": str(folder / "tokens.bin"), "format": "tokens_u16", "seq_len": 256},
        "batch": {"global": 8, "micro": 8}, "mesh": {}, "zero": {}, "pipeline": {},
        "precision": {"compute": dtype}, "checkpoint": {"every": 0}, "monitor": {"tensorboard": False}}
    for flag in flags:
        key, value = flag.removeprefix("--").split("=")
        *path, name = key.split(".")
        section = sections
        for each in path:
            section = section.setdefault(each, {})
        numbers = [int(each) for each in value.split(",") if each.isdigit()]
        section[name] = value if not numbers else numbers if "," in value else numbers[0]
    ranks = sections["mesh"].get("dp", 1)
    sections["batch"]["micro"] = min(sections["batch"]["micro"], sections["batch"]["global"] // ranks)
    model["tie_embeddings"] = model.get("family") == "gpt2"
    path = folder / "run.json"
    path.write_text(json.dumps(sections))
    if not (folder / "tokens.bin").exists():
        rng = random.Random(1)
        (folder / "tokens.bin").write_bytes(struct.pack("<200000H", *(rng.randrange(min(8192, model["vocab"])) for _ in range(200000))))
    return path


def children(pid):
    try:
        found = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return found + [each for child in found for each in children(child)]


def resident(pid):
    """Bytes of all processes together; what they share counts once for each that has it, by its part."""
    total = 0
    for each in [pid, *children(pid)]:
        try:
            lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
        except OSError:
            pass
    return total


def measured(command, cwd):
    """Runs it: its output and the most bytes it had."""
    process = subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    most = 0
    while process.poll() is None:
        most = max(most, resident(process.pid))
        time.sleep(0.25)
    out, errors = process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{errors[-3000:]}")
    return out, most


def of_tessera(options, folder, ranks, path):
    _, most = measured([options.program, "train", path, "--nproc", str(ranks)], folder)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    subprocess.run(["rm", "-r", folder / "run"], check=True)
    return [line["step_s"] for line in lines][2:], most, lines[-1]["loss"]


def of_torch(kind, folder, ranks, path):
    script = [HERE / "torch_step.py", kind, path]
    command = ([sys.executable, *script] if ranks == 1 else
               [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port",
                str(random.randrange(20000, 30000)), *script])
    out, most = measured(command, folder)
    said = json.loads(out.splitlines()[-1])
    return said["step_s"], most, said.get("loss")


def case_of(options, name, dtype):
    ranks, flags, kinds = CASES[name]
    times, most, failed = {}, {}, set()
    kinds = [kind for kind in kinds if kind in (options.peers or kinds)]
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        path = configuration(folder, flags, options.steps, dtype)
        for _ in range(options.rounds):
            for kind in ["tessera", *(each for each in kinds if each not in failed)]:
                try:
                    steps, peak, _ = (of_tessera(options, folder, ranks, path) if kind == "tessera"
                                      else of_torch(kind, folder, ranks, path))
                except RuntimeError as error:
                    if kind == "tessera":
                        raise
                    failed.add(kind)
                    print(f"{name:12} {dtype}  {kind} failed: {str(error).strip().splitlines()[-1]}", flush=True)
                    continue
                times.setdefault(kind, []).append(statistics.median(steps))
                most[kind] = max(most.get(kind, 0), peak)
    kinds = [kind for kind in kinds if kind not in failed]
    row = {"case": name, "dtype": dtype, "seconds": {kind: statistics.median(each) for kind, each in times.items()},
           "rounds": times, "bytes": most}
    ours = row["seconds"]["tessera"]
    row["over"] = {kind: statistics.median(b / a for a, b in zip(times["tessera"], times[kind], strict=True))
                   for kind in kinds}
    print(f"{name:12} {dtype}  tessera {ours:.3f} s, {most['tessera'] / 2**20:.0f} MiB" + "".join(
        f"; {kind} {row['seconds'][kind]:.3f} s ({row['over'][kind]:.2f}x), {most[kind] / 2**20:.0f} MiB"
        for kind in kinds), flush=True)
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=lambda text: Path(text).resolve())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--peers", nargs="+", help="of those of a case, these alone")
    parser.add_argument("--dtype", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    print(model.split(": ")[1] + ",", *(flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
                                        if flag in flags.split()), f"load {os.getloadavg()[0]:.1f}", flush=True)
    rows = [case_of(options, name, dtype) for name in options.case or BY_DEFAULT for dtype in options.dtype]
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
