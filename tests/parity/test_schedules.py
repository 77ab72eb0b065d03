"""Every schedule of the zero-bubble and DualPipe kinds, and PipeDream-2BW, on pipelines of 2 to 8 stages beside one
rank, each with every other strategy; what a schedule cannot take, refused before ranks start.
"""

import itertools
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from fuzz import verify
from runs import assert_same_bits, checkpoint, configuration, metrics, stop_after, train

# Chunks a rank, and whether they are parts of one model: else of two replicas.
SCHEDULES = {"zb_h1": (1, True), "zb_h2": (1, True), "interleaved_zb": (3, True), "zb_v": (2, True),
             "dualpipe": (2, False), "dualpipe_v": (2, True), "pipedream_2bw": (1, True)}
EXPERTS = {"family": "mixtral", "moe": {"experts": 4, "top_k": 2, "aux_loss": 0.1, "every": 2}}
STRATEGIES = {
    "alone": {},
    "another split": {},
    "dp 2": {"mesh": {"dp_replicate": 2}},
    "zero 1": {"mesh": {"dp_shard": 2}, "zero": {"stage": 1}},
    "zero 2": {"mesh": {"dp_shard": 2}, "zero": {"stage": 2}},
    "zero 3": {"mesh": {"dp_shard": 2}, "zero": {"stage": 3}},
    "zero 3 kept": {"mesh": {"dp_shard": 2}, "zero": {"stage": 3, "reshard_after_forward": False}},
    "tp 2": {"mesh": {"tp": 2}},
    "sp 2, tied": {"mesh": {"tp": 2}, "tensor": {"sequence_parallel": True}, "model": {"tie_embeddings": True}},
    "cp 2": {"mesh": {"cp": 2}},
    "ep 2": {"mesh": {"dp_replicate": 2, "ep": 2}, "model": EXPERTS},
    "experts of zero 3": {"mesh": {"dp_shard": 2, "ep": 1}, "zero": {"stage": 3}, "model": EXPERTS},
    "block": {"recompute": {"mode": "block", "every": 2}},
    "selective": {"recompute": {"mode": "selective"}},
    "stage": {"recompute": {"mode": "stage"}},
    "minimal": {"recompute": {"mode": "minimal"}},
    "tied": {"model": {"tie_embeddings": True}},
    **{f"tied, zero {stage}": {"mesh": {"dp_shard": 2}, "zero": {"stage": stage}, "model": {"tie_embeddings": True}}
       for stage in (1, 2, 3)},
    "gpt2, dropout": {"model": {"family": "gpt2", "kv_heads": 4, "dropout": 0.3}},
    "qwen3": {"model": {"family": "qwen3", "head_dim": 6}},
    "olmo2": {"model": {"family": "olmo2", "norm_eps": 1e-3}},
    "gemma3": {"model": {"family": "gemma3_text", "norm_eps": 1e-3, "window": 5, "window_every": 2,
                         "rope_theta_local": 100.0}},
    "documents": {"data": {"intra_document_masking": True}},
    "muon of zero 2": {"mesh": {"dp_shard": 2}, "zero": {"stage": 2}, "optimizer": {"type": "muon"}},
    "offload": {"zero": {"offload": "all"}},
}


def case(schedule, name, pp, microbatches):
    """A model of two layers more than there are parts, on this pipeline with one more strategy."""
    chunks, parts_of_one = SCHEDULES[schedule]
    parts = pp * chunks if parts_of_one else pp
    if schedule == "interleaved_zb":
        microbatches = -(-microbatches // pp) * pp
    if schedule == "dualpipe":
        microbatches += microbatches % 2
    sections = {"run": {"steps": 2}, "schedule": {"warmup": 0}, "mesh": {"pp": pp}, "batch": {"micro": 1},
                "model": {"layers": parts + 2, "tie_embeddings": False},
                "pipeline": {"schedule": schedule, "chunks": chunks}}
    if schedule == "pipedream_2bw":
        microbatches = max(microbatches, pp)
    for section, values in STRATEGIES[name].items():
        sections[section] = {**sections.get(section, {}), **values}
    if schedule == "pipedream_2bw" and name == "offload":
        sections["zero"] = {"offload": "optimizer"}
    mesh = sections["mesh"]
    sections["batch"]["global"] = microbatches * mesh.get("dp_replicate", 1) * mesh.get("dp_shard", 1)
    if name == "another split":
        sections["pipeline"]["split"] = [0, *([1] * (parts - 2)), 4] if parts > 2 else [0, 4]
    return sections


# All of a schedule's strategies, over stages and micro-batches in turn: fewer than stages, and more.
def cases(schedule):
    stages = [2, 4, 8] if schedule == "dualpipe" else [2, 3, 4, 8]
    turn = itertools.cycle(itertools.product([2, 5, 9, 16], stages))
    return [(name, *next(turn)[::-1]) for name in STRATEGIES]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_with_every_strategy_equals_one_rank(program, tokens, tmp_path, schedule):
    def fault_of(each):
        name, pp, microbatches = each
        path = configuration(tokens, tmp_path / name.replace(" ", "-"), **case(schedule, *each))
        # The second one's weights are one update behind those of the third.
        return verify(program, path, "--steps", "4" if schedule == "pipedream_2bw" else "2", "--precision", "fp64")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for each, fault in zip(cases(schedule), pool.map(fault_of, cases(schedule))):
            assert fault == "", each


# Two versions of the weights: on one rank, and on pipelines whose batches overlap but where something looks at the
# model: checkpoints behind steps 4 and 8, validations behind 3, 6 and 9.
DELAYED = {"run": {"steps": 10}, "precision": {"compute": "fp64"}, "data": {"valid_share": 0.2},
           "batch": {"global": 12, "micro": 1}, "validate": {"every": 3}, "checkpoint": {"every": 4, "keep": 0},
           "model": {"layers": 3}, "pipeline": {"schedule": "pipedream_2bw"}}
ON = {"one rank": {"batch": {"global": 12, "micro": 12}}, "pp 2": {"mesh": {"pp": 2}},
      "pp 3": {"mesh": {"pp": 3, "dp_replicate": 2}},
      "zero 3": {"mesh": {"pp": 2, "dp_shard": 2}, "zero": {"stage": 3}}}


def delayed(tokens, folder, name, **more):
    sections = {section: dict(values) for section, values in DELAYED.items()}
    for section, values in {**ON[name], **more}.items():
        sections[section] = {**sections.get(section, {}), **values}
    return configuration(tokens, folder, **sections)


def expect_alike(found, wanted):
    assert [line["step"] for line in found] == [line["step"] for line in wanted]
    for one, other in zip(found, wanted):
        for key in ("loss", "grad_norm", "lr", "valid_loss", "tokens"):
            assert (key in one) == (key in other)
            assert one.get(key, 0) == pytest.approx(other.get(key, 0), rel=1e-10), (key, one["step"])


def test_delayed_runs_are_alike_on_any_mesh_and_go_on_on_another(program, tokens, tmp_path):
    for name in ON:
        train(program, delayed(tokens, tmp_path / name, name))
    whole = metrics(tmp_path / "one rank")
    assert [line["step"] for line in whole if "valid_loss" in line] == [3, 6, 9, 10]
    for name in ON:
        expect_alike(metrics(tmp_path / name), whole)
    plain = delayed(tokens, tmp_path / "plain", "pp 2", pipeline={"schedule": "1f1b"})
    train(program, plain)
    assert abs(metrics(tmp_path / "plain")[-1]["loss"] / whole[-1]["loss"] - 1) > 1e-4
    for begun, on in (("pp 2", "one rank"), ("zero 3", "pp 3"), ("one rank", "zero 3"), ("pp 2", "pp 2")):
        folder = tmp_path / f"{begun}, {on}"
        train(program, delayed(tokens, folder, on), "--resume", str(tmp_path / begun / "run/checkpoints/step-4"))
        expect_alike(metrics(folder), whole[4:])
        if begun == on:
            wanted = checkpoint(tmp_path / on, 10)
            assert any(key.startswith("delayed.") for key in wanted)
            assert_same_bits(checkpoint(folder, 10), wanted)
    done = train(program, plain, "--resume", str(tmp_path / "pp 2/run/checkpoints/step-4"), check=False)
    assert done.returncode == 78 and 'pipeline.schedule is "pipedream_2bw" in it' in done.stderr


def test_a_delayed_run_that_is_stopped_ends_the_batch_that_has_begun(program, tokens, tmp_path):
    path = delayed(tokens, tmp_path, "pp 2", run={"steps": 100000}, checkpoint={"every": 0}, validate={"every": 0})
    code, errors = stop_after(program, path, tmp_path, 6, lambda running: running.terminate())
    assert code == 75 and "with a checkpoint" in errors, errors
    steps = [line["step"] for line in metrics(tmp_path)]
    assert steps == list(range(1, len(steps) + 1))
    saved = checkpoint(tmp_path, steps[-1])
    assert any(key.startswith("delayed.") for key in saved)


def test_backwards_of_gpipe_come_in_either_order(program, tokens, tmp_path):
    for order in ("reverse", "forward"):
        path = configuration(tokens, tmp_path / order, mesh={"pp": 2}, batch={"global": 6, "micro": 1},
                             pipeline={"schedule": "gpipe", "order": order})
        assert verify(program, path, "--steps", "2", "--precision", "fp64") == "", order


OWN = """stages 2, chunks 1, microbatches 3      # of each data-parallel rank
F0 F1 I0 W0 F2 I1 W1 I2 W2
F0 I0 F1 I1 W0 F2 I2 W1 W2
"""


def test_a_schedule_of_a_file(program, tokens, tmp_path):
    file = tmp_path / "own.txt"
    file.write_text(OWN)
    sections = {"mesh": {"pp": 2}, "batch": {"global": 3, "micro": 1}, "pipeline": {"schedule": str(file)}}
    path = configuration(tokens, tmp_path / "right", **sections)
    assert verify(program, path, "--steps", "2", "--precision", "fp64") == ""
    path = configuration(tokens, tmp_path / "four", **{**sections, "batch": {"global": 4, "micro": 1}})
    done = train(program, path, "--nproc", "2", check=False)
    assert done.returncode == 78
    assert "is for mesh.pp 2, pipeline.chunks 1 and 3 micro-batches" in done.stderr
    file.write_text(OWN.replace("F0 I0 F1", "I0 F0 F1"))
    done = train(program, configuration(tokens, tmp_path / "wrong", **sections), "--nproc", "2", check=False)
    assert done.returncode == 78
    assert f"{file}:3: I0 comes before its forward" in done.stderr


# Ranks that take micro-batches in other orders than they are sent in, of activations and of gradients.
CROSSED = ["F2 F1 F0 B2 B1 B0\nF0 F1 F2 B2 B1 B0", "F0 F1 F2 B0 B1 B2\nF2 F1 F0 B0 B1 B2",
           "F1 F0 B1 B0 F2 B2\nF0 F1 B0 B1 F2 B2", "F0+F1+F2 B0+B1+B2\nF1 F0+B1 F2+B0 B2"]


@pytest.mark.parametrize("turns", CROSSED)
def test_orders_that_cross_run_as_they_stand(program, tokens, tmp_path, turns):
    (tmp_path / "own.txt").write_text(f"stages 2, chunks 1, microbatches 3\n{turns}\n")
    path = configuration(tokens, tmp_path / "run", mesh={"pp": 2}, batch={"global": 3, "micro": 1},
                         pipeline={"schedule": str(tmp_path / "own.txt")})
    assert verify(program, path, "--steps", "2", "--precision", "fp64") == ""


def test_a_schedule_is_text(program, tokens, tmp_path):
    (tmp_path / "own.txt").write_bytes(b"stages 2\0")
    path = configuration(tokens, tmp_path / "run", mesh={"pp": 2}, pipeline={"schedule": str(tmp_path / "own.txt")})
    done = train(program, path, "--nproc", "2", check=False)
    assert done.returncode == 78 and "own.txt has bytes of 0: it is no text" in done.stderr


# What is asked for, and what the message names.
REFUSED = {
    "zb_v of three chunks": ({"schedule": "zb_v", "chunks": 3}, {"pp": 2}, 4, ["zb_v", "Use pipeline.chunks 2"]),
    "chunks of zb_h1": ({"schedule": "zb_h1", "chunks": 2}, {"pp": 2}, 4, ["zb_h1", "Use pipeline.chunks 1"]),
    "micro-batches of 2bw": ({"schedule": "pipedream_2bw"}, {"pp": 4}, 3, ["mesh.pp (4)", "a step has 3", ": 4;"]),
    "groups": ({"schedule": "interleaved_zb", "chunks": 2}, {"pp": 3}, 4, ["groups of mesh.pp (3)", "3 or 6"]),
    "an odd pipeline": ({"schedule": "dualpipe"}, {"pp": 3}, 4, ["mesh.pp is even", "2 or 4"]),
    "an odd batch": ({"schedule": "dualpipe"}, {"pp": 2}, 5, ["two pipelines", "4 or 6"]),
    "more parts than layers": ({"schedule": "dualpipe_v"}, {"pp": 4}, 8, ["= 8 parts", "model.layers is 6"]),
    "an order": ({"schedule": "gpipe", "order": "sideways"}, {"pp": 2}, 4, ["pipeline.order", "reverse"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_schedule_cannot_take_is_refused(program, tokens, tmp_path, name):
    pipeline, mesh, microbatches, said = REFUSED[name]
    path = configuration(tokens, tmp_path, model={"layers": 6}, mesh=mesh, pipeline=pipeline,
                         batch={"global": microbatches, "micro": 1})
    done = train(program, path, "--nproc", str(mesh["pp"]), check=False)
    assert done.returncode == 78
    assert all(each in done.stderr for each in said), done.stderr
