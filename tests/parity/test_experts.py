"""Experts as a user trains them: that balance comes, what is dropped, what is said and refused."""

import json
import random
import struct
import subprocess

import pytest
import torch
import transformers
from runs import configuration, metrics, train

EXPERTS, STEPS = 8, 200


@pytest.fixture(scope="module")
def skewed(tmp_path_factory):
    """Tokens of which few are most, as in a language: by Zipf's law, each with its likely follower."""
    drawn = random.Random(1)
    weights = [1 / (1 + rank) for rank in range(61)]
    ids = drawn.choices(range(61), weights, k=60000)
    for i in range(1, len(ids)):
        if drawn.random() < 0.5:
            ids[i] = ids[i - 1] * 7 % 61
    path = tmp_path_factory.mktemp("skewed") / "ids.bin"
    path.write_bytes(struct.pack(f"<{len(ids)}H", *ids))
    return {"train": str(path)}


def lines_of(program, tokens, folder, moe, *arguments, steps=STEPS, check=True):
    path = configuration(tokens, folder, only_model={
        "family": "mixtral", "layers": 3, "hidden": 32, "heads": 4, "ffn": 24, "vocab": 61, "max_seq": 32,
        "moe": {"experts": EXPERTS, "top_k": 2, "aux_loss": 0.0, **moe}}, data={"seq_len": 32},
        batch={"global": 32}, run={"steps": steps}, optimizer={"lr": 0.003}, checkpoint={"every": 0})
    done = train(program, path, *arguments, check=check)
    return (metrics(folder) if done.returncode == 0 else []), done


def largest_load(lines):
    """Over the mean, of the last 20 steps together; of a model with one layer of experts."""
    loads = zip(*(line["expert_load"] for line in lines[-20:]))
    return max(sum(load) for load in loads) / 20 * EXPERTS


ONE_LAYER = {"first_dense": 2}


@pytest.mark.parametrize("moe", [{"aux_loss": 0.05}, {"bias_balance": True}, {"bias_balance": True, "score": "sigmoid"}],
                         ids=["loss", "bias", "bias of sigmoids"])
def test_a_skewed_stream_is_balanced_within_200_steps(program, skewed, tmp_path, moe):
    lines, _ = lines_of(program, skewed, tmp_path, {**ONE_LAYER, **moe})
    assert largest_load(lines) < 1.3
    assert all(len(line["expert_imbalance"]) == 1 for line in lines)


def test_without_either_it_is_not_and_the_user_hears_of_it(program, skewed, tmp_path):
    lines, done = lines_of(program, skewed, tmp_path, {**ONE_LAYER, "top_k": 1, "experts": 32}, "--optimizer.lr=0.02")
    assert largest_load(lines) > 2
    assert "of layer 2 got" in done.stderr and "model.moe.aux_loss" in done.stderr
    assert done.stderr.count("of its even share of tokens") == 1


def test_what_is_dropped_is_counted_and_alike_on_a_mesh(program, skewed, tmp_path):
    moe = {"capacity_factor": 1.0, "aux_loss": 0.01}
    one, _ = lines_of(program, skewed, tmp_path / "one", moe, "--precision.compute=fp64", steps=5)
    mesh, _ = lines_of(program, skewed, tmp_path / "mesh", moe, "--precision.compute=fp64", "--nproc", "4",
                       "--ranks", "threads", "--mesh.cp=2", "--mesh.dp=2", "--mesh.ep=4", steps=5)
    for a, b in zip(one, mesh, strict=True):
        assert a["expert_dropped"] == pytest.approx(b["expert_dropped"], abs=1e-12)
        assert a["routing_entropy"] == pytest.approx(b["routing_entropy"], abs=1e-10)
        assert len(a["expert_dropped"]) == 3 and 0 < max(a["expert_dropped"]) < 1
        assert max(a["expert_imbalance"]) <= 2


@pytest.mark.parametrize("moe, said", [
    ({"capacity_factor": 0.001}, ["model.moe.capacity_factor (0.001)", "Every token would be dropped", "Use 0.125"]),
    ({"groups": 3}, ["model.moe.groups (3)", "model.moe.experts (8)", "Nearest model.moe.groups: 2 or 4"]),
    ({"groups": 4, "top_groups": 5}, ["model.moe.top_groups (5)", "Use 4"]),
    ({"groups": 4, "top_k": 4}, ["model.moe.top_k (4)", "top_groups 2 or more"]),
    ({"top_k": 9}, ["model.moe.top_k (9)", "Use 8 or less"]),
    ({"first_dense": 3}, ["model.moe.first_dense (3)", "Use 2 or less"]),
    ({"score": "linear"}, ["model.moe.score", "softmax", "sigmoid"]),
    ({"choice": "experts"}, ["model.moe.choice experts needs model.moe.capacity_factor", "Use 1"]),
    ({"choice": "experts", "capacity_factor": 4.5}, ["model.moe.capacity_factor (4.5)", "Use 4 or less"]),
    ({"choice": "experts", "capacity_factor": 1.0, "groups": 2}, ["model.moe.groups (2)", "Use 1"]),
    ({"choice": "experts", "capacity_factor": 1.0, "bias_balance": True}, ["model.moe.bias_balance false"]),
    ({"choice": "experts", "capacity_factor": 0.001}, ["Every token would be dropped", "Use 0.125"]),
    ({"balance": "tokens"}, ["model.moe.balance", "sample", "layer", "batch"]),
])
def test_bad_input_is_refused_before_ranks_start(program, skewed, tmp_path, moe, said):
    _, done = lines_of(program, skewed, tmp_path, moe, "--nproc", "2", check=False)
    assert done.returncode == 78, done.stderr
    for words in said:
        assert words in done.stderr, done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("arguments, said", [
    (["--mesh.pp=2", "--nproc=2"], ["model.moe.balance batch", "all 3 layers", "Use mesh.pp 1"]),
    (["--mesh.dp=2", "--mesh.data_parallel=dp"], ["model.moe.balance is batch", "Use sample"]),
])
def test_a_balance_that_a_mesh_cannot_have_is_refused(program, skewed, tmp_path, arguments, said):
    _, done = lines_of(program, skewed, tmp_path, {"balance": "batch", "aux_loss": 0.1}, *arguments, check=False)
    assert done.returncode == 78, done.stderr
    for words in said:
        assert words in done.stderr, done.stderr


def test_latent_attention_is_of_its_families(program, skewed, tmp_path):
    _, done = lines_of(program, skewed, tmp_path, {}, "--model.latent.rope_dim=2", check=False)
    assert done.returncode == 78 and "model.latent.rope_dim is 2" in done.stderr, done.stderr


def test_a_folder_of_its_own_has_what_the_run_had(program, tessera, skewed, tmp_path):
    model = {"family": "deepseek_v3", "layers": 2, "hidden": 32, "heads": 4, "head_dim": 12, "ffn": 24, "vocab": 61,
             "max_seq": 32, "moe": {"experts": 8, "top_k": 2, "bias_balance": True}}
    path = configuration(skewed, tmp_path, only_model=model, run={"steps": 4}, checkpoint={"every": 4},
                         data={"seq_len": 32}, schedule={"warmup": 1})
    train(program, path)
    tessera("convert", "--from", tmp_path / "run", "--to", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["n_shared_experts"] == 0
    source = {"from": str(tmp_path / "out"), "load_weights": True, "rope_scaling": {
        "type": "yarn", "factor": 2.0, "original_max_seq": 32}}
    again = configuration(skewed, tmp_path / "again", only_model=source, run={"steps": 2}, checkpoint={"every": 2},
                          data={"seq_len": 32}, schedule={"warmup": 1})
    train(program, again)
    tessera("convert", "--from", tmp_path / "again" / "run", "--to", tmp_path / "longer")
    said = transformers.AutoConfig.from_pretrained(tmp_path / "longer")
    assert said.rope_parameters["rope_type"] == "yarn" and said.rope_parameters["factor"] == 2.0


def test_a_mixtral_that_was_made_longer_is_read_by_transformers(program, tessera, skewed, tmp_path):
    """Which scales by head_dim, and a Mixtral's folder need not say it."""
    transformers.MixtralForCausalLM(transformers.MixtralConfig(
        hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=2, vocab_size=61, max_position_embeddings=32)).save_pretrained(tmp_path / "model")
    assert not json.loads((tmp_path / "model" / "config.json").read_text()).get("head_dim")
    model = {"from": str(tmp_path / "model"), "load_weights": True, "max_seq": 64,
             "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_seq": 32}}
    train(program, configuration(skewed, tmp_path, only_model=model, run={"steps": 1}, checkpoint={"every": 1},
                                 data={"seq_len": 64}, schedule={"warmup": 1}))
    tessera("convert", "--from", tmp_path / "run", "--to", tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert theirs.config.head_dim == 8 and theirs(torch.arange(8)[None]).logits.isfinite().all()


def test_another_balance_is_not_resumed(program, skewed, tmp_path):
    path = configuration(skewed, tmp_path, only_model={
        "family": "mixtral", "layers": 2, "hidden": 32, "heads": 4, "ffn": 24, "vocab": 61, "max_seq": 16},
        run={"steps": 2}, checkpoint={"every": 2}, schedule={"warmup": 1})
    train(program, path)
    done = train(program, path, "--run.steps=4", "--model.moe.bias_balance=true", check=False)
    assert done.returncode == 78 and "model.moe.bias_balance" in done.stderr, done.stderr


def test_adapters_of_shared_experts_alone_are_trained(program, skewed, tmp_path):
    _, done = lines_of(program, skewed, tmp_path, {"shared_experts": 1, "aux_loss": 0.1}, "--model.lora.rank=2",
                       "--model.lora.targets=shared.up", steps=4)
    assert len(metrics(tmp_path)) == 4, done.stderr


def test_a_model_whose_experts_choose_writes_no_text(program, tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    path = configuration({"train": str(tmp_path / "text.txt")}, tmp_path, only_model={
        "family": "mixtral", "layers": 1, "hidden": 32, "heads": 4, "ffn": 24, "vocab": 300, "max_seq": 16,
        "moe": {"choice": "experts", "capacity_factor": 1.0}}, data={"format": "auto"}, run={"steps": 2},
        checkpoint={"every": 2}, schedule={"warmup": 1})
    train(program, path)
    for arguments in (["generate", "--model", tmp_path / "run", "--prompt", "the"],
                      ["train", path, "--run.name=other", "--monitor.sample=1"]):
        done = subprocess.run([program, *arguments], capture_output=True, text=True)
        assert done.returncode == 78 and "with model.moe.choice experts" in done.stderr, done.stderr


def test_a_text_drops_nothing(program, tessera, tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    path = configuration({"train": str(tmp_path / "text.txt")}, tmp_path, only_model={
        "family": "mixtral", "layers": 2, "hidden": 32, "heads": 4, "ffn": 24, "vocab": 300, "max_seq": 16,
        "moe": {"experts": EXPERTS, "top_k": 2, "capacity_factor": 1.0}}, data={"format": "auto"}, run={"steps": 30},
        precision={"compute": "fp64"}, checkpoint={"every": 30}, schedule={"warmup": 1},
        monitor={"sample": 30, "sample_tokens": 9, "sample_temperature": 0, "sample_prompt": "the fox"})
    train(program, path)
    words = ["generate", "--model", tmp_path / "run", "--prompt", "the fox", "--temperature", 0, "--dtype", "fp64",
             "--max-tokens", 9]
    written = tessera(*words)
    assert tessera(*words, "--ranks", "threads", "--mesh.tp=2") == written
    assert tessera(*words, "--ranks", "threads", "--mesh.tp=2", "--mesh.ep=2") == written
    # What the run wrote, of itself.
    (line,) = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    assert written.startswith("the fox" + json.loads(line)["text"].split("\n")[0])


def test_experts_choose_as_many_tokens_each(program, skewed, tmp_path):
    lines, _ = lines_of(program, skewed, tmp_path, {"choice": "experts", "capacity_factor": 1.0}, "--checkpoint.every=6",
                        steps=6)
    assert lines[-1]["loss"] < lines[0]["loss"]
    for line in lines:
        assert line["expert_load"] == pytest.approx([1 / EXPERTS] * EXPERTS)
        assert line["expert_imbalance"] == pytest.approx([1.0] * 3)
        assert len(line["expert_dropped"]) == 3 and 0 < max(line["expert_dropped"]) < 1
    done = subprocess.run([program, "convert", "--from", tmp_path / "run", "--to", tmp_path / "out"],
                          capture_output=True, text=True)
    assert done.returncode == 78 and "model.moe.choice is experts" in done.stderr, done.stderr


@pytest.mark.parametrize("key, value, said", [("shared_experts", 1, "1"), ("noise", True, "true")])
def test_a_folder_that_cannot_say_it_is_refused_by_name(program, skewed, tmp_path, key, value, said):
    lines_of(program, skewed, tmp_path, {key: value}, "--checkpoint.every=4", steps=4)
    done = subprocess.run([program, "convert", "--from", tmp_path / "run", "--to", tmp_path / "out"],
                          capture_output=True, text=True)
    assert done.returncode == 78 and f"model.moe.{key} is {said}" in done.stderr, done.stderr
