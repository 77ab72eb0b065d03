"""Runs of the program itself: several ranks against one, stops and resumes.

Every test drives `tessera train` as a user does and reads the run folder.
"""

import json
import math
import os
import random
import signal
import struct
import subprocess
import time

import pytest
from safetensors import safe_open

STEPS = 20
MODEL = {"family": "llama", "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2,
         "ffn": 48, "vocab": 61, "max_seq": 16}


@pytest.fixture(scope="session")
def tokens(tmp_path_factory):
    """Token files with something to learn: a noisy cycle."""
    rng = random.Random(1)
    folder = tmp_path_factory.mktemp("tokens")

    def write(name, count):
        ids, token = [], 0
        for _ in range(count):
            token = (token * 7 + 3) % 61 if rng.random() < 0.8 else rng.randrange(61)
            ids.append(token)
        path = folder / name
        path.write_bytes(struct.pack(f"<{count}H", *ids))
        return str(path)

    return {"train": write("train.bin", 5000), "valid": write("valid.bin", 1000)}


def configuration(tokens, folder, **sections):
    config = {
        "run": {"dir": str(folder), "name": "run", "seed": 3, "steps": STEPS, "device": "cpu"},
        "model": dict(MODEL),
        "data": {"train": tokens["train"], "format": "tokens_u16", "seq_len": 16},
        "batch": {"global": 12},
        "precision": {"compute": "fp32"},
        "optimizer": {"type": "adamw", "lr": 0.01, "clip_norm": 0.5},
        "schedule": {"type": "cosine", "warmup": 4},
        "checkpoint": {"every": STEPS},
        "monitor": {"tensorboard": False},
    }
    for section, values in sections.items():
        config.setdefault(section, {}).update(values)
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, "run.json")
    with open(path, "w") as file:
        json.dump(config, file)
    return path


def train(program, path, *arguments, check=True):
    done = subprocess.run([str(program), "train", path, *arguments], capture_output=True, text=True,
                          timeout=300)
    if check:
        assert done.returncode == 0, done.stderr[-3000:]
    return done


def metrics(folder):
    with open(os.path.join(folder, "run", "metrics.jsonl")) as file:
        return [json.loads(line) for line in file]


def checkpoint(folder, step=STEPS):
    """Every tensor of a checkpoint, whole, as (dtype, bytes) or a list of floats."""
    path = os.path.join(folder, "run", "checkpoints", f"step-{step}")
    tensors = {}
    for name in sorted(os.listdir(path)):
        if name.endswith(".safetensors"):
            with safe_open(os.path.join(path, name), framework="pt") as file:
                for key in file.keys():
                    assert key not in tensors, f"{key} is in two files"
                    tensors[key] = file.get_tensor(key)
    return tensors


def run(program, tokens, folder, *arguments, **sections):
    train(program, configuration(tokens, folder, **sections), *arguments)
    return metrics(folder), checkpoint(folder)


def assert_close(one, other, bound, what=""):
    """Every floating tensor within `bound` of its norm."""
    assert one.keys() == other.keys(), what
    for key, value in one.items():
        if not value.is_floating_point():
            continue
        difference = (value - other[key]).double().norm()
        assert difference <= bound * value.double().norm() + 1e-300, (what, key)


def assert_same_bits(one, other):
    import torch

    assert one.keys() == other.keys()
    for key in one:
        assert torch.equal(one[key], other[key]), f"{key} differs"


RANKS = [(world, backend, kind) for world in (2, 3, 4) for backend in ("shm", "gloo")
         for kind in ("processes", "threads")]


@pytest.mark.parametrize("precision, bound", [("fp64", 1e-10), ("fp32", 1e-5)])
def test_ranks_equal_one_rank(program, tokens, tmp_path, precision, bound):
    sections = {"precision": {"compute": precision}, "batch": {"global": 12, "micro": 1}}
    losses, state = run(program, tokens, tmp_path / "one", "--nproc", "1", **sections)
    assert len(losses) == STEPS and losses[-1]["loss"] < losses[0]["loss"]
    for world, backend, kind in RANKS:
        folder = tmp_path / f"{world}-{backend}-{kind}"
        other, other_state = run(
            program, tokens, folder, "--nproc", str(world), "--ranks", kind, **sections,
            mesh={"dp": world}, comm={"backend": backend})
        for a, b in zip(losses, other, strict=True):
            for key in ("loss", "grad_norm"):
                assert math.isclose(a[key], b[key], rel_tol=bound), (world, backend, kind, key, a["step"])
        assert_close(state, other_state, 1e-10 if precision == "fp64" else 1e-4, (world, backend, kind))


@pytest.mark.parametrize("micro", [1, 2, 3, 6])
def test_microbatches_equal_one_batch(program, tokens, tmp_path, micro):
    precision = {"precision": {"compute": "fp64"}}
    whole, state = run(program, tokens, tmp_path / "whole", **precision, batch={"micro": 12})
    parts, other_state = run(program, tokens, tmp_path / "parts", **precision, batch={"micro": micro})
    for a, b in zip(whole, parts, strict=True):
        assert math.isclose(a["loss"], b["loss"], rel_tol=1e-10)
        assert math.isclose(a["grad_norm"], b["grad_norm"], rel_tol=1e-10)
    assert_close(state, other_state, 1e-10)


def test_data_parallel_on_threads_equals_one_rank(program, tokens, tmp_path):
    precision = {"precision": {"compute": "fp64"}}
    one, state = run(program, tokens, tmp_path / "one", **precision)
    star, other_state = run(program, tokens, tmp_path / "star", **precision,
                            mesh={"dp": 3, "data_parallel": "dp"})
    for a, b in zip(one, star, strict=True):
        assert math.isclose(a["loss"], b["loss"], rel_tol=1e-10)
        assert math.isclose(a["grad_norm"], b["grad_norm"], rel_tol=1e-10)
    assert_close(state, other_state, 1e-10)


def test_the_same_bits_over_bucket_sizes(program, tokens, tmp_path):
    reference = None
    for bucket_mb in (0.0005, 0.002, 0.008, 0.03, 25):
        _, state = run(program, tokens, tmp_path / str(bucket_mb), "--nproc", "3",
                       mesh={"dp": 3}, zero={"bucket_mb": bucket_mb})
        if reference is None:
            reference = state
        assert_same_bits(reference, state)


def stop_after(program, path, folder, step, stop, *arguments):
    """Starts a run, sends `stop` once `step` steps are in metrics.jsonl."""
    process = subprocess.Popen([str(program), "train", path, *arguments], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    lines = os.path.join(folder, "run", "metrics.jsonl")
    while time.monotonic() < deadline:
        if os.path.exists(lines) and sum(1 for _ in open(lines)) >= step:
            break
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.002)
    stop(process)
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors


# A run slow enough to be stopped in the middle.
SLOW = {"model": {**MODEL, "hidden": 128, "ffn": 384, "layers": 4}}


@pytest.mark.parametrize("nproc", [1, 2])
def test_sigterm_writes_a_checkpoint_and_the_resumed_run_has_the_same_bits(program, tokens, tmp_path, nproc):
    mesh = {"mesh": {"dp": nproc}}
    arguments = ("--nproc", str(nproc))
    _, whole = run(program, tokens, tmp_path / "whole", *arguments, **mesh, **SLOW)
    folder = tmp_path / "stopped"
    path = configuration(tokens, folder, **mesh, **SLOW)
    code, errors = stop_after(program, path, folder, 7, lambda p: p.send_signal(signal.SIGTERM), *arguments)
    assert code == 75, errors
    stopped_at = len(metrics(folder))
    assert 7 <= stopped_at < STEPS
    assert os.path.isdir(folder / "run" / "checkpoints" / f"step-{stopped_at}")
    train(program, path, *arguments)
    assert [line["step"] for line in metrics(folder)] == list(range(1, STEPS + 1))
    assert_same_bits(whole, checkpoint(folder))


def children_of(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]


@pytest.mark.parametrize("victim", ["a rank", "everything"])
def test_kill_9_and_the_resumed_run_has_the_same_bits(program, tokens, tmp_path, victim):
    mesh = {"mesh": {"dp": 2}, "checkpoint": {"every": 3}}
    _, whole = run(program, tokens, tmp_path / "whole", "--nproc", "2", **mesh, **SLOW)
    folder = tmp_path / "killed"
    path = configuration(tokens, folder, **mesh, **SLOW)

    def kill(process):
        ranks = children_of(process.pid)
        assert len(ranks) == 2
        if victim == "everything":
            process.kill()
        else:
            os.kill(ranks[1], signal.SIGKILL)

    started = time.monotonic()
    code, errors = stop_after(program, path, folder, 7, kill, "--nproc", "2")
    assert time.monotonic() - started < 30
    if victim == "a rank":
        assert code == 128 + 9, errors
        assert "rank 1 of 2" in errors.splitlines()[-1] and "SIGKILL" in errors.splitlines()[-1]
    else:
        assert code == -9
    train(program, path, "--nproc", "2")
    assert [line["step"] for line in metrics(folder)] == list(range(1, STEPS + 1))
    assert_same_bits(whole, checkpoint(folder))
