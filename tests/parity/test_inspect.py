"""tessera inspect: every kind of file and folder, and what is none."""

import json
import re
import struct

import pytest
import torch
from safetensors.torch import save_file
from test_checkpoint import STEP, TENSORS, driver, save  # noqa: F401


def inspect(tessera, *arguments, code=0, says=""):
    return json.loads(tessera("inspect", "--json", *arguments, code=code, says=says))


def test_a_checkpoint(tessera, driver, tmp_path):
    step = save(driver, tmp_path, 3, 5)
    seen = inspect(tessera, step)
    assert (seen["kind"], seen["step"], seen["ranks"]) == ("checkpoint", STEP, 3)
    tensors = {row["name"]: row for row in seen["tensors"]}
    assert set(tensors) == set(TENSORS) | {"model.none", "model.rows_of_none"}
    assert seen["written by"] == "a program of one's own"
    assert tensors["model.embed.weight"]["shape"] == [13, 6]
    assert tensors["model.embed.weight"]["dtype"] == "F32"
    assert inspect(tessera, step / "manifest.json") == seen
    assert inspect(tessera, "--verify", step)["verified"] is True
    assert "model.norm.weight" in tessera("inspect", step)

    folder = inspect(tessera, tmp_path)
    assert [row["name"] for row in folder["checkpoints"]] == [f"step-{STEP}"]


@pytest.mark.parametrize("kind, said", [
    ("engine2", {"written by": "tessera::initialize()", "optimizer": "adamw", "client state": "words of my own"}),
    ("2", {"written by": "tessera::ShardedCheckpoint", "optimizer": "torch::optim::AdamW", "client state": "mine"}),
])
def test_a_checkpoint_of_a_module_of_ones_own(program, tessera, tmp_path, kind, said):
    driver = program.parents[1] / "tests" / "module_driver"
    tessera("launch", "-n", 2, "--", driver, kind, "fp32", tmp_path)
    step = tmp_path / "step-10"
    seen = inspect(tessera, step)
    for key, words in said.items():
        assert words in seen[key] and words in tessera("inspect", step), seen


def test_a_damaged_checkpoint(tessera, driver, tmp_path):
    step = save(driver, tmp_path, 3, 5)
    shard = sorted(step.glob("*.safetensors"))[1]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 4
    shard.write_bytes(content)
    seen = inspect(tessera, "--verify", step, code=74, says="checksum differs")
    assert seen["verified"] is False
    states = [row["state"] for row in seen["files"]]
    assert states[0] == states[2] == "good"
    assert shard.name in states[1] and "checksum differs" in states[1]
    [row] = inspect(tessera, "--verify", tmp_path, code=74, says="bad: ")["checkpoints"]
    assert row["state"].startswith("bad")
    shard.unlink()
    [row] = inspect(tessera, "--verify", tmp_path, code=74, says="is missing")["checkpoints"]
    assert f"{shard}: is missing" in row["state"]
    assert inspect(tessera, tmp_path)["checkpoints"] == [row]


def test_a_safetensors_file(tessera, tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"w": torch.zeros(2, 3, dtype=torch.bfloat16)}, path)
    seen = inspect(tessera, path)
    assert seen["tensors"] == [{"name": "w", "dtype": "BF16", "shape": [2, 3],
                                "bytes": 12}]
    path.write_bytes(path.read_bytes()[:-1])
    tessera("inspect", path, code=74, says='tensor "w" ends at byte 12 of the data, but the file has 11 of them')


def test_a_configuration(tessera, tmp_path):
    path = tmp_path / "run.json"
    path.write_text('{"run": {"steps": 12}} // short\n')
    assert inspect(tessera, path)["values"]["run"]["steps"] == 12
    assert "run.json:1:19" in tessera("inspect", path)
    path.write_text(json.dumps({"model": {
        "family": "mixtral", "layers": 2, "hidden": 8, "heads": 2, "ffn": 10, "vocab": 20, "tie_embeddings": False,
        "moe": {"experts": 4, "top_k": 1, "shared_experts": 1, "ffn": 6}}}))
    expert, others = 3 * 8 * 6, 2 * 20 * 8 + 8 + 2 * (4 * 8 * 8 + 2 * 8 + 4 * 8)
    seen = inspect(tessera, path)
    assert seen["parameters"] == others + 2 * 5 * expert and seen["active_parameters"] == others + 2 * 2 * expert
    path.write_text('{"run": {"stepz": 12}}')
    tessera("inspect", path, code=78, says='run.json:1:10: unknown key "run.stepz". Did you mean "run.steps"?')


def test_a_token_file(tessera, tmp_path):
    path = tmp_path / "train.bin"
    path.write_bytes(struct.pack("<5H", 1, 2, 3, 65535, 0))
    seen = inspect(tessera, path)
    assert (seen["format"], seen["tokens"]) == ("tokens_u16", 5)


def test_a_tokenizer(tessera, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and the dog sat too\n" * 20)
    tessera("tokenize", "train", "--vocab-size", 270, "--output",
            tmp_path / "tokenizer.json", "--input", text)
    seen = inspect(tessera, tmp_path / "tokenizer.json")
    assert seen["kind"] == "tokenizer" and seen["vocab_size"] == 270
    assert inspect(tessera, tmp_path)["kind"] == "tokenizer"
    assert inspect(tessera, tmp_path)["chat template"] == "none"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": "{{ 1 }}"}))
    seen = inspect(tessera, tmp_path)
    assert seen["special tokens"] == {"eos_token": "</s>"} and seen["vocab_size"] == 270
    assert seen["chat template"] == str(tmp_path / "tokenizer_config.json")
    alone = inspect(tessera, tmp_path / "tokenizer_config.json")
    assert alone["kind"] == "configuration of a tokenizer" and alone["special tokens"] == {"eos_token": "</s>"}
    (tmp_path / "tokenizer.json").unlink()
    assert "not beside it" in inspect(tessera, tmp_path)["vocabulary"]
    assert "eos_token" in tessera("inspect", tmp_path)


def test_a_model_type_that_is_no_word(tessera, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": 3}')
    tessera("inspect", tmp_path, code=74, says="config.json: model_type: expected a string, got 3")


def test_a_run(tessera, driver, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "config.json").write_text('{"run": {"name": "short"}}')
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 6, "loss": 2.5}\n{"step": 7, "loss": 2.25}\n{"step": 8, "lo')
    save(driver, tmp_path / "checkpoints", 2, 3)
    seen = inspect(tessera, tmp_path)
    assert (seen["kind"], seen["name"]) == ("run", "short")
    assert seen["last step"] == {"step": 7, "loss": 2.25}
    assert [row["name"] for row in seen["checkpoints"]] == [f"step-{STEP}"]


def test_a_folder_of_runs_and_a_page_on_them(tessera, tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    (tmp_path / "run.json").write_text(json.dumps({
        "run": {"steps": 6, "dir": "runs", "threads": 1}, "batch": {"global": 4}, "checkpoint": {"every": 3},
        "model": {"layers": 1, "hidden": 32, "heads": 4, "vocab": 300, "max_seq": 32},
        "data": {"train": "text.txt", "valid": "text.txt", "seq_len": 16},
        "monitor": {"tensorboard": False, "by_rank": True}}))
    for name, steps in ("one", 6), ("two", 3), ("two", 6):
        tessera("train", "run.json", "--nproc", 2, f"--run.name={name}", f"--run.steps={steps}", cwd=tmp_path)
    runs = {row["name"]: row for row in inspect(tessera, tmp_path / "runs")["runs"]}
    assert set(runs) == {"one", "two"} and runs["two"]["step"] == runs["two"]["of"] == 6
    assert runs["one"]["state"] == "done" and runs["one"]["loss"] > 0

    assert runs["one"]["best_valid_loss"] > 0
    assert all(re.fullmatch(r"\d+\.\d{1,5}", word) for row in tessera("inspect", tmp_path / "runs").splitlines()[2:]
               for word in row.split() if "." in word)

    seen = inspect(tessera, tmp_path / "runs" / "one")
    assert {"step", "loss", "grad_norm"} < set(seen["last step"]) and "steps" in seen["summary"]
    assert seen["parameters"] == seen["active_parameters"] > 0
    shown = tessera("inspect", tmp_path / "runs" / "one")
    lines = {line.split("  ")[0]: line for line in shown.splitlines()}
    assert re.fullmatch(r"last step +step 6, loss \d\.\d{1,5}, valid_loss \d\.\d{1,5}, .*tokens_per_s \d+.*",
                        lines["last step"])
    assert re.fullmatch(r"summary +.*seconds \d.*", lines["summary"])
    assert max(map(len, shown.splitlines())) < 140 and not re.search(r"[1-9]\.\d{6}", shown), shown

    step = inspect(tessera, tmp_path / "runs" / "one" / "checkpoints" / "step-6")
    assert step["written by"] == 'tessera train, of the run "one"' and step["optimizer"] == "adamw", step
    assert step["parameters"] == seen["parameters"]
    seen = inspect(tessera, "--verify", tmp_path / "runs" / "one")["checkpoints"]
    assert [(row["step"], row["state"]) for row in seen] == [(6, "good"), (3, "good")]
    assert all(row["bytes"] > 0 and row["loss"] > 0 and row["valid_loss"] > 0 for row in seen)

    # What a rank had under way never lasts longer than its step.
    for line in (tmp_path / "runs" / "one" / "metrics.jsonl").read_text().splitlines():
        step = json.loads(line)
        assert 0 < step["comm_s"] <= step["step_s"] and step["exposed_comm_s"] <= step["step_s"]
        keys = ("work_s", "comm_s", "exposed_comm_s", "comm_bytes", "bubble", "mem_peak_mib")
        of_ranks = {key: step[f"{key}_by_rank"] for key in keys}
        assert all(len(values) == 2 for values in of_ranks.values())
        assert all(step[key] == max(of_ranks[key]) for key in ("comm_s", "comm_bytes", "mem_peak_mib"))
        busiest = [bytes_ for seconds, bytes_ in zip(of_ranks["comm_s"], of_ranks["comm_bytes"])
                   if seconds == step["comm_s"]]
        assert any(step["comm_gbps"] == pytest.approx(bytes_ / step["comm_s"] / 1e9) for bytes_ in busiest)
        assert step["work_s"] == pytest.approx(sum(of_ranks["work_s"]) / 2) and step["bubble"] == 0
        assert step["work_max_s"] == of_ranks["work_s"][step["slowest_rank"]]

    page = tmp_path / "runs" / "two" / "report.html"
    assert tessera("report", tmp_path / "runs" / "two").strip() == str(page)
    text = page.read_text()
    assert "resumed after step 3" in text and "all_reduce" in text and "<script" not in text
    assert "work by rank" in text and "memory by rank" in text
    tessera("report", tmp_path / "runs" / "one", tmp_path / "runs" / "two", "--out", tmp_path / "both.html")
    assert "Configured otherwise" in (tmp_path / "both.html").read_text()
    tessera("report", tmp_path / "runs" / "one", "--out", tmp_path / "both.html")
    assert "Configured otherwise" not in (tmp_path / "both.html").read_text()
    tessera("report", tmp_path, code=74, says=f"{tmp_path}: is no folder of a run: it has no metrics.jsonl")


@pytest.mark.parametrize("name, says", [
    ("notes.txt", "is none of what inspect knows. Tried: safetensors"),
    ("empty", "is none of what inspect knows. Tried: a checkpoint"), ("missing", "there is no such file or folder")])
def test_what_is_none_of_these_is_refused(tessera, tmp_path, name, says):
    if name == "notes.txt":
        (tmp_path / name).write_text("hello")
    if name == "empty":
        (tmp_path / name).mkdir()
    tessera("inspect", tmp_path / name, code=74, says=f"{tmp_path / name}: {says}")
