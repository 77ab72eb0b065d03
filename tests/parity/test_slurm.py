"""Ranks that a real Slurm starts, over two nodes: srun, sbatch, a signal before the time is over."""

import time

import pytest
from hosts import Hosts
from hosts import why_not as why_no_namespaces
from runs import ENDLESS, assert_equal_runs, assert_same_bits, checkpoint, configuration, metrics, run, steps_written
from slurm import Slurm, why_not

FP64 = {"precision": {"compute": "fp64"}}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    reason = why_no_namespaces() or why_not()
    if reason:
        pytest.skip(reason)
    with Hosts(2) as hosts, Slurm(hosts, tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


# Two nodes, whose ranks are as many, then not; and one, which needs no name.
@pytest.mark.parametrize("shape, mesh, backend", [
    (["-N2", "-n4"], {"dp": 2, "tp": 2}, "shm+gloo"), (["-N2", "-n3"], {"dp": 3}, "shm+gloo"),
    (["-N1", "-n2"], {"pp": 2}, "shm")])
def test_ranks_of_srun_equal_one_rank(program, tokens, slurm, tmp_path, shape, mesh, backend):
    one = run(program, tokens, tmp_path / "one", **FP64)
    path = configuration(tokens, tmp_path / "srun", **FP64, mesh=mesh)
    done = slurm("srun", *shape, program, "train", path)
    assert_equal_runs(one, (metrics(tmp_path / "srun"), checkpoint(tmp_path / "srun")), 1e-10, 1e-10)
    assert f"ranks, over {backend}\n" in done.stderr and "(slurm), local rank 0 of" in done.stderr
    assert ("meeting at n1:" in done.stderr) == ("-N2" in shape), done.stderr


def test_a_job_that_is_stopped_goes_on_when_it_runs_again(program, tokens, slurm, tmp_path):
    sections = {**ENDLESS, "checkpoint": {"every": 100_000}, "mesh": {"dp": 4}}
    path = configuration(tokens, tmp_path / "job", **sections)
    job = tmp_path / "job.sh"

    def submit(*more):
        job.write_text(f"#!/bin/bash\n#SBATCH -N2 -n4\nsrun {program} train {path} {' '.join(more)}\n")
        return slurm("sbatch", "--parsable", f"--output={tmp_path}/out", job).stdout.strip()

    def wait(number):
        deadline = time.monotonic() + 60
        while slurm("squeue", "--noheader", "--jobs", number, check=False).stdout:
            assert time.monotonic() < deadline, (tmp_path / "out").read_text()
            time.sleep(0.1)

    first = submit()
    deadline = time.monotonic() + 60
    while steps_written(tmp_path / "job") < 5:
        assert time.monotonic() < deadline, (tmp_path / "out").read_text()
        time.sleep(0.05)
    slurm("scancel", "--signal=TERM", first)  # as --signal=TERM@120 has it done
    wait(first)
    stopped = metrics(tmp_path / "job")[-1]["step"]
    assert f"stopped on request after step {stopped}, with a checkpoint" in (tmp_path / "out").read_text()
    more = f"--run.steps={stopped + 5}"
    wait(submit(more))
    slurm("srun", "-N2", "-n4", program, "train", configuration(tokens, tmp_path / "whole", **sections), more)
    assert [line["loss"] for line in metrics(tmp_path / "job")] == [line["loss"] for line in metrics(tmp_path / "whole")]
    assert_same_bits(checkpoint(tmp_path / "job", stopped + 5), checkpoint(tmp_path / "whole", stopped + 5))


def test_a_rank_that_dies_is_named_and_ends_the_others(program, tokens, slurm, tmp_path):
    path = configuration(tokens, tmp_path, **ENDLESS, mesh={"dp": 4})
    begun = f"until [ -s {tmp_path}/run/metrics.jsonl ]; do sleep 0.1; done"
    dies = f'[ "$SLURM_PROCID" != 3 ] || {{ {begun}; sleep 0.5; kill -9 $$; }} & exec {program} train {path}'
    started = time.monotonic()
    done = slurm("srun", "-N2", "-n4", "bash", "-c", dies, check=False)
    assert time.monotonic() - started < 60
    assert done.returncode != 0 and "n2: task 3: Killed" in done.stderr, done.stderr[-3000:]
    assert "rank 3" in done.stderr
