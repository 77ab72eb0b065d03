"""Meshes against one rank: the same losses, norms, weights and moments.

The sizes are odd on purpose: 61 entries of the vocabulary, 2 key/value heads and layers of
48 features divide by few degrees, so that shards are uneven, short and empty.
"""

import shutil

import pytest
from runs import assert_equal_runs, assert_same_bits, configuration, run, train

GPT2 = {"family": "gpt2", "kv_heads": 4}
QWEN3 = {"family": "qwen3", "tie_embeddings": False, "head_dim": 6}
UNTIED = {"tie_embeddings": False}
SP = {"tensor": {"sequence_parallel": True}}


def zero(stage, **more):
    return {"zero": {"stage": stage, **more}}


# Name: (ranks, model, the rest of the configuration).
MESHES = {
    "zero 1": (2, {}, {"mesh": {"dp": 2}, **zero(1)}),
    "zero 2": (2, {}, {"mesh": {"dp": 2}, **zero(2)}),
    "zero 3": (2, {}, {"mesh": {"dp": 2}, **zero(3)}),
    "zero 1 of 3": (3, UNTIED, {"mesh": {"dp": 3}, **zero(1)}),
    "zero 2 of 3": (3, UNTIED, {"mesh": {"dp": 3}, **zero(2)}),
    "zero 3 of 3": (3, UNTIED, {"mesh": {"dp": 3}, **zero(3)}),
    "zero 3 kept, gpt2": (3, GPT2, {"mesh": {"dp": 3}, **zero(3, reshard_after_forward=False)}),
    "hybrid 1": (4, {}, {"mesh": {"dp_replicate": 2, "dp_shard": 2}, **zero(1)}),
    "hybrid 2, gpt2": (4, GPT2, {"mesh": {"dp_replicate": 2, "dp_shard": 2}, **zero(2)}),
    "hybrid 3": (4, QWEN3, {"mesh": {"dp_replicate": 2, "dp_shard": 2}, **zero(3)}),
    "zero 3 of 12": (12, {}, {"mesh": {"dp": 12}, **zero(3)}),
    "tp 2": (2, {}, {"mesh": {"tp": 2}}),
    "tp 2 gpt2": (2, GPT2, {"mesh": {"tp": 2}}),
    "tp 2 untied": (2, UNTIED, {"mesh": {"tp": 2}}),
    "tp 4, fewer kv heads": (4, {}, {"mesh": {"tp": 4}}),
    "tp 4 qwen3": (4, QWEN3, {"mesh": {"tp": 4}}),
    "tp 4, one kv head": (4, {"kv_heads": 1}, {"mesh": {"tp": 4}}),
    "tp 8, empty shards": (8, {"heads": 8, "head_dim": 4, "ffn": 13, "vocab": 61}, {"mesh": {"tp": 8}}),
    "sp 2": (2, {}, {"mesh": {"tp": 2}, **SP}),
    "sp 2 gpt2": (2, GPT2, {"mesh": {"tp": 2}, **SP}),
    "sp 4 qwen3": (4, QWEN3, {"mesh": {"tp": 4}, **SP}),
    "sp 4, one kv head": (4, {"kv_heads": 1, **UNTIED}, {"mesh": {"tp": 4}, **SP}),
    "dp 2 x tp 2": (4, {}, {"mesh": {"dp": 2, "tp": 2}}),
    "zero 1 x tp 2": (4, {}, {"mesh": {"dp": 2, "tp": 2}, **zero(1)}),
    "zero 2 x sp 2, gpt2": (4, GPT2, {"mesh": {"dp": 2, "tp": 2}, **zero(2), **SP}),
    "zero 3 x sp 2": (4, QWEN3, {"mesh": {"dp": 2, "tp": 2}, **zero(3), **SP}),
    "zero 3 x tp 4": (8, {}, {"mesh": {"dp": 2, "tp": 4}, **zero(3)}),
    "hybrid 3 x sp 4": (16, {}, {"mesh": {"dp_replicate": 2, "dp_shard": 2, "tp": 4}, **zero(3), **SP}),
    "tp outermost": (4, {}, {"mesh": {"dp": 2, "tp": 2, "order": ["tp", "pp", "cp", "dp_shard", "dp_replicate"]},
                             **zero(3), **SP}),
    "cp ring 2": (2, {}, {"mesh": {"cp": 2}}),
    "cp ring 4, gpt2": (4, GPT2, {"mesh": {"cp": 4}}),
    "cp ulysses 2": (2, {}, {"mesh": {"cp": 2}, "context": {"method": "ulysses"}}),
    "cp ulysses 4": (4, QWEN3, {"mesh": {"cp": 4}, "context": {"method": "ulysses"}}),
    "cp allgather 4": (4, {}, {"mesh": {"cp": 4}, "context": {"method": "allgather"}}),
    "pp 2 naive": (2, {}, {"mesh": {"pp": 2}, "pipeline": {"schedule": "naive"}}),
    "pp 2 gpipe": (2, UNTIED, {"mesh": {"pp": 2}, "pipeline": {"schedule": "gpipe"}}),
    "pp 2 1f1b": (2, {}, {"mesh": {"pp": 2}}),
    "pp 3 1f1b, gpt2": (3, {**GPT2, "layers": 4}, {"mesh": {"pp": 3}}),
    "pp 2 split": (2, {"layers": 5}, {"mesh": {"pp": 2}, "pipeline": {"split": [4, 1]}}),
    "pp 2 interleaved": (2, {"layers": 5}, {"mesh": {"pp": 2}, "pipeline": {"schedule": "interleaved", "chunks": 2}}),
    "recompute": (1, {}, {"recompute": {"mode": "block"}}),
    "recompute every second": (2, {"layers": 5}, {"mesh": {"dp": 2}, **zero(3), "recompute": {"mode": "block",
                                                                                            "every": 2}}),
    "cp 2 x sp 2": (4, {}, {"mesh": {"cp": 2, "tp": 2}, **SP}),
    "ulysses 2 x tp 2": (4, QWEN3, {"mesh": {"cp": 2, "tp": 2}, "context": {"method": "ulysses"}}),
    "zero 3 x cp 2": (4, {}, {"mesh": {"dp": 2, "cp": 2}, **zero(3)}),
    "zero 1 x cp 2, gpt2": (4, GPT2, {"mesh": {"dp": 2, "cp": 2}, **zero(1)}),
    "pp 2 x dp 2": (4, {}, {"mesh": {"pp": 2, "dp": 2}}),
    "pp 2 x zero 1": (4, {}, {"mesh": {"pp": 2, "dp": 2}, **zero(1)}),
    "pp 2 x zero 2": (4, {}, {"mesh": {"pp": 2, "dp": 2}, **zero(2)}),
    "pp 2 x zero 3": (4, {}, {"mesh": {"pp": 2, "dp": 2}, **zero(3)}),
    "pp 2 interleaved x zero 3": (4, {"layers": 4}, {"mesh": {"pp": 2, "dp": 2}, **zero(3),
                                                     "pipeline": {"schedule": "interleaved", "chunks": 2}}),
    "pp 2 x tp 2": (4, QWEN3, {"mesh": {"pp": 2, "tp": 2}}),
    "pp 2 x sp 2": (4, {}, {"mesh": {"pp": 2, "tp": 2}, **SP}),
    "pp 2 x cp 2": (4, {}, {"mesh": {"pp": 2, "cp": 2}}),
    "gpipe 2 x sp 2 x recompute, gpt2": (4, GPT2, {"mesh": {"pp": 2, "tp": 2}, **SP, "pipeline": {"schedule": "gpipe"},
                                             "recompute": {"mode": "block"}}),
    **{f"pp 2 x dp 2 x cp 2 x sp 2, zero {stage}": (
        16, {}, {"mesh": {"pp": 2, "dp": 2, "cp": 2, "tp": 2}, **SP, **zero(stage)}) for stage in range(4)},
    "pp 2 x hybrid 2 x sp 2, zero 3": (16, UNTIED, {"mesh": {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "tp": 2}, **SP,
                                                    **zero(3), "recompute": {"mode": "block"}}),
}
# The batch divides by every degree of data parallelism in the list.
BATCH = {"batch": {"global": 12, "micro": 1}}
ONE_RANK = {}


def one_rank(program, tokens, folder, model, precision):
    """The run of one rank, made once for each model and precision."""
    key = (tuple(sorted(model.items())), precision)
    if key not in ONE_RANK:
        ONE_RANK[key] = run(program, tokens, folder, "--nproc", "1", **BATCH, model=model,
                            precision={"compute": precision})
    return ONE_RANK[key]


def compare(program, tokens, tmp_path, name, precision, bound, state_bound):
    world, model, sections = MESHES[name]
    one = one_rank(program, tokens, tmp_path / "one", model, precision)
    other = run(program, tokens, tmp_path / "mesh", "--nproc", str(world), "--ranks", "threads", **BATCH,
                model=model, precision={"compute": precision}, **sections)
    assert_equal_runs(one, other, bound, state_bound, name)


@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_equals_one_rank(program, tokens, tmp_path, name):
    compare(program, tokens, tmp_path, name, "fp64", 1e-10, 1e-10)


@pytest.mark.parametrize("name", [
    "zero 3 of 3", "hybrid 2, gpt2", "tp 4, fewer kv heads", "sp 4 qwen3", "cp ring 4, gpt2", "cp ulysses 4",
    "cp allgather 4", "pp 2 interleaved", "pp 2 split", "recompute", "pp 2 x dp 2 x cp 2 x sp 2, zero 3"])
def test_a_mesh_equals_one_rank_in_fp32(program, tokens, tmp_path, name):
    compare(program, tokens, tmp_path, name, "fp32", 1e-5, 1e-4)


@pytest.mark.parametrize("name", ["zero 3", "hybrid 2, gpt2", "sp 2", "zero 3 x sp 2"])
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_processes_equal_one_rank(program, tokens, tmp_path, name, backend):
    world, model, sections = MESHES[name]
    one = one_rank(program, tokens, tmp_path / "one", model, "fp64")
    other = run(program, tokens, tmp_path / "mesh", "--nproc", str(world), **BATCH, model=model,
                precision={"compute": "fp64"}, comm={"backend": backend}, **sections)
    assert_equal_runs(one, other, 1e-10, 1e-10, name)


# Bits do not depend on bucket sizes, nor on what is freed and gathered again.
def test_the_same_bits_however_it_travels(program, tokens, tmp_path):
    states = []
    for i, sections in enumerate([zero(3), zero(3, reshard_after_forward=False), zero(2), zero(3, bucket_mb=0.001)]):
        _, state = run(program, tokens, tmp_path / str(i), "--nproc", "3", "--ranks", "threads", **BATCH,
                       mesh={"dp": 3}, **sections)
        states.append(state)
    for state in states[1:]:
        assert_same_bits(states[0], state)


SAVED_ON = ["one", "zero 3", "zero 1 of 3", "hybrid 2, gpt2", "tp 4, fewer kv heads", "zero 3 x sp 2", "pp 2 x zero 2",
            "pp 2 interleaved x zero 3", "zero 3 x cp 2", "pp 2 x dp 2 x cp 2 x sp 2, zero 3"]
MOVING = {"model": {"layers": 4}, "run": {"steps": 6}, "schedule": {"type": "constant", "warmup": 0},
          "precision": {"compute": "fp64"}, **BATCH}


def sections_of(name):
    world, _, sections = MESHES[name] if name != "one" else (1, {}, {})
    return ("--nproc", str(world), "--ranks", "threads"), sections


@pytest.mark.parametrize("name", SAVED_ON)
def test_saved_on_one_mesh_and_resumed_on_others(program, tokens, tmp_path, name):
    """Half the steps on one mesh, the rest on another: what one rank would have done."""
    whole = run(program, tokens, tmp_path / "whole", "--nproc", "1", step=6, **MOVING)
    arguments, sections = sections_of(name)
    half = {**MOVING, "run": {"steps": 3}, "checkpoint": {"every": 3}}
    train(program, configuration(tokens, tmp_path / "saved", **half, **sections), *arguments)
    for other in SAVED_ON:
        folder = tmp_path / other.replace(" ", "-")
        shutil.copytree(tmp_path / "saved", folder)
        arguments, sections = sections_of(other)
        resumed = run(program, tokens, folder, *arguments, step=6, **MOVING, **sections)
        assert_equal_runs(whole, resumed, 1e-10, 1e-10, (name, other))
