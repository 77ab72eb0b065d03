"""The ranks of test_own_module.py in PyTorch: tests/parity/module_driver.cpp's model, data and loop.

Usage, under torchrun: module_ranks.py ddp|fsdp2 DTYPE. Rank 0 prints loss and norm of each step.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
from torch_step import Gpt2, loss_of  # noqa: E402

SHAPE = {"layers": 3, "hidden": 32, "heads": 4, "vocab": 61, "max_seq": 16}
SAMPLES, STEPS = 4, 10


def linear_of_cpp(self, x):
    """As torch::nn has it, of three dims: in bf16 the sum is rounded twice."""
    return x.matmul(self.weight.t()) + self.bias


def gpt(dtype):
    nn.Linear.forward = linear_of_cpp
    model = Gpt2(SHAPE).to(dtype)
    with torch.no_grad():
        for number, (name, parameter) in enumerate(sorted(model.named_parameters())):
            values = (torch.arange(parameter.numel(), dtype=torch.float64) * 0.37 + 1.3 * number).sin() * 0.05
            parameter.copy_((values + ("norm.weight" in name)).view_as(parameter))
    return model


def ids_of(step, rank):
    sample = (torch.arange(SAMPLES) + rank * SAMPLES).unsqueeze(1)
    place = torch.arange(SHAPE["max_seq"] + 1).unsqueeze(0)
    return (7 * sample + 3 * place + 11 * step + sample * place) % SHAPE["vocab"]


def main():
    kind, dtype = sys.argv[1:]
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = gpt(torch.float64 if dtype == "fp64" else torch.float32)
    forward = model
    if kind == "ddp":
        forward = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
        policy = policy if dtype == "bf16" else {}
        mesh = dist.init_device_mesh("cpu", (world,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, **policy)
        fully_shard(model, mesh=mesh, **policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    for step in range(STEPS):
        ids = ids_of(step, rank)
        logits = forward(ids[:, :-1])
        loss = (nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
                if dtype == "fp64" else loss_of(logits, ids[:, 1:]))
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        optimizer.step()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"{mean.item() / world:.17g} {norm.item():.17g}")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads abort now and then at a process's end: pytorch issue 90549


if __name__ == "__main__":
    main()
