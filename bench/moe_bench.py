#!/usr/bin/env python3
"""Layers of experts beside transformers' own; steps of models with them beside its own and beside a dense model of as
many active operations; and experts shared out.

Usage: bench/moe_bench.py BUILD [--rounds 3] [--steps 6] [--case NAME]... [--dtype fp32 bf16] [--json FILE]
BUILD is a build folder. In every round each of a case's sides runs in turn, with two threads or as two ranks of one; a
figure is the median over rounds of the ratio of what a round's median step took. A layer goes forward and backward, of
other tokens each time. Models have the same weights as transformers', which clips, and steps by fused AdamW. Of its
implementations of experts ("eager", "batched_mm", "grouped_mm"; of layers without the second, which copies weights for
every token) the fastest that runs counts.
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

VOCAB, LENGTH, BATCH = 8192, 256, 8
COMMON = dict(vocab_size=VOCAB, max_position_embeddings=LENGTH, hidden_size=512, num_hidden_layers=4,
              num_attention_heads=8, num_key_value_heads=8, tie_word_embeddings=False, bos_token_id=None,
              eos_token_id=None)
PEERS = {
    "mixtral": ("MixtralConfig", dict(intermediate_size=704, num_local_experts=8, num_experts_per_tok=2,
                                      router_aux_loss_coef=0.0)),
    "qwen3_moe": ("Qwen3MoeConfig", dict(intermediate_size=1408, moe_intermediate_size=176, num_experts=32,
                                         num_experts_per_tok=4, head_dim=64, norm_topk_prob=True,
                                         router_aux_loss_coef=0.0)),
    "deepseek_v3": ("DeepseekV3Config", dict(intermediate_size=1408, moe_intermediate_size=176, n_routed_experts=32,
                                             num_experts_per_tok=4, n_group=4, topk_group=2, n_shared_experts=1,
                                             first_k_dense_replace=1, q_lora_rank=192, kv_lora_rank=64,
                                             qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=32,
                                             num_nextn_predict_layers=0)),
}
MODEL = {"layers": 4, "hidden": 512, "heads": 8, "ffn": 1408, "vocab": VOCAB, "max_seq": LENGTH,
         "tie_embeddings": False}
EXPERTS = {**MODEL, "family": "mixtral", "ffn": 704, "moe": {"experts": 8, "top_k": 2, "aux_loss": 0.01}}
# Of layers: kind, tokens, width, width of an expert, experts, experts of a token.
LAYERS = {
    "mixtral layer": ("mixtral", 2048, 512, 704, 8, 2),
    "wide mixtral layer": ("mixtral", 2048, 1024, 3584, 8, 2),
    "deepseek layer": ("deepseek_v3", 2048, 512, 176, 32, 4),
    "wide deepseek layer": ("deepseek_v3", 2048, 1024, 256, 64, 6),
}
# Name: (the first over the second, as (ranks, model, mesh) each).
PAIRS = {
    "experts over dense": ((1, EXPERTS, {}), (1, MODEL, {})),
    "ep 2 over ep 1": ((2, EXPERTS, {"dp": 2, "ep": 2}), (2, EXPERTS, {"dp": 2})),
}


def configuration(folder, model, mesh, options, dtype):
    path = folder / "run.json"
    tokens = folder / "tokens.bin"
    if not tokens.exists():
        drawn = random.Random(1)
        tokens.write_bytes(struct.pack("<200000H", *(drawn.randrange(VOCAB) for _ in range(200000))))
    path.write_text(json.dumps({
        "run": {"name": "run", "dir": str(folder), "steps": options.steps, "device": "cpu"}, "model": model,
        "data": {"train": str(tokens), "format": "tokens_u16", "seq_len": LENGTH},
        "batch": {"global": BATCH, "micro": BATCH // mesh.get("dp", 1)}, "mesh": mesh,
        "precision": {"compute": dtype}, "checkpoint": {"every": 0}, "monitor": {"tensorboard": False}}))
    return path


def of_tessera(options, folder, ranks, model, mesh, dtype):
    path = configuration(folder, model, mesh, options, dtype)
    done = subprocess.run([options.program, "train", path, "--nproc", str(ranks)], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr[-3000:])
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    subprocess.run(["rm", "-r", folder / "run"], check=True)
    return statistics.median(line["step_s"] for line in lines[2:])


def torch_step(model_folder, implementation, steps, dtype):
    """Run in a process of its own: seconds of each step."""
    import torch
    import transformers

    torch.set_num_threads(2)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    model.set_experts_implementation(implementation)
    if dtype == "bf16":
        model = model.to(torch.bfloat16)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    times = []
    for _ in range(steps):
        ids = torch.randint(VOCAB, (BATCH, LENGTH + 1))
        start = time.perf_counter()
        logits = model(input_ids=ids[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        times.append(time.perf_counter() - start)
    print(json.dumps(times[2:]))


def torch_layer(kind, implementation, dtype, times, tokens, width, hidden, experts, top_k):
    """Run in a process of its own: prints the seconds of each time."""
    import torch
    import transformers
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    torch.set_num_threads(2)
    if kind == "mixtral":
        layer, config = MixtralSparseMoeBlock, transformers.MixtralConfig(
            hidden_size=width, intermediate_size=hidden, num_local_experts=experts, num_experts_per_tok=top_k)
    else:
        layer, config = DeepseekV3MoE, transformers.DeepseekV3Config(
            hidden_size=width, moe_intermediate_size=hidden, n_routed_experts=experts, num_experts_per_tok=top_k,
            n_group=4, topk_group=2, n_shared_experts=1)
    config._experts_implementation = implementation
    layer = layer(config)
    for each in layer.parameters():
        torch.nn.init.normal_(each, 0, 0.02)
    layer = layer.to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    dy = torch.randn(1, tokens, width).to(next(layer.parameters()).dtype)
    took = []
    for _ in range(times):
        x = torch.randn_like(dy).requires_grad_()
        start = time.perf_counter()
        layer(x).backward(dy)
        took.append(time.perf_counter() - start)
    print(json.dumps(took))


def beside_a_layer(options, name, dtype, _folder):
    kind, *sizes = LAYERS[name]
    words = [str(size) for size in sizes]

    def once(command):
        done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ,
                                                                                       "OMP_NUM_THREADS": "2"})
        return statistics.median(json.loads(done.stdout.splitlines()[-1])[2:])

    sides = {"tessera": []}
    for _ in range(options.rounds):
        sides["tessera"].append(once([options.build / "bench" / "moe_layer", kind, *words, dtype, str(options.steps)]))
        for implementation in ("eager", "grouped_mm"):
            sides.setdefault(implementation, []).append(once(
                [sys.executable, __file__, "--torch-layer", kind, implementation, dtype, str(options.steps), *words]))
    return compared(name, dtype, sides)


def of_transformers(folder, implementation, options, dtype):
    done = subprocess.run([sys.executable, __file__, "--torch-step", folder / "model", implementation,
                           str(options.steps), dtype], capture_output=True, text=True)
    return statistics.median(json.loads(done.stdout.splitlines()[-1])) if done.returncode == 0 else None


def beside_transformers(options, name, dtype, folder):
    import torch
    import transformers

    kind, sizes = PEERS[name]
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**{**COMMON, **sizes}))
    model.save_pretrained(folder / "model")
    source = {"from": str(folder / "model"), "load_weights": True, "moe": {"bias_balance": False}}
    sides = {"tessera": []}
    for _ in range(options.rounds):
        sides["tessera"].append(of_tessera(options, folder, 1, source, {}, dtype))
        for implementation in ("eager", "batched_mm", "grouped_mm"):
            sides.setdefault(implementation, []).append(of_transformers(folder, implementation, options, dtype))
    return compared(name, dtype, sides)


def compared(name, dtype, sides):
    theirs = {each: times for each, times in sides.items() if each != "tessera" and None not in times}
    best = min(theirs, key=lambda each: statistics.median(theirs[each]))
    ratio = statistics.median(b / a for a, b in zip(sides["tessera"], theirs[best]))
    print(f"{name:20} {dtype}  tessera {statistics.median(sides['tessera']):.3f} s; " + "; ".join(
        f"{each} {statistics.median(times):.3f} s" for each, times in theirs.items()) + f"; {ratio:.2f}x {best}",
        flush=True)
    return {"case": name, "dtype": dtype, "rounds": sides, "over": ratio, "beside": best}


def pair(options, name, dtype, folder):
    times = ([], [])
    for _ in range(options.rounds):
        for side, (ranks, model, mesh) in zip(times, PAIRS[name]):
            side.append(of_tessera(options, folder, ranks, model, mesh, dtype))
    ratio = statistics.median(a / b for a, b in zip(*times))
    print(f"{name:20} {dtype}  {statistics.median(times[0]):.3f} s over {statistics.median(times[1]):.3f} s: {ratio:.3f}",
          flush=True)
    return {"case": name, "dtype": dtype, "rounds": times, "over": ratio}


def main():
    if sys.argv[1:2] == ["--torch-step"]:
        return torch_step(sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
    if sys.argv[1:2] == ["--torch-layer"]:
        return torch_layer(*sys.argv[2:5], *(int(number) for number in sys.argv[5:]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=lambda text: Path(text).resolve())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--case", action="append", choices=[*LAYERS, *PEERS, *PAIRS])
    parser.add_argument("--dtype", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--json")
    options = parser.parse_args()
    options.program = options.build / "cli" / "tessera"
    rows = []
    for name in options.case or [*LAYERS, *PEERS, *PAIRS]:
        for dtype in options.dtype:
            with tempfile.TemporaryDirectory() as folder:
                act = beside_a_layer if name in LAYERS else beside_transformers if name in PEERS else pair
                rows.append(act(options, name, dtype, Path(folder)))
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
