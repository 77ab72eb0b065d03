"""What can be left out by name, kernels and wide vectors, changes nothing but time."""

import pytest
import torch
from runs import assert_equal_runs, configuration, run, run_once, train

KERNELS = ["onednn_product", "widened_product", "joint_products", "gradient_in_place", "swiglu", "geglu", "gelu",
           "attention", "bf16_attention", "norm_branch", "cross_entropy", "head_by_rows", "inputs_again",
           "expert_rows", "adamw", "grouped_product", "waiting_rows", "step_graph"]
# Large enough for each of them. The first steps of Adam are as long for a gradient that is all rounding as for
# any other, but for eps: with 1e-8 they make 1e-4 of it, with 1e-5 what is left is rounding itself.
SECTIONS = {"run": {"steps": 4}, "checkpoint": {"every": 4}, "optimizer": {"eps": 1e-5},
            "model": {"hidden": 128, "ffn": 352, "layers": 2}, "schedule": {"warmup": 0},
            "batch": {"micro": 1}}


def setting(monkeypatch, name, value):
    if value:
        monkeypatch.setenv(name, value)


# Of losses and norms, and of weights and moments.
BOUNDS = {"fp64": (1e-12, 1e-10), "fp32": (1e-6, 1e-5), "fp16": (3e-3, 2e-2)}
MODELS = {"geglu": {"family": "gemma3_text", "norm_eps": 1e-3}, "gelu": {"family": "gpt2", "kv_heads": 4},
          "expert_rows": {"family": "mixtral", "moe": {"experts": 8, "top_k": 2}},
          # So many logits that they are not all there at once.
          "head_by_rows": {"hidden": 32, "ffn": 48, "vocab": 9000}}
# What spares memory alone, by how much at least.
SPARING = {"head_by_rows": 1.5, "inputs_again": 1.1}
# Where each acts on a CPU: neither a GPU's product nor its recorded steps do, and bf16_attention has its own test.
ACTS_IN = {name: ["fp64", "fp32"] for name in KERNELS}
for elsewhere in ("grouped_product", "step_graph", "bf16_attention"):
    del ACTS_IN[elsewhere]
ACTS_IN |= {"onednn_product": ["fp32"], "widened_product": ["fp16"], "norm_branch": ["fp64", "fp32", "fp16"]}


def with_and_without(program, tokens, tmp_path, monkeypatch, name, precision, vectors=""):
    """The run with all kernels, and that without one."""
    sections = {**SECTIONS, "precision": {"compute": precision}, "model": {**SECTIONS["model"], **MODELS.get(name, {})}}
    if name in SPARING:
        sections["batch"] = {"global": 60, "micro": 60}
    if precision == "fp16":
        sections["precision"]["loss_scale"] = 128
    fast = run_once(program, tokens, tmp_path / "fast", step=4, **sections)
    setting(monkeypatch, "TESSERA_WITHOUT_KERNELS", name)
    setting(monkeypatch, "TESSERA_VECTORS", vectors)
    plain = run(program, tokens, tmp_path / "plain", step=4, **sections)
    assert_equal_runs(fast, plain, *BOUNDS[precision], what=MODELS.get(name, {}).get("family", ""))
    return fast, plain


def are_same(one, other):
    return all(torch.equal(value, other[1][key]) for key, value in one[1].items())


@pytest.mark.parametrize("name, precision", [(name, precision) for name, all_ in ACTS_IN.items() for precision in all_])
def test_training_goes_the_same_way_without(program, tokens, tmp_path, monkeypatch, name, precision):
    fast, plain = with_and_without(program, tokens, tmp_path, monkeypatch, name, precision)
    if name in SPARING:
        assert plain[0][-1]["mem_peak_mib"] > SPARING[name] * fast[0][-1]["mem_peak_mib"], f"{name} does nothing here"
        assert name != "inputs_again" or are_same(fast, plain)
    # oneDNN's is not taken on processors of MKL's maker; a norm's sum is rounded once more in a narrow type alone.
    elif name != "onednn_product" and (name, precision) not in (("norm_branch", "fp64"), ("norm_branch", "fp32")):
        assert not are_same(fast, plain), f"{name} does nothing here"


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("without, vectors", [(",".join(KERNELS), ""), ("", "baseline"), ("", "avx2")],
                         ids=["all", "baseline", "avx2"])
def test_training_goes_the_same_way(program, tokens, tmp_path, monkeypatch, without, vectors, precision):
    fast, plain = with_and_without(program, tokens, tmp_path, monkeypatch, without, precision, vectors)
    assert not without or not are_same(fast, plain)


@pytest.mark.parametrize("sections", [
    {}, *({"mesh": {"dp_shard": 2}, "zero": {"stage": stage}} for stage in (1, 2, 3)),
    {"mesh": {"pp": 2}, "pipeline": {"schedule": "zb_h1"}},
    {"mesh": {"dp_shard": 2}, "zero": {"stage": 3},
     "model": {**SECTIONS["model"], "family": "mixtral", "moe": {"experts": 8, "top_k": 1}}}],
    ids=["one rank", "zero 1", "zero 2", "zero 3", "zb_h1", "experts of zero 3"])
def test_gradients_do_not_see_what_their_memory_held(program, tokens, tmp_path, monkeypatch, sections):
    sections = {**SECTIONS, "precision": {"compute": "fp64"}, "batch": {"micro": 1}, **sections}
    ranks = ("--nproc", "2" if "mesh" in sections else "1")
    setting(monkeypatch, "TESSERA_WITHOUT_KERNELS", "gradient_in_place")
    filled = run(program, tokens, tmp_path / "filled", *ranks, step=4, **sections)
    monkeypatch.delenv("TESSERA_WITHOUT_KERNELS")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.perturb=1")  # what is allocated is -7e303
    unwritten = run(program, tokens, tmp_path / "unwritten", *ranks, step=4, **sections)
    assert_equal_runs(unwritten, filled, 1e-12, 1e-10)


# Micro-batches of 16 tokens, whose rows wait for each other where gradients stay whole.
WAITING = {
    "llama": {}, "gpt2": {"model": {"family": "gpt2", "kv_heads": 4}}, "tied": {"model": {"tie_embeddings": True}},
    "seven micro-batches": {"batch": {"global": 7}}, "recompute": {"recompute": {"mode": "stage"}},
    "muon": {"optimizer": {"type": "muon"}}, "adapters": {"model": {"lora": {"rank": 64}}},
    **{f"zero {stage}": {"mesh": {"dp_shard": 2}, "zero": {"stage": stage}} for stage in (0, 1, 2, 3)},
    "uneven": {"mesh": {"dp": 2, "speeds": [1, 2]}, "batch": {"micro": 3, "global": 24}},
    "tp": {"mesh": {"tp": 2}, "tensor": {"sequence_parallel": True}}, "cp": {"mesh": {"cp": 2}},
    **{schedule: {"mesh": {"pp": 2}, "pipeline": {"schedule": schedule}}
       for schedule in ("gpipe", "1f1b", "zb_h1", "pipedream_2bw")},
    "dualpipe": {"mesh": {"pp": 2}, "pipeline": {"schedule": "dualpipe", "chunks": 2}},
    "pp and zero 1": {"mesh": {"pp": 2, "dp_shard": 2}, "zero": {"stage": 1}},
    "experts": {"mesh": {"dp_shard": 2, "ep": 2},
                "model": {"family": "mixtral", "moe": {"experts": 4, "top_k": 2}}},
    **{f"tokens ahead, {pp} stages": {
        "mesh": {"pp": pp}, "model": {"family": "deepseek_v3", "kv_heads": 4, "mtp": {"layers": 1},
                                      "moe": {"experts": 4, "top_k": 2}}} for pp in (1, 2)},
}


@pytest.mark.parametrize("name, precision", [
    *((name, "fp32") for name in WAITING), ("llama", "fp16"), ("zb_h1", "fp16"), ("pp and zero 1", "fp16")])
def test_rows_that_wait_change_sums_by_rounding_alone(program, tokens, tmp_path, monkeypatch, name, precision):
    said = WAITING[name]
    ranks = 1
    for degree in ("dp", "dp_shard", "tp", "cp", "pp"):
        ranks *= said.get("mesh", {}).get(degree, 1)
    sections = {**SECTIONS, "precision": {"compute": precision}, "batch": {"micro": 1, "global": 16}}
    sections = {key: {**sections.get(key, {}), **said.get(key, {})} for key in {**sections, **said}}
    waited = run(program, tokens, tmp_path / "waited", "--nproc", str(ranks), step=4, **sections)
    monkeypatch.setenv("TESSERA_WITHOUT_KERNELS", "waiting_rows")
    plain = run(program, tokens, tmp_path / "plain", "--nproc", str(ranks), step=4, **sections)
    assert_equal_runs(waited, plain, *((5e-6, 1e-5) if precision == "fp32" else (1e-3, 1e-2)), name)
    if name in {"zero 2", "zero 3"}:
        assert are_same(waited, plain), "gradients that are reduced with each micro-batch wait for none"
    else:
        assert not are_same(waited, plain), "no rows waited"


def test_bf16_attention_differs_by_its_rounding(program, tokens, tmp_path, monkeypatch):
    sections = {**SECTIONS, "precision": {"compute": "bf16"}}
    fast = run(program, tokens, tmp_path / "fast", step=4, **sections)
    setting(monkeypatch, "TESSERA_WITHOUT_KERNELS", "bf16_attention")
    plain = run(program, tokens, tmp_path / "plain", step=4, **sections)
    assert_equal_runs(fast, plain, 1e-2, 1e-1)


@pytest.mark.parametrize("variable, value, said", [
    ("TESSERA_WITHOUT_KERNELS", "swiglu,fast_one", 'names "fast_one", which is no kernel that can be left out. '
     "There are: " + " ".join(KERNELS)),
    ("TESSERA_VECTORS", "sse9", 'is "sse9". There are: baseline, avx2, avx512')])
def test_other_names_are_refused_before_ranks_start(program, tokens, tmp_path, monkeypatch, variable, value, said):
    monkeypatch.setenv(variable, value)
    done = train(program, configuration(tokens, tmp_path, mesh={"dp": 2}), "--nproc", "2", check=False)
    assert done.returncode == 78 and said in done.stderr, done.stderr
    assert "rank 1" not in done.stderr
