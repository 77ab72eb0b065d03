"""tessera bench step: where a step's time goes, beside its floor."""

import json
import subprocess

import pytest

MODEL = {"layers": 2, "hidden": 64, "heads": 4, "ffn": 176, "vocab": 256, "max_seq": 32}
RUN = {"model": MODEL, "data": {"seq_len": 32}, "batch": {"global": 4, "micro": 2}}


def bench(program, folder, *flags, run=RUN):
    path = folder / "run.json"
    path.write_text(json.dumps(run))
    return subprocess.run([program, "bench", "step", path, "--rounds", "2", *flags], cwd=folder, capture_output=True,
                          text=True, timeout=300)


def weights_that_multiply():
    width, ffn = MODEL["hidden"], MODEL["ffn"]
    return MODEL["layers"] * (4 * width * width + 3 * width * ffn) + width * MODEL["vocab"]


@pytest.mark.parametrize("flags, ranks", [
    ((), 1), (("--mesh.tp=2",), 2), (("--mesh.pp=2",), 2), (("--mesh.pp=2", "--pipeline.schedule=pipedream_2bw"), 2)])
def test_figures_add_up(program, tmp_path, flags, ranks):
    done = bench(program, tmp_path, "--json", "step.json", "--plot", "step.svg", *flags)
    assert done.returncode == 0, done.stderr
    step = json.loads((tmp_path / "step.json").read_text())
    assert step["ranks"] == ranks == len(step["by_rank"])
    assert 0 < step["step_s"]["fastest"] <= step["step_s"]["median"] <= step["step_s"]["slowest"]
    # Forward, and both parts of backward, of this rank's part of the weights.
    tokens = RUN["batch"]["global"] * RUN["data"]["seq_len"]
    if "--mesh.pp=2" not in flags:
        assert step["floor_flops"] == 6 * tokens * weights_that_multiply() / ranks
    products = sum(each["count"] * 2 * each["rows"] * each["in"] * each["out"] for each in step["products"])
    assert step["floor_flops"] == products
    assert step["tokens_per_s"] == pytest.approx(tokens / step["step_s"]["median"])
    inside = sum(each["seconds"] for each in step["instructions"])
    assert 0 < inside <= 1.05 * step["step_s"]["slowest"]
    assert {"Forward", "Backward", "Loss", "OptimizerStep"} <= {each["name"] for each in step["instructions"]} or ranks > 1
    assert any(each["name"] in ("tessera::product", "aten::mm") for each in step["kernels"])
    assert step["bytes"]["parameters"] > 0 and step["bytes"]["at_most"] > 0
    assert "step/floor" in done.stdout and (tmp_path / "step.svg").read_text().startswith("<svg")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("flags, code, said", [
    (("--json", "missing/step.json"), 74, "there is no folder"),
    (("--json", "same", "--plot", "same"), 2, "--json and --plot both name same"),
    (("--rounds", "0"), 2, "--rounds"),
    (("--mesh.data_parallel=dp", "--mesh.dp=2"), 78, "Use ddp"),
    (("--mesh.tp=3",), 78, "mesh.tp")])
def test_bad_input_is_refused_before_ranks_start(program, tmp_path, flags, code, said):
    done = bench(program, tmp_path, *flags)
    assert done.returncode == code and said in done.stderr, (done.returncode, done.stderr)
