"""Runs of the program on a small model, and what they leave."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors import safe_open

STEPS = 20
MODEL = {"family": "llama", "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2,
         "ffn": 48, "vocab": 61, "max_seq": 16}


def configuration(tokens, folder, only_model=None, **sections):
    """Writes run.json: the defaults here, with `sections` over them, or with another model."""
    config = {
        # One thread: on so small a model a second one is waited for longer than it helps.
        "run": {"dir": str(folder), "name": "run", "seed": 3, "steps": STEPS, "device": "cpu", "threads": 1},
        "model": only_model or dict(MODEL),
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


def free_port():
    """A free port below those that the kernel gives away: nobody takes it until it is used."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(max(1024, first - 12000), first)
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("127.0.0.1", port))
            return port


def train(program, path, *arguments, check=True):
    done = subprocess.run([str(program), "train", path, *arguments], capture_output=True, text=True,
                          timeout=300)
    if check:
        assert done.returncode == 0, done.stderr[-3000:]
    return done


def printed(command):
    """The lines that a program prints whose ranks have a thread each."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def printed_by_torchrun(ranks, script, *arguments):
    return printed([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", ranks, "--master-port",
                    free_port(), script, *arguments])


def metrics(folder):
    with open(os.path.join(folder, "run", "metrics.jsonl")) as file:
        return [json.loads(line) for line in file]


def checkpoint(folder, step=STEPS):
    """Every tensor of a checkpoint, put together from the boxes that ranks saved."""
    import torch

    path = os.path.join(folder, "run", "checkpoints", f"step-{step}")
    boxes = {}
    for name in sorted(os.listdir(path)):
        if name.endswith(".safetensors"):
            with safe_open(os.path.join(path, name), framework="pt") as file:
                places = json.loads(file.metadata()["DCP_SHARDING_INFO"])
                for key in file.keys():
                    offset = tuple(places[key]["saved_offsets"])
                    box = file.get_tensor(key)
                    assert offset not in boxes.setdefault(key, {}), f"{key} at {offset} twice"
                    boxes[key][offset] = box
    whole = {}
    for key, parts in boxes.items():
        dims = range(next(iter(parts.values())).dim())
        shape = [max(o[d] + box.shape[d] for o, box in parts.items()) for d in dims]
        whole[key] = torch.empty(shape, dtype=next(iter(parts.values())).dtype)
        for offset, box in parts.items():
            whole[key][tuple(slice(o, o + n) for o, n in zip(offset, box.shape))] = box
        assert sum(box.numel() for box in parts.values()) == whole[key].numel(), key
    return whole


def steps_written(folder):
    """Of a run that may be at it, or was killed: whole lines."""
    lines = Path(folder) / "run" / "metrics.jsonl"
    return lines.read_bytes().count(b"\n") if lines.exists() else 0


@contextlib.contextmanager
def started(*command, **options):
    """A process that is over, and its pipes closed, when the block is left, however that is."""
    with subprocess.Popen(list(map(str, command)), **options) as process:
        try:
            yield process
        finally:
            process.kill()


def last_words(process):
    with contextlib.suppress(subprocess.TimeoutExpired):  # of who holds its pipe still
        return process.communicate(timeout=10)[1]


def wait_until(what, *processes, seconds=60):
    """Until what() holds. Fails where it does not in time, or where one of the processes has ended."""
    deadline = time.monotonic() + seconds
    while not what():
        for process in processes:
            assert process.poll() is None, f"ended with {process.returncode} meanwhile: {last_words(process)}"
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.002)


def stop_after(program, path, folder, step, stop, *arguments):
    """Starts a run, sends `stop` once `step` steps are in metrics.jsonl."""
    def heeds_hangups():  # also below nohup, which a run rightly goes by
        signal.signal(signal.SIGHUP, signal.SIG_DFL)

    with started(program, "train", path, *arguments, stderr=subprocess.PIPE, text=True,
                 preexec_fn=heeds_hangups) as process:
        wait_until(lambda: steps_written(folder) >= step, process)
        stop(process)
        _, errors = process.communicate(timeout=120)
    return process.returncode, errors


def until(steps):
    """A run of so many steps, whose steps do not depend on how many there are."""
    return {"run": {"steps": steps}, "schedule": {"type": "constant"}}


# More steps than are done before it is stopped, however late that is.
ENDLESS = until(100_000)


def children_of(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]


def run(program, tokens, folder, *arguments, step=STEPS, **sections):
    train(program, configuration(tokens, folder, **sections), *arguments)
    return metrics(folder), checkpoint(folder, step)


RUNS = {}


def run_once(program, tokens, folder, *arguments, step=STEPS, **sections):
    """run(), made once for all tests of the same: of one that no environment changes."""
    key = json.dumps([tokens, arguments, step, sections], sort_keys=True, default=str)
    if key not in RUNS:
        RUNS[key] = run(program, tokens, folder, *arguments, step=step, **sections)
    return RUNS[key]


def assert_same_bits(one, other):
    import torch

    assert one.keys() == other.keys()
    for key in one:
        assert torch.equal(one[key], other[key]), f"{key} differs"


def assert_equal_runs(one, other, bound, state_bound, what=""):
    """Losses, norms and what experts got within `bound`, weights and moments within `state_bound` of their norm."""
    losses, state = one
    other_losses, other_state = other
    for a, b in zip(losses, other_losses, strict=True):
        assert [a[key] for key in ("step", "lr", "tokens")] == [b[key] for key in ("step", "lr", "tokens")], what
        for key in ("loss", "grad_norm", "aux_loss", "mtp_loss"):
            assert (key in a) == (key in b), (what, key, a["step"])
            difference = abs(a.get(key, 0) - b.get(key, 0))
            assert difference <= bound * abs(a.get(key, 0)), (what, key, a["step"], a[key], b[key])
        assert a.get("expert_load") == pytest.approx(b.get("expert_load"), abs=bound), (what, a["step"])
    # A softmax does not see k's bias: its gradient is zero, and what is there is rounding.
    idle = [key for key in state if "gpt2" in what and "attention.k.bias" in key]
    assert_close({key: value for key, value in state.items() if key not in idle},
                 {key: value for key, value in other_state.items() if key not in idle}, state_bound, what)


def assert_close(one, other, bound, what=""):
    """Every floating tensor within `bound` of its norm, and the others equal."""
    import torch

    assert one.keys() == other.keys(), what
    for key, value in one.items():
        assert value.shape == other[key].shape, (what, key)
        if value.is_floating_point():
            difference = (value - other[key]).double().norm()
            assert difference <= bound * value.double().norm() + 1e-300, (what, key, float(difference))
        else:
            assert torch.equal(value, other[key]), (what, key)
