"""Pipelines around modules of one's own beside torch.distributed.pipelining: every schedule that both have.

The ranks are processes; five steps of SGD in fp64, loss by loss, and what the weights are at the end.
"""

from pathlib import Path

import pytest
from runs import printed, printed_by_torchrun

HERE = Path(__file__).resolve().parent
CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "bfs": 2, "interleaved_zb": 2, "zb_v": 2, "dualpipe_v": 2}


@pytest.fixture(scope="module")
def of_torch():
    found = {}
    for name, number in map(str.split, printed_by_torchrun(2, HERE / "pipeline_ranks.py")):
        found.setdefault(name, []).append(float(number))
    return found


@pytest.mark.parametrize("schedule", CHUNKS)
def test_five_steps_are_those_of_pytorch(program, of_torch, schedule):
    driver = program.parents[1] / "tests" / "pipeline_driver"
    lines = printed([program, "launch", "-n", 2, "--", driver, schedule, CHUNKS[schedule]])
    assert len(of_torch[schedule]) == 6
    assert list(map(float, lines)) == pytest.approx(of_torch[schedule], rel=1e-12)
