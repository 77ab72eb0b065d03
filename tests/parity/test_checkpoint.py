"""Checkpoints against PyTorch's distributed checkpoint and safetensors."""

import json
import os
import random
import struct
import subprocess

import pytest
import safetensors
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint._consolidate_hf_safetensors import (
    consolidate_safetensors_files)

STEP = 7
# As in tessera/checkpoint/detail/test_state.h.
TENSORS = {
    "model.embed.weight": (torch.float32, (13, 6)),
    "model.layers.0.mlp.weight": (torch.bfloat16, (8, 5, 3)),
    "model.norm.weight": (torch.float32, (6,)),
    "optimizer.exp_avg.model.embed.weight": (torch.float64, (13, 6)),
    "optimizer.step": (torch.int64, ()),
    "buffer.bytes": (torch.uint8, (7,)),
}


def expected(name):
    dtype, shape = TENSORS[name]
    whole = torch.arange(torch.Size(shape).numel())
    return ((whole * 3 + len(name) + STEP * 17) % 251).to(dtype).reshape(shape)


@pytest.fixture(scope="module")
def driver(program):
    path = program.parents[1] / "tests" / "checkpoint_driver"
    assert path.is_file(), f"{path} is not there: run ./dev build first"
    return path


def save(driver, folder, ranks, seed):
    subprocess.run([driver, "save", folder, str(ranks), str(seed)], check=True,
                   timeout=300)
    return folder / f"step-{STEP}"


@pytest.mark.parametrize("ranks, seed", [(1, 0), (2, 3), (3, 5), (4, 11)])
def test_pytorch_loads_a_checkpoint_bit_for_bit(driver, tmp_path, ranks, seed):
    step = save(driver, tmp_path, ranks, seed)
    state = {name: torch.zeros(shape, dtype=dtype)
             for name, (dtype, shape) in TENSORS.items()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(step)),
             no_dist=True)
    for name, tensor in state.items():
        assert torch.equal(tensor, expected(name)), name


@pytest.mark.parametrize("ranks, seed", [(2, 0), (3, 5)])
def test_pytorch_consolidates_a_checkpoint(driver, tmp_path, ranks, seed):
    step = save(driver, tmp_path / "saved", ranks, seed)
    whole = tmp_path / "whole"
    whole.mkdir()
    # PyTorch 2.13 consolidates floating-point tensors alone.
    names = [name for name, (dtype, _) in TENSORS.items()
             if dtype.is_floating_point]
    consolidate_safetensors_files(str(step), str(whole),
                                  {name: 1 for name in names})
    tensors = load_file(whole / "model-00001-of-00001.safetensors")
    for name in names:
        assert torch.equal(tensors[name], expected(name)), name


def judge(driver, paths):
    done = subprocess.run([driver, "judge"], input="\n".join(paths) + "\n",
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    verdicts = done.stdout.splitlines()
    assert len(verdicts) == len(paths)
    return verdicts


def taken_by_rust(path):
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            for name in file.keys():
                file.get_slice(name)
    except safetensors.SafetensorError:
        return False
    return True


# Why a file may be refused that the Rust implementation takes.
STRICTER = ["is there twice", '" twice', "unknown field",
            "does not begin with '{'", "does not end with '}'",
            "null is not what", "a list is not what", "overflows",
            "is not one of", "too large", "has more than"]


def seeds(folder):
    """Headers to start from, each with its data."""
    save_file({"a": torch.arange(6.).reshape(2, 3), "b": torch.ones(4).bool(),
               "e": torch.zeros(0, 3)}, folder / "seed.safetensors",
              metadata={"format": "pt"})
    content = (folder / "seed.safetensors").read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    yield content[8:8 + length], content[8 + length:]
    yield b"{}", b""
    two = {"x": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
           "y": {"dtype": "I16", "shape": [2, 1], "data_offsets": [3, 7]}}
    yield json.dumps(two).encode(), bytes(7)


# What a mutation may put in: pieces that mean something in a header.
PIECES = [b'"', b"{", b"}", b"[", b"]", b",", b":", b" ", b"\n", b"\0", b"-1",
          b"0", b"1", b"18446744073709551616", b"9223372036854775807", b"1.0",
          b"1e3", b"null", b"true", b'"dtype":"F32"', b'"shape":[0]',
          b'"data_offsets":[0,0]', b'"a":', b'"__metadata__":{"k":"v"},',
          b'"F64"', b'"BF16"', b'"F8_E4M3"', b"\\u0000", b"\\ud800", b"\xff",
          b"\xef\xbb\xbf"]


# Mutations that may well leave a good file.
SWAPS = [(b"F32", b"I32"), (b"F32", b"F16"), (b"BOOL", b"U8"), (b"U8", b"I8"),
         (b":", b" : "), (b",", b",\n"), (b"}", b"} "), (b'"a"', b'"a/../b"'),
         (b'"a"', b'""'), (b'"a"', b'"\\u0000"'), (b"[2,3]", b"[3,2]"),
         (b"[2,3]", b"[6,1,1]"), (b"[2, 1]", b"[1,2]"), (b"[0,3]", b"[7,0]"),
         (b'"pt"', b'"\\n"'), (b'"format"', b'"a"'), (b"{}", b"{}  ")]


def mutate(header, data, draw):
    if draw.random() < 0.4:
        for old, new in draw.sample(SWAPS, 4):
            header = header.replace(old, new, draw.choice([1, -1]))
        return struct.pack("<Q", len(header)) + header + data
    for _ in range(draw.randint(1, 3)):
        place = draw.randint(0, len(header))
        end = min(len(header), place + draw.choice([0, 1, 1, 2, 5]))
        piece = draw.choice(PIECES) if draw.random() < 0.7 else bytes(
            [draw.randrange(256)])
        header = header[:place] + piece + header[end:]
    if draw.random() < 0.2:
        data = data[:draw.randint(0, len(data))]
    elif draw.random() < 0.1:
        data += b"x"
    length = len(header)
    if draw.random() < 0.1:
        length = draw.choice([0, length - 1, length + 1, length + len(data),
                              100_000_001, 2**63, 2**64 - 1])
    return struct.pack("<Q", length) + header + data


def test_a_mutated_file_gets_the_verdict_of_rust_or_a_stricter_one(
        driver, tmp_path):
    count = int(os.environ.get("TESSERA_FUZZ_FILES", 6000))
    draw = random.Random(1)
    starts = list(seeds(tmp_path))
    paths = []
    for index in range(count):
        path = tmp_path / f"{index}.safetensors"
        path.write_bytes(mutate(*draw.choice(starts), draw))
        paths.append(str(path))
    taken = 0
    stricter = 0
    for path, verdict in zip(paths, judge(driver, paths)):
        rust = taken_by_rust(path)
        if verdict == "taken":
            taken += 1
            assert rust, f"{path} is taken here alone"
        else:
            assert path in verdict
            if rust:
                stricter += 1
                assert any(why in verdict for why in STRICTER), verdict
        os.remove(path)
    assert taken > count // 50, "the mutations leave too little to compare"
    assert stricter < count // 5


def test_files_of_the_python_package_are_read(driver, tmp_path):
    path = tmp_path / "all.safetensors"
    save_file({str(dtype): torch.ones(3, 2).to(dtype) for dtype in [
        torch.float64, torch.float32, torch.float16, torch.bfloat16,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
        torch.bool]} | {"scalar": torch.tensor(2.)}, path)
    assert judge(driver, [str(path)]) == ["taken"]
