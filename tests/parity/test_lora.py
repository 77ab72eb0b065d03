"""LoRA against transformers with PEFT: eight steps loss by loss, and folders both ways."""

import json
import subprocess

import peft
import pytest
import torch
import transformers
from runs import checkpoint, metrics, train
from safetensors.torch import load_file, save_file
from test_transformers_on_meshes import CONFIGS, MORE, SP, STEPS, configuration_of, made_folder, make_model, steps_of_transformers

RANK, ALPHA = 4, 10
TARGETS = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "qwen3": ["q_proj", "o_proj", "down_proj"],
    "gpt2": ["c_fc"],
    "mixtral": ["q_proj", "v_proj", "o_proj"],
}
MESHES = {
    "one rank": (1, []),
    "tp 2": (2, ["--mesh.tp=2"]),
    "tp 4 with sp": (4, ["--mesh.tp=4", *SP]),
    "zero 1": (2, ["--mesh.dp=2", "--zero.stage=1"]),
    "zero 2": (2, ["--mesh.dp=2", "--zero.stage=2"]),
    "zero 3": (2, ["--mesh.dp=2", "--zero.stage=3"]),
    "pp 2": (2, ["--mesh.pp=2"]),
    "cp 2": (2, ["--mesh.cp=2"]),
    "recomputed": (2, ["--mesh.dp=2", "--recompute.mode=block"]),
    "16 ranks": (16, ["--mesh.pp=2", "--mesh.dp=2", "--mesh.cp=2", "--mesh.tp=2", "--zero.stage=3", *SP]),
}
CASES = [("llama", mesh) for mesh in MESHES] + [
    ("qwen3", "one rank"), ("qwen3", "pp 2"), ("qwen3", "zero 3"), ("gpt2", "one rank"), ("gpt2", "tp 2"),
    ("mixtral", "one rank"), ("mixtral", "zero 3")]


def peft_model(folder, name):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    model = peft.get_peft_model(model, peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=TARGETS[name], task_type="CAUSAL_LM",
        fan_in_fan_out=name == "gpt2"))
    torch.manual_seed(8)
    with torch.no_grad():  # else B is zero and A does not train in the first step
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def peers(tmp_path_factory):
    """By name: a folder with model, adapters and tokens, PEFT's losses and the adapters that it ends with."""
    made = {}
    for name in TARGETS:
        folder = tmp_path_factory.mktemp(name)
        ids = made_folder(folder, make_model(CONFIGS[name](), len(name)))
        model = peft_model(folder, name)
        model.save_pretrained(folder / "adapters")
        losses = []
        for _, loss in steps_of_transformers(model, ids):
            loss.backward()
            losses.append(loss.item())
        model.save_pretrained(folder / "trained")
        made[name] = (folder, losses)
    return made


def lora_run(program, folder, tmp_path, *arguments, world=1):
    path = configuration_of(folder, tmp_path, checkpoint={"every": STEPS})
    return train(program, path, "--nproc", str(world), "--ranks", "threads", *arguments, check=False)


def adapters(folder):
    return load_file(folder / "adapter_model.safetensors")


def assert_near(one, other):
    assert one.keys() == other.keys()
    for key in one:
        assert (one[key] - other[key]).norm() < 1e-4 * other[key].norm(), key


@pytest.mark.parametrize("name, mesh", CASES)
def test_eight_steps(program, tessera, peers, tmp_path, name, mesh):
    folder, theirs = peers[name]
    world, arguments = MESHES[mesh]
    done = lora_run(program, folder, tmp_path, f"--model.lora.from={folder / 'adapters'}", *arguments, world=world)
    assert done.returncode == 0, done.stderr[-3000:]
    assert theirs[-1] != pytest.approx(theirs[0], rel=1e-3)
    assert [line["loss"] for line in metrics(tmp_path)] == pytest.approx(theirs, rel=2e-5)
    tessera("convert", "--from", tmp_path / "run", "--to", tmp_path / "out")
    assert_near(adapters(tmp_path / "out"), adapters(folder / "trained"))
    state = checkpoint(tmp_path, STEPS)
    moments = {key for key in state if key.startswith("optimizer.exp_avg.")}
    assert moments and all("lora_" in key for key in moments)


def test_peft_reads_what_was_trained(program, tessera, peers, tmp_path):
    folder, _ = peers["llama"]
    assert lora_run(program, folder, tmp_path, "--model.lora.rank=3", "--model.lora.alpha=6",
                    "--model.lora.targets=[\"attention.*\", \"down_proj\"]").returncode == 0
    tessera("convert", "--from", tmp_path / "run", "--to", tmp_path / "peft")
    tessera("convert", "--from", tmp_path / "run", "--to", tmp_path / "merged", "--merge")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    before = {key: value.clone() for key, value in base.state_dict().items()}
    model = peft.PeftModel.from_pretrained(base, tmp_path / "peft").eval()
    assert len(adapters(tmp_path / "peft")) == 2 * 3 * 5
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, merged(ids).logits, atol=2e-5)
    # What has no adapter has its bits, and what has one was trained.
    for key, value in merged.state_dict().items():
        has_one = any(f"{part}_proj" in key for part in ("q", "k", "v", "o", "down"))
        assert torch.equal(value, before[key]) != has_one, key
    said = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == str(folder / "model")


@pytest.mark.parametrize("flags, words", [
    (["--model.rope_scaling.type=linear", "--model.rope_scaling.factor=2"],
     ["another model than PEFT would add them to", "model.rope_scaling.factor", "--merge"]),
    (["--model.load_weights=false"], ["model.load_weights is false", "--merge"])])
def test_adapters_of_a_model_that_peft_would_not_have_are_merged_alone(program, peers, tmp_path, flags, words):
    folder, _ = peers["llama"]
    done = lora_run(program, folder, tmp_path, "--model.lora.rank=3", *flags)
    assert done.returncode == 0, done.stderr
    convert = [program, "convert", "--from", tmp_path / "run", "--to"]
    refused = subprocess.run([*convert, tmp_path / "peft"], capture_output=True, text=True)
    assert refused.returncode == 78 and all(word in refused.stderr for word in words), refused.stderr
    assert not (tmp_path / "peft").exists()
    assert subprocess.run([*convert, tmp_path / "merged", "--merge"]).returncode == 0


def test_adapters_are_one_file(program, peers, tmp_path):
    folder, _ = peers["llama"]
    assert lora_run(program, folder, tmp_path, "--model.lora.rank=3", "--run.steps=1").returncode == 0
    refused = subprocess.run([program, "convert", "--from", tmp_path / "run", "--to", tmp_path / "peft",
                              "--max-shard-size=1KB"], capture_output=True, text=True)
    assert refused.returncode == 78 and "--max-shard-size: adapters are one file" in refused.stderr, refused.stderr


def test_a_folder_of_adapters_is_no_model(program, tessera, peers, tmp_path):
    folder, _ = peers["llama"]
    config = json.loads((folder / "adapters" / "adapter_config.json").read_text())
    seen = json.loads(tessera("inspect", "--json", folder / "adapters"))
    assert (seen["kind"], seen["rank"]) == ("PEFT folder of adapters", config["r"])
    assert seen["base_model"] == config["base_model_name_or_path"]
    assert sorted(seen["targets"]) == sorted(config["target_modules"])
    assert len(seen["tensors"]) == len(adapters(folder / "adapters"))
    shown = tessera("inspect", folder / "adapters")
    assert "model.lora.from" in shown and config["target_modules"][0] in shown
    for command in (["generate", "--prompt", "a"], ["eval", "--data", "ids.bin"]):
        done = subprocess.run([program, *command, "--model", folder / "adapters"], capture_output=True, text=True)
        assert done.returncode == 74, done.stderr
        for word in "PEFT folder of adapters", "model.lora.from", "--merge", config["base_model_name_or_path"]:
            assert word in done.stderr, done.stderr


def test_first_values_are_those_of_peft(program, tessera, peers, tmp_path):
    folder, _ = peers["llama"]
    lora_run(program, folder, tmp_path, "--model.lora.rank=4", "--optimizer.lr=0")
    tessera("convert", "--from", tmp_path / "run", "--to", tmp_path / "out")
    for key, value in adapters(tmp_path / "out").items():
        if "lora_B" in key:
            assert not value.any(), key
            continue
        bound = value.shape[1] ** -0.5  # kaiming_uniform of a = sqrt(5)
        assert 0.9 * bound < value.abs().max() <= bound, key
        assert abs(value.mean()) < 0.2 * bound, key


def test_a_run_goes_on_and_is_evaluated(program, tessera, peers, tmp_path):
    folder, _ = peers["llama"]
    flags = [f"--model.lora.from={folder / 'adapters'}"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert lora_run(program, folder, whole, *flags).returncode == 0
    assert lora_run(program, folder, parts, *flags, "--run.steps=4", "--checkpoint.every=4").returncode == 0
    refused = lora_run(program, folder, parts, *flags, "--optimizer.type=sgd")
    assert refused.returncode == 78 and "tessera convert --from" in refused.stderr, refused.stderr
    assert "--to FOLDER --merge, then --model.from=FOLDER" in refused.stderr, refused.stderr
    assert lora_run(program, folder, parts, *flags).returncode == 0
    one, other = checkpoint(whole, STEPS), checkpoint(parts, STEPS)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)

    def evaluated(path, *flags):
        text = tessera("eval", "--model", path, "--data", folder / "ids.bin", "--format", "tokens_u16", *flags)
        return json.loads(text.splitlines()[-1])["loss"]

    tessera("convert", "--from", parts / "run", "--to", tmp_path / "merged", "--merge")
    merged = evaluated(tmp_path / "merged")
    assert evaluated(parts / "run") == pytest.approx(merged, rel=1e-6)
    assert evaluated(parts / "run", "--mesh.tp=2") == pytest.approx(merged, rel=1e-6)


# Stages, and ranks of ZeRO, that hold no adapter at all.
@pytest.mark.parametrize("arguments", [
    ["--mesh.pp=3"], ["--mesh.dp=4", "--zero.stage=3"], ["--mesh.pp=2", "--mesh.dp=2", "--zero.stage=1"]],
    ids=["pp 3", "zero 3", "pp 2, zero 1"])
def test_adapters_in_one_layer(program, peers, tmp_path, arguments):
    folder, _ = peers["llama"]
    flags = ["--model.lora.rank=2", "--model.lora.targets=[\"blocks.1.attention.q\"]"]
    for name, more in (("one", []), ("mesh", arguments)):
        done = train(program, configuration_of(folder, tmp_path / name), "--ranks", "threads", *flags, *more,
                     check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    one, mesh = ([line["loss"] for line in metrics(tmp_path / name)] for name in ("one", "mesh"))
    assert mesh == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize("flags, words", [
    (["--model.lora.rank=4", "--model.lora.targets=[\"nothing\"]"], ["\"nothing\" names no linear layer", "attention.q"]),
    (["--model.lora.from={qwen3}"], ["another model", "q_proj.lora_B", "model.lora.from", "{qwen3}"]),
    (["--model.lora.from={llama}", "--model.lora.rank=5"], ["model.lora.rank is 5", "has 4"]),
    (["--model.lora.from={llama}", "--model.load_weights=false"], ["model.lora.from", "model.load_weights"]),
    (["--model.lora.from={dora}"], ["use_dora", "not supported"]),
    (["--model.lora.from={alora}"], ["{alora}/adapter_config.json", "alora_invocation_tokens is [5,6]"]),
    (["--model.lora.from={llama}", "--model.lora.targets=[\"q_proj\"]"],
     ["model.lora.targets", "q_proj", "{llama}", "Leave the key out"]),
    (["--model.lora.from={fewer}"], ["{fewer}/adapter_config.json", "target_modules", "up_proj", "adapter_model"]),
    (["--model.lora.from={more}"], ["{more}/adapter_config.json", "target_modules", "up_proj", "adapter_model"]),
    (["--model.lora.from={nan}"], ["{nan}", "q_proj.lora_B", "not a finite number"]),
    (["--model.lora.rank=100000"], ["model.lora.rank is 100000", "smaller side"]),
    (["--model.lora.rank=4", "--mesh.data_parallel=dp", "--mesh.dp=2"], ["model.lora.rank is 4"]),
])
def test_what_does_not_fit_is_refused(program, peers, tmp_path, flags, words):
    folder, _ = peers["llama"]
    names = {"llama": folder / "adapters", "qwen3": peers["qwen3"][0] / "adapters"}
    config = json.loads((folder / "adapters" / "adapter_config.json").read_text())
    tensors = adapters(folder / "adapters")
    broken = {key: value.clone() for key, value in tensors.items()}
    next(value for key, value in broken.items() if "q_proj.lora_B" in key)[1, 1] = float("nan")
    without_up = [module for module in config["target_modules"] if module != "up_proj"]
    for name, changed, kept in [
            ("dora", {"use_dora": True}, tensors),
            ("alora", {"alora_invocation_tokens": [5, 6]}, tensors),
            ("fewer", {"target_modules": without_up}, tensors),
            ("more", {}, {key: value for key, value in tensors.items() if "up_proj" not in key}),
            ("nan", {}, broken)]:
        names[name] = tmp_path / name
        names[name].mkdir()
        (names[name] / "adapter_config.json").write_text(json.dumps({**config, **changed}))
        save_file(kept, names[name] / "adapter_model.safetensors")
    path = configuration_of(folder, tmp_path)
    done = train(program, path, *(flag.format(**names) for flag in flags), check=False)
    assert done.returncode == 78, done.stderr
    for word in words:
        assert word.format(**names) in done.stderr, done.stderr


def test_dropout_is_said_to_be_left_out(program, peers, tmp_path):
    folder, _ = peers["llama"]
    config = json.loads((folder / "adapters" / "adapter_config.json").read_text())
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "adapter_config.json").write_text(json.dumps({**config, "lora_dropout": 0.25}))
    save_file(adapters(folder / "adapters"), tmp_path / "adapters" / "adapter_model.safetensors")
    done = train(program, configuration_of(folder, tmp_path), f"--model.lora.from={tmp_path / 'adapters'}",
                 "--run.steps=1")
    said = [line for line in done.stderr.splitlines() if "lora_dropout is 0.25" in line]
    assert said and "warning" in said[0], done.stderr


def test_own_targets_may_say_the_same(program, peers, tmp_path):
    folder, _ = peers["qwen3"]
    done = train(program, configuration_of(folder, tmp_path), f"--model.lora.from={folder / 'adapters'}",
                 "--model.lora.targets=[\"attention.q\", \"o_proj\", \"mlp.down\"]", "--dry-run", check=False)
    assert done.returncode == 0, done.stderr


def test_less_memory_is_asked_for(program, peers, tmp_path):
    folder, _ = peers["llama"]
    path = configuration_of(folder, tmp_path)

    def kibibytes_of_states(*flags):
        text = train(program, path, "--dry-run", *flags).stdout
        line = next(line for line in text.splitlines() if line.startswith("memory"))
        number, unit = line.split()[1:3]
        return float(number) * {"KiB": 1, "MiB": 1024}[unit]

    # Weights alone, and of the adapters gradients and two moments.
    whole, lora = kibibytes_of_states(), kibibytes_of_states("--model.lora.rank=2")
    assert whole / 4 < lora < 0.45 * whole


@pytest.mark.parametrize("name, rank, alpha", [("gpt2", 10, 5.6), ("phi3", 3, 6)])
def test_layers_that_a_folder_has_whole(program, tessera, tmp_path, name, rank, alpha):
    """q, k and v, or gate and up: an adapter each here, whose blocks are one in PEFT's."""
    folder = tmp_path / "from"
    folder.mkdir()
    made_folder(folder, make_model(CONFIGS[name](), len(name)))
    flags = [f"--model.lora.rank={rank}", f"--model.lora.alpha={alpha}"]
    assert lora_run(program, folder, tmp_path, *flags).returncode == 0
    tessera("convert", "--from", tmp_path / "run", "--to", tmp_path / "peft")
    tessera("convert", "--from", tmp_path / "run", "--to", tmp_path / "merged", "--merge")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        before = base(ids).logits
        theirs = peft.PeftModel.from_pretrained(base, tmp_path / "peft").eval()(ids).logits
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()(ids).logits
    assert torch.allclose(theirs, merged, atol=2e-5) and not torch.allclose(theirs, before, atol=1e-2)
    # Read again, in parts, they are as they were.
    again = lora_run(program, folder, tmp_path / "again", f"--model.lora.from={tmp_path / 'peft'}", "--optimizer.lr=0",
                     "--mesh.tp=2", world=2)
    assert again.returncode == 0 and "several layers" not in again.stderr, again.stderr[-3000:]
    tessera("convert", "--from", tmp_path / "again" / "run", "--to", tmp_path / "same")
    one, other = adapters(tmp_path / "peft"), adapters(tmp_path / "same")
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_an_adapter_of_peft_becomes_one_of_each_part(program, tmp_path):
    ids = made_folder(tmp_path, make_model(CONFIGS["gpt2"](), 4))
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    model = peft.get_peft_model(base, peft.LoraConfig(
        r=6, lora_alpha=12, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True))
    for key, parameter in model.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path / "adapters")
    _, loss = next(steps_of_transformers(model, ids))
    for mesh in (1, 2):
        done = lora_run(program, tmp_path, tmp_path / str(mesh), f"--model.lora.from={tmp_path / 'adapters'}",
                        f"--mesh.tp={mesh}", world=mesh)
        assert done.returncode == 0 and "train one of their own, where PEFT trains one" in done.stderr, done.stderr
        assert metrics(tmp_path / str(mesh))[0]["loss"] == pytest.approx(loss.item(), rel=2e-6)
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    patterns = {"rank_pattern": {"c_attn": 6}, "alpha_pattern": {"c_attn": 12}}
    for changed, words in (({"r": 4}, ["c_attn.lora_A.weight\" is [6, 40], expected [4, 40]"]),
                           ({"r": 2, "lora_alpha": 4, **patterns}, ["of rank 6 over all its rows", "3 layers there"]),
                           ({"r": 2, "lora_alpha": 5, **patterns}, ["rank_pattern is {\"c_attn\":6}", "not supported"])):
        (tmp_path / "adapters" / "adapter_config.json").write_text(json.dumps({**config, **changed}))
        done = lora_run(program, tmp_path, tmp_path / "refused", f"--model.lora.from={tmp_path / 'adapters'}")
        assert done.returncode == 78 and all(word in done.stderr for word in words), done.stderr


def test_adapters_that_peft_would_lose_are_told_at_once(program, tmp_path):
    """Of a dense layer in a model of experts."""
    made_folder(tmp_path, make_model(CONFIGS["deepseek_v3"](), 4))
    done = lora_run(program, tmp_path, tmp_path, "--model.lora.rank=3", *MORE["deepseek_v3"],
                    "--model.lora.targets=[\"blocks.0.mlp.down\"]")
    assert done.returncode == 0 and "will write this run with --merge alone" in done.stderr, done.stderr
    convert = [program, "convert", "--from", tmp_path / "run", "--to"]
    refused = subprocess.run([*convert, tmp_path / "peft"], capture_output=True, text=True)
    assert refused.returncode == 78 and "PEFT would take" in refused.stderr, refused.stderr
    subprocess.run([*convert, tmp_path / "merged", "--merge"], check=True, capture_output=True)
