"""What a command writes to, and what it reads when reading fails: nothing of a user's is lost."""

import json
import os
import subprocess

import pytest
from runs import ENDLESS, configuration, stop_after, train


@pytest.fixture
def folder(program, tmp_path):
    """With a text, its tokenizer, and the configuration of a run on it."""
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 40)
    done = call(program, "tokenize", "train", "--input", tmp_path / "text.txt", "--vocab-size", 270, "--output",
                tmp_path / "tok.json")
    assert done.returncode == 0, done.stderr
    configuration({"train": str(tmp_path / "text.txt")}, tmp_path,
                  {"layers": 2, "hidden": 16, "heads": 2, "vocab": 270, "max_seq": 16}, run={"steps": 2},
                  data={"format": "auto", "tokenizer": str(tmp_path / "tok.json")}, schedule={"warmup": 0},
                  checkpoint={"every": 2})
    return tmp_path


def call(program, *arguments, **options):
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=120, **options)


def test_input_that_cannot_be_read_is_no_empty_text(program, folder):
    train(program, folder / "run.json")
    ids = folder / "good.u16"
    done = call(program, "tokenize", "encode", "--tokenizer", folder / "tok.json", "--output", ids, input="a text")
    assert done.returncode == 0
    before = ids.read_bytes()
    for arguments in (["tokenize", "encode", "--tokenizer", folder / "tok.json", "--output", ids],
                      ["tokenize", "decode", "--tokenizer", folder / "tok.json", "--jsonl"],
                      ["generate", "--model", folder / "run", "--prompt-file", "-", "--max-tokens", 2]):
        unreadable = os.open(folder, os.O_RDONLY)  # read() of a folder fails
        try:
            done = call(program, *arguments, stdin=unreadable)
        finally:
            os.close(unreadable)
        assert done.returncode == 74 and "standard input: reading failed" in done.stderr, (arguments, done.stderr)
    assert ids.read_bytes() == before


def test_what_is_no_output_of_its_kind_is_not_replaced(program, folder):
    (folder / "link.u16").symlink_to("text.txt")
    train_on = ["tokenize", "train", "--input", folder / "text.txt", "--vocab-size", 270, "--output"]
    encode = ["tokenize", "encode", "--tokenizer", folder / "tok.json", "--input", folder / "text.txt", "--output"]
    (folder / "cluster.json").write_text(json.dumps({
        "nodes": 1, "devices_per_node": 2, "device": {"kind": "cpu", "tflops": 0.1, "memory_gib": 1},
        "in_node": {"latency_us": 1, "gb_per_s": 1}, "between_nodes": {"latency_us": 1, "gb_per_s": 1}}))
    plan = ["plan", folder / "run.json", "--cluster", folder / "cluster.json"]
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    for arguments in ([*train_on, folder / "run.json"], [*encode, folder / "link.u16"],
                      [*plan, "--emit", folder / "text.txt"], [*plan, "--json", folder / "text.txt"],
                      [*plan, f"--data.train={folder}/t*.txt", "--emit", folder / "text.txt"], [*plan, "--emit", ""], ["generate", "--model", folder, "--prompt-file", ""]):
        done = call(program, *arguments)
        assert done.returncode == 2, (arguments, done.stderr)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
    assert call(program, *train_on, folder / "tok.json").returncode == 0  # a tokenizer by a tokenizer


def test_a_key_has_one_value_on_a_command_line(program, folder):
    done = call(program, "train", folder / "run.json", "--run.steps=3", "--set", "run.steps=2", "--print-config")
    assert done.returncode == 2 and "--run.steps=3 and --set run.steps=2 set one key" in done.stderr, done.stderr


def test_one_odd_line_does_not_hide_the_other_runs(program, folder):
    train(program, folder / "run.json")
    odd = folder / "odd"
    (odd / "logs").mkdir(parents=True)
    (odd / "config.json").write_text("{}")
    (odd / "metrics.jsonl").write_text('{"loss": 1}\n')
    done = call(program, "inspect", "--json", folder)
    assert done.returncode == 0, done.stderr
    assert {"odd", "run"} <= {row["name"] for row in json.loads(done.stdout)["runs"]}


def test_all_ranks_of_a_run_under_way_read_one_checkpoint(program, tokens, tmp_path):
    path = configuration(tokens, tmp_path, **{**ENDLESS, "checkpoint": {"every": 1, "keep": 0}})

    def evaluate(process):
        for _ in range(3):
            done = call(program, "eval", "--model", tmp_path / "run", "--data", tokens["valid"], "--format", "tokens_u16",
                        "--seq-len", 16, "--nproc", 2)
            assert done.returncode == 0, done.stderr
        process.terminate()

    code, errors = stop_after(program, path, tmp_path, 5, evaluate)
    assert code in (75, -15, 143), errors
