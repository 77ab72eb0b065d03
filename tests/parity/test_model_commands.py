"""tessera eval and tessera generate against transformers, on the same folder."""

import json
import math

import pytest
import tokenizers
import torch
import transformers

TEXT = "".join(
    f"In the year {year} the river rose {year % 7} feet, \u00fcber \u4e2d.\n"
    for year in range(1800, 1860))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random Llama with a byte-level BPE tokenizer of its own."""
    path = tmp_path_factory.mktemp("folder")
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([TEXT], vocab_size=300, show_progress=False,
                                  special_tokens=["<|endoftext|>"])
    tokenizer.save(str(path / "tokenizer.json"))
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=320, hidden_size=48, intermediate_size=96,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, bos_token_id=0, eos_token_id=0,
        initializer_range=0.2))
    model.save_pretrained(path)
    return path, model.eval(), tokenizer


def mean_loss(model, ids, window):
    """Every token but the first predicted once, from its own window."""
    total = 0.0
    for first in range(0, len(ids) - 1, window):
        part = torch.tensor(ids[first:first + window + 1])
        with torch.no_grad():
            logits = model(input_ids=part[None, :-1]).logits[0]
        total += torch.nn.functional.cross_entropy(
            logits, part[1:], reduction="sum").item()
    return total / (len(ids) - 1)


@pytest.mark.parametrize("window", [64, 17])
def test_eval(tessera, folder, tmp_path, window):
    path, model, tokenizer = folder
    (tmp_path / "text.txt").write_text(TEXT)
    ids = tokenizer.encode(TEXT).ids
    out = tessera("eval", "--model", path, "--data", tmp_path / "text.txt",
                  "--seq-len", window)
    result = json.loads(out.splitlines()[-1])
    expected = mean_loss(model, ids, window)
    assert result["tokens"] == len(ids) - 1
    assert result["loss"] == pytest.approx(expected, rel=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(expected), rel=1e-4)


def test_greedy_text(tessera, folder):
    path, model, tokenizer = folder
    prompt = "In the year 1812 the river"
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    # Ids 300 .. 319 have no text: Tessera never draws them.
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=20,
        do_sample=False, suppress_tokens=list(range(300, 320)), pad_token_id=0)
    text = tessera("generate", "--model", path, "--prompt", prompt,
                   "--max-tokens", 20, "--temperature", 0)
    assert text.rstrip("\n") == tokenizer.decode(
        expected[0].tolist(), skip_special_tokens=True).rstrip("\n")


def test_seeds(tessera, folder):
    path, _, _ = folder

    def text(seed):
        return tessera("generate", "--model", path, "--prompt", "In",
                       "--max-tokens", 12, "--seed", seed)

    assert text(1) == text(1)
    assert text(1) != text(2)


@pytest.mark.parametrize("arguments, code", [
    (["eval", "--data", "x.txt"], 2),
    (["eval", "--model", "nowhere", "--data", "x.txt"], 74),
    (["eval", "--model", "{folder}", "--data", "nowhere.txt"], 78),
    (["eval", "--model", "{folder}", "--data", "{text}", "--seq-len", "65"], 78),
    (["eval", "--model", "{folder}", "--data", "{text}", "--dtype", "int"], 2),
    (["generate", "--model", "{folder}", "--prompt", "a", "--top-p", "0"], 2),
    (["generate", "--model", "{folder}", "--prompt", "a", "--max-tokens", "0"],
     2),
])
def test_bad_input(tessera, folder, tmp_path, arguments, code):
    (tmp_path / "text.txt").write_text(TEXT)
    words = [word.format(folder=folder[0], text=tmp_path / "text.txt")
             for word in arguments]
    tessera(*words, code=code, cwd=tmp_path)
