"""tessera convert: its memory, and what comes between while it works."""

import json
import os
import signal
import subprocess

import pytest
import torch
from runs import checkpoint, configuration, started, train, wait_until
from safetensors.torch import load_file


def most_memory_of(command):
    """Bytes that the process had at once."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = status
    assert status == 0
    return usage.ru_maxrss * 1024


def test_a_model_need_not_fit_into_the_memory_of_who_converts_it(program, tokens, tmp_path):
    def converted(name, hidden, layers):
        path = configuration(tokens, tmp_path / name, {"layers": layers, "hidden": hidden, "heads": 8, "vocab": 97},
                             run={"steps": 1}, optimizer={"type": "sgd", "momentum": 0.0}, schedule={"warmup": 1},
                             checkpoint={"every": 1})
        train(program, path)
        whole = tmp_path / name / "whole"
        most = most_memory_of([program, "convert", "--from", tmp_path / name / "run", "--to", whole])
        return most, os.path.getsize(whole / "model.safetensors")

    (least, small), (most, large) = converted("small", 64, 2), converted("large", 512, 16)
    assert large - small > 100_000_000
    assert most - least < (large - small) / 4


def test_what_is_stopped_or_changed_while_it_is_converted_leaves_nothing_under_its_name(program, tokens, tmp_path):
    path = configuration(tokens, tmp_path, {"layers": 16, "hidden": 512, "heads": 8, "vocab": 97}, run={"steps": 1},
                         optimizer={"type": "sgd", "momentum": 0.0}, schedule={"warmup": 1}, checkpoint={"every": 1})
    train(program, path)
    step = tmp_path / "run" / "checkpoints" / "step-1"
    target = tmp_path / "new" / "whole"

    def converted(meanwhile):
        with started(program, "convert", "--from", step, "--to", target, stderr=subprocess.PIPE, text=True) as process:
            wait_until(lambda: list(tmp_path.glob("new/whole.tmp-*/model.safetensors.tmp")), process)
            process.send_signal(signal.SIGSTOP)
            meanwhile(process)
            process.send_signal(signal.SIGCONT)
            _, errors = process.communicate(timeout=120)
        assert not list(tmp_path.glob("new/whole*"))
        return process.returncode, errors

    def change(_):
        with open(next(step.glob("*.safetensors")), "r+b") as file:
            file.seek(-5_000_000, os.SEEK_END)  # in a block, which is read late
            file.write(1000 * b"A")
        (target.parent / "of somebody else").write_text("")

    code, _ = converted(lambda process: process.terminate())
    assert code == -signal.SIGTERM and not target.parent.exists()
    code, errors = converted(change)
    assert code == 74 and "something writes to it" in errors, errors
    assert os.listdir(target.parent) == ["of somebody else"]


@pytest.mark.parametrize("name", ["step-3", "step-3.tmp", "step-1/whole"])
def test_nothing_is_converted_into_the_checkpoints_of_a_run(program, tokens, tmp_path, name):
    train(program, configuration(tokens, tmp_path, run={"steps": 1}, schedule={"warmup": 1}, checkpoint={"every": 1}))
    checkpoints = tmp_path / "run" / "checkpoints"
    done = subprocess.run([program, "convert", "--from", tmp_path / "run", "--to", checkpoints / name],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 74 and "lies among the checkpoints of" in done.stderr, done.stderr
    assert not (checkpoints / name).exists()


@pytest.mark.parametrize("flags", [[], ["--shards", "2"]], ids=["whole", "shards"])
def test_a_convert_that_fails_leaves_nothing(program, tokens, tmp_path, flags):
    train(program, configuration(tokens, tmp_path, run={"steps": 1}, schedule={"warmup": 1}, checkpoint={"every": 1}))
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "file").write_text("")
    # A run's name is told in its log, a Hugging Face folder's nowhere.
    named = [("a/b\nc", 78, "no control characters")] if flags else []
    for to, code, words in [("link", 74, "is a link to nothing"), ("file/x", 74, "cannot be made: Not a directory"),
                            ("link/x", 74, "cannot be made"),
                            *named, ("over/there", 74, "")]:
        if to == "over/there":
            damaged = next((tmp_path / "run" / "checkpoints" / "step-1").glob("*.safetensors"))
            damaged.write_bytes(damaged.read_bytes()[:-8])
        done = subprocess.run([program, "convert", "--from", tmp_path / "run", "--to", tmp_path / to, *flags],
                              capture_output=True, text=True, timeout=120)
        assert done.returncode == code and words in done.stderr, done.stderr
    assert sorted(os.listdir(tmp_path)) == ["file", "link", "run", "run.json"]


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_what_was_trained_in_a_narrow_type_leaves_as_it_was_updated(program, tessera, tokens, tmp_path, compute):
    """Its fp32 masters: in a folder, in an evaluation of it, and as what another run begins with."""
    path = configuration(tokens, tmp_path, run={"steps": 3}, schedule={"warmup": 1},
                         precision={"compute": compute}, checkpoint={"every": 3})
    train(program, path, "--nproc=2", "--mesh.dp=2", "--zero.stage=2")
    state = checkpoint(tmp_path, 3)
    masters = {key.removeprefix("optimizer.master."): held for key, held in state.items() if "optimizer.master." in key}
    assert masters and all(torch.equal(state[f"model.{key}"], held.to(state[f"model.{key}"].dtype))
                           for key, held in masters.items())
    assert any(not torch.equal(state[f"model.{key}"].float(), held) for key, held in masters.items())
    tessera("convert", "--from", tmp_path / "run", "--to", tmp_path / "out")
    out = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(out["model.embed_tokens.weight"], masters["embed.tokens.weight"])
    losses = [json.loads(tessera("eval", "--model", tmp_path / of, "--data", tokens["valid"], "--seq-len", "16",
                                 "--format", "tokens_u16").splitlines()[-1])["loss"] for of in ("run", "out")]
    assert losses[0] == losses[1]
    anew = configuration(tokens, tmp_path / "anew", {"from": str(tmp_path / "run"), "load_weights": True},
                         run={"steps": 1}, optimizer={"lr": 0.0}, schedule={"warmup": 1}, checkpoint={"every": 1})
    train(program, anew)
    begun = checkpoint(tmp_path / "anew", 1)
    assert all(torch.equal(begun[f"model.{key}"], held) for key, held in masters.items())


def test_before_its_first_update_a_run_is_what_it_began_with(program, tessera, tokens, tmp_path):
    """Its optimizer has nothing of the weights yet."""
    fp16 = {"compute": "fp16", "initial_loss_scale": 2.0 ** 40}
    sections = {"run": {"steps": 1}, "schedule": {"warmup": 1}, "checkpoint": {"every": 1}}
    train(program, configuration(tokens, tmp_path / "base", **sections))
    train(program, configuration(tokens, tmp_path / "anew", {"from": str(tmp_path / "base" / "run"), "load_weights": True},
                                 precision=fp16, **sections))
    assert json.loads((tmp_path / "anew" / "run" / "summary.json").read_text())["skipped_steps"] == 1
    weights = []
    for name in "base", "anew":
        tessera("convert", "--from", tmp_path / name / "run", "--to", tmp_path / name / "out")
        weights.append(load_file(tmp_path / name / "out" / "model.safetensors"))
    assert all(torch.equal(held.half().float(), weights[1][key]) for key, held in weights[0].items())
