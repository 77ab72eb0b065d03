"""Files of others: what they cost to refuse, and what their names may do to a terminal."""

import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tokenizers
from runs import ENDLESS, children_of, configuration, started, stop_after, wait_until

MANY = 150_000
LETTERS = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


def tokenizer_json(added):
    return json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        "post_processor": None, "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": {letter: id for id, letter in enumerate(LETTERS)}, "merges": []}})


def test_many_added_tokens_take_no_time(tessera, tmp_path):
    added = [{"id": 256 + i, "content": f"<{i}>", "special": True} for i in range(MANY)]
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(added))
    start = time.monotonic()
    tessera("inspect", "--json", tmp_path / "tokenizer.json", timeout=120)
    assert time.monotonic() - start < 12  # it was 25 and grew by its square


def test_an_added_id_that_is_taken_is_still_refused(program, tmp_path):
    added = [{"id": 300, "content": content, "special": True}
             for content in ("<x>", "<x>", "<y>")]
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(added))
    done = subprocess.run([program, "inspect", tmp_path / "tokenizer.json"], capture_output=True, text=True)
    assert done.returncode == 74
    assert "added_tokens[2] '<y>' has the id 300 of '<x>'" in done.stderr


@pytest.mark.parametrize("name, command", [
    ("config.json", ["generate", "--prompt", "a", "--model", "{folder}"]),
    ("config.json", ["inspect", "{folder}/config.json"]),
    ("config.json", ["train", "{folder}/config.json"]),
    ("tokenizer.json", ["inspect", "{folder}/tokenizer.json"]),
])
def test_a_huge_file_is_refused_unread(name, command, program, tmp_path):
    with open(tmp_path / name, "wb") as file:
        file.truncate(3 << 29)
    # By way of a small process: what a child of this one holds before it becomes the program counts as well.
    between = ("import os, subprocess, sys; child = subprocess.Popen(sys.argv[1:]); _, status, usage = "
               "os.wait4(child.pid, 0); print(usage.ru_maxrss); sys.exit(os.waitstatus_to_exitcode(status))")
    done = subprocess.run([sys.executable, "-c", between, program, *(word.format(folder=tmp_path) for word in command)],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode in (74, 78), done.stderr
    assert "1610612736 bytes" in done.stderr and "67108864" in done.stderr
    assert int(done.stdout) < 600 * 1024  # KiB; LibTorch alone takes some


def test_names_do_not_reach_the_terminal_raw(program, tmp_path):
    name = "a\x1b[2Jb\u009b31m"
    header = json.dumps({name: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, ensure_ascii=False).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0")
    done = subprocess.run([program, "inspect", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "a\\u001b[2Jb\\u009b31m" in done.stdout
    assert "\x1b" not in done.stdout and "\u009b" not in done.stdout


def test_names_in_messages_do_not_either(program, tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"model": {"lay\u009b31m\x7fers": 3}}))
    done = subprocess.run([program, "train", tmp_path / "run.json"], capture_output=True, text=True)
    assert done.returncode == 78
    assert "\\u009b31m\\u007f" in done.stderr, done.stderr
    assert "\u009b" not in done.stderr and "\x7f" not in done.stderr


# A report draws no point of a figure that is no number; inspect reads the steps alone.
@pytest.mark.parametrize("name, line, command, code, words", [
    ("samples.jsonl", '{"step": "x", "text": "a"}', "report", 74,
     "samples.jsonl: line 1: (bytes 9-12) type must be number"),
    ("samples.jsonl", '{"step": 1, "text": null}', "report", 74,
     "samples.jsonl: line 1: (bytes 20-24) type must be string"),
    ("samples.jsonl", '{"step": "x", "text": "a"}', "inspect", 0, ""),
    ("metrics.jsonl", '{"step": "x", "loss": 1}', "report", 74,
     "metrics.jsonl: line 2: (bytes 9-12) type must be number"),
    ("metrics.jsonl", '{"step": "x", "loss": 1}', "inspect", 74,
     "metrics.jsonl: line 2: (bytes 9-12) type must be number"),
    ("metrics.jsonl", "[1]", "report", 74, "metrics.jsonl: line 2: is no step of a run"),
    ("metrics.jsonl", "[1]", "inspect", 74, "metrics.jsonl: line 2: ")])
def test_a_value_of_another_type_is_named_with_its_line(name, line, command, code, words, program, tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "logs").mkdir()
    (run / "config.json").write_text("{}")
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2}\n')
    with open(run / name, "a") as file:
        file.write(line + "\n")
    flags = ["--out", tmp_path / "page.html"] if command == "report" else []
    done = subprocess.run([program, command, run, *flags], capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    assert not words or f"{run}/{words}" in done.stderr and "json.exception" not in done.stderr, done.stderr


def test_a_message_does_not_repeat_a_huge_file(program, tmp_path):
    (tmp_path / "config.json").write_text('{"run": "' + "x" * 5_000_000)
    done = subprocess.run([program, "inspect", tmp_path / "config.json"], capture_output=True, text=True)
    assert done.returncode in (74, 78) and len(done.stderr) < 1000


def test_a_broken_last_line_is_named_by_its_number(program, tmp_path):
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    (run / "config.json").write_text("{}")
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2}\n' * 41 + '{"step": 42, "los\n')
    done = subprocess.run([program, "inspect", run], capture_output=True, text=True)
    assert done.returncode == 74
    assert "metrics.jsonl: line 42" in done.stderr, done.stderr


def test_a_list_without_documents_is_no_input(program, tmp_path):
    (tmp_path / "tokenizer.json").write_text(tokenizer_json([]))
    (tmp_path / "none.json").write_text("[]")
    done = subprocess.run([program, "tokenize", "encode", "--tokenizer", tmp_path / "tokenizer.json",
                           "--input", tmp_path / "none.json", "--output", tmp_path / "out.u16"],
                          capture_output=True, text=True)
    assert done.returncode == 78 and "none.json: no text to encode" in done.stderr, done.stderr
    assert not (tmp_path / "out.u16").exists()


def test_blanks_before_json_take_no_time(program, tmp_path):
    (tmp_path / "tokenizer.json").write_text(tokenizer_json([]))
    for name, text in (("a.jsonl", '{"text": "ab"}'), ("a.json", '[{"text": "ab"}]')):
        (tmp_path / name).write_text(" " * (50 << 20) + text)
        start = time.monotonic()
        done = subprocess.run([program, "tokenize", "encode", "--tokenizer", tmp_path / "tokenizer.json",
                               "--input", tmp_path / name], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert time.monotonic() - start < 12


def test_a_file_that_is_cut_short_while_it_is_read_is_named(program, tmp_path):
    """As one whose disk fails: its pages are asked for, and not there."""
    text = tmp_path / "a\x1bb.txt"
    text.write_bytes(b"so it was, and so it is\n" * 3_000_000)
    with started(program, "tokenize", "train", "--input", text, "--vocab-size", "500", "--output",
                 tmp_path / "tokenizer.json", stderr=subprocess.PIPE, text=True) as reads:
        wait_until(lambda: str(text) in Path(f"/proc/{reads.pid}/maps").read_text(), reads)
        os.truncate(text, 4096)
        _, errors = reads.communicate(timeout=120)
    assert reads.returncode == 74, errors
    assert re.search(rf"error: {tmp_path}/a[?]b.txt: byte \d+ cannot be had: the file became shorter", errors), errors


def test_ranks_that_are_started_name_it_too(program, tokens, tmp_path):
    caught = []

    def look(process):
        for rank in children_of(process.pid):
            mask = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{rank}/status").read_text()).group(1)
            caught.append(int(mask, 16) >> (signal.SIGBUS - 1) & 1)
        process.terminate()

    path = configuration(tokens, tmp_path, mesh={"dp": 2}, checkpoint={"every": 0}, **ENDLESS)
    code, errors = stop_after(program, path, tmp_path, 2, look, "--nproc", "2")
    assert code == 75 and caught == [1, 1], errors
