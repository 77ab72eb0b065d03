"""Runs of the program itself: several ranks against one, stops and resumes.

Every test drives `tessera train` as a user does and reads the run folder.
"""

import contextlib
import json
import math
import os
import re
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest
from runs import (ENDLESS, MODEL, STEPS, assert_close, assert_equal_runs, assert_same_bits, checkpoint, children_of,
                  configuration, metrics, run, run_once, started, steps_written, stop_after, train, until, wait_until)


RANKS = [(world, backend, kind) for world in (2, 3, 4) for backend in ("shm", "gloo")
         for kind in ("processes", "threads")]
# In fp32 each number of ranks, backend and kind of rank at least once.
RANKS_IN_FP32 = [(2, "shm", "processes"), (3, "gloo", "threads"), (4, "shm", "threads"), (4, "gloo", "processes")]


@pytest.mark.parametrize("precision, bound, among", [("fp64", 1e-10, RANKS), ("fp32", 1e-5, RANKS_IN_FP32)],
                         ids=["fp64", "fp32"])
def test_ranks_equal_one_rank(program, tokens, tmp_path, precision, bound, among):
    sections = {"precision": {"compute": precision}, "batch": {"global": 12, "micro": 1}}
    losses, state = run(program, tokens, tmp_path / "one", "--nproc", "1", **sections)
    assert len(losses) == STEPS and losses[-1]["loss"] < losses[0]["loss"]
    for world, backend, kind in among:
        folder = tmp_path / f"{world}-{backend}-{kind}"
        other, other_state = run(
            program, tokens, folder, "--nproc", str(world), "--ranks", kind, **sections,
            mesh={"dp": world}, comm={"backend": backend})
        assert_equal_runs((losses, state), (other, other_state), bound,
                          1e-10 if precision == "fp64" else 1e-4, (world, backend, kind))


@pytest.mark.parametrize("micro", [1, 2, 3, 6])
def test_microbatches_equal_one_batch(program, tokens, tmp_path, micro):
    precision = {"precision": {"compute": "fp64"}}
    whole, state = run_once(program, tokens, tmp_path / "whole", **precision, batch={"micro": 12})
    parts, other_state = run(program, tokens, tmp_path / "parts", **precision, batch={"micro": micro})
    for a, b in zip(whole, parts, strict=True):
        assert math.isclose(a["loss"], b["loss"], rel_tol=1e-10)
        assert math.isclose(a["grad_norm"], b["grad_norm"], rel_tol=1e-10)
    assert_close(state, other_state, 1e-10)


EXPERTS = {"family": "mixtral", "moe": {"experts": 4, "aux_loss": 0.1}, "layers": 3, "ffn": 13}


@pytest.mark.parametrize("model", [{}, EXPERTS], ids=["dense", "experts"])
def test_data_parallel_on_threads_equals_one_rank(program, tokens, tmp_path, model):
    sections = {"precision": {"compute": "fp64"}, "model": model}
    one = run(program, tokens, tmp_path / "one", **sections)
    star = run(program, tokens, tmp_path / "star", **sections, mesh={"dp": 3, "data_parallel": "dp"})
    assert len(one[0]) == len(star[0]) == STEPS
    assert_equal_runs(one, star, 1e-10, 1e-10)


# In the first step both have the same weights, and all else alike.
def test_threads_keep_gradients_as_ranks_do(program, tokens, tmp_path):
    norms = []
    for way, ranks in (("dp", []), ("ddp", ["--nproc", "3", "--ranks", "threads"])):
        path = configuration(tokens, tmp_path / way, mesh={"dp": 3, "data_parallel": way}, run={"steps": 1},
                             precision={"compute": "bf16"}, schedule={"warmup": 0}, checkpoint={"every": 0})
        train(program, path, *ranks)
        norms.append(metrics(tmp_path / way)[0]["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


# Every stage, and experts over the data ranks; 62 samples of 16 tokens share out unevenly.
EXPERTS_MESH = {"mesh": {"pp": 2, "dp": 2, "tp": 2, "ep": 2}, "zero": {"stage": 3}, "model": EXPERTS,
                "tensor": {"sequence_parallel": True}, "batch": {"micro": 3}}
AS_THREADS = ["--nproc", "8", "--ranks", "threads"]


def validations(lines):
    return {line["step"]: line["valid_loss"] for line in lines if "valid_loss" in line}


def test_validation_has_steps_of_its_own_and_ends_a_run(program, tokens, tmp_path):
    # A learning rate that only makes it worse: after step 2 no validation is better.
    sections = {"data": {"valid": tokens["valid"]}, "optimizer": {"lr": 0.5, "weight_decay": 0},
                "schedule": {"type": "constant"}, "run": {"steps": 40}, "checkpoint": {"every": 20, "keep_best": True},
                "validate": {"every": 2, "at_start": True, "patience": 3, "samples": 0}}
    done = train(program, configuration(tokens, tmp_path, **sections))
    assert done.returncode == 0, done.stderr
    losses = validations(metrics(tmp_path))
    steps = sorted(losses)
    assert steps == list(range(2, steps[-1] + 1, 2)) and steps[-1] < 40
    best = min(losses, key=losses.get)
    assert steps[-1] == best + 6, losses
    assert "validate step: 0 " in done.stderr and "validate.patience: 3 validations" in done.stderr
    checkpoints = tmp_path / "run" / "checkpoints"
    assert (checkpoints / "best").read_text() == f"step-{best}\n"
    assert (checkpoints / f"step-{best}" / "manifest.json").exists()
    # The same command has nothing to do; a patient one goes on.
    again = train(program, configuration(tokens, tmp_path, **sections))
    assert again.returncode == 0 and len(metrics(tmp_path)) == steps[-1], again.stderr


def test_losses_read_late_are_those_of_their_steps(program, tokens, tmp_path):
    sections = {"model": EXPERTS, "mesh": {"dp": 2}, "data": {"valid": tokens["valid"]}, "validate": {"every": 7}}
    runs = [run(program, tokens, tmp_path / str(late), "--nproc", "2", **sections, monitor={"losses_late": late})
            for late in (0, 3, 8)]
    told = ("step", "loss", "grad_norm", "lr", "aux_loss", "expert_load", "valid_loss", "comm_bytes")
    for lines, state in runs[1:]:
        assert [{key: line.get(key) for key in told} for line in lines] == [
            {key: line.get(key) for key in told} for line in runs[0][0]]
        assert_same_bits(state, runs[0][1])
        assert all(line["mem_peak_mib"] > 0.5 * lines[0]["mem_peak_mib"] for line in lines)


def test_validation_on_a_mesh_equals_one_rank(program, tokens, tmp_path):
    sections = {"precision": {"compute": "fp64"}, "data": {"valid": tokens["valid"]},
                "run": {"steps": 4}, "checkpoint": {"every": 2}}
    one, _ = run(program, tokens, tmp_path / "one", step=4, **sections, model=EXPERTS)
    mesh, _ = run(program, tokens, tmp_path / "mesh", *AS_THREADS, step=4, **sections, **EXPERTS_MESH)
    losses = [[line["valid_loss"] for line in lines if "valid_loss" in line] for lines in (one, mesh)]
    assert len(losses[0]) == 2 and losses[0][0] != losses[0][1]
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)


@pytest.mark.parametrize("precision", [{}, {"compute": "bf16"}, {"compute": "bf16", "reduce": "bf16"},
                                       {"compute": "fp16"}, {"reduce": "fp16"}],
                         ids=["fp32", "bf16", "bf16 reduced in bf16", "fp16", "fp32 reduced in fp16"])
def test_experts_resumed_on_the_same_mesh_have_the_same_bits(program, tokens, tmp_path, precision):
    sections = {"precision": precision, "schedule": {"type": "constant", "warmup": 0}, **EXPERTS_MESH}
    whole, state = run(program, tokens, tmp_path / "whole", *AS_THREADS, **sections)
    assert whole[-1]["loss"] < whole[0]["loss"] - 0.2
    half = {**sections, "run": {"steps": 8}, "checkpoint": {"every": 8}}
    train(program, configuration(tokens, tmp_path / "again", **half), *AS_THREADS)
    _, resumed = run(program, tokens, tmp_path / "again", *AS_THREADS, **sections)
    assert_same_bits(state, resumed)


# No mask is kept: a resumed run draws those that it would have drawn. A validation draws none.
def test_dropout_resumes_with_the_same_bits_and_spares_validation(program, tokens, tmp_path):
    threads = ["--nproc", "4", "--ranks", "threads"]
    sections = {"model": {"dropout": 0.2}, "mesh": {"dp": 2, "tp": 2}, "zero": {"stage": 3}, "run": {"steps": 8},
                "schedule": {"type": "constant", "warmup": 0}, "data": {"valid": tokens["valid"]},
                "validate": {"every": 8, "at_start": True}}
    half = {**sections, "run": {"steps": 4}, "checkpoint": {"every": 4}}
    first = train(program, configuration(tokens, tmp_path / "again", **half), *threads)
    _, resumed = run(program, tokens, tmp_path / "again", *threads, step=8, **sections)
    whole, state = run(program, tokens, tmp_path / "whole", *threads, step=8, **sections)
    assert_same_bits(state, resumed)
    without = train(program, configuration(tokens, tmp_path / "without", **{**sections, "model": {}}), *threads)
    assert metrics(tmp_path / "without")[0]["loss"] != whole[0]["loss"]
    at_start = [re.search(r"validate step: 0 +loss: +(\S+)", done.stderr)[1] for done in (first, without)]
    assert at_start[0] == at_start[1]


def test_the_same_bits_over_bucket_sizes(program, tokens, tmp_path):
    reference = None
    for bucket_mb in (0.0005, 0.002, 0.008, 0.03, 25):
        _, state = run(program, tokens, tmp_path / str(bucket_mb), "--nproc", "3",
                       mesh={"dp": 3}, zero={"bucket_mb": bucket_mb})
        if reference is None:
            reference = state
        assert_same_bits(reference, state)


@pytest.mark.parametrize(("nproc", "number", "late"), [(1, signal.SIGHUP, 0), (2, signal.SIGTERM, 3)])
def test_a_signal_writes_a_checkpoint_and_the_resumed_run_has_the_same_bits(program, tokens, tmp_path, nproc, number,
                                                                            late):
    mesh = {"mesh": {"dp": nproc}, "monitor": {"losses_late": late}}
    arguments = ("--nproc", str(nproc))
    folder = tmp_path / "stopped"
    path = configuration(tokens, folder, **mesh, **ENDLESS)
    code, errors = stop_after(program, path, folder, 7, lambda p: p.send_signal(number), *arguments)
    assert code == 75, errors
    stopped_at = steps_written(folder)
    assert stopped_at >= 7
    assert os.path.isdir(folder / "run" / "checkpoints" / f"step-{stopped_at}")
    assert_the_same_bits_as_one_run(program, tokens, tmp_path, "stopped", stopped_at, *arguments, **mesh)


def assert_the_same_bits_as_one_run(program, tokens, tmp_path, name, stopped_at, *arguments, **sections):
    """Of the run in folder `name`, which goes on to some steps behind where it was stopped."""
    end = stopped_at + 20
    lines, resumed = run(program, tokens, tmp_path / name, *arguments, step=end, **sections, **until(end))
    _, whole = run(program, tokens, tmp_path / "whole", *arguments, step=end, **sections, **until(end))
    assert [line["step"] for line in lines] == list(range(1, end + 1))
    assert_same_bits(whole, resumed)


@pytest.mark.parametrize(("victim", "beside"), [("a rank", False), ("everything", True)])
def test_kill_9_and_the_resumed_run_has_the_same_bits(program, tokens, tmp_path, victim, beside):
    sections = {"mesh": {"dp": 2}, "checkpoint": {"every": 3, "async": beside}}
    folder = tmp_path / "killed"
    path = configuration(tokens, folder, **sections, **ENDLESS)

    def kill(process):
        ranks = children_of(process.pid)
        assert len(ranks) == 2
        if victim == "everything":
            process.kill()
        else:
            os.kill(ranks[1], signal.SIGKILL)

    begun = time.monotonic()
    code, errors = stop_after(program, path, folder, 7, kill, "--nproc", "2")
    assert time.monotonic() - begun < 30
    if victim == "a rank":
        assert code == 128 + 9, errors
        assert "rank 1 of 2" in errors.splitlines()[-1] and "SIGKILL" in errors.splitlines()[-1]
    else:
        assert code == -9
    assert_the_same_bits_as_one_run(program, tokens, tmp_path, "killed", steps_written(folder), "--nproc", "2", **sections)


def test_batches_that_are_skipped_are_as_if_they_had_never_been(program, tokens, tmp_path):
    """A run that goes back to before them has the bits of one that never saw them, on any mesh."""
    sections = {"mesh": {"dp": 2}, "checkpoint": {"every": 5, "keep": 0}, **until(STEPS)}
    _, whole = run(program, tokens, tmp_path / "never", "--nproc", "2", "--data.skip=8:11", **sections)
    lines, other = run(program, tokens, tmp_path / "back", "--nproc", "2", **sections)
    path, back = str(tmp_path / "back" / "run.json"), tmp_path / "back" / "run" / "checkpoints"
    refused = train(program, path, "--nproc=2", f"--resume={back / 'step-10'}", "--data.skip=8:11", check=False)
    assert refused.returncode == 78 and "what it has taken cannot be left out" in refused.stderr
    assert "rank" not in refused.stderr  # none has started
    assert metrics(tmp_path / "back") == lines
    train(program, path, "--nproc=2", f"--resume={back / 'step-5'}", "--data.skip=8:11")
    again = metrics(tmp_path / "back")
    assert [line["step"] for line in again] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in again[:7]] == [line["loss"] for line in lines[:7]]
    assert again[7]["loss"] != lines[7]["loss"]
    assert json.loads((back / "step-10" / "manifest.json").read_text())["parent"] == 5  # and not what it went back from
    assert (back / "resumed-from").read_text().startswith("step-5 ")
    assert_same_bits(whole, checkpoint(tmp_path / "back"))


def test_a_run_that_saves_only_when_it_is_stopped_goes_on_from_what_it_was_told(program, tokens, tmp_path):
    run(program, tokens, tmp_path, checkpoint={"every": 5, "keep": 0}, **until(10), step=10)
    checkpoints = tmp_path / "run" / "checkpoints"
    code, errors = stop_after(program, str(tmp_path / "run.json"), tmp_path, 20, lambda process: process.terminate(),
                              f"--resume={checkpoints / 'step-5'}", "--checkpoint.every=0", "--run.steps=100000")
    assert code == 75, errors
    stopped = json.loads((checkpoints / f"step-{steps_written(tmp_path)}" / "manifest.json").read_text())
    assert stopped["parent"] == 5 and (checkpoints / "resumed-from").read_text().startswith("step-5 ")


@pytest.mark.parametrize("place", ["", "checkpoints"])
def test_a_run_is_gone_on_from_by_its_folder(program, tokens, tmp_path, place):
    run(program, tokens, tmp_path / "one", checkpoint={"every": 5}, **until(10), step=10)
    path = configuration(tokens, tmp_path / "other", **until(12))
    done = train(program, path, f"--resume={tmp_path / 'one' / 'run' / place}", "--nproc=2")
    assert "resumed after step 10\n" in done.stderr, done.stderr
    refused = train(program, path, f"--resume={tmp_path / 'one'}", check=False)
    assert refused.returncode == 74 and "no folder of a run that has one" in refused.stderr, refused.stderr


def flip_a_bit_of(pid, pattern):
    """Where these bytes are in a process's memory: the lowest bit of the first."""
    places = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    found = 0
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory, contextlib.suppress(OSError):  # once it has ended
        for begin, end in (place[0].split("-") for place in places if place[1].startswith("rw")):
            memory.seek(int(begin, 16))
            at = memory.read(int(end, 16) - int(begin, 16)).find(pattern)
            if at >= 0:
                memory.seek(int(begin, 16) + at)
                memory.write(bytes([pattern[0] ^ 1]))
                found += 1
    assert found > 0


def flip_in_rank_1(folder, name):
    """What flips a bit of the weight that the checkpoint of step 50 has, and waits for the end."""

    def flip(process):
        flip_a_bit_of(children_of(process.pid)[1], checkpoint(folder, 50)[name][0].numpy().tobytes())
        process.wait(timeout=120)

    return flip


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_rank_that_is_stopped_for_a_moment_changes_nothing(program, tokens, tmp_path, backend):
    """For longer than that it counts as lost, and the run goes on from its newest checkpoint."""
    # It is stopped among them, on a machine that is slow to do so as well.
    steps = {"shm": 600, "gloo": 300}[backend]
    sections = {"mesh": {"dp": 2}, "checkpoint": {"every": 100}, "comm": {"backend": backend, "silence_s": 4}}
    lines, whole = run(program, tokens, tmp_path / "whole", "--nproc", "2", step=steps, **sections, **until(steps))
    path = configuration(tokens, tmp_path / "stopped", **sections, **until(steps))

    def stop_and_go_on(process):
        rank = children_of(process.pid)[1]
        os.kill(rank, signal.SIGSTOP)
        time.sleep(2)
        os.kill(rank, signal.SIGCONT)

    code, errors = stop_after(program, path, tmp_path / "stopped", 50, stop_and_go_on, "--nproc", "2")
    assert code == 0 and "goes on" in errors and "lost" not in errors, errors
    assert [line["loss"] for line in metrics(tmp_path / "stopped")] == [line["loss"] for line in lines]
    assert_same_bits(whole, checkpoint(tmp_path / "stopped", steps))
    path = configuration(tokens, tmp_path / "lost", **sections, **until(steps))

    def stop(process):
        os.kill(children_of(process.pid)[1], signal.SIGSTOP)

    code, errors = stop_after(program, path, tmp_path / "lost", 150, stop, "--nproc", "2", "--max-restarts", "1")
    assert code == 0, errors
    assert re.search(r"rank 1 \(pid \d+ on \S+\) has been stopped for 4 s", errors), errors
    assert re.search(r"resumed after step [1-5]00\n", errors), errors
    assert "all ranks are started again, 1 of 1" in errors, errors
    assert_same_bits(whole, checkpoint(tmp_path / "lost", steps))


@pytest.mark.parametrize("late, local_every", [(0, 0), (2, 0), (0, 1)])
def test_a_bit_that_flips_in_one_replica_ends_the_run_before_a_checkpoint_has_it(program, tokens, tmp_path, late,
                                                                                 local_every):
    import torch

    # Weights that stay where they are can be found.
    path = configuration(tokens, tmp_path, mesh={"dp": 2}, optimizer={"lr": 0},
                         checkpoint={"every": 50, "keep": 0, "local_every": local_every,
                                     "local_dir": str(tmp_path / "memory")},
                         monitor={"replicas": 20, "losses_late": late}, **ENDLESS)
    name = "model.blocks.1.mlp.down.weight"

    code, errors = stop_after(program, path, tmp_path, 51, flip_in_rank_1(tmp_path, name), "--nproc", "2")
    assert code == 1, errors
    assert re.search(rf"after step \d+ ranks 0 \(dp_replicate=0\), 1 \(dp_replicate=1\) differ in '{name}', which each "
                     r"of them computes alike. They were alike after step \d+: ", errors), errors
    end = steps_written(tmp_path) + 1
    assert train(program, path, "--nproc", "2", f"--run.steps={end}").returncode == 0
    assert [line["step"] for line in metrics(tmp_path)] == list(range(1, end + 1))
    assert torch.equal(checkpoint(tmp_path, end)[name], checkpoint(tmp_path, 50)[name])


def test_one_of_three_ranks_that_computes_otherwise_is_named_by_computing_again(program, tokens, tmp_path):
    # Weights that stay where they are can be found, and none are compared.
    path = configuration(tokens, tmp_path, mesh={"dp": 3}, optimizer={"lr": 0}, checkpoint={"every": 50, "keep": 0},
                         monitor={"replicas": 0, "reruns": 20}, **ENDLESS)

    flip = flip_in_rank_1(tmp_path, "model.blocks.1.mlp.down.weight")
    code, errors = stop_after(program, path, tmp_path, 51, flip, "--nproc", "3")
    assert code == 1, errors
    assert re.search(r"step \d+0 was computed several times before its update, and by rank 1 \(dp_replicate=1\) "
                     r"otherwise again: ", errors), errors


def test_steps_that_are_computed_again_change_nothing(program, tokens, tmp_path):
    runs = [run(program, tokens, tmp_path / str(every), "--nproc", "2", mesh={"dp": 2}, zero={"stage": 3},
                monitor={"reruns": every, "losses_late": 2}) for every in (0, 3)]
    assert [line["loss"] for line in runs[0][0]] == [line["loss"] for line in runs[1][0]]
    assert_same_bits(runs[0][1], runs[1][1])


@pytest.mark.parametrize("sections", [
    {"mesh": {"dp": 2}, "zero": {"stage": 2}, "monitor": {"losses_late": 2}},
    {"mesh": {"pp": 2, "dp": 2}, "pipeline": {"schedule": "pipedream_2bw"}, "batch": {"micro": 1}},
])
def test_checkpoints_written_beside_the_steps_have_the_same_bits(program, tokens, tmp_path, sections):
    nproc = str(math.prod(sections["mesh"].values()))
    runs = {beside: run(program, tokens, tmp_path / str(beside), "--nproc", nproc, **sections,
                        checkpoint={"every": 3, "keep": 0, "async": beside})[0] for beside in (False, True)}
    assert [line["loss"] for line in runs[True]] == [line["loss"] for line in runs[False]]
    for step in (3, 6, 9, 12, 15, 18, STEPS):
        assert_same_bits(checkpoint(tmp_path / "False", step), checkpoint(tmp_path / "True", step))


def test_two_runs_do_not_share_a_folder_of_checkpoints(program, tokens, tmp_path):
    """Nor while it is empty: one that is in it says whose it is."""
    path = configuration(tokens, tmp_path, checkpoint={"every": 1000000}, **ENDLESS)
    with started(program, "train", path, stderr=subprocess.DEVNULL) as first:
        wait_until(lambda: steps_written(tmp_path), first)
        # By its name, and where it lies.
        for flags in (["--run.name=other", f"--checkpoint.dir={tmp_path}/run/checkpoints"], []):
            done = train(program, path, *flags, check=False)
            assert done.returncode == 74 and "held by another process" in done.stderr, done.stderr
        first.send_signal(signal.SIGTERM)
        assert first.wait(timeout=60) == 75


@pytest.mark.parametrize("beside", [False, True])
def test_a_checkpoint_that_fails_is_told_and_the_run_goes_on(program, tokens, tmp_path, beside):
    """A limit of the files' size that comes and goes, as a full disk does."""
    path = configuration(tokens, tmp_path, checkpoint={"every": 5, "async": beside}, **ENDLESS)
    latest = tmp_path / "run" / "checkpoints" / "latest"
    said = tmp_path / "stderr"

    def limit_files(size):
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    with open(said, "w") as stderr, started(program, "train", path, stderr=stderr) as process:
        wait_until(latest.exists, process)
        limit_files(100 << 10)
        wait_until(lambda: "EFBIG" in said.read_text(), process)
        failed = int(re.search(r"step (\d+) was not saved: .*EFBIG.*The run goes on", said.read_text())[1])
        limit_files(resource.RLIM_INFINITY)
        wait_until(lambda: int(latest.read_text().removeprefix("step-")) > failed, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 75, said.read_text()[-3000:]
    told = {line["checkpoint_failed"]: line["step"] for line in metrics(tmp_path) if "checkpoint_failed" in line}
    assert failed in told and all(step % 5 == 0 for step in told)
    assert beside or told[failed] == failed + 1
    assert set(os.listdir(latest.parent)) == {"latest", *(path.name for path in latest.parent.glob("step-*[0-9]"))}
    assert train(program, path, f"--run.steps={steps_written(tmp_path) + 1}").returncode == 0


def test_the_last_checkpoint_must_stand(program, tokens, tmp_path):
    path = configuration(tokens, tmp_path, checkpoint={"every": 5, "async": True})
    done = subprocess.run(["bash", "-c", f"ulimit -f 100; exec {program} train {path}"], capture_output=True, text=True,
                          timeout=300)
    assert done.returncode == 74, done.stderr
    assert done.stderr.count("The run goes on") == STEPS // 5 - 1
    assert f"step {STEPS} was not saved" in done.stderr


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_weights_of_a_run_are_those_that_narrow_ones_begin_from(program, tokens, tmp_path, compute):
    """Without learning, the weights stay what they were, rounded: also the wide ones that are updated."""
    _, base = run(program, tokens, tmp_path / "base")
    _, other = run(program, tokens, tmp_path / "other", only_model={"from": str(tmp_path / "base" / "run"),
                                                                  "load_weights": True},
                   precision={"compute": compute, "loss_scale": 1}, optimizer={"lr": 1e-30, "ema": 0.5})
    for name, value in base.items():
        if name.startswith("model."):
            assert other[name].equal(value.to(other[name].dtype)), name
            average = other[f"optimizer.average.{name.removeprefix('model.')}"]
            assert average.allclose(other[name].to(average.dtype), rtol=1e-6, atol=0), name


def test_a_balance_that_a_run_was_not_trained_with_is_refused_first(program, tokens, tmp_path):
    experts = dict(MODEL, family="mixtral", moe={"experts": 4, "top_k": 2})
    run(program, tokens, tmp_path / "base", only_model=experts)
    path = configuration(tokens, tmp_path / "other", only_model={"from": str(tmp_path / "base" / "run"),
                                                                 "load_weights": True, "moe": {"bias_balance": True}})
    done = train(program, path, check=False)
    assert done.returncode == 78 and "has no bias to load" in done.stderr, done.stderr
    assert not (tmp_path / "other" / "run").exists()


def test_a_killed_rank_is_started_again_and_the_run_has_the_same_bits(program, tokens, tmp_path):
    steps = 800
    sections = {"mesh": {"dp": 2}, "checkpoint": {"every": 100}}
    path = configuration(tokens, tmp_path / "killed", **sections, **until(steps))
    killed = []

    def kill_one(process):
        killed.append(children_of(process.pid)[1])
        os.kill(killed[0], signal.SIGKILL)

    code, errors = stop_after(program, path, tmp_path / "killed", 150, kill_one, "--nproc", "2", "--max-restarts", "1")
    assert code == 0, errors
    assert errors.count("all ranks are started again, 1 of 1 times without a new checkpoint") == 1
    assert errors.count("resumed after step") == 1 and "rank 1 of 2" in errors
    _, whole = run(program, tokens, tmp_path / "whole", "--nproc", "2", step=steps, **sections, **until(steps))
    assert [line["step"] for line in metrics(tmp_path / "killed")] == list(range(1, steps + 1))
    assert_same_bits(whole, checkpoint(tmp_path / "killed", steps))


def test_a_checkpoint_in_other_files_goes_on_with_the_same_bits(program, tokens, tmp_path):
    sections = {"mesh": {"dp": 3}, "zero": {"stage": 3}, "optimizer": {"ema": 0.9}}
    _, whole = run(program, tokens, tmp_path / "whole", "--nproc", "3", step=20, **sections, **until(20))
    run(program, tokens, tmp_path / "half", "--nproc", "3", step=10, **sections, **until(10))
    moved = tmp_path / "moved" / "run"
    convert = [str(program), "convert", "--from", str(tmp_path / "half" / "run"), "--to", str(moved), "--shards", "2"]
    done = subprocess.run(convert, capture_output=True, text=True, check=True)
    assert done.stdout == f"{moved}\n" and sorted(os.listdir(moved)) == ["checkpoints", "config.json", "logs"]
    assert len(list((moved / "checkpoints" / "step-10").glob("*.safetensors"))) == 2
    train(program, moved / "config.json", "--nproc", "3", "--run.steps=20")
    assert_same_bits(whole, checkpoint(tmp_path / "moved", 20))
    again = subprocess.run(convert, capture_output=True, text=True)
    assert again.returncode == 74 and "not empty" in again.stderr
    # Whoever moves it is told that its configuration is of the place before.
    elsewhere = tmp_path / "elsewhere"
    moved.rename(elsewhere)
    told = train(program, elsewhere / "config.json", "--nproc", "3", "--run.steps=21").stderr
    assert f"--run.dir={tmp_path} --run.name=elsewhere to go on there" in told, told
    told = train(program, elsewhere / "config.json", "--nproc", "3", "--run.steps=21", f"--run.dir={tmp_path}",
                 "--run.name=elsewhere").stderr
    assert "resumed after step 20" in told and "warning: " not in told, told
    # Without `latest`, as a kill may leave it.
    (elsewhere / "checkpoints" / "latest").unlink()
    done = subprocess.run([*convert[:2], "--from", str(elsewhere), "--to", str(tmp_path / "hf")], capture_output=True)
    assert done.returncode == 0


def test_a_rank_that_fails_for_good_leaves_the_run_to_fewer(program, tokens, tmp_path):
    """7 samples on 3 ranks and then on 2: the steps are those of one rank."""
    sections = {"precision": {"compute": "fp64"}, "batch": {"global": 7, "uneven": True}, **until(800)}
    folder = tmp_path / "fewer"
    path = configuration(tokens, folder, **sections, zero={"stage": 2}, checkpoint={"every": 50})

    def kill_the_third(process):
        def is_over():
            with contextlib.suppress(OSError):  # it has just ended
                if len(ranks := children_of(process.pid)) == 3:
                    os.kill(ranks[-1], signal.SIGKILL)
            return process.poll() is not None

        wait_until(is_over, seconds=120)

    code, errors = stop_after(program, path, folder, 60, kill_the_third, "--nproc", "3", "--max-restarts", "1",
                              "--min-nproc", "2")
    assert code == 0, errors
    assert "1 times in a row without a new checkpoint: 2 ranks go on in place of 3" in errors, errors
    assert "3, 2, 2 samples" in errors and "4, 3 samples" in errors, errors
    assert re.search(r"\[rank 0/2 .*resumed after step \d+\n", errors), errors
    steps = metrics(folder)
    assert [line["step"] for line in steps] == list(range(1, 801))
    one, _ = run(program, tokens, tmp_path / "one", step=200, **{**sections, **until(200)})
    for a, b in zip(one, steps[:200], strict=True):
        assert math.isclose(a["loss"], b["loss"], rel_tol=1e-8), (a, b)


def test_fewer_ranks_than_can_train_are_refused_first(program, tokens, tmp_path):
    path = configuration(tokens, tmp_path, batch={"global": 7})
    for flags, code, words in (
            (("--min-nproc", "2"), 2, "Give --max-restarts too"),
            (("--min-nproc", "7", "--max-restarts", "1"), 2, "--min-nproc 7 is no fewer than the 7 ranks"),
            (("--min-nproc", "2", "--max-restarts", "1"), 78, "no fewer ranks than 7 can train this"),
            (("--min-nproc", "1", "--max-restarts", "1", "--mesh.dp=7"), 78, "Start 7 ranks, or change mesh.dp"),
            (("--min-nproc", "2", "--max-restarts", "1", "--batch.uneven=true", "--dry-run"), 0, "")):
        done = train(program, path, "--nproc", "7", *flags, check=False)
        assert done.returncode == code and words in done.stderr, done.stderr
    assert not (tmp_path / "run").exists()


def test_fewer_ranks_have_the_batch_that_deepspeeds_json_says(program, tokens, tmp_path):
    path = configuration(tokens, tmp_path)
    without_batch = json.loads(Path(path).read_text())
    del without_batch["batch"]
    Path(path).write_text(json.dumps(without_batch))
    for ds, flags, code, words in (
            ({"train_micro_batch_size_per_gpu": 1}, (), 78, "With 3: batch.global would be 3 in place of 4"),
            ({"train_batch_size": 4}, (), 78, "With 3: batch: 4 = 3 x ? x ? has no solution"),
            ({"train_batch_size": 4}, ("--batch.uneven=true",), 0, ""),
            ({"train_batch_size": 12}, (), 0, "")):
        (tmp_path / "ds.json").write_text(json.dumps(ds))
        done = train(program, path, "--nproc", "4", "--min-nproc", "3", "--max-restarts", "1", "--deepspeed",
                     tmp_path / "ds.json", "--dry-run", *flags, check=False)
        assert done.returncode == code and words in done.stderr, done.stderr


def test_what_fails_again_and_again_ends(program, tokens, tmp_path):
    path = configuration(tokens, tmp_path, mesh={"dp": 2}, optimizer={"lr": 1000, "weight_decay": 1, "clip_norm": 0},
                         checkpoint={"every": 0}, **until(1000))
    done = train(program, path, "--nproc", "2", "--max-restarts", "2", check=False)
    assert done.returncode == 1, done.stderr
    assert "1 of 2 times" in done.stderr and "2 of 2 times" in done.stderr
    assert "started again 2 times in a row without a new checkpoint" in done.stderr.splitlines()[-1]
    for flag, word in (("--ranks=threads", "--ranks processes"), ("--mesh.data_parallel=dp", "mesh.data_parallel ddp")):
        refused = train(program, path, flag, "--max-restarts", "1", check=False)
        assert refused.returncode == 2 and word in refused.stderr, refused.stderr


# What leaves a rank in a step, in bytes of the gradients, before a ring's (N - 1)/N.
def test_traffic_of_each_stage(program, tokens, tmp_path):
    sent = {}
    for stage in (0, 1, 3):
        lines, state = run(program, tokens, tmp_path / str(stage), "--nproc", "2", mesh={"dp": 2}, zero={"stage": stage},
                           batch={"micro": 6}, optimizer={"type": "sgd", "clip_norm": 0.0}, step=4, **until(4),
                           checkpoint={"every": 4})
        weights = sum(t.numel() * 4 for name, t in state.items() if name.endswith("weight"))
        sent[stage] = [line["comm_bytes"] / weights for line in lines[1:]]
    for stage, units in ((0, 2), (1, 2), (3, 3)):
        assert sent[stage] == pytest.approx([units] * 3, rel=0.1), sent


# Rank 0 writes summary.json where it lives; else who started it does.
@pytest.mark.parametrize("rank", [0, 1])
def test_the_summary_of_a_run_whose_rank_was_killed(program, tokens, tmp_path, rank):
    train(program, configuration(tokens, tmp_path, mesh={"dp": 2}, **until(5), checkpoint={"every": 5}), "--nproc", "2")
    path = configuration(tokens, tmp_path, mesh={"dp": 2}, **ENDLESS, checkpoint={"every": 5})
    code, _ = stop_after(program, path, tmp_path, 9, lambda launcher: os.kill(children_of(launcher.pid)[rank], 9),
                         "--nproc", "2")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert code == summary["exit_code"] == 137 and summary["reason"] == "failed" and summary["message"]
    assert summary["steps"] == steps_written(tmp_path)


def test_a_run_with_nothing_to_do_has_a_summary(program, tokens, tmp_path):
    path = configuration(tokens, tmp_path, **until(5), checkpoint={"every": 5})
    train(program, path)
    summary = tmp_path / "run" / "summary.json"
    summary.unlink()
    train(program, path)
    told = json.loads(summary.read_text())
    assert (told["reason"], told["exit_code"], told["steps"], told["total_steps"]) == ("done", 0, 5, 5)
