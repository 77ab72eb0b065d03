"""What the comparisons with Python peers share.

`tessera` runs the program: `tessera("eval", "--model", folder)` gives its
standard output and fails the test on any exit code but 0, or `code=` with
`says=` in what it says of that.
Each test has pytest's own `tmp_path`, which is removed after it passed.
"""

import os
import random
import struct
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

# Beside ranks that use the cores: threads that wait for each other by spinning were 100 times slower than one.
torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def program():
    """The built program: $TESSERA_PROGRAM, or the one of ./dev build."""
    default = ROOT / "build" / "dev" / "cli" / "tessera"
    path = Path(os.environ.get("TESSERA_PROGRAM", default)).resolve()
    assert path.is_file(), f"{path} is not there: run ./dev build first"
    return path


@pytest.fixture(scope="session")
def tessera(program):
    def run(*arguments, code=0, says="", timeout=300, **options):
        assert code == 0 or says, "a refusal has words"
        done = subprocess.run(
            [program, *map(str, arguments)], capture_output=True, text=True,
            timeout=timeout, **options)
        assert done.returncode == code, (
            f"tessera {' '.join(map(str, arguments))} ended with "
            f"{done.returncode}, not {code}:\n{done.stderr[-4000:]}")
        assert says in done.stdout + done.stderr, f"no '{says}' in: {done.stderr[-4000:]}"
        return done.stdout

    return run


def lies_in_memory(folder):
    kind = subprocess.run(["stat", "-f", "-c", "%T", str(folder)], capture_output=True, text=True, check=True).stdout
    return kind.strip() in {"tmpfs", "ramfs"}


@pytest.fixture
def disk_path(program, tmp_path):
    """tmp_path, or where that lies in memory a folder beside the program: for states in files (zero.offload)."""
    if not lies_in_memory(tmp_path):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="tessera-test-", dir=program.parent) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def tokens(tmp_path_factory):
    """Token files with something to learn: a noisy cycle."""
    rng = random.Random(1)
    folder = tmp_path_factory.mktemp("tokens")

    def write(name, count):
        ids, token = [], 0
        for _ in range(count):
            token = (token * 7 + 3) % 61 if rng.random() < 0.8 else rng.randrange(61)
            ids.append(token)
        path = folder / name
        path.write_bytes(struct.pack(f"<{count}H", *ids))
        return str(path)

    return {"train": write("train.bin", 5000), "valid": write("valid.bin", 1000)}
