"""tessera bench kernels, from outside: every kernel in each type, and what it refuses."""

import json
import subprocess

import pytest

KERNELS = ["rms_norm", "rms_norm_backward", "rotary", "swiglu", "swiglu_backward", "gelu", "gelu_backward", "attention",
           "attention_backward", "attention_window", "attention_window_backward", "product_forward", "product_dx",
           "product_dw", "embedding_backward", "cross_entropy", "head_loss", "adamw", "small_experts", "small_experts_backward", "experts", "experts_backward"]


def run(program, *arguments, cwd=None):
    return subprocess.run([str(program), "bench", "kernels", *map(str, arguments)], capture_output=True, text=True,
                          timeout=600, cwd=cwd)


def test_every_kernel_is_right_and_timed(program, tmp_path):
    done = run(program, "--threads", 1, "--seconds", 0.001, "--json", "figures.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["threads"] == 1 and figures["processor"] and figures["vectors"] in ("baseline", "avx2", "avx512")
    assert figures["command"].startswith("tessera bench kernels --threads 1")
    assert [(row["kernel"], row["dtype"]) for row in figures["rows"]] == [
        (kernel, dtype) for kernel in KERNELS for dtype in ("fp32", "bf16")]
    for row in figures["rows"]:
        assert row["shape"] and 0 <= row["ulps"] <= 64 and row["seconds"] > 0, row
        assert row["ratio"] == pytest.approx(row["libtorch_seconds"] / row["seconds"])
        multiplies = row["kernel"].startswith(("product", "attention", "head", "small_experts", "experts"))
        assert (row["gflops"] is not None, row["gbps"] is not None) == (multiplies, not multiplies)
    assert "# 1 thread on " in done.stdout and figures["processor"] in done.stdout
    for kernel in KERNELS:
        assert f" {kernel}  fp32 " in done.stdout


@pytest.mark.parametrize("arguments, code, said", [
    (["--threads", 0], 2, "--threads"), (["--seconds", "nan"], 2, "--seconds"), (["--iters", 3], 2, "--iters"),
    (["--json", "."], 2, "is a folder"), (["--json", "none/figures.json"], 74, "there is no folder")])
def test_bad_flags_are_refused(program, tmp_path, arguments, code, said):
    done = run(program, *arguments, cwd=tmp_path)
    assert done.returncode == code and said in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""
