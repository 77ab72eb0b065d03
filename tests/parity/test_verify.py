"""tessera verify: a mesh beside one rank, as a user asks for it."""

import json

import fuzz
import pytest

RUN = {
    "model": {"family": "llama", "layers": 3, "hidden": 48, "heads": 4, "kv_heads": 2, "vocab": 515, "max_seq": 64},
    "data": {"seq_len": 32},
    "batch": {"global": 12, "micro": 1},
}


@pytest.fixture
def run_json(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(RUN))
    return path


def test_of_a_mixture_no_data_is_read(tessera, tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({**RUN, "data": {
        "train": ["none.txt", "of them.txt"], "weights": [1, 2], "seq_len": 32}}))
    assert "equal: this mesh" in tessera("verify", tmp_path / "run.json", "--shrink", "--mesh.dp=2")
    assert "step/floor" in tessera("bench", "step", tmp_path / "run.json", "--rounds", "1")


@pytest.mark.parametrize("mesh", [
    ["--mesh.dp=3", "--zero.stage=3"],
    ["--mesh.tp=4", "--tensor.sequence_parallel=true", "--model.family=qwen3"],
    ["--mesh.cp=2", "--context.method=ulysses", "--mesh.dp_replicate=2", "--model.family=gpt2", "--model.kv_heads=4"],
    ["--mesh.pp=3", "--mesh.tp=2", "--recompute.mode=block"],
    ["--mesh.pp=2", "--mesh.dp=2", "--mesh.cp=2", "--mesh.tp=2", "--zero.stage=2"],
    ["--mesh.dp=2", "--mesh.tp=2", "--zero.stage=2", "--optimizer.normalize_grad=true", "--optimizer.type=sgd"],
    # Experts' reductions waited for the tied embedding's, whose other stage waited for them.
    ["--mesh.pp=2", "--mesh.dp=2", "--model.family=mixtral", "--zero.expert_stage=2"],
    ["--mesh.dp_replicate=2", "--mesh.dp_shard=2", "--mesh.tp=2", "--mesh.ep=2", "--model.family=mixtral",
     "--zero.stage=3", "--zero.expert_shard=dp_shard"],
    ["--mesh.pp=2", "--mesh.dp=2", "--zero.stage=3", "--zero.offload=all"],
    ["--zero.stage=3", "--zero.offload=all"],
])
@pytest.mark.parametrize("shrink", [[], ["--shrink"]], ids=["whole", "shrunk"])
def test_meshes_are_equal(tessera, run_json, mesh, shrink):
    answer = tessera("verify", run_json, *mesh, *shrink)
    assert answer.endswith("equal: this mesh trains the model that one rank trains\n")


def test_a_mesh_that_cannot_be_is_refused(tessera, run_json):
    tessera("verify", run_json, "--mesh.tp=3", code=78, says="mesh.tp (3) does not divide model.heads (4)")
    tessera("verify", run_json, "--mesh.data_parallel=dp", code=78, says="mesh.data_parallel dp has one")
    # Of a LibTorch without CUDA.
    tessera("verify", run_json, "--run.device=cuda", code=78, says="run.device is cuda")


@pytest.mark.parametrize("seed", range(1000, 1036))
def test_random_configurations_are_equal(program, tmp_path, seed):
    assert fuzz.fault_of(program, seed, tmp_path) == ""


@pytest.mark.parametrize("seed", range(2000, 2020))
def test_random_routing_is_equal(program, tmp_path, seed):
    assert fuzz.fault_of(program, seed, tmp_path, experts=True) == ""
