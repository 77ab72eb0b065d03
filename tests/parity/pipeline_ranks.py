"""The ranks of test_pipelining.py in PyTorch: tests/parity/pipeline_driver.cpp's model, data and loop.

Usage, under torchrun: pipeline_ranks.py. Rank 0 prints, of each schedule, its name, the loss of each step and a sum over
all weights.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

WIDTH, BLOCKS, ROWS, MICROBATCHES, STEPS = 16, 8, 24, 6, 5
# Those that hold one stage a rank; of the others, whether stages lie in a V.
ONE = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}
SEVERAL = {"interleaved": (pipelining.ScheduleInterleaved1F1B, False), "bfs": (pipelining.ScheduleLoopedBFS, False),
           "interleaved_zb": (pipelining.ScheduleInterleavedZeroBubble, False),
           "zb_v": (pipelining.ScheduleZBVZeroBubble, True), "dualpipe_v": (pipelining.ScheduleDualPipeV, True)}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.in_ = nn.Linear(WIDTH, 4 * WIDTH)
        self.out = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.out(nn.functional.gelu(self.in_(self.norm(x))))


def make_net():
    net = nn.Sequential(*[Block() for _ in range(BLOCKS)]).double()
    with torch.no_grad():
        named = {name.replace("in_", "in"): parameter for name, parameter in net.named_parameters()}
        for number, (name, parameter) in enumerate(sorted(named.items())):
            values = (torch.arange(parameter.numel(), dtype=torch.float64) * 0.37 + 1.3 * number).sin() * 0.05
            parameter.copy_((values + ("norm.weight" in name)).view_as(parameter))
    return net


def rows_of(start):
    return (torch.arange(ROWS * WIDTH, dtype=torch.float64) * 0.11 + start).sin().view(ROWS, WIDTH)


def train(name):
    rank, world = dist.get_rank(), dist.get_world_size()
    net = make_net()
    chunks = 1 if name in ONE else 2
    indices = [rank] if chunks == 1 else [rank, 2 * world - 1 - rank if SEVERAL[name][1] else rank + world]
    length = BLOCKS // (world * chunks)
    parts = [net[i * length:(i + 1) * length] for i in indices]
    stages = [PipelineStage(part, i, world * chunks, torch.device("cpu"))
              for part, i in zip(parts, indices, strict=True)]
    options = {"n_microbatches": MICROBATCHES, "loss_fn": nn.functional.mse_loss}
    schedule = ONE[name](stages[0], **options) if name in ONE else SEVERAL[name][0](stages, **options)
    parameters = [parameter for part in parts for parameter in part.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    last = world * chunks - 1
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = []
        takes = {"target": rows_of(step + 0.5), "losses": losses} if last in indices else {}
        schedule.step(*([rows_of(step)] if rank == 0 else []), **takes)
        optimizer.step()
        loss = torch.tensor([sum(float(loss.detach()) for loss in losses) / MICROBATCHES], dtype=torch.float64)
        dist.all_reduce(loss)
        if rank == 0:
            print(name, repr(loss.item()))
    total = sum(parameter.detach().square().sum() for parameter in parameters).reshape(1)
    dist.all_reduce(total)
    if rank == 0:
        print(name, repr(total.item()))


def main():
    dist.init_process_group("gloo")
    for name in [*ONE, *SEVERAL]:
        train(name)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
