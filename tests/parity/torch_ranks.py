"""The ranks of test_torch_distributed.py.

Usage: torch_ranks.py RANKS BACKEND OUT SCENARIO..., or the same as the program
of torchrun, with RANKS 0. Each scenario is a function here; what it returns on
rank 0 goes into OUT, as JSON by name.
"""

import json
import multiprocessing
import os
import shutil
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

import tessera_torch  # noqa: F401  registers the backend

STEPS, VOCAB, WIDTH, LENGTH, BATCH = 20, 61, 32, 16, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))

    def forward(self, x):
        n = self.norms[0](x)
        x = x + self.attention(n, n, n, need_weights=False)[0]
        return x + self.mlp(self.norms[1](x))


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(VOCAB, WIDTH), Block(), Block(),
                         nn.Linear(WIDTH, VOCAB))


def train(net):
    """Twenty steps; the losses, each the mean over the ranks."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    random = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(STEPS):
        tokens = torch.randint(VOCAB, (BATCH, LENGTH), generator=random)
        loss = nn.functional.cross_entropy(net(tokens).flatten(0, 1),
                                           (7 * tokens + 3).flatten() % VOCAB)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def ddp():
    return train(nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=0.01))


def fsdp2():
    net = model()
    for block in net[1:3]:
        fully_shard(block)
    return train(fully_shard(net))


def functional_collectives():
    n, rank = dist.get_world_size(), dist.get_rank()
    own = torch.arange(6.0) + rank
    total = n * torch.arange(6.0) + sum(range(n))
    every = torch.cat([torch.arange(6.0) + r for r in range(n)])
    group = dist.group.WORLD
    assert functional.all_reduce(own, "sum", group).equal(total)
    assert functional.all_gather_tensor(own, 0, group).equal(every)
    assert functional.reduce_scatter_tensor(every, "avg", 0, group).equal(own)
    assert functional.broadcast(own, 0, group).equal(torch.arange(6.0))
    assert functional.all_to_all_single(every, [6] * n, [6] * n, group).equal(own.repeat(n))
    both = functional.all_gather_into_tensor_coalesced([own, own.int()], group)
    assert both[0].equal(every) and both[1].equal(every.int())
    both = functional.all_reduce_coalesced([own, own.int()], "sum", group)
    assert both[0].equal(total) and both[1].equal(total.int())
    wide = own.clone().requires_grad_()
    assert functional.all_reduce(wide, "sum", group).equal(total)
    dist.all_gather([torch.empty(6) for _ in range(n)], wide)


def groups_and_objects():
    n, rank = dist.get_world_size(), dist.get_rank()
    pairs = [dist.new_group([0, r]) for r in range(1, n)]
    for other, pair in enumerate(pairs, 1):
        if rank in (0, other):
            one = torch.ones(3)
            dist.all_reduce(one, group=pair)
            assert one.equal(torch.full((3,), 2.0))
    objects = [None] * n
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    assert [o["rank"] for o in objects] == list(range(n))
    objects = [("root", rank)]
    dist.broadcast_object_list(objects, src=1)
    assert objects == [("root", 1)]
    alone = dist.new_group([rank], use_local_synchronization=True)
    one = torch.ones(3)
    dist.all_reduce(one, group=alone)
    assert one.equal(torch.ones(3))


def crossing_messages():
    """4 MiB to every peer at once, and from every peer."""
    n, rank = dist.get_world_size(), dist.get_rank()
    peers = [r for r in range(n) if r != rank]
    sent = torch.full((1 << 20,), float(rank))
    got = {r: torch.empty(1 << 20) for r in peers}
    operations = [dist.P2POp(dist.isend, sent, r) for r in peers]
    operations += [dist.P2POp(dist.irecv, got[r], r) for r in peers]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert all(got[r].eq(r).all() for r in peers)


def lists():
    """Lists of strided, empty and uneven tensors."""
    n, rank = dist.get_world_size(), dist.get_rank()
    sizes = [0 if r == 1 else 2 * r + 1 for r in range(n)]
    every = [torch.full((2, size), float(r)) for r, size in enumerate(sizes)]
    out = [torch.empty(size, 2).t() for size in sizes]
    dist.all_gather(out, every[rank])
    assert all(a.equal(b) for a, b in zip(out, every))
    out = torch.empty(sizes[rank], 2).t()
    dist.reduce_scatter(out, every, op=dist.ReduceOp.SUM)
    assert out.equal(every[rank] * n)
    out = [torch.empty(size, 2).t() for size in sizes]
    dist.gather(every[rank], out if rank == 0 else None, dst=0)
    assert rank != 0 or all(a.equal(b) for a, b in zip(out, every))
    out = torch.empty(sizes[rank], 2).t()
    dist.scatter(out, every if rank == n - 1 else None, src=n - 1)
    assert out.equal(every[rank])
    out = [torch.empty(sizes[rank], 2).t() for _ in range(n)]
    dist.all_to_all(out, every)
    assert all(t.equal(every[rank]) for t in out)
    for empty in (torch.empty(0), torch.empty(3, 0)):
        dist.all_reduce(empty)
        dist.broadcast(empty, 0)
        dist.all_gather([empty.clone() for _ in range(n)], empty)
    dist.all_to_all_single(torch.empty(0), torch.empty(0))
    dist.all_gather_into_tensor(torch.empty(0), torch.empty(0))
    dist.reduce_scatter_tensor(torch.empty(0), torch.empty(0))
    kept = torch.full((5,), float(rank))
    dist.reduce(kept, dst=1)
    assert kept.eq(sum(range(n)) if rank == 1 else rank).all()


def futures():
    """Callbacks may wait for other operations: communication hooks do."""
    n = dist.get_world_size()

    def then_another(future):
        again = dist.all_reduce(future.value()[0], async_op=True)
        return again.get_future().wait()[0] / n

    work = [dist.all_reduce(torch.full((3,), float(k)), async_op=True) for k in range(8)]
    chained = [w.get_future().then(then_another) for w in work]
    for k, future in enumerate(chained):
        assert future.wait().eq(k * n).all()


def refusals():
    """Every rank is told what is wrong, and the group stays usable."""
    n = dist.get_world_size()
    cases = [
        ("all_reduce: tensor of", lambda: dist.all_reduce(torch.ones(4, 4).t())),
        ("Give tensors of one dtype", lambda: dist.all_gather_into_tensor(
            torch.empty(n), torch.empty(1, dtype=torch.int))),
        ("ranks) times", lambda: dist.reduce_scatter_tensor(torch.empty(2), torch.empty(3))),
        ("dense tensor on the CPU", lambda: dist.group.WORLD._get_backend(
            torch.device("cpu")).allreduce([torch.empty(2, device="meta")])),
    ]
    for words, call in cases:
        try:
            call()
        except (RuntimeError, ValueError) as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"no refusal that says '{words}'")
    dist.barrier()


def checkpoint():
    net = fully_shard(model())
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(parameter + 1)
    dcp.save(net.state_dict(), checkpoint_id=folder[0])
    other = fully_shard(model())
    state = other.state_dict()
    dcp.load(state, checkpoint_id=folder[0])
    other.load_state_dict(state)
    for a, b in zip(net.parameters(), other.parameters()):
        assert a.full_tensor().equal(b.full_tensor())
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


def mismatch():
    """TORCH_DISTRIBUTED_DEBUG=DETAIL names the ranks that differ."""
    try:
        dist.all_reduce(torch.ones(2 + dist.get_rank()))
    except RuntimeError as error:
        assert "Detected mismatch between collectives on ranks" in str(error), error
        assert "Rank 0 is running collective" in str(error), error
    else:
        raise AssertionError("other shapes were not seen")


def run(backend, out, *scenarios):
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    assert dist.get_backend() == backend
    results = {name: globals()[name]() for name in scenarios}
    if dist.get_rank() == 0:
        with open(out, "w") as file:
            json.dump(results, file)
    dist.destroy_process_group()


def fork_rank(environment, arguments):
    os.environ.update(environment)
    run(*arguments)


def main(ranks, *arguments):
    """Forks the ranks, which so share one import of torch."""
    if ranks == "0":
        return run(*arguments)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("fork")
    processes = []
    for rank in range(int(ranks)):
        environment = {"RANK": str(rank), "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1",
                       "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        processes.append(context.Process(target=fork_rank, args=(environment, arguments)))
        processes[-1].start()
    for process in processes:
        process.join()
    return max(abs(process.exitcode) for process in processes)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
