"""tessera eval and tessera generate against transformers, on the same folder."""

import itertools
import json
import math
import os
import signal
import subprocess

import pytest
import torch
import transformers
import year_model
from runs import configuration, started, train
from year_model import PROMPT, TEXT


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return year_model.save(tmp_path_factory.mktemp("folder"))


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


@pytest.mark.parametrize("flags", [[], ["--nproc", "2"], ["--nproc", "2", "--ranks", "threads"]],
                         ids=["one rank", "processes", "threads"])
def test_an_eval_that_is_stopped_leaves_no_tokens(program, folder, tmp_path, flags):
    (tmp_path / "text.txt").write_text(TEXT * 3000)
    kept = tmp_path / "tmp"
    kept.mkdir()
    with started(program, "eval", "--model", folder[0], "--data", tmp_path / "text.txt", "--seq-len", 8, *flags,
                 stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                 env={**os.environ, "TMPDIR": str(kept)}) as running:
        said = itertools.takewhile(lambda line: "evaluating" not in line, running.stderr)
        assert "error" not in "".join(said)
        assert list(kept.glob("tessera-eval-*/*"))
        running.send_signal(signal.SIGTERM)
        running.communicate(timeout=60)
    assert running.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM)
    assert not list(kept.iterdir())


def test_a_model_that_was_made_longer(program, tessera, folder, tmp_path):
    path, _, tokenizer = folder
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    longer = {"from": str(path), "load_weights": True, "max_seq": 128,
              "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_seq": 64}}
    train(program, configuration(
        {"train": str(text)}, tmp_path, only_model=longer, run={"steps": 1}, data={"format": "auto", "seq_len": 128},
        batch={"global": 2}, optimizer={"lr": 0.0}, schedule={"type": "constant", "warmup": 0},
        checkpoint={"every": 1}))
    tessera("convert", "--from", tmp_path / "run", "--to", tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    rope = model.config.rope_parameters
    assert model.config.max_position_embeddings == 128
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 2.0, 64)
    expected = mean_loss(model, tokenizer.encode(TEXT).ids, 128)
    for source in (tmp_path / "run", tmp_path / "out"):
        said = tessera("eval", "--model", source, "--data", text, "--seq-len", 128)
        assert json.loads(said.splitlines()[-1])["loss"] == pytest.approx(expected, rel=1e-5)


def test_greedy_text(tessera, folder):
    path, model, tokenizer = folder
    ids = torch.tensor([tokenizer.encode(PROMPT).ids])
    # Ids 300 .. 319 have no text: Tessera never draws them.
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=20,
        do_sample=False, suppress_tokens=list(range(300, 320)), pad_token_id=0)
    text = tessera("generate", "--model", path, "--prompt", PROMPT,
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


@pytest.mark.parametrize("arguments, code, says", [
    (["eval", "--data", "x.txt"], 2, "--model is required"),
    (["eval", "--model", "nowhere", "--data", "x.txt"], 74, "nowhere: there is no such folder"),
    (["eval", "--model", "{folder}", "--data", "nowhere.txt"], 78, "--data: 'nowhere.txt' does not exist"),
    (["eval", "--model", "{folder}", "--data", "{text}", "--seq-len", "65"], 78,
     "--seq-len 65 is longer than the model's max_seq 64"),
    (["eval", "--model", "{folder}", "--data", "{text}", "--dtype", "int"], 2, '--dtype "int": expected fp32, bf16'),
    (["generate", "--model", "{folder}", "--prompt", "a", "--top-p", "0"], 2, '--top-p: "0" is no number above 0'),
    (["generate", "--model", "{folder}", "--prompt", "a", "--max-tokens", "0"], 2,
     '--max-tokens: "0" is no whole number from 1'),
])
def test_bad_input(tessera, folder, tmp_path, arguments, code, says):
    (tmp_path / "text.txt").write_text(TEXT)
    words = [word.format(folder=folder[0], text=tmp_path / "text.txt")
             for word in arguments]
    tessera(*words, code=code, says=says, cwd=tmp_path)
