"""fully_shard, DistributedDataParallel and initialize around a module of one's own, beside PyTorch's FSDP2 and DDP.

The ranks are processes; ten steps of AdamW, clipped, loss by loss and norm by norm.
"""

from pathlib import Path

import pytest
from runs import printed, printed_by_torchrun

HERE = Path(__file__).resolve().parent
# Sums are added up in another order; in bf16 that turns a rounding now and then, from the fourth step on.
BOUNDS = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 1e-2}
OF_FIRST_STEPS = {"fp64": 1e-12, "fp32": 1e-6, "bf16": 1e-6}


def numbers(lines):
    rows = [list(map(float, line.split())) for line in lines]
    assert len(rows) == 10
    return rows


@pytest.fixture(scope="module")
def of_torch():
    known = {}

    def run(kind, dtype, ranks):
        if (kind, dtype, ranks) not in known:
            known[kind, dtype, ranks] = numbers(printed_by_torchrun(ranks, HERE / "module_ranks.py", kind, dtype))
        return known[kind, dtype, ranks]

    return run


@pytest.mark.parametrize(("kind", "peer", "dtype"), [
    ("ddp", "ddp", "fp32"), ("0", "ddp", "fp32"), ("1", "fsdp2", "bf16"), ("2", "fsdp2", "fp32"), ("3", "fsdp2", "fp64"),
    ("3", "fsdp2", "fp32"), ("3", "fsdp2", "bf16"), ("engine0", "ddp", "fp32"), ("engine2", "fsdp2", "fp32"),
    ("engine2", "fsdp2", "bf16"), ("engine3", "fsdp2", "fp32"), ("engine3", "fsdp2", "bf16")])
def test_ten_steps_are_those_of_pytorch(program, of_torch, kind, peer, dtype, monkeypatch):
    # What goes through fp32, where bf16 is no faster, is rounded later than PyTorch rounds it.
    monkeypatch.setenv("TESSERA_WITHOUT_KERNELS", "widened_product")
    driver = program.parents[1] / "tests" / "module_driver"
    found = numbers(printed([program, "launch", "-n", 2, "--", driver, kind, dtype]))
    wanted = of_torch(peer, dtype, 2)
    for step, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert ours == pytest.approx(theirs, rel=(OF_FIRST_STEPS if step < 3 else BOUNDS)[dtype])


@pytest.mark.parametrize(("kind", "ranks"), [("3", 3), ("hybrid", 4)])
def test_other_ranks_too(program, of_torch, kind, ranks):
    driver = program.parents[1] / "tests" / "module_driver"
    found = numbers(printed([program, "launch", "-n", ranks, "--", driver, kind, "fp64"]))
    for ours, theirs in zip(found, of_torch("fsdp2", "fp64", ranks), strict=True):
        assert ours == pytest.approx(theirs, rel=BOUNDS["fp64"])
