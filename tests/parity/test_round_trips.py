"""Hugging Face folders through a run and back: what they said is still said."""

import json
import shutil

import pytest
import tokenizers
import torch
import transformers
from runs import train
from safetensors.torch import load_file, save_file
from test_models import CONFIGS

TEXT = "".join(
    f"In the year {year} the river rose {year % 7} feet, \u00fcber \u4e2d.\n"
    for year in range(1800, 1860))
VOCAB = 320
TEMPLATE = ("{%- for message in messages %}<{{ message['role'] }}>"
            "{{ message['content'] }}{%- endfor %}\n")
# Of a folder's single file of weights, all else is in `kept`.
NOT_KEPT = {"README.md", "pytorch_model.bin"}


def write_tokenizer(folder):
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(
        [TEXT], vocab_size=300, show_progress=False,
        special_tokens=["<|endoftext|>", "<s>", "</s>", "<pad>"])
    trained.save(str(folder / "tokenizer.json"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>",
        eos_token="</s>", pad_token="<pad>", chat_template=TEMPLATE,
        model_max_length=48)
    tokenizer.save_pretrained(folder)
    (folder / "special_tokens_map.json").write_text('{"bos_token": "<s>"}')
    (folder / "added_tokens.json").write_text('{"<pad>": 3}')


def write_folder(folder, name, dtype=torch.float32):
    """As transformers writes it, with a tokenizer, a template and keys of somebody's own."""
    config = CONFIGS[name]()
    config.vocab_size = VOCAB
    config.pad_token_id = 3
    config.house_key = {"of": ["nobody", 1e-7]}
    torch.manual_seed(4)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    model.generation_config.update(temperature=0.6, top_p=0.95, do_sample=True,
                                   eos_token_id=[2, 0])
    model.save_pretrained(folder)
    write_tokenizer(folder)
    (folder / "README.md").write_text("What the weights were.")
    (folder / "pytorch_model.bin").write_bytes(b"other weights")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()
            if path.name not in NOT_KEPT}


def train_without_learning(program, tmp_path, source, **sections):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    config = {
        "run": {"dir": str(tmp_path), "name": "run", "steps": 1, "threads": 1},
        "model": {"from": str(source), "load_weights": True},
        "data": {"train": str(text), "seq_len": 16},
        "batch": {"global": 2},
        "precision": {"compute": "fp32"},
        "optimizer": {"lr": 0.0},
        "schedule": {"type": "constant", "warmup": 0},
        "checkpoint": {"every": 1},
        "monitor": {"tensorboard": False},
    }
    for section, values in sections.items():
        config[section].update(values)
    path = tmp_path / "run.json"
    path.write_text(json.dumps(config))
    return train(program, str(path))


@pytest.mark.parametrize("name", [
    "gpt2", "llama_grouped", "llama_scaled", "qwen2_tied", "qwen3", "olmo2_grouped", "mixtral", "qwen3_moe_sparse",
    "deepseek_v3", "mistral", "mistral_full", "qwen2_window", "qwen3_by_layer", "mixtral_window", "qwen3_moe_window",
    "gemma3", "gemma3_scaled", "phi3", "phi3_tied_window"])
def test_a_folder_comes_back_byte_for_byte(name, program, tessera, tmp_path):
    source = tmp_path / "source"
    write_folder(source, name)
    before = contents(source)
    assert {"config.json", "generation_config.json", "model.safetensors",
            "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
            "special_tokens_map.json", "added_tokens.json"} <= before.keys()
    # A step of the bias is no learning rate's.
    still = {"model": {"moe": {"bias_balance": False}}} if name == "deepseek_v3" else {}
    train_without_learning(program, tmp_path, source, **still)
    shutil.rmtree(source)  # the run has what it needs
    tessera("convert", "--from", tmp_path / "run", "--to", tmp_path / "out")
    after = contents(tmp_path / "out")
    assert after.keys() == before.keys()
    for file, held in before.items():
        assert after[file] == held, file


def test_only_what_changed_is_said_otherwise(program, tessera, tmp_path):
    source = tmp_path / "source"
    write_folder(source, "mixtral", torch.bfloat16)
    before = contents(source)
    train_without_learning(program, tmp_path, source,
                           model={"moe": {"aux_loss": 0.5}})
    tessera("convert", "--from", tmp_path / "run", "--to", tmp_path / "same")
    tessera("convert", "--from", tmp_path / "run", "--to", tmp_path / "wide",
            "--dtype", "fp32")
    said = json.loads(before["config.json"])
    same = json.loads((tmp_path / "same" / "config.json").read_text())
    assert same == said | {"router_aux_loss_coef": 0.5}
    wide = json.loads((tmp_path / "wide" / "config.json").read_text())
    assert wide == same | {"dtype": "float32"}
    assert list(wide) == list(said)
    assert (tmp_path / "same" / "model.safetensors").read_bytes() == \
        before["model.safetensors"]


def test_another_tokenizer_is_not_the_folders(program, tessera, tmp_path):
    source = tmp_path / "source"
    write_folder(source, "llama_grouped")
    other = tokenizers.ByteLevelBPETokenizer()
    other.train_from_iterator([TEXT[:600]], vocab_size=290, show_progress=False,
                              special_tokens=["<|endoftext|>"])
    other.save(str(tmp_path / "tokenizer.json"))
    train_without_learning(program, tmp_path, source, data={
        "tokenizer": str(tmp_path / "tokenizer.json")})
    out = tmp_path / "out"
    tessera("convert", "--from", tmp_path / "run", "--to", out)
    back = transformers.AutoTokenizer.from_pretrained(out)
    assert back("the river").input_ids == other.encode("the river").ids
    assert not (out / "chat_template.jinja").exists()
    config = json.loads((out / "config.json").read_text())
    generation = json.loads((out / "generation_config.json").read_text())
    for said in (config, generation):
        assert said["eos_token_id"] == said["bos_token_id"] == 0 and said.get("pad_token_id") is None
    assert config["house_key"] == {"of": ["nobody", 1e-7]}


@pytest.mark.parametrize("word, dtype", [
    ("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp64", torch.float64)])
def test_a_folder_is_converted_to_another_type(word, dtype, tessera, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    write_folder(source, "llama_grouped")
    tessera("convert", "--from", source, "--to", out, "--dtype", word)
    tensors = load_file(source / "model.safetensors")
    back = load_file(out / "model.safetensors")
    assert tensors.keys() == back.keys()
    for key, value in back.items():
        assert value.dtype == dtype
        assert torch.equal(tensors[key].to(dtype), value), key
    said = json.loads((out / "config.json").read_text())
    assert said["dtype"] == str(dtype).removeprefix("torch.")


def test_a_large_model_is_split_as_transformers_splits_it(tessera, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    write_folder(source, "llama_grouped")
    whole = load_file(source / "model.safetensors")
    most = sum(value.nbytes for value in whole.values()) // 3
    tessera("convert", "--from", source, "--to", out, "--max-shard-size", f"{most}B")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in whole.values())
    files = sorted(set(index["weight_map"].values()))
    assert files == sorted(path.name for path in out.glob("*.safetensors")) and len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    for file in files:
        held = load_file(out / file)
        assert sum(value.nbytes for value in held.values()) <= most or len(held) == 1
        for key, value in held.items():
            assert index["weight_map"].pop(key) == file and torch.equal(whole[key], value), key
    assert not index["weight_map"]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in whole.items())
    tessera("convert", "--from", out, "--to", tmp_path / "one")  # and it is read
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_a_run_starts_from_a_run(program, tessera, tmp_path):
    source = tmp_path / "source"
    write_folder(source, "llama_grouped")
    before = contents(source)
    (tmp_path / "one").mkdir()
    train_without_learning(program, tmp_path / "one", source)
    shutil.rmtree(source)
    first = tmp_path / "one" / "run"
    for name, start in [("run", first), ("step", first / "checkpoints" / "step-1")]:
        (tmp_path / name).mkdir()
        train_without_learning(program, tmp_path / name, start)
        tessera("convert", "--from", tmp_path / name / "run",
                "--to", tmp_path / name / "out")
        assert contents(tmp_path / name / "out") == before


def test_a_start_of_other_sizes_is_refused(program, tessera, tmp_path):
    source = tmp_path / "source"
    write_folder(source, "llama_grouped")
    train_without_learning(program, tmp_path, source)
    done = train(program, str(tmp_path / "run.json"), "--run.name=other",
                 f"--model.from={tmp_path / 'run'}", "--model.hidden=64",
                 check=False)
    assert done.returncode == 78
    assert "model.hidden is 64" in done.stderr and "60" in done.stderr


def test_what_balances_experts_stays_fp32(program, tessera, tmp_path):
    """A bias as large as those of trained models, whose choices bf16 would change: read, trained beside and written."""
    losses = {}
    (tmp_path / "text.txt").write_text(TEXT)
    for name, offset in {"small": 0.0, "large": 7.5}.items():
        source = tmp_path / name
        write_folder(source, "deepseek_v3", torch.bfloat16)
        weights = load_file(source / "model.safetensors")
        biases = [key for key in weights if key.endswith("e_score_correction_bias")]
        torch.manual_seed(9)
        for key in biases:
            weights[key] = offset + 0.05 * torch.randn(weights[key].shape)
        save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
        losses[name] = [json.loads(tessera(
            "eval", "--model", source, "--data", tmp_path / "text.txt", "--seq-len", "16", "--dtype", dtype,
        ).splitlines()[-1])["loss"] for dtype in ("bf16", "fp16")]
        train_without_learning(program, tmp_path, source, run={"name": f"{name}-run"}, precision={"compute": "bf16"},
                               model={"moe": {"bias_balance": False}})
        for what in (source, tmp_path / f"{name}-run"):
            to = tmp_path / f"{name}-out-{what.name}"
            tessera("convert", "--from", what, "--to", to)
            out = load_file(to / "model.safetensors")
            for key, held in weights.items():
                assert out[key].dtype == held.dtype and torch.equal(out[key], held), key
    assert biases and losses["large"] == losses["small"]
