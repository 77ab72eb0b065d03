"""checkpoint.local_every: a run that lost a rank, or a host with its memory, goes on from the step before."""

import os
import re
import shutil
import signal
import subprocess

import pytest
from hosts import Hosts, end_of, places, why_not
from runs import (ENDLESS, assert_same_bits, checkpoint, children_of, configuration, metrics, run, steps_written,
                  stop_after, train, until, wait_until)

# Each host is started in a folder of its own, in which this one is.
LOCAL = {"local_every": 1, "local_dir": "memory"}


def resumed_after(errors):
    """The steps after which a run went on from the memory of hosts."""
    return [int(step) for step in re.findall(r"resumed after step (\d+), from the memory of hosts", errors)]


def test_a_killed_rank_costs_no_step(program, tokens, tmp_path):
    steps, sections = 300, {"mesh": {"dp": 2}, "zero": {"stage": 3}}
    folder, memory = tmp_path / "killed", tmp_path / "memory"
    path = configuration(tokens, folder, checkpoint={**LOCAL, "every": steps, "local_dir": str(memory)}, **sections,
                         **until(steps))

    def kill_both_in_turn(process):
        for number, step in enumerate((80, 180)):
            wait_until(lambda: steps_written(folder) >= step and len(children_of(process.pid)) == 2, process)
            os.kill(children_of(process.pid)[number], signal.SIGKILL)

    code, errors = stop_after(program, path, folder, 50, kill_both_in_turn, "--nproc", "2", "--max-restarts", "1")
    assert code == 0, errors
    resumed = resumed_after(errors)
    assert errors.count("resumed after step") == len(resumed) == 2, errors
    # Of the rank that was left: the step that it was at, or had just done.
    at = [int(step) for step in re.findall(r"step=(\d+)\] .* has died", errors)]
    assert [done - step in (0, 1) for step, done in zip(resumed, at)] == [True, True], (resumed, at)
    assert [line["step"] for line in metrics(folder)] == list(range(1, steps + 1))
    _, whole = run(program, tokens, tmp_path / "whole", "--nproc", "2", step=steps, checkpoint={"every": steps},
                   **sections, **until(steps))
    assert_same_bits(whole, checkpoint(folder, steps))
    assert os.listdir(memory) == []


@pytest.fixture(scope="module")
def namespaces():
    reason = why_not()
    if reason:
        pytest.skip(reason)


def start(hosts, program, folder, per_host, *arguments):
    """`tessera train` on all hosts, each in a folder of its own."""
    ranks = []
    first = next(host for host, count in enumerate(per_host) if count > 0)
    for host, variables in places(per_host, master=Hosts.address(first)):
        here = folder / f"host-{host}"
        here.mkdir(exist_ok=True)
        ranks.append(hosts.start(host, [program, "train", *arguments], variables, cwd=here, stderr=subprocess.PIPE,
                                 text=True))
    return ranks


def train_on(hosts, program, folder, per_host, *arguments):
    """What the first rank says."""
    ends = end_of(start(hosts, program, folder, per_host, *arguments))
    assert [code for code, _ in ends] == [0] * len(ends), ends
    return ends[0][1]


def lose_a_host(hosts, program, folder, per_host, lost, *arguments):
    """Kills the ranks of a host after some steps, and what it had in memory; the steps that were written."""
    ranks = start(hosts, program, folder, per_host, *arguments)
    try:
        wait_until(lambda: steps_written(folder) >= 20, *ranks)
        for (host, _), rank in zip(places(per_host), ranks):
            if host == lost:
                rank.kill()
    except BaseException:
        end_of(ranks, timeout=0)
        raise
    end_of(ranks)
    shutil.rmtree(folder / f"host-{lost}")
    return steps_written(folder)


@pytest.mark.parametrize(("per_host", "lost", "sections"), [
    ([1, 1], 0, {"mesh": {"dp": 2}, "zero": {"stage": 3}}),
    ([1, 1], 1, {"mesh": {"pp": 2}, "batch": {"micro": 3}}),
    ([2, 1, 1], 1, {"mesh": {"dp": 2, "tp": 2}, "zero": {"stage": 1}, "precision": {"compute": "bf16"}}),
])
def test_a_host_that_is_lost_with_its_memory_costs_no_step(program, tokens, tmp_path, namespaces, per_host, lost,
                                                           sections):
    path = configuration(tokens, tmp_path, checkpoint={"every": 0, **LOCAL}, **sections, **ENDLESS)
    with Hosts(len(per_host)) as hosts:
        written = lose_a_host(hosts, program, tmp_path, per_host, lost, path)
        steps = written + 20
        last = (f"--checkpoint.every={steps}", f"--run.steps={steps}")
        (resumed,) = resumed_after(train_on(hosts, program, tmp_path, per_host, path, *last))
        assert written - resumed in (0, 1)
        whole = configuration(tokens, tmp_path / "whole", **sections, **until(steps))
        train_on(hosts, program, tmp_path, per_host, whole, *last)
    assert [line["step"] for line in metrics(tmp_path)] == list(range(1, steps + 1))
    assert_same_bits(checkpoint(tmp_path / "whole", steps), checkpoint(tmp_path, steps))
    assert [os.listdir(tmp_path / f"host-{host}" / "memory") for host in range(len(per_host))] == [[]] * len(per_host)


def test_what_is_left_of_the_hosts_goes_on_with_fewer_ranks(program, tokens, tmp_path, namespaces):
    sections = {"zero": {"stage": 3}, "precision": {"compute": "fp64"}, "batch": {"micro": 1}}
    path = configuration(tokens, tmp_path, checkpoint={"every": 0, **LOCAL}, **sections, **ENDLESS)
    with Hosts(2) as hosts:
        written = lose_a_host(hosts, program, tmp_path, [2, 2], 0, path)
        steps = written + 10
        (resumed,) = resumed_after(train_on(hosts, program, tmp_path, [0, 1], path, f"--run.steps={steps}"))
    assert written - resumed in (0, 1)
    train(program, configuration(tokens, tmp_path / "whole", **sections, **until(steps)))
    for one, other in zip(metrics(tmp_path / "whole"), metrics(tmp_path), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-10), one["step"]


def test_a_host_and_the_next_one_are_too_many(program, tokens, tmp_path, namespaces):
    path = configuration(tokens, tmp_path, mesh={"dp": 2}, zero={"stage": 3}, checkpoint={**LOCAL, "every": 10},
                         **ENDLESS)
    with Hosts(2) as hosts:
        written = lose_a_host(hosts, program, tmp_path, [1, 1], 0, path)
        shutil.rmtree(tmp_path / "host-1")
        steps = written + 10
        errors = train_on(hosts, program, tmp_path, [1, 1], path, f"--run.steps={steps}")
    # The line of step 20 may be there, and its checkpoint not yet.
    assert f"resumed after step {written // 10 * 10}" in errors or f"resumed after step {written // 10 * 10 - 10}" in errors
    assert [line["step"] for line in metrics(tmp_path)] == list(range(1, steps + 1))


def test_a_run_that_is_stopped_leaves_nothing_in_memory(program, tokens, tmp_path):
    memory = tmp_path / "memory"
    path = configuration(tokens, tmp_path, mesh={"dp": 2}, checkpoint={**LOCAL, "every": 0, "local_dir": str(memory)},
                         **ENDLESS)
    code, errors = stop_after(program, path, tmp_path, 10, lambda process: process.terminate(), "--nproc", "2")
    assert code == 75 and os.listdir(memory) == [], errors


def kill_at(program, path, folder, step, *arguments):
    """A run that is over; what stays of it in memory is told."""
    code, errors = stop_after(program, path, folder, step,
                              lambda process: os.kill(children_of(process.pid)[0], signal.SIGKILL), *arguments)
    assert code == 137 and "stays in memory: the same command goes on from it, " in errors, errors
    return int(re.search(r"/step-(\d+) stays in memory", errors)[1])


def test_who_goes_on_from_elsewhere_leaves_what_is_in_memory(program, tokens, tmp_path):
    memory = tmp_path / "memory"
    path = configuration(tokens, tmp_path, mesh={"dp": 2}, checkpoint={"every": 10, "keep": 0, **LOCAL,
                                                                       "local_dir": str(memory)}, **ENDLESS)
    nproc = ("--nproc", "2")
    saved = kill_at(program, path, tmp_path, 25, *nproc)
    # Another model of the same name is refused before any rank starts.
    refused = train(program, path, "--model.hidden=64", *nproc, check=False)
    assert refused.returncode == 78 and f"step-{saved} holds other tensors" in refused.stderr, refused.stderr
    assert "stays in memory" not in refused.stderr
    older = tmp_path / "run" / "checkpoints" / "step-10"
    errors = train(program, path, *nproc, "--resume", str(older), "--run.steps=12").stderr
    assert "resumed after step 10\n" in errors and os.listdir(memory) == [], errors
    # Who turns them off says what is left.
    kill_at(program, path, tmp_path, 45, *nproc)
    off = ("--checkpoint.local_every=0", f"--checkpoint.local_dir={tmp_path}")
    inside = next(memory.glob("*/step-*/manifest.json")).parent
    refused = train(program, path, *nproc, "--resume", str(inside), check=False)
    assert refused.returncode == 78 and "--resume auto goes on from it" in refused.stderr, refused.stderr
    errors = train(program, path, *nproc, "--run.steps=62", *off).stderr
    assert "resumed after step 40\n" in errors and f"{inside.parent} on each host is not used any more" in errors, errors
    errors = train(program, path, *nproc, "--run.steps=64").stderr
    assert "resumed after step 62\n" in errors and os.listdir(memory) == [], errors
    saved = kill_at(program, path, tmp_path, 75, *nproc)
    errors = train(program, path, *nproc, "--run.steps=82", "--checkpoint.local_every=0").stderr
    assert re.search(rf"step-{saved} is newer than all in \S+, and not used: checkpoint.local_every is 0", errors), errors
    # A run folder that is removed is a new run, also where memory has something of the old one.
    kill_at(program, path, tmp_path, 95, *nproc)
    shutil.rmtree(tmp_path / "run")
    errors = train(program, path, *nproc, "--run.steps=12").stderr
    assert "resumed" not in errors and os.listdir(memory) == [], errors


def test_a_run_that_is_done_in_memory_alone_is_written(program, tokens, tmp_path):
    memory = tmp_path / "memory"
    path = configuration(tokens, tmp_path, mesh={"dp": 2}, checkpoint={"every": 1000, **LOCAL, "local_dir": str(memory)},
                         **ENDLESS)
    saved = kill_at(program, path, tmp_path, 25, "--nproc", "2")
    errors = train(program, path, "--nproc", "2", f"--run.steps={saved}").stderr
    assert "nothing to do" in errors and os.listdir(memory) == [], errors
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == f"step-{saved}\n"


def test_bad_input_is_refused_before_any_rank_starts(program, tokens, tmp_path, namespaces):
    path = configuration(tokens, tmp_path, mesh={"dp": 2}, checkpoint={"local_every": 5})
    (tmp_path / "file").write_text("")
    for arguments, words in (
            ((f"--checkpoint.local_dir={tmp_path}/file",), "is no folder"),
            ((f"--checkpoint.local_dir={tmp_path}/file/below",), "is no folder"),
            (("--checkpoint.local_dir=/proc",), "/proc has 0 B free"),
            (("--checkpoint.local_every=-1",), "checkpoint.local_every"),
            (("--checkpoint.local_every=2.5",), "checkpoint.local_every")):
        done = train(program, path, "--nproc", "2", *arguments, check=False)
        assert done.returncode == 78 and words in done.stderr, done.stderr
        assert not (tmp_path / "run").exists(), arguments
    with Hosts(2) as hosts:
        for code, errors in end_of(start(hosts, program, tmp_path, [1, 1], path,
                                         f"--checkpoint.local_dir={tmp_path}/both")):
            assert code == 78 and "is the same folder as on another host" in errors, errors
