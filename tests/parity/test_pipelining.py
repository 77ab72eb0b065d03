"""Pipelines around modules of one's own beside torch.distributed.pipelining: every schedule that both have.

The ranks are processes; five steps of SGD in fp64, loss by loss, and what the weights are at the end.
"""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "bfs": 2, "interleaved_zb": 2, "zb_v": 2, "dualpipe_v": 2}


def printed(command):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def of_torch():
    lines = printed([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port",
                     random.randrange(20000, 30000), HERE / "pipeline_ranks.py"])
    found = {}
    for name, number in map(str.split, lines):
        found.setdefault(name, []).append(float(number))
    return found


@pytest.mark.parametrize("schedule", CHUNKS)
def test_five_steps_are_those_of_pytorch(program, of_torch, schedule):
    driver = program.parents[1] / "tests" / "pipeline_driver"
    lines = printed([program, "launch", "-n", 2, "--", driver, schedule, CHUNKS[schedule]])
    assert len(of_torch[schedule]) == 6
    assert list(map(float, lines)) == pytest.approx(of_torch[schedule], rel=1e-12)
