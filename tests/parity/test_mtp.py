"""Multi-token prediction against the formula of DeepSeek-V3 (arXiv 2412.19437, eq. 21 to 25), on transformers' layers.

The order of eh_proj's columns and the norm in front of a module are those of the published weights, as vLLM, SGLang and
Megatron-Core read them.
"""

import json
import shutil
import subprocess

import pytest
import torch
import transformers
from runs import metrics, train
from safetensors.torch import load_file, save_file
from test_transformers_on_meshes import LENGTH, RATE, ROTARY, SAMPLES, VOCAB, configuration_of, made_folder, make_model
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

LAYERS, DEPTHS, WEIGHT = ROTARY["num_hidden_layers"], 2, 0.3


def config_of(**more):
    return transformers.DeepseekV3Config(
        n_routed_experts=8, num_experts_per_tok=2, n_group=4, topk_group=2, n_shared_experts=1,
        moe_intermediate_size=24, first_k_dense_replace=1, routed_scaling_factor=1.5, q_lora_rank=20,
        kv_lora_rank=12, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=10, num_nextn_predict_layers=DEPTHS,
        **{**ROTARY, "num_key_value_heads": 4}, **more)


class Module(torch.nn.Module):
    """What a module has beside its block: named as in published folders."""

    def __init__(self, config, index):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = deepseek.DeepseekV3RMSNorm(width, eps)
        self.hnorm = deepseek.DeepseekV3RMSNorm(width, eps)
        self.eh_proj = torch.nn.Linear(2 * width, width, bias=False)
        self.norm = deepseek.DeepseekV3RMSNorm(width, eps)
        self.block = deepseek.DeepseekV3DecoderLayer(config, index)

    def forward(self, embedded, hidden, positions):
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        return self.norm(self.block(x, position_embeddings=positions))


class Reference(torch.nn.Module):
    """The model, and behind it its modules; each shares the embedding and the head."""

    def __init__(self, config, depths=DEPTHS):
        super().__init__()
        self.model = make_model(config, seed=7)
        torch.manual_seed(8)
        self.modules_ahead = torch.nn.ModuleList(
            Module(self.model.config, LAYERS + depth) for depth in range(depths))
        with torch.no_grad():
            for parameter in self.modules_ahead.parameters():
                parameter.copy_(0.1 * torch.randn_like(parameter) + (1 if parameter.dim() == 1 else 0))

    def losses(self, tokens):
        """Of samples of LENGTH + 1 tokens: the main loss, and each depth's."""
        ids = tokens[:, :-1]
        length = ids.shape[1]
        positions = self.model.model.rotary_emb(self.model.model.embed_tokens(ids), torch.arange(length)[None])
        hidden = self.model.model(ids).last_hidden_state
        found = [self.loss_of(hidden, tokens[:, 1:])]
        for depth, module in enumerate(self.modules_ahead, 1):
            ahead = torch.nn.functional.pad(ids[:, depth:], (0, depth))
            hidden = module(self.model.model.embed_tokens(ahead), hidden, positions)
            found.append(self.loss_of(hidden[:, :length - depth], tokens[:, 1 + depth:]))
        return found

    def loss_of(self, hidden, targets):
        return torch.nn.functional.cross_entropy(self.model.lm_head(hidden).reshape(-1, VOCAB), targets.reshape(-1))

    def tensors_ahead(self):
        """Of a published folder, behind those of the model."""
        found = {}
        for depth, module in enumerate(self.modules_ahead):
            prefix = f"model.layers.{LAYERS + depth}."
            for name, tensor in unpacked(module.state_dict()).items():
                name = name.removeprefix("block.")
                found[prefix + ("shared_head.norm.weight" if name == "norm.weight" else name)] = tensor
            found[prefix + "embed_tokens.weight"] = self.model.model.embed_tokens.weight.detach().clone()
            found[prefix + "shared_head.head.weight"] = self.model.lm_head.weight.detach().clone()
        return found


def unpacked(state):
    """Experts one by one, as folders have them."""
    found = {}
    for name, tensor in state.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, rows in enumerate(tensor):
                stem = f"{name.removesuffix('gate_up_proj')}{expert}."
                found[stem + "gate_proj.weight"], found[stem + "up_proj.weight"] = (
                    part.clone() for part in rows.chunk(2))
        elif name.endswith("experts.down_proj"):
            for expert, rows in enumerate(tensor):
                found[f"{name.removesuffix('down_proj')}{expert}.down_proj.weight"] = rows.clone()
        else:
            found[name] = tensor.clone()
    return found


def made(folder, **more):
    """A folder as published, the tokens, and the reference."""
    reference = Reference(config_of(**more))
    ids = made_folder(folder, reference.model)
    path = folder / "model" / "model.safetensors"
    save_file({**load_file(path), **reference.tensors_ahead()}, path, {"format": "pt"})
    return reference, ids


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    return folder, *made(folder)


def batch(ids, step=0):
    return torch.stack([ids[k * LENGTH:k * LENGTH + LENGTH + 1] for k in range(step * SAMPLES, (step + 1) * SAMPLES)])


STILL = ["--model.moe.bias_balance=false"]
ONE_STEP = ["--run.steps=1", *STILL]
# A step of it is the gradient.
SGD = ["--optimizer.type=sgd", "--optimizer.lr=1", "--optimizer.momentum=0", "--optimizer.weight_decay=0",
       "--optimizer.clip_norm=0"]


@pytest.mark.parametrize("tied", [False, True])
def test_loss_and_gradients_are_those_of_the_formula(program, tessera, tmp_path, tied):
    reference, ids = made(tmp_path, tie_word_embeddings=tied)
    main, *ahead = reference.losses(batch(ids))
    (main + WEIGHT / DEPTHS * sum(ahead)).backward()
    train(program, configuration_of(tmp_path, tmp_path, checkpoint={"every": 1}), *ONE_STEP, *SGD)
    line = metrics(tmp_path)[0]
    assert line["loss"] == pytest.approx(main.item(), rel=1e-6)
    assert line["mtp_loss"] == pytest.approx(sum(ahead).item() / DEPTHS, rel=1e-6)
    tessera("convert", "--from", tmp_path / "run", "--to", tmp_path / "out")
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter -= parameter.grad
    before = load_file(tmp_path / "model" / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    expected = {**unpacked(reference.model.state_dict()), **reference.tensors_ahead()}
    for name, tensor in after.items():
        moved, theirs = tensor - before[name], expected[name] - before[name]
        assert (moved - theirs).norm() <= 1e-4 * theirs.norm() + 1e-7 * before[name].norm(), name
    assert any("eh_proj" in name for name in after)


def test_eight_steps(program, published, tmp_path):
    folder, _, ids = published
    torch.manual_seed(0)
    reference = made(tmp_path / "again")[0]
    decay = [p for p in reference.parameters() if p.dim() >= 2]
    plain = [p for p in reference.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
                                  lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    theirs = []
    for step in range(8):
        optimizer.zero_grad()
        main, *ahead = reference.losses(batch(ids, step))
        (main + WEIGHT / DEPTHS * sum(ahead)).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
        theirs.append((main.item(), sum(ahead).item() / DEPTHS))
    train(program, configuration_of(folder, tmp_path), *STILL)
    ours = [(line["loss"], line["mtp_loss"]) for line in metrics(tmp_path)]
    assert [loss for pair in ours for loss in pair] == pytest.approx(
        [loss for pair in theirs for loss in pair], rel=3e-5)


def test_a_published_folder_comes_back_bit_for_bit(program, tessera, published, tmp_path):
    folder, _, _ = published
    train(program, configuration_of(folder, tmp_path, checkpoint={"every": 1}), *ONE_STEP, "--optimizer.lr=0")
    tessera("convert", "--from", tmp_path / "run", "--to", tmp_path / "out")
    before = load_file(folder / "model" / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said["num_nextn_predict_layers"] == DEPTHS


def test_transformers_reads_what_a_run_writes(program, tessera, published, tmp_path):
    folder, _, ids = published
    path = configuration_of(folder, tmp_path, checkpoint={"every": 2})
    train(program, path, "--run.steps=2", *STILL)
    tessera("convert", "--from", tmp_path / "run", "--to", tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        tokens = batch(ids)
        loss = torch.nn.functional.cross_entropy(theirs(tokens[:, :-1]).logits.reshape(-1, VOCAB),
                                                 tokens[:, 1:].reshape(-1))
    train(program, configuration_of(folder, tmp_path / "again"), *ONE_STEP, f"--model.from={tmp_path / 'out'}")
    assert metrics(tmp_path / "again")[0]["loss"] == pytest.approx(loss.item(), rel=1e-6)


def test_without_modules_a_published_folder_is_the_model_alone(program, published, tmp_path):
    folder, reference, ids = published
    train(program, configuration_of(folder, tmp_path), *ONE_STEP, "--model.mtp.layers=0")
    line = metrics(tmp_path)[0]
    assert "mtp_loss" not in line
    assert line["loss"] == pytest.approx(reference.losses(batch(ids))[0].item(), rel=1e-6)


# As transformers writes one, whose config.json names modules that it does not keep.
def test_a_folder_whose_modules_are_not_there_is_the_model_alone(program, tessera, published, tmp_path):
    folder, reference, ids = published
    other = tmp_path / "other"
    shutil.copytree(folder / "model", other)
    kept = {name: tensor for name, tensor in load_file(other / "model.safetensors").items()
            if not any(name.startswith(f"model.layers.{LAYERS + k}.") for k in range(DEPTHS))}
    save_file(kept, other / "model.safetensors", {"format": "pt"})
    done = train(program, configuration_of(folder, tmp_path), *ONE_STEP, f"--model.from={other}")
    assert "leaves out" not in done.stderr, done.stderr
    line = metrics(tmp_path)[0]
    assert "mtp_loss" not in line
    assert line["loss"] == pytest.approx(reference.losses(batch(ids))[0].item(), rel=1e-6)
    tessera("convert", "--from", other, "--to", tmp_path / "out")
    back = load_file(tmp_path / "out" / "model.safetensors")
    assert back.keys() == kept.keys() and all(torch.equal(back[name], kept[name]) for name in kept)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    # Asked for, they are missed.
    done = train(program, configuration_of(folder, tmp_path / "asked"), *ONE_STEP, f"--model.from={other}",
                 f"--model.mtp.layers={DEPTHS}", check=False)
    assert done.returncode != 0 and "model.from has the weights of 0 modules" in done.stderr, done.stderr


# Adapters are beside the layers of the model alone.
def test_adapters_leave_a_folders_modules_out(program, published, tmp_path):
    folder, _, _ = published
    done = train(program, configuration_of(folder, tmp_path), *ONE_STEP, "--model.lora.rank=2")
    assert "mtp_loss" not in metrics(tmp_path)[0]
    assert f"model.from has {DEPTHS} modules" in done.stderr and "as adapters have none" in done.stderr, done.stderr


# Validation and `tessera eval` of a run with modules, which may begin a stage of their own.
def test_a_run_is_measured_by_the_model_alone(program, tessera, published, tmp_path):
    folder, _, _ = published
    ids = folder / "ids.bin"
    flags = [*ONE_STEP, f"--data.valid={ids}", "--validate.samples=8", "--optimizer.lr=0", "--batch.global=8"]
    found = []
    for name, more in (("alone", ["--model.mtp.layers=0"]),
                       ("one", []),
                       ("stages", ["--nproc=2", "--mesh.pp=2", "--pipeline.split=[3,0]"]),
                       ("zero", ["--nproc=2", "--mesh.dp=2", "--zero.stage=3"])):
        train(program, configuration_of(folder, tmp_path / name, checkpoint={"every": 1}), *flags, *more)
        found.append(metrics(tmp_path / name)[-1]["valid_loss"])
    assert found == pytest.approx([found[0]] * 4, rel=1e-6)
    said = [json.loads(tessera("eval", "--model", tmp_path / name / "run", "--data", ids, "--format", "tokens_u16",
                               "--seq-len", LENGTH)) for name in ("alone", "one")]
    assert said[0] == said[1]


# Nothing of the modules' losses is in what trains the model.
def test_a_weight_of_nothing_trains_the_model_as_without(program, published, tmp_path):
    folder, _, _ = published
    lines = []
    for name, more in (("none", ["--model.mtp.layers=0"]), ("nothing", ["--model.mtp.weight=0"])):
        train(program, configuration_of(folder, tmp_path / name), *STILL, *more)
        lines.append([(line["loss"], line["grad_norm"]) for line in metrics(tmp_path / name)])
    assert lines[0] == lines[1]


def test_a_copy_that_is_not_shared_is_refused(program, published, tmp_path):
    folder, _, _ = published
    tensors = load_file(folder / "model" / "model.safetensors")
    name = f"model.layers.{LAYERS}.embed_tokens.weight"
    tensors[name][0, 0] += 1
    other = tmp_path / "other" / "model"
    other.mkdir(parents=True)
    (other / "config.json").write_text((folder / "model" / "config.json").read_text())
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    done = train(program, configuration_of(folder, tmp_path), *STILL, f"--model.from={other}", check=False)
    assert done.returncode != 0 and f'"{name}" differs from "model.embed_tokens.weight"' in done.stderr, done.stderr


@pytest.mark.parametrize("arguments, said", [
    (["--model.family=llama", "--model.mtp.layers=1"], "model.family llama has no multi-token prediction"),
    (["--model.family=deepseek_v3", "--model.mtp.layers=16"], "Nearest model.mtp.layers: 15"),
    (["--model.family=deepseek_v3", "--model.mtp.layers=1", "--model.lora.rank=2"], "model.lora.rank is 2"),
    (["--model.family=deepseek_v3", "--model.mtp.layers=1", "--mesh.dp=2", "--mesh.data_parallel=dp"],
     "model.mtp.layers is 1, but with mesh.data_parallel dp"),
])
def test_what_does_not_fit_is_refused_by_name(program, published, tmp_path, arguments, said):
    config = {"run": {"dir": str(tmp_path), "name": "run", "steps": 2}, "batch": {"global": 4},
              "model": {"layers": 2, "hidden": 32, "heads": 4, "vocab": VOCAB, "max_seq": 16},
              "data": {"train": str(published[0] / "ids.bin"), "format": "tokens_u16", "seq_len": 16}}
    path = tmp_path / "run.json"
    path.write_text(json.dumps(config))
    done = subprocess.run([program, "train", path, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 78 and said in done.stderr, done.stderr
