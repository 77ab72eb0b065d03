"""States in files (zero.offload): the same bits, also resumed, and a model that memory does not hold."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from runs import assert_same_bits, checkpoint, configuration, metrics, run, train

AS_THREADS = ["--nproc", "2", "--ranks", "threads"]
SECTIONS = {"zero": {"stage": 2}, "optimizer": {"ema": 0.9}, "precision": {"compute": "bf16"},
            "validate": {"ema": True, "every": 5}, "checkpoint": {"every": 10}}


def without_times(lines):
    return [{key: line.get(key) for key in ("step", "loss", "grad_norm", "valid_loss")} for line in lines]


@pytest.mark.parametrize("offload", ["optimizer", "all"])
def test_a_resumed_run_has_the_same_bits(program, tokens, disk_path, offload):
    data = {"data": {"valid": tokens["valid"]}}
    lines, state = run(program, tokens, disk_path / "memory", *AS_THREADS, **SECTIONS, **data)
    sections = {**SECTIONS, **data, "zero": {"stage": 2, "offload": offload}}
    path = configuration(tokens, disk_path / "files", **sections)
    train(program, path, *AS_THREADS, "--run.steps=10", "--schedule.steps=20")
    train(program, path, *AS_THREADS)
    assert_same_bits(state, checkpoint(disk_path / "files"))
    assert without_times(lines) == without_times(metrics(disk_path / "files"))
    assert not list((disk_path / "files" / "run").glob(".states*"))


@pytest.mark.parametrize("zero, words", [
    ({"offload": "optimizer", "offload_folder": "/none"}, ["zero.offload_folder", "/none", "No such file"]),
    ({"offload": "optimizer", "offload_folder": "/dev/shm"}, ["zero.offload", "/dev/shm", "lies in memory"]),
    ({"offload": "disk"}, ["zero.offload", "optimizer"]),
])
def test_bad_input_is_refused_before_any_rank_starts(program, tokens, tmp_path, zero, words):
    done = train(program, configuration(tokens, tmp_path, zero=zero), check=False)
    assert done.returncode == 78, done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


def test_devices_of_one_process_are_refused(program, tokens, tmp_path):
    path = configuration(tokens, tmp_path, zero={"offload": "all"})
    done = train(program, path, "--mesh.dp=2", "--mesh.data_parallel=dp", check=False)
    assert done.returncode == 78 and "zero.offload is all" in done.stderr, done.stderr


def test_a_dry_run_says_what_lies_where(program, tokens, disk_path):
    path = configuration(tokens, disk_path, zero={"offload": "all", "offload_folder": str(disk_path)})
    said = train(program, path, "--dry-run").stdout
    assert f"of its states lie in {disk_path}" in said, said


def memory_group():
    """The folder of this process's control group that counts memory, and the file of its limit."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, kind, path = line.split(":", 2)
        if kind == "memory":
            return f"/sys/fs/cgroup/memory{path}", "memory.limit_in_bytes"
    return f"/sys/fs/cgroup{path}", "memory.max"


class LimitedMemory:
    """A control group of so many bytes, of either version."""

    def __init__(self, limit):
        parent, self.key = memory_group()
        self.folder = Path(parent, f"tessera-{os.getpid()}")
        self.limit = limit

    def __enter__(self):
        try:
            self.folder.mkdir()
            Path(self.folder, self.key).write_text(str(self.limit))
        except OSError as error:
            self.__exit__()
            pytest.skip(f"needs control groups that limit memory: {error}")
        return self

    def __exit__(self, *_):
        if self.folder.is_dir():
            self.folder.rmdir()

    def run(self, program, *arguments):
        words = f'echo $$ > {self.folder}/cgroup.procs; exec "$@"'
        return subprocess.run(["sh", "-c", words, "sh", str(program), *arguments], capture_output=True, text=True,
                              timeout=300)


# 25 million parameters: 400 MB of states in fp32, of which gradients, a quarter, stay in memory.
WIDE = {"family": "llama", "layers": 8, "hidden": 512, "heads": 8, "kv_heads": 8, "ffn": 1365, "vocab": 61,
        "max_seq": 16}
LIMIT = 330 << 20


def test_a_model_whose_states_exceed_the_memory_trains(program, tokens, disk_path):
    def path_of(name, offload):
        return configuration(tokens, disk_path / name, only_model=WIDE, run={"steps": 3}, batch={"global": 2},
                             schedule={"warmup": 0}, checkpoint={"every": 0}, zero={"offload": offload})

    train(program, path_of("memory", "none"))
    with LimitedMemory(LIMIT) as group:
        refused = group.run(program, "train", path_of("refused", "none"))
        assert refused.returncode == 78 and "zero.offload optimizer or all" in refused.stderr, refused.stderr
        done = group.run(program, "train", path_of("files", "all"))
        assert done.returncode == 0, done.stderr[-3000:]
    assert without_times(metrics(disk_path / "memory")) == without_times(metrics(disk_path / "files"))
    with open(disk_path / "files" / "run" / "config.json") as file:
        assert json.load(file)["zero"]["offload"] == "all"
