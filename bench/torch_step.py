"""A step of the same model by PyTorch alone: bench/step_bench.py's peer.

Usage: torch_step.py floor|eager|compile|ddp|fsdp2|tp|pp RUN.json; several ranks under torchrun. With run.device cuda
eager and compile run on a GPU.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.head = width // heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x, cos, sin):
        def heads_of(y):
            return y.view(y.size(0), y.size(1), -1, self.head).transpose(1, 2)

        def turned(y):
            a, b = y.chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        q, k, v = heads_of(self.q(x)), heads_of(self.k(x)), heads_of(self.v(x))
        y = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(model["hidden"], 1e-5), nn.RMSNorm(model["hidden"], 1e-5)
        self.attention = Attention(model["hidden"], model["heads"])
        self.mlp = Mlp(model["hidden"], model["ffn"])

    def forward(self, x, cos, sin):
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.tokens = nn.Embedding(model["vocab"], model["hidden"])
        self.blocks = nn.ModuleList(Block(model) for _ in range(model["layers"]))
        self.norm = nn.RMSNorm(model["hidden"], 1e-5)
        self.head = nn.Linear(model["hidden"], model["vocab"], bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        half = model["hidden"] // model["heads"] // 2
        angles = torch.outer(torch.arange(model["max_seq"]), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, ids):
        x = self.tokens(ids)
        cos, sin = self.cos[:ids.size(1)].to(x.dtype), self.sin[:ids.size(1)].to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


class Gpt2Block(nn.Module):
    def __init__(self, model):
        super().__init__()
        width = model["hidden"]
        self.heads = model["heads"]
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = (y.view(y.size(0), y.size(1), self.heads, -1).transpose(1, 2)
                   for y in self.qkv(self.attention_norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class Gpt2(nn.Module):
    """As nanoGPT has it: one product for q, k and v, flash attention, the head tied to the embedding."""

    def __init__(self, model):
        super().__init__()
        self.tokens, self.positions = (nn.Embedding(rows, model["hidden"]) for rows in (model["vocab"], model["max_seq"]))
        self.blocks = nn.ModuleList(Gpt2Block(model) for _ in range(model["layers"]))
        self.norm = nn.LayerNorm(model["hidden"])
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.size(1), device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def mixtral(model):
    """transformers' own, with the experts that it takes by default."""
    from transformers import MixtralConfig, MixtralForCausalLM

    class Logits(MixtralForCausalLM):
        def forward(self, ids):
            return super().forward(input_ids=ids, use_cache=False).logits

    return Logits(MixtralConfig(
        vocab_size=model["vocab"], hidden_size=model["hidden"], intermediate_size=model["ffn"],
        num_hidden_layers=model["layers"], num_attention_heads=model["heads"], num_key_value_heads=model["kv_heads"],
        num_local_experts=model["moe"]["experts"], num_experts_per_tok=model["moe"]["top_k"],
        max_position_embeddings=model["max_seq"], output_router_logits=True))


class Stage(nn.Module):
    """A part of a Llama, for a pipeline of two: `first` layers are the first rank's."""

    def __init__(self, model, rank, first):
        super().__init__()
        whole = Llama(model)
        self.tokens = whole.tokens if rank == 0 else None
        self.blocks = whole.blocks[:first] if rank == 0 else whole.blocks[first:]
        self.norm, self.head = (None, None) if rank == 0 else (whole.norm, whole.head)
        self.register_buffer("cos", whole.cos)
        self.register_buffer("sin", whole.sin)

    def forward(self, x):
        x = self.tokens(x) if self.tokens is not None else x
        cos, sin = self.cos[:x.size(1)].to(x.dtype), self.sin[:x.size(1)].to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return x if self.head is None else self.head(self.norm(x))


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def pipeline_times(config, rank, ids, steps):
    """1F1B of torch.distributed.pipelining."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    first = config["pipeline"].get("split", [config["model"]["layers"] // 2])[0]
    stage = Stage(config["model"], rank, first)
    count = config["batch"]["global"] // config["batch"]["micro"]
    schedule = Schedule1F1B(PipelineStage(stage, rank, 2, torch.device("cpu")), count, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        if rank == 0:
            schedule.step(ids[:, :-1])
        else:
            schedule.step(target=ids[:, 1:])
        nn.utils.clip_grad_norm_(stage.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dist.barrier()
        times.append(time.perf_counter() - start)
    return times


def products_of(model, rows, dtype):
    """Of a step: (rows, in, out) of every layer, forward and both parts of backward, each by its fastest call."""
    width, ffn = model["hidden"], model["ffn"]
    shapes = [((width, width), 4 * model["layers"]), ((width, ffn), 2 * model["layers"]),
              ((ffn, width), model["layers"]), ((width, model["vocab"]), 1)]
    calls = []
    for (inner, outer), count in shapes:
        x, w = torch.randn(rows, inner).to(dtype), torch.randn(outer, inner).to(dtype)
        dy = torch.randn(rows, outer).to(dtype)
        for left, right in ((x, w.t()), (dy, w), (dy.t(), x)):
            y = torch.empty(left.size(0), right.size(1), dtype=dtype)
            weight = right.t().contiguous()
            ways = [lambda a=left, b=right, y=y: torch.mm(a, b, out=y),
                    lambda a=left.contiguous(), w=weight: torch.ops.mkldnn._linear_pointwise(a, w, None, "none", [], "")]
            calls.append((min(ways, key=seconds_of), count))
    return calls


def seconds_of(call):
    call()
    times = []
    for _ in range(4):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def tensor_parallel(model, mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    for block in model.blocks:
        parallelize_module(block, mesh, {
            **{f"attention.{name}": ColwiseParallel() for name in "qkv"}, "attention.o": RowwiseParallel(),
            "mlp.gate": ColwiseParallel(), "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()})
    return model


def now(device):
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def alike(parameters):
    """Those that are DTensors and those that are not: clipping takes no mixture, and two norms cost what one does."""
    groups = {}
    for each in parameters:
        groups.setdefault(type(each.data), []).append(each)
    return groups.values()


def main():
    kind, path = sys.argv[1:]
    config = json.load(open(path))
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    torch.set_num_threads(len(os.sched_getaffinity(0)) // world)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[config["precision"]["compute"]]
    samples = config["batch"]["global"] // (1 if kind == "tp" else world)
    length, steps = config["data"]["seq_len"], config["run"]["steps"]
    if kind == "floor":
        calls = products_of(config["model"], samples * length, dtype)
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            for call, count in calls:
                for _ in range(count):
                    call()
            times.append(time.perf_counter() - start)
        return print(json.dumps({"step_s": times[2:]}))
    if world > 1:
        dist.init_process_group("gloo")
    device = config["run"]["device"]
    torch.manual_seed(1)
    if kind == "pp":
        ids = torch.randint(config["model"]["vocab"], (config["batch"]["global"], length + 1))
        times = pipeline_times(config, rank, ids, steps)
        if rank == 0:
            print(json.dumps({"step_s": times[2:]}))
        return dist.destroy_process_group()
    make = {"gpt2": Gpt2, "mixtral": mixtral}.get(config["model"].get("family"), Llama)
    model = make(config["model"]).to(device)
    forward = model
    if kind == "compile":
        forward = torch.compile(model)
    elif kind == "ddp":
        forward = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif kind == "fsdp2":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        policy = {} if dtype == torch.float32 else {
            "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)}
        mesh = dist.init_device_mesh("cpu", (world,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, **policy)
        fully_shard(model, mesh=mesh, **policy)
    elif kind == "tp":
        forward = tensor_parallel(model, dist.init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1,
                                  fused=kind != "tp")  # of DTensors and others: not together
    ids = torch.randint(config["model"]["vocab"], (samples, length + 1)).to(device)
    parts = ids.split(min(samples, config["batch"]["micro"]))
    casts = dtype != torch.float32 and kind != "fsdp2"
    times = []
    for _ in range(steps):
        start = now(device)
        for part in parts:
            with torch.autocast(device, dtype, enabled=casts):
                logits = forward(part[:, :-1])
                loss = loss_of(logits, part[:, 1:])
            del logits
            (loss / len(parts)).backward()
        for group in alike(model.parameters()):
            nn.utils.clip_grad_norm_(group, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(now(device) - start)
    if rank == 0:
        print(json.dumps({"step_s": times[2:], "loss": loss.item()}))
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
