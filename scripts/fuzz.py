#!/usr/bin/env python3
"""Random configurations beside one rank: fuzz.py --program TESSERA [--count N] [--seed FIRST] [--experts]

A seed makes a legal configuration: a small model of odd sizes, of experts two in
nine (all with --experts), routed in any way there is, a mesh of up to 16 ranks,
of uneven speed one in two, stages of ZeRO, a schedule, a batch. `tessera verify`
must find it equal to one rank; a configuration that it refuses is a fault as
well, and one that takes ten minutes. Prints what fails, with its seed and the
command that shows it again.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

MOST_RANKS = 16


def mesh_of(rng):
    """Degrees whose product is at most MOST_RANKS, one axis after the other."""
    left, degrees = MOST_RANKS, {}
    axes = ["tp", "cp", "pp", "dp_shard", "dp_replicate"]
    rng.shuffle(axes)
    for axis in axes:
        choices = [n for n in (1, 1, 2, 3, 4) if n <= left and (axis not in ("tp", "cp") or n != 3)]
        degrees[axis] = rng.choice(choices)
        left //= degrees[axis]
    return degrees


def add_experts(rng, config):
    """Shares out experts over a divisor of a stage's ranks, whole or cut over tp."""
    mesh = config["mesh"]
    mesh["etp"] = rng.choice([1, mesh["tp"]])
    ranks = mesh["dp_replicate"] * mesh["dp_shard"] * mesh["cp"] * mesh["tp"] // mesh["etp"]
    mesh["ep"] = rng.choice([n for n in range(1, ranks + 1) if ranks % n == 0])
    experts = mesh["ep"] * rng.randint(1, max(1, 6 // mesh["ep"]))
    fewer = min(2, config["model"]["layers"])
    top_k = rng.choice([experts, rng.randint(1, min(experts, 4))])
    config["model"]["moe"] = {"experts": experts, "top_k": top_k,
                              "every": rng.choice([1, 1, fewer]), "aux_loss": rng.choice([0, 0.01, 0.3])}
    config["zero"]["expert_stage"] = rng.randrange(-1, 4)
    config["expert"] = {"dispatch_chunks": rng.choice([0, 0, 1, 2, 3])}


def add_expert_shard(rng, config):
    """Shards experts inside each replica, where they may be. REQUIRES: mesh and stages as they stay."""
    mesh, zero = config["mesh"], config["zero"]
    of_experts = zero["stage"] if zero.get("expert_stage", -1) < 0 else zero["expert_stage"]
    ranks = mesh.get("dp_shard", 1) * mesh["cp"] * mesh["tp"] // mesh.get("etp", 1)
    if "moe" not in config["model"] or of_experts == 0 or mesh["dp_replicate"] == 1 or ranks % mesh["ep"] != 0:
        return
    if rng.random() < 0.7:
        zero["expert_shard"] = "dp_shard"
        if "order" in mesh:
            mesh["order"].sort(key=lambda axis: axis != "dp_replicate")


def add_routing(rng, config):
    """What a gate may do beside. REQUIRES: experts, and the batch as it stays."""
    moe, batch, mesh = config["model"]["moe"], config["batch"], config["mesh"]
    experts, top_k = moe["experts"], moe["top_k"]
    moe |= {"score": rng.choice(["softmax", "sigmoid"]), "normalize": rng.random() < 0.7, "scale": rng.choice([1.0, 2.5]),
            "z_loss": rng.choice([0, 0, 0.05]), "noise": rng.random() < 0.3, "shared_experts": rng.choice([0, 0, 1, 2])}
    if mesh["cp"] == 1 and not config["tensor"]["sequence_parallel"] and rng.random() < 0.1:
        config["data"]["seq_len"] = 1
    # So much that an expert takes a token of a sample.
    least = experts / (top_k * config["data"]["seq_len"])
    if rng.random() < 0.3:
        moe |= {"choice": "experts", "capacity_factor": min(experts / top_k, max(least, rng.choice([0.5, 1.0, 2.0])))}
    else:
        moe["capacity_factor"] = rng.choice([0, 0, max(least, 0.5), max(least, 1.25)])
        moe["bias_balance"] = rng.random() < 0.3
        moe["groups"] = rng.choice([n for n in range(1, experts + 1) if experts % n == 0])
        moe["top_groups"] = rng.randint(-(-top_k * moe["groups"] // experts), moe["groups"])
    # These are of micro-batches: one rank has those of the mesh, or all of the batch at once.
    data_ranks = mesh["dp_shard"] * mesh["dp_replicate"]
    balance = rng.choice(["sample", "sample", "layer", "batch"])
    if balance == "batch" and mesh["pp"] > 1:
        balance = "layer"
    if data_ranks == 1 or batch["micro"] * data_ranks == batch["global"]:
        moe["balance"] = balance


def add_depths(rng, config):
    """Latent attention and multi-token prediction, of one model with experts in three."""
    model = config["model"]
    depths = rng.choice([n for n in (1, 2) if n < config["data"]["seq_len"]] or [0])
    if rng.random() < 0.67 or model["moe"].get("choice") == "experts":
        return
    model.pop("window", None)  # which Mixtral may have
    model |= {"family": "deepseek_v3", "kv_heads": model["heads"], "head_dim": max(4, model["head_dim"]),
              "mtp": {"layers": depths, "weight": rng.choice([0.1, 1.0])}}
    model["latent"] = {"kv_rank": rng.randrange(1, 9), "q_rank": rng.choice([0, 5])}


def add_optimizer(rng, optimizer):
    """Muon, parameter groups and an average of the weights, each now and then."""
    if rng.random() < 0.25:
        optimizer["type"] = "muon"
        optimizer["muon"] = {"nesterov": rng.random() < 0.5, "adamw_lr": rng.choice([0, 0.003]),
                             "adjust_lr": rng.choice(["original", "match_rms_adamw"])}
    if rng.random() < 0.3:
        optimizer["groups"] = [{"match": rng.choice(["blocks.0.*", "*norm.weight", "*.attention.*"]), "lr": 0.03},
                               {"match": ["*"], "weight_decay": rng.choice([0, 0.3])}][:rng.choice([1, 2])]
    optimizer["ema"] = rng.choice([0, 0, 0.9])


def schedule_of(rng, pp):
    """A schedule that pp stages can take, and its chunks."""
    if pp > 1 and rng.random() < 0.5:
        choices = [("interleaved", 2), ("interleaved_zb", 2), ("interleaved_zb", 3), ("bfs", 2), ("zb_v", 2),
                   ("dualpipe_v", 2)]
        return rng.choice(choices + [("dualpipe", 2)] * (2 if pp % 2 == 0 else 0))
    return rng.choice(["naive", "gpipe", "1f1b", "eager_1f1b", "zb_h1", "zb_h2", "pipedream_2bw"]), 1


def add_speeds(rng, config):
    """A cut by facts now and then, and ranks of which some are slow, or all of another speed."""
    config["pipeline"]["cut"] = rng.choice(["layers", "layers", "facts"])
    if rng.random() < 0.5:
        return
    ranks = 1
    for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"):
        ranks *= config["mesh"].get(axis, 1)
    slow = rng.choice([[1, 0.5], [1, 1, 1, 0.1], [n / 10 for n in range(1, 11)]])
    config["mesh"]["speeds"] = [rng.choice(slow) for _ in range(ranks)]


def add_window(rng, model, seq_len):
    """In all or some layers, now and then, of the families that have windows."""
    if model["family"] in ("gpt2", "olmo2") or rng.random() < 0.6:
        return
    model["window"] = rng.randrange(1, seq_len + 2)
    if model["family"] == "llama":
        model["family"] = "mistral"
    elif model["family"] not in ("mixtral", "phi3"):
        model["window_every"] = rng.choice([0, 2, 3])
    if model["family"] == "gemma3_text":
        model["rope_theta_local"] = rng.choice([0, 100.0])


def configuration(seed, experts=False):
    rng = random.Random(seed)
    mesh = mesh_of(rng)
    tp, cp, pp = mesh["tp"], mesh["cp"], mesh["pp"]
    family = rng.choice(["gpt2", "llama", "qwen2", "qwen3", "olmo2", "gemma3_text", "phi3", "mixtral", "mixtral"])
    family = "mixtral" if experts else family
    method = rng.choice(["ring", "ulysses", "allgather"])
    heads = tp * (cp if method == "ulysses" else 1) * rng.choice([1, 2])
    # One of tp and kv_heads divides the other, and so with cp for ulysses.
    kv_heads = heads if family == "gpt2" else rng.choice([n for n in (1, tp, heads) if heads % n == 0])
    head_dim = rng.choice([2, 4, 6])
    schedule, chunks = schedule_of(rng, pp)
    layers = pp * (1 if schedule == "dualpipe" else chunks) + rng.choice([0, 1, 2])
    micro = rng.choice([1, 2, 3])
    in_groups = schedule in ("interleaved", "interleaved_zb") and chunks > 1
    accumulation = pp * rng.choice([1, 2]) if in_groups else rng.choice([1, 2, 3, 4])
    accumulation += accumulation % 2 if schedule == "dualpipe" else 0
    accumulation = max(accumulation, pp) if schedule == "pipedream_2bw" else accumulation
    sequence_parallel = tp > 1 and rng.random() < 0.5
    # So short, now and then, that a rank of tp has no token for an expert.
    seq_len = 2 * cp * (tp if sequence_parallel else 1) * rng.choice([1, 2, 3])
    config = {
        "run": {"seed": seed, "steps": 10},
        "model": {"family": family, "layers": layers, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim,
                  "hidden": heads * head_dim if family == "gpt2" else rng.randrange(5, 24),
                  "ffn": rng.randrange(1, 40), "vocab": rng.randrange(2, 90), "max_seq": seq_len,
                  "tie_embeddings": rng.random() < 0.5},
        "data": {"seq_len": seq_len},
        "batch": {"micro": micro, "global": micro * accumulation * mesh["dp_shard"] * mesh["dp_replicate"]},
        "mesh": mesh,
        "zero": {"stage": rng.randrange(4) if mesh["dp_shard"] > 1 else 0,
                 "reshard_after_forward": rng.random() < 0.7, "bucket_mb": rng.choice([0.0001, 25])},
        "tensor": {"sequence_parallel": sequence_parallel},
        "context": {"method": method},
        "pipeline": {"schedule": schedule, "chunks": chunks, "order": rng.choice(["reverse", "forward"])},
        "recompute": {"mode": rng.choice(["none", "block"]), "every": rng.choice([1, 2])},
        "optimizer": {"type": rng.choice(["adamw", "sgd"]), "lr": 0.01, "momentum": 0.0,
                      "clip_norm": rng.choice([0, 0.1, 1.0])},
        "schedule": {"warmup": 0},
    }
    if config["optimizer"]["type"] == "sgd":
        config["optimizer"]["momentum"] = 0.9
    if family == "mixtral":
        add_experts(rng, config)
        add_routing(rng, config)
    if family == "gemma3_text":
        config["model"]["query_pre_attn_scalar"] = rng.choice([0, 5])
    if config["zero"]["stage"] == 0:
        config["mesh"]["dp_replicate"] *= config["mesh"].pop("dp_shard")
    if rng.random() < 0.5:
        order = ["pp", "dp_replicate", "dp_shard", "cp", "tp"]
        rng.shuffle(order)
        config["mesh"]["order"] = order
    config["data"]["intra_document_masking"] = rng.random() < 0.25
    config["optimizer"]["normalize_grad"] = rng.random() < 0.2
    add_optimizer(rng, config["optimizer"])
    if config["recompute"]["mode"] == "block":
        config["recompute"]["mode"] = rng.choice(["block", "selective", "stage", "minimal"])
        config["recompute"]["every"] = rng.choice([0, 1, 2])
    config["model"]["dropout"] = rng.choice([0.0, 0.0, 0.1, 0.5])
    config["precision"] = {"compute": rng.choice(["fp32", "fp16"]), "loss_scale": rng.choice([-1, 0, 1, 1024]),
                           "scale_growth_interval": rng.choice([1, 2, 2000])}
    config["zero"]["offload"] = rng.choice(["none", "none", "optimizer", "all"])
    # Batches that overlap are read by every rank.
    config["data"]["reader"] = "every" if schedule == "pipedream_2bw" else rng.choice(["every", "first"])
    add_speeds(rng, config)
    add_window(rng, config["model"], seq_len)
    # Drawn behind all else, which a seed has as before.
    if family == "mixtral":
        add_depths(rng, config)
    if schedule == "pipedream_2bw":  # whose batches overlap
        precision = config["precision"]
        precision["loss_scale"] = 1024 if precision["loss_scale"] <= 0 else precision["loss_scale"]
        config["zero"]["offload"] = config["zero"]["offload"].replace("all", "optimizer")
    add_expert_shard(rng, config)  # last, so that what a seed draws before stays as it was
    return config


def verify(program, path, *arguments):
    """What `tessera verify` says against the configuration; "" where the mesh equals one rank."""
    # One thread a rank: on so small a model a second one is waited for longer than it helps.
    try:
        done = subprocess.run([str(program), "verify", str(path), *arguments], capture_output=True, text=True,
                              timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"})
    except subprocess.TimeoutExpired as hang:
        said = [(part or b"").decode(errors="replace") for part in (hang.stdout, hang.stderr)]
        return f"did not end within {hang.timeout:.0f} s\n{''.join(said)}"
    return "" if done.returncode == 0 else f"ended with {done.returncode}\n{done.stdout}{done.stderr}"


def fault_of(program, seed, folder, experts=False):
    """What verify says against the configuration of this seed; "" if nothing."""
    path = Path(folder, f"fuzz-{seed}.json")
    path.write_text(json.dumps(configuration(seed, experts), indent=1))
    fault = verify(program, path)
    return fault and f"seed {seed}\n{path.read_text()}\n{fault}"


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="the first; the others follow it")
    parser.add_argument("--experts", action="store_true", help="of models with experts alone")
    options = parser.parse_args(arguments)
    faults = 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seed, options.seed + options.count):
            fault = fault_of(options.program, seed, folder, options.experts)
            if fault:
                faults += 1
                print(fault)
                print(f"again: ./dev fuzz --seed {seed} --count 1{' --experts' * options.experts}", flush=True)
    last = options.seed + options.count - 1
    print(f"fuzz: seeds {options.seed} to {last}: {faults} of {options.count} differ from one rank")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
