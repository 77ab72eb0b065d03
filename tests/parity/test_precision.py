"""fp16 with a scaled loss: beside PyTorch's half model, masters and GradScaler; over meshes; resumed; at its end. fp8."""

import copy
import json

import pytest
import torch
import transformers
from runs import assert_close, assert_same_bits, checkpoint, configuration, metrics, run, run_once, train
from safetensors.torch import load_file, save_file
from test_transformers_on_meshes import CONFIGS, LENGTH, RATE, SAMPLES, VOCAB, configuration_of, made_folder, make_model

STEPS = 8
# So high that the first steps overflow, in gradients that any sum would have.
FP16 = {"compute": "fp16", "initial_loss_scale": 2.0**30, "scale_growth_interval": 3}
THREADS = ["--ranks", "threads"]


def scales(folder):
    return [line["loss_scale"] for line in metrics(folder)]


def skipped(folder):
    """By what the scale does: it is halved behind each."""
    all_scales = scales(folder)
    return [step for step, (a, b) in enumerate(zip(all_scales, all_scales[1:]), 1) if b < a]


def steps_of_half_model(model, ids, scale, dtype=torch.float16):
    """A half model with fp32 masters and torch's GradScaler: each step's loss and scale."""
    masters = copy.deepcopy(model).float()
    half = copy.deepcopy(model).to(dtype).train()
    pairs = list(zip(half.parameters(), masters.parameters()))
    groups = [{"params": [m for _, m in pairs if (m.dim() >= 2) == decays], "weight_decay": 0.1 * decays}
              for decays in (True, False)]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=FP16["scale_growth_interval"])
    for step in range(STEPS):
        rows = [ids[k * LENGTH:k * LENGTH + LENGTH + 1] for k in range(step * SAMPLES, (step + 1) * SAMPLES)]
        batch = torch.stack(rows)
        logits = half(input_ids=batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.float().reshape(-1, VOCAB), batch[:, 1:].reshape(-1))
        yield loss.item(), scaler.get_scale()
        half.zero_grad()
        scaler.scale(loss).backward()
        for parameter, master in pairs:
            master.grad = parameter.grad.float()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(masters.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            for parameter, master in pairs:
                parameter.copy_(master)


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "olmo2", "gemma3"])
def test_fp16_equals_a_half_model_with_masters(program, tmp_path, name):
    model = make_model(CONFIGS[name](), len(name))
    ids = made_folder(tmp_path, model)
    path = configuration_of(tmp_path, tmp_path, precision={**FP16, "initial_loss_scale": 1024.0})
    train(program, path)
    theirs = list(steps_of_half_model(model, ids, 1024.0))
    # Roundings grow from step to step, otherwise on each kind of processor: a half model itself strays from a whole one.
    whole = list(steps_of_half_model(model, ids, 1024.0, torch.float32))
    for step, (line, (half, _), (full, _)) in enumerate(zip(metrics(tmp_path), theirs, whole, strict=True)):
        strays = max(5e-3, 2 * abs(half / full - 1))
        assert line["loss"] == pytest.approx(half, rel=strays if step > 0 else 5e-5), step
    assert scales(tmp_path) == [scale for _, scale in theirs] == [1024.0] * 3 + [2048.0] * 3 + [4096.0] * 2


MESHES = {
    "dp 2": (2, {"mesh": {"dp": 2}}),
    "zero 3, reduced narrow": (2, {"mesh": {"dp": 2}, "zero": {"stage": 3}}),
    "tp 2 with sp": (2, {"mesh": {"tp": 2}, "tensor": {"sequence_parallel": True}}),
    "cp 2": (2, {"mesh": {"cp": 2}}),
    "pp 2": (2, {"mesh": {"pp": 2}, "batch": {"micro": 3}}),
    "8 ranks": (8, {"mesh": {"pp": 2, "tp": 2}, "zero": {"stage": 2}, "batch": {"micro": 3}}),
    "recomputed": (1, {"recompute": {"mode": "block"}}),
    "split backward": (2, {"mesh": {"pp": 2}, "batch": {"micro": 3}, "pipeline": {"schedule": "zb_h1"}}),
}
FP8 = {"compute": "bf16", "products": "fp8"}
# fp16 without an overflow, whose step depends on how sums are rounded on the way.
NARROW = {"fp16": {"compute": "fp16", "initial_loss_scale": 256.0}, "bf16": {"compute": "bf16"}, "fp8": FP8}
# Of losses, norms of gradients, and the norm of each weight and momentum: three times what was measured, or more.
BOUNDS = {"fp16": (1e-4, 5e-4, 2e-3), "bf16": (1e-3, 5e-3, 2e-2), "fp8": (1e-3, 5e-3, 0.12)}
# Steps as long as gradients are, so that a wrong scale of them shows in weights and momenta too.
PLAIN = {"optimizer": {"type": "sgd", "lr": 0.1, "momentum": 0.9, "clip_norm": 0.0}}


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("kind", NARROW)
def test_a_mesh_trains_as_one_rank_does(program, tokens, tmp_path, kind, name):
    one, state = run_once(program, tokens, tmp_path / "one", precision=NARROW[kind], **PLAIN)
    world, sections = MESHES[name]
    reduce = {"reduce": NARROW[kind]["compute"]} if name == "zero 3, reduced narrow" else {}
    other, state_of_it = run(program, tokens, tmp_path / "mesh", "--nproc", str(world), *THREADS, **sections, **PLAIN,
                             precision={**NARROW[kind], **reduce})
    of_losses, of_norms, of_states = BOUNDS[kind]
    for line, wanted in zip(other, one, strict=True):
        assert line["loss"] == pytest.approx(wanted["loss"], rel=of_losses), line["step"]
        assert line["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=of_norms), line["step"]
        assert line.get("loss_scale") == (256.0 if kind == "fp16" else None)
    assert_close(state, state_of_it, of_states)
    if name == "recomputed":
        assert_same_bits(state, state_of_it)


@pytest.fixture(scope="module")
def one_rank(program, tokens, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    train(program, configuration(tokens, folder, precision=FP16))
    return folder


def test_skipped_steps_update_nothing_and_are_told(program, tokens, tmp_path, one_rank):
    lines = metrics(one_rank)
    steps = skipped(one_rank)
    count = len(steps)
    first = next(line["step"] for line in lines if line["step"] not in steps)
    assert first >= 5
    # The schedule waits: its warm-up begins with the first update.
    assert {line["lr"] for line in lines[:first]} == {0.0025} and lines[first]["lr"] == 0.005
    assert {line["step"] for line in lines if line["grad_norm"] is None} == set(steps)
    summary = json.loads((one_rank / "run" / "summary.json").read_text())
    assert summary["skipped_steps"] == count
    log = (one_rank / "run" / "logs" / "rank-0.log").read_text()
    assert log.count(" is skipped: the gradient's norm is ") == count
    assert "at loss scale 1.07374e+09. Nothing was updated; the loss scale is 5.36871e+08 now" in log
    assert int(checkpoint(one_rank)["optimizer.step"]) == len(lines) - count


def test_a_resumed_run_has_the_same_bits(program, tokens, tmp_path, one_rank):
    sections = {"precision": FP16, "schedule": {"type": "constant", "warmup": 0}, "mesh": {"dp": 2}, "zero": {"stage": 2}}
    whole = tmp_path / "whole"
    train(program, configuration(tokens, whole, **sections), "--nproc", "2")
    for stop in (4, 13):  # while it still overflows, and between two growths
        folder = tmp_path / f"stopped-{stop}"
        half = {**sections, "run": {"steps": stop}, "checkpoint": {"every": stop}}
        train(program, configuration(tokens, folder, **half), "--nproc", "2")
        train(program, configuration(tokens, folder, **sections), "--nproc", "2")
        assert scales(folder) == scales(whole)
        assert_same_bits(checkpoint(whole), checkpoint(folder))
    # On another mesh it goes on with the same scale.
    other = tmp_path / "other"
    train(program, configuration(tokens, other, **{**half, "checkpoint": {"every": 13}}), "--nproc", "2")
    train(program, configuration(tokens, other, **{**sections, "mesh": {"dp": 1, "tp": 2}, "zero": {"stage": 0}}),
          "--nproc", "2", *THREADS)
    assert scales(other)[:14] == scales(whole)[:14]


@pytest.mark.parametrize("arguments", [[], ["--nproc", "2", "--mesh.pp=2"]])
def test_at_its_floor_the_run_ends_and_says_why(program, tokens, tmp_path, arguments):
    path = configuration(tokens, tmp_path, precision={**FP16, "min_loss_scale": 2.0**28})
    done = train(program, path, *arguments, check=False)
    assert done.returncode == 1, done.stderr
    assert "precision.min_loss_scale" in done.stderr and "not finite" in done.stderr
    assert scales(tmp_path) == [2.0**30, 2.0**29]


@pytest.fixture(scope="module")
def bad_token(tmp_path_factory):
    """A model whose embedding of token 7 is infinite, and tokens of which some samples have it."""
    folder = tmp_path_factory.mktemp("bad")
    ids = made_folder(folder, make_model(transformers.LlamaConfig(**{
        "vocab_size": VOCAB, "max_position_embeddings": 32, "num_hidden_layers": 2, "hidden_size": 32,
        "intermediate_size": 48, "num_attention_heads": 4, "tie_word_embeddings": False}), 1))
    ids[ids == 7] = 8
    ids[3 * SAMPLES * LENGTH + 2 * LENGTH + 5] = 7  # step 4, sample 14
    (folder / "ids.bin").write_bytes(b"".join(int(i).to_bytes(2, "little") for i in ids))
    path = folder / "model" / "model.safetensors"
    weights = load_file(path)
    weights["model.embed_tokens.weight"][7] = float("inf")
    save_file(weights, path, metadata={"format": "pt"})
    return folder


RANKS_WITH_IT = pytest.mark.parametrize("arguments, log", [
    ([], "rank-0.log"), (["--nproc", "2", "--mesh.dp=2", "--zero.stage=3"], "rank-1.log"),
    (["--nproc", "2", "--mesh.pp=2"], "rank-1.log"),
    (["--nproc", "2", "--mesh.pp=2", "--pipeline.schedule=zb_h1"], "rank-1.log")],
                         ids=["one rank", "zero 3", "pp 2", "pp 2, zb_h1"])


@RANKS_WITH_IT
def test_a_step_without_a_finite_gradient_is_skipped_by_choice(program, bad_token, tmp_path, arguments, log):
    train(program, configuration_of(bad_token, tmp_path), "--optimizer.skip_nonfinite=true", *arguments)
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines if line["grad_norm"] is None] == [4]
    assert "loss_scale" not in lines[0]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["skipped_steps"] == 1
    text = (tmp_path / "run" / "logs" / log).read_text()
    assert "step 4: not finite first in the gradient of '" in text and ": sample 14 of the training data" in text
    assert "step 4 is skipped: the gradient's norm is nan. Nothing was updated. Skipped so far: 1" in (
        tmp_path / "run" / "logs" / "rank-0.log").read_text()


@RANKS_WITH_IT
def test_else_it_ends_the_run(program, bad_token, tmp_path, arguments, log):
    done = train(program, configuration_of(bad_token, tmp_path), *arguments, check=False)
    assert done.returncode == 1 and "is nan" in done.stderr and len(metrics(tmp_path)) == 3
    text = (tmp_path / "run" / "logs" / log).read_text()
    assert "step 4: not finite first in the gradient of '" in text and ": sample 14 of the training data" in text


@RANKS_WITH_IT
def test_or_is_left_behind(program, bad_token, tmp_path, arguments, log):
    """spike.action rewind: the bits of a run that never saw it."""
    found = {}
    for name, more in {"back": ["--spike.action=rewind", "--spike.skip_before=0", "--spike.skip_after=0"],
                       "never": ["--data.skip=4"]}.items():
        train(program, configuration_of(bad_token, tmp_path / name), "--checkpoint.every=3", *arguments, *more)
        found[name] = checkpoint(tmp_path / name, metrics(tmp_path / name)[-1]["step"])
    # What is infinite at the start has moments that are no number.
    assert_same_bits(*({key: value.nan_to_num() for key, value in found[name].items()} for name in ("back", "never")))
    text = (tmp_path / "back" / "run" / "logs" / log).read_text()
    assert "step 4: not finite first in the gradient of '" in text and ": sample 14 of the training data" in text


def test_of_a_step_that_is_read_late_the_norm_alone_is_told(program, bad_token, tmp_path):
    done = train(program, configuration_of(bad_token, tmp_path), "--monitor.losses_late=2", check=False)
    assert done.returncode == 1 and "is nan" in done.stderr and len(metrics(tmp_path)) == 3
    assert "not finite first" not in done.stderr


def test_a_loss_scale_changes_nothing_in_fp64(program, tokens, tmp_path):
    found = []
    for name, precision in {"none": {}, "fixed": {"loss_scale": 1024}, "found": {"loss_scale": 0}}.items():
        path = configuration(tokens, tmp_path / name, precision={"compute": "fp64", **precision})
        train(program, path)
        found.append([(line["loss"], line["grad_norm"]) for line in metrics(tmp_path / name)])
    assert found[0] == found[1] == found[2]


def test_a_scale_whose_inverse_is_no_number_is_refused(program, tokens, tmp_path):
    for key in ("loss_scale", "initial_loss_scale", "min_loss_scale"):
        path = configuration(tokens, tmp_path, precision={"compute": "fp16", key: 1e-39})
        done = train(program, path, check=False)
        assert done.returncode == 78 and f"precision.{key}" in done.stderr and "rank 0" not in done.stderr, done.stderr


def test_a_run_that_updates_nothing_any_more_ends(program, tokens, tmp_path):
    path = configuration(tokens, tmp_path, run={"steps": 30}, precision={"compute": "fp16", "loss_scale": 1.7e38})
    done = train(program, path, "--nproc", "2", check=False)
    assert done.returncode == 1, done.stderr
    assert "step 11 is the 11th in a row that updated nothing" in done.stderr, done.stderr


@pytest.fixture(scope="module")
def fp8_rank(program, tokens, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fp8")
    done = train(program, configuration(tokens, folder, precision=FP8))
    assert done.stderr.count("precision.products fp8 is emulated on the CPU") == 1
    assert "linear layers of rank 0" not in done.stderr
    return folder


def test_fp8_says_which_layers_it_leaves(program, tokens, tmp_path):
    for stages, layers in ((1, "8 of 14"), (2, "4 of 7")):
        path = configuration(tokens, tmp_path / str(stages), model={"ffn": 24}, precision=FP8, run={"steps": 1},
                             mesh={"pp": stages}, checkpoint={"every": 1}, schedule={"warmup": 0})
        done = train(program, path, "--nproc", str(stages), *THREADS)
        assert done.stderr.count(f"by which {layers} linear layers of rank 0 multiply") == 1


def losses(folder):
    return [line["loss"] for line in metrics(folder)]


def test_fp8_products_train_as_bf16_does(program, tokens, tmp_path, fp8_rank):
    train(program, configuration(tokens, tmp_path, precision={"compute": "bf16"}))
    bf16, fp8 = losses(tmp_path), losses(fp8_rank)
    assert fp8 != bf16
    assert fp8 == pytest.approx(bf16, rel=2e-2)
    assert fp8[-1] < 0.95 * fp8[0]


@pytest.mark.parametrize("precision, said", [
    ({"compute": "fp32", "products": "fp8"}, "precision.products is fp8 and precision.compute fp32"),
    ({"compute": "bf16", "products": "fp4"}, 'precision.products')])
def test_products_that_are_refused_before_ranks_start(program, tokens, tmp_path, precision, said):
    done = train(program, configuration(tokens, tmp_path, precision=precision), "--nproc", "2", check=False)
    assert done.returncode == 78 and said in done.stderr, done.stderr
    assert "rank 1" not in done.stderr
