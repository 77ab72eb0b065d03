"""Optimizers of the wheel, fed with the gradients of a run: the same weights, step by step.

A checkpoint behind every step has weights and momenta; two momenta, one behind the other, tell
the gradient between them.
"""

import json
import os

import pytest
import torch
from runs import assert_equal_runs, assert_same_bits, checkpoint, configuration, metrics, run, train

STEPS = 4
MUON = {"type": "muon", "lr": 0.02, "weight_decay": 0.1, "clip_norm": 0.5}
EVERY = {"checkpoint": {"every": 1, "keep": 0}, "schedule": {"type": "constant", "warmup": 0}}


def is_hidden_matrix(name, tensor):
    return name.startswith("blocks.") and tensor.dim() >= 2


# (name, weight before, momentum before, gradient, weight after) of every hidden matrix and step.
def muon_steps(folder):
    states = [checkpoint(folder, step) for step in range(1, STEPS + 1)]
    for before, after in zip(states, states[1:]):
        for key, momentum in after.items():
            if not key.startswith("optimizer.momentum."):
                continue
            name = key.removeprefix("optimizer.momentum.")
            gradient = (momentum - 0.95 * before[key]) / 0.05
            yield name, before[f"model.{name}"], before[key], gradient, after[f"model.{name}"]


def torchs_step(weight, momentum, gradient, **options):
    weight = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.Muon([weight], lr=MUON["lr"], weight_decay=MUON["weight_decay"], **options)
    optimizer.state[weight]["momentum_buffer"] = momentum.clone()
    weight.grad = gradient
    optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("adjust, nesterov", [("original", True), ("match_rms_adamw", False)])
def test_muon_is_torchs(program, tokens, tmp_path, monkeypatch, adjust, nesterov):
    # The wheel orthogonalises in bf16 alone; here its own loop is left in fp64.
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    run(program, tokens, tmp_path, step=STEPS, run={"steps": STEPS}, precision={"compute": "fp64"},
        optimizer={**MUON, "muon": {"adjust_lr": adjust, "nesterov": nesterov}}, **EVERY)
    names = set()
    for name, weight, momentum, gradient, after in muon_steps(tmp_path):
        theirs = torchs_step(weight, momentum, gradient, adjust_lr_fn=adjust, nesterov=nesterov)
        assert (after - theirs).norm() <= 1e-11 * after.norm(), name
        names.add(name)
    weights = {name.removeprefix("model."): value for name, value in checkpoint(tmp_path, STEPS).items()
               if name.startswith("model.")}
    assert names == {name for name, value in weights.items() if is_hidden_matrix(name, value)} and names


# Rounded to bf16 where torch rounds: an update is the wheel's but for what one bit more or less of the gradient does.
def test_muon_in_bf16_is_torchs(program, tokens, tmp_path):
    run(program, tokens, tmp_path, step=STEPS, run={"steps": STEPS},
        optimizer={**MUON, "muon": {"dtype": "bf16"}}, **EVERY)
    for name, weight, momentum, gradient, after in muon_steps(tmp_path):
        theirs = torchs_step(weight, momentum, gradient)
        assert (after - theirs).norm() <= 0.02 * (after - weight).norm(), name


def test_adamw_beside_muon_is_torchs(program, tokens, tmp_path):
    groups = [{"match": "*norm.weight", "lr": 0.05, "weight_decay": 0.3}]
    run(program, tokens, tmp_path, step=STEPS, run={"steps": STEPS}, precision={"compute": "fp64"},
        optimizer={**MUON, "muon": {"adamw_lr": 0.005}, "groups": groups}, **EVERY)
    states = [checkpoint(tmp_path, step) for step in range(1, STEPS + 1)]
    parameters = [key.removeprefix("optimizer.exp_avg.") for key in states[0] if ".exp_avg." in key]
    assert "embed.tokens.weight" in parameters and "final_norm.weight" in parameters, parameters
    for name in parameters:
        assert not is_hidden_matrix(name, states[0][f"model.{name}"])
        of_group = name.endswith("norm.weight")
        weight = torch.nn.Parameter(states[0][f"model.{name}"].clone())
        theirs = torch.optim.AdamW([weight], lr=0.05 if of_group else 0.005, betas=(0.9, 0.95), eps=1e-8,
                                   weight_decay=0.3 if of_group else 0.1)
        theirs.state[weight] = {"step": torch.tensor(1.0), **{key: states[0][f"optimizer.{key}.{name}"].clone()
                                                              for key in ("exp_avg", "exp_avg_sq")}}
        for before, after in zip(states, states[1:]):
            weight.grad = (after[f"optimizer.exp_avg.{name}"] - 0.9 * before[f"optimizer.exp_avg.{name}"]) / 0.1
            theirs.step()
            ours = after[f"model.{name}"]
            assert (weight.detach() - ours).norm() <= 1e-11 * ours.norm(), name


# What a run keeps: (sections of one rank, of a mesh, its ranks).
KEPT = {
    "muon": ({"optimizer": MUON}, {"mesh": {"dp": 2}, "zero": {"stage": 2}}, 2),
    "muon, tp": ({"optimizer": MUON}, {"mesh": {"tp": 2}}, 2),
    "average": ({"optimizer": {"ema": 0.9}}, {"mesh": {"dp": 2}, "zero": {"stage": 3}}, 2),
    "states in bf16": ({"optimizer": {"state_dtype": "bf16"}}, {"mesh": {"dp": 2}, "zero": {"stage": 1}}, 2),
    "bf16, all of it": ({"optimizer": {**MUON, "state_dtype": "bf16", "ema": 0.9}, "precision": {"compute": "bf16"}},
                        {"mesh": {"dp": 2}, "zero": {"stage": 3}}, 2),
}


@pytest.mark.parametrize("name", KEPT)
def test_resumes_bit_for_bit(program, tokens, tmp_path, name):
    sections, mesh, ranks = KEPT[name]
    more = {**sections, **mesh, "schedule": {"steps": 6}, "checkpoint": {"every": 3, "keep": 0}}
    arguments = ("--nproc", str(ranks), "--ranks", "threads")
    _, whole = run(program, tokens, tmp_path / "whole", *arguments, step=6, run={"steps": 6}, **more)
    path = configuration(tokens, tmp_path / "parts", run={"steps": 3}, **more)
    train(program, path, *arguments)
    train(program, path, *arguments, "--run.steps=6")
    assert_same_bits(whole, checkpoint(tmp_path / "parts", 6))


# Begun on a mesh, ended on one rank, and the other way.
@pytest.mark.parametrize("name", ["muon", "muon, tp", "average"])
def test_resumes_on_another_mesh(program, tokens, tmp_path, name):
    sections, mesh, ranks = KEPT[name]
    more = {**sections, "precision": {"compute": "fp64"}, "schedule": {"steps": 6}, "checkpoint": {"every": 3}}
    one = run(program, tokens, tmp_path / "one", "--nproc", "1", step=6, run={"steps": 6}, **more)
    on_mesh = ["--nproc", str(ranks), "--ranks", "threads", *(f"--{section}.{key}={value}" for section, keys in
                                                             mesh.items() for key, value in keys.items())]
    for folder, first, second in [("up", ["--nproc", "1"], on_mesh), ("down", on_mesh, ["--nproc", "1"])]:
        path = configuration(tokens, tmp_path / folder, run={"steps": 3}, **more)
        train(program, path, *first)
        train(program, path, *second, "--run.steps=6")
        assert_equal_runs(one, (metrics(tmp_path / folder), checkpoint(tmp_path / folder, 6)), 1e-10, 1e-10)


def test_states_in_bf16_are_kept_so(program, tokens, tmp_path):
    _, state = run(program, tokens, tmp_path, step=2, run={"steps": 2}, schedule={"warmup": 0}, checkpoint={"every": 2},
                   optimizer={"state_dtype": "bf16", "ema": 0.9})
    for key, value in state.items():
        narrow = ".exp_avg" in key
        assert not value.is_floating_point() or value.dtype == (torch.bfloat16 if narrow else torch.float32), key


# The average follows torch's AveragedModel, and is what evaluations ask for.
def test_the_average_is_torchs_and_evaluated(program, tokens, tmp_path):
    sections = {"run": {"steps": STEPS}, "optimizer": {"ema": 0.8}, "precision": {"compute": "fp64"}, **EVERY}
    told, last = run(program, tokens, tmp_path, step=STEPS, **sections)
    states = [checkpoint(tmp_path, step) for step in range(1, STEPS + 1)]
    for name in [key.removeprefix("model.") for key in last if key.startswith("model.")]:
        module = torch.nn.ParameterList([states[0][f"model.{name}"]])
        theirs = torch.optim.swa_utils.AveragedModel(
            module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.8))
        theirs.update_parameters(torch.nn.ParameterList([states[0][f"optimizer.average.{name}"]]))
        for state in states[1:]:
            theirs.update_parameters(torch.nn.ParameterList([state[f"model.{name}"]]))
        ours = last[f"optimizer.average.{name}"]
        assert (ours - theirs.module[0].detach()).norm() <= 1e-13 * ours.norm(), name


def evaluate(program, data, folder, *arguments):
    import subprocess

    done = subprocess.run([str(program), "eval", "--model", os.path.join(folder, "run"), "--data", str(data),
                           "--format", "tokens_u16", "--seq-len", "16", "--dtype", "fp64", *arguments],
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 or arguments, done.stderr
    return json.loads(done.stdout) if done.returncode == 0 else done.stderr


def test_averages_are_evaluated_and_converted(program, tokens, tmp_path):
    # Whole samples and a token more, of which nothing is left over.
    valid = tmp_path / "valid.bin"
    with open(tokens["train"], "rb") as file:
        valid.write_bytes(file.read(2 * (16 * 300 + 1)))
    sections = {"data": {"valid": str(valid)}, "validate": {"every": 2, "samples": 0},
                "precision": {"compute": "fp64"}, "optimizer": {"ema": 0.7}}
    losses = {}
    for ema in (False, True):
        for ranks in (1, 2):
            mesh = {} if ranks == 1 else {"mesh": {"dp": 2}, "zero": {"stage": 2}}
            told, state = run(program, tokens, tmp_path / f"{ema}{ranks}", "--nproc", str(ranks), "--ranks", "threads",
                              step=4, run={"steps": 4}, checkpoint={"every": 4},
                              **{**sections, "validate": {**sections["validate"], "ema": ema}, **mesh})
            losses[ema, ranks] = [line["valid_loss"] for line in told if "valid_loss" in line]
            losses["trained", ema, ranks] = [line["loss"] for line in told]
    for ema in (False, True):
        assert losses[ema, 1] == pytest.approx(losses[ema, 2], rel=1e-10)
    assert losses["trained", True, 1] == losses["trained", False, 1]  # what is measured changes nothing
    assert abs(losses[True, 1][-1] - losses[False, 1][-1]) > 1e-4
    folder = tmp_path / "False1"
    plain, averaged = (evaluate(program, valid, folder, *flag)["loss"] for flag in ((), ("--ema",)))
    assert plain == pytest.approx(losses[False, 1][-1], rel=1e-10)
    assert averaged == pytest.approx(losses[True, 1][-1], rel=1e-10)
    hf = tmp_path / "hf"
    import subprocess

    done = subprocess.run([str(program), "convert", "--from", str(folder / "run"), "--to", str(hf), "--dtype", "fp64",
                           "--ema"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    from safetensors.torch import load_file
    weights = load_file(next(hf.glob("*.safetensors")))
    state = checkpoint(folder, 4)
    assert torch.equal(weights["model.embed_tokens.weight"], state["optimizer.average.embed.tokens.weight"])


def test_there_must_be_averages(program, tokens, tmp_path):
    run(program, tokens, tmp_path, step=1, run={"steps": 1}, schedule={"warmup": 0}, checkpoint={"every": 1})
    assert "has no averages of its weights" in evaluate(program, tokens["train"], tmp_path, "--ema")


@pytest.mark.parametrize("optimizer, says", [
    ({"groups": [{"match": "blocks.*.attn.q.weight", "lr": 1}]},
     'optimizer.groups[0].match is "blocks.*.attn.q.weight", which matches no parameter'),
    ({"groups": [{"match": "*", "lrr": 1}]}, 'unknown key "optimizer.groups[0].lrr"'),
    ({"groups": [{"lr": 1}]}, "optimizer.groups[0].match"),
    ({"groups": [{"match": "*", "lr": -0.5}]}, "it must be at least 0, or -1"),
    ({"ema": 1}, "optimizer.ema"), ({"state_dtype": "fp16"}, "optimizer.state_dtype")])
def test_is_refused_before_ranks_start(program, tokens, tmp_path, optimizer, says):
    done = train(program, configuration(tokens, tmp_path, optimizer=optimizer), "--nproc", "2", check=False)
    assert done.returncode == 78 and says in done.stderr, done.stderr
    assert not os.path.exists(tmp_path / "run" / "logs")


def test_groups_are_printed_and_in_the_schema(program, tokens, tmp_path):
    import subprocess

    groups = [{"match": ["*norm.weight"], "lr": 0.5, "weight_decay": -1.0, "betas": []}]
    path = configuration(tokens, tmp_path, optimizer={"groups": groups})
    done = train(program, path, "--print-config")
    line = next(line for line in done.stdout.splitlines() if line.startswith("optimizer.groups"))
    assert json.dumps(groups, separators=(",", ":")) in line and "run.json:" in line
    schema = json.loads(subprocess.run([str(program), "schema"], capture_output=True, text=True).stdout)
    item = schema["properties"]["optimizer"]["properties"]["groups"]["items"]
    assert set(item["properties"]) == {"match", "lr", "weight_decay", "betas"}
