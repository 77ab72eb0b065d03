"""Ranks with unlike shares, by their speeds or since they do not divide the batch, train what one rank trains."""

import json
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from fuzz import verify
from runs import configuration, metrics, run, train

LLAMA = {"layers": 6, "tie_embeddings": False}
EXPERTS = {**LLAMA, "family": "mixtral", "moe": {"experts": 4, "top_k": 2, "aux_loss": 0.1, "every": 2}}
DROPOUT = {**LLAMA, "family": "gpt2", "kv_heads": 4, "dropout": 0.3}
HALF = [1, 0.5]
CASES = {
    "pp 2": {"mesh": {"pp": 2, "speeds": HALF}},
    "pp 3": {"mesh": {"pp": 3, "speeds": [1, 0.5, 0.8]}},
    "pp 2, tied": {"mesh": {"pp": 2, "speeds": HALF}, "model": {"tie_embeddings": True}},
    "pp 2, by facts": {"mesh": {"pp": 2}, "pipeline": {"cut": "facts"}},
    "pp 3, by facts and speeds": {"mesh": {"pp": 3, "speeds": [0.4, 1, 1]}, "pipeline": {"cut": "facts"}},
    "interleaved": {"mesh": {"pp": 2, "speeds": HALF}, "pipeline": {"schedule": "interleaved", "chunks": 2}},
    "zb_v": {"mesh": {"pp": 2, "speeds": [0.5, 1]}, "pipeline": {"schedule": "zb_v"}},
    "dualpipe": {"mesh": {"pp": 4, "speeds": [1, 1, 0.5, 1]}, "pipeline": {"schedule": "dualpipe"}},
    "dp 2": {"mesh": {"dp_replicate": 2, "speeds": HALF}},
    "dp 3": {"mesh": {"dp_replicate": 3, "speeds": [0.4, 1, 0.9]}},
    **{f"zero {stage}": {"mesh": {"dp_shard": 2, "speeds": HALF}, "zero": {"stage": stage}} for stage in (1, 2, 3)},
    "hybrid": {"mesh": {"dp_replicate": 2, "dp_shard": 2, "speeds": [1, 0.5, 0.7, 1]}, "zero": {"stage": 2}},
    "hybrid, another order": {"mesh": {"dp_replicate": 2, "dp_shard": 2, "speeds": [1, 0.5, 0.2, 1],
                                       "order": ["dp_shard", "pp", "dp_replicate", "cp", "tp"]},
                              "zero": {"stage": 3}},
    "pp 2 x dp 2": {"mesh": {"pp": 2, "dp_replicate": 2, "speeds": [1, 0.3, 0.5, 0.2]}},
    "pp 2 x zero 2, dropout": {"mesh": {"pp": 2, "dp_shard": 2, "speeds": [0.5, 1, 0.3, 1]}, "zero": {"stage": 2},
                               "model": DROPOUT},
    "dropout": {"mesh": {"dp_replicate": 2, "speeds": HALF}, "model": DROPOUT},
    "tp 2 x dp 2": {"mesh": {"tp": 2, "dp_replicate": 2, "speeds": [1, 1, 0.5, 1]}},
    "sp 2 x dp 2": {"mesh": {"tp": 2, "dp_shard": 2, "speeds": [1, 1, 0.5, 1]}, "zero": {"stage": 3},
                    "tensor": {"sequence_parallel": True}},
    "cp 2 x dp 2": {"mesh": {"cp": 2, "dp_replicate": 2, "speeds": [1, 0.5, 1, 1]}},
    "experts over dp": {"mesh": {"dp_replicate": 2, "ep": 2, "speeds": HALF}, "model": EXPERTS},
    "experts over dp and tp": {"mesh": {"dp_shard": 2, "tp": 2, "ep": 4, "speeds": [1, 1, 0.5, 1]},
                               "zero": {"stage": 3}, "model": EXPERTS},
    "experts over one half of dp": {"mesh": {"dp_replicate": 4, "ep": 2, "speeds": [1, 0.5, 0.5, 0.25]},
                                    "model": EXPERTS},
    "recomputed": {"mesh": {"pp": 2, "dp_replicate": 2, "speeds": [1, 0.5, 0.5, 0.25]},
                   "recompute": {"mode": "stage"}},
    "documents": {"mesh": {"dp_replicate": 2, "speeds": HALF}, "data": {"intra_document_masking": True}},
    "muon": {"mesh": {"dp_shard": 2, "speeds": HALF}, "zero": {"stage": 2}, "optimizer": {"type": "muon"}},
    # Samples that the ranks do not divide.
    "8 on 3": {"mesh": {"dp_replicate": 3}, "batch": {"global": 8}},
    "10 on 3, zero 3": {"mesh": {"dp_shard": 3}, "zero": {"stage": 3}, "batch": {"global": 10, "micro": 2}},
    "10 on 3, speeds": {"mesh": {"dp_shard": 3, "speeds": [0.3, 1, 1]}, "zero": {"stage": 2},
                        "batch": {"global": 10, "micro": 2}},
    "20 on pp 2 x 3": {"mesh": {"pp": 2, "dp_replicate": 3}, "batch": {"global": 20, "micro": 2},
                       "pipeline": {"cut": "facts"}, "recompute": {"mode": "block"}},
    "7 on sp 2 x 2": {"mesh": {"tp": 2, "dp_shard": 2}, "zero": {"stage": 1}, "batch": {"global": 7},
                      "tensor": {"sequence_parallel": True}},
    "7 on cp 2 x 2": {"mesh": {"cp": 2, "dp_shard": 2}, "zero": {"stage": 3}, "batch": {"global": 7}},
    "7 on 2, experts": {"mesh": {"dp_shard": 2, "ep": 2}, "zero": {"stage": 3}, "batch": {"global": 7},
                        "model": EXPERTS},
    "7 on 2, documents": {"mesh": {"dp_replicate": 2}, "batch": {"global": 7},
                          "data": {"intra_document_masking": True}},
}


def sections_of(name):
    sections = {"run": {"steps": 3}, "schedule": {"warmup": 0}, "model": dict(LLAMA), **CASES[name]}
    sections["model"] = {**LLAMA, **sections["model"]}
    mesh = sections["mesh"]
    even = {"micro": 3, "global": 3 * 4 * mesh.get("dp_replicate", 1) * mesh.get("dp_shard", 1)}
    sections["batch"] = {**sections["batch"], "uneven": True} if "batch" in sections else even
    return sections


def shown(program, path, *arguments):
    return train(program, path, "--dry-run", *arguments).stdout


def test_uneven_ranks_train_what_one_rank_trains(program, tokens, tmp_path):
    def fault_of(name):
        path = configuration(tokens, tmp_path / name.replace(" ", "-"), **sections_of(name))
        plan = shown(program, path)
        moved = any(word in plan for word in ("by mesh.speeds", " by facts", "and mesh.speeds", "by batch.uneven"))
        return verify(program, path, "--steps", "3", "--precision", "fp64") if moved else "nothing moved\n" + plan

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, fault in zip(CASES, pool.map(fault_of, CASES)):
            assert fault == "", name


def test_what_was_chosen_is_shown(program, tokens, tmp_path):
    sections = {"model": LLAMA, "mesh": {"pp": 2, "dp_replicate": 2, "speeds": [1, 0.3, 0.5, 0.2]},
                "batch": {"micro": 3, "global": 12}}
    path = configuration(tokens, tmp_path, **sections)
    plan = shown(program, path)
    assert "stages      layers 4, 2 by layers and mesh.speeds\n" in plan
    assert "5, 1 samples of a micro-batch on the data-parallel ranks, by mesh.speeds" in plan
    printed = train(program, path, "--print-config").stdout
    assert any(re.fullmatch(r"pipeline\.split +\[4,2\] +chosen by layers and mesh\.speeds", line)
               for line in printed.splitlines()), printed
    told = train(program, path, "--nproc", "4", "--run.steps=1", "--schedule.warmup=0", "--checkpoint.every=0").stderr
    for text in (told, (tmp_path / "run" / "logs" / "rank-0.log").read_text()):
        assert "layers 4, 2 by layers and mesh.speeds\n" in text
        assert "5, 1 samples of a micro-batch on the data-parallel ranks, by mesh.speeds\n" in text


def test_a_run_goes_on_at_other_speeds(program, tokens, tmp_path):
    """Shares decide nothing but who computes: on fp64 the whole run is that of one rank."""
    common = {"model": LLAMA, "batch": {"micro": 3, "global": 12}, "checkpoint": {"every": 5},
              "precision": {"compute": "fp64"}}
    uneven = {"pp": 2, "dp_replicate": 2}
    one = run(program, tokens, tmp_path / "one", **{**common, "batch": {"micro": 12, "global": 12}})
    folder = tmp_path / "two"
    first = configuration(tokens, folder, **common, mesh={**uneven, "speeds": [1, 0.3, 0.5, 0.2]})
    train(program, first, "--nproc", "4", "--run.steps=10", "--schedule.steps=20")
    second = configuration(tokens, folder, **common, mesh={**uneven, "speeds": [0.5, 1, 0.2, 1]})
    train(program, second, "--nproc", "4")
    for a, b in zip(one[0], metrics(folder), strict=True):
        for key in ("loss", "grad_norm"):
            assert b[key] == pytest.approx(a[key], rel=1e-9), (key, a["step"])


def test_validation_and_measured_speeds(program, tokens, tmp_path):
    path = configuration(tokens, tmp_path, model=LLAMA, mesh={"pp": 2, "measure_speeds": True},
                         batch={"micro": 2, "global": 8}, run={"steps": 2}, schedule={"warmup": 0},
                         data={"valid": tokens["train"]}, validate={"every": 1, "samples": 7})
    done = train(program, path, "--nproc", "2")
    found = {}
    for text in (done.stderr, (tmp_path / "run" / "logs" / "rank-0.log").read_text()):
        assert re.search(r"mesh\.measure_speeds: (relative speeds [0-9., ]+|all ranks are as fast .*)\n", text), text
        found = re.search(r"\] (layers (\d), (\d) .*)\n", text)
        assert found, text
    # What starts from the run's configuration does what the run did, and measures nothing.
    kept = str(tmp_path / "run" / "config.json")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert not config["mesh"]["measure_speeds"]
    again = train(program, kept, "--nproc", "2", "--run.steps=4")
    assert "mesh.measure_speeds: " not in again.stderr and "resumed after step 2" in again.stderr
    assert f"layers {found[2]}, {found[3]} " in again.stderr, again.stderr
    path = configuration(tokens, tmp_path / "given", model=LLAMA, mesh={"dp_replicate": 2, "speeds": HALF},
                         batch={"micro": 2, "global": 8}, run={"steps": 2}, schedule={"warmup": 0},
                         data={"valid": tokens["train"]}, validate={"every": 1, "samples": 7})
    train(program, path, "--nproc", "2")
    other = configuration(tokens, tmp_path / "even", model=LLAMA, mesh={"dp_replicate": 2},
                          batch={"micro": 2, "global": 8}, run={"steps": 2}, schedule={"warmup": 0},
                          data={"valid": tokens["train"]}, validate={"every": 1, "samples": 7})
    train(program, other, "--nproc", "2")
    for a, b in zip(metrics(tmp_path / "given"), metrics(tmp_path / "even"), strict=True):
        assert a["valid_loss"] == pytest.approx(b["valid_loss"], rel=1e-5)


def test_cut_by_a_traced_run(program, tokens, tmp_path):
    sections = {"model": LLAMA, "mesh": {"pp": 2}, "batch": {"micro": 2, "global": 8}, "run": {"steps": 4},
                "schedule": {"warmup": 0}}
    traced = configuration(tokens, tmp_path / "traced", **sections, monitor={"trace": 3})
    train(program, traced, "--nproc", "2")
    folder = str(tmp_path / "traced" / "run")
    path = configuration(tokens, tmp_path / "cut", **sections, pipeline={"cut": folder})
    plan = shown(program, path)
    assert re.search(f" by {re.escape(folder)}\n +embedding [0-9.]+[mu]?s, a layer [0-9.]+[mu]?s, head [0-9.]+[mu]?s "
                     "of a micro-batch", plan), plan
    told = train(program, path, "--nproc", "2").stderr
    assert f" by {folder}\n" in told and f"{folder}: embedding " in told, told
    assert verify(program, path, "--steps", "2", "--precision", "fp64") == ""
    done = train(program, path, "--nproc", "2", "--model.layers=7", check=False)
    assert done.returncode == 78 and "a run of another model: model.layers 6 -> 7" in done.stderr
    for change, words in (("--data.seq_len=8", "data.seq_len 16 -> 8"), ("--recompute.mode=minimal", "Use facts")):
        done = train(program, path, "--nproc", "2", change, check=False)
        assert done.returncode == 78 and words in done.stderr, done.stderr
    kept = tmp_path / "traced" / "run" / "config.json"
    text = kept.read_text()
    uneven = json.loads(text)
    uneven["mesh"]["dp_replicate"] = 2
    uneven["batch"] = {"global": 7, "micro": 4, "uneven": True}
    kept.write_text(json.dumps(uneven))
    done = train(program, path, "--nproc", "2", check=False)
    assert done.returncode == 78 and "numbers of samples, by batch.uneven. Trace one without" in done.stderr, done.stderr
    kept.write_text(text)
    trace = tmp_path / "traced" / "run" / "trace" / "rank-0.json"
    text, changed = re.subn(r'"unit":1\b', '"unit":-1000000', trace.read_text())
    assert changed > 0
    trace.write_text(text)
    done = train(program, path, "--nproc", "2", check=False)
    assert done.returncode == 78 and "of unit -1000000" in done.stderr, (done.returncode, done.stderr)
    done = train(program, path, "--nproc", "2", "--pipeline.cut=nowhere", check=False)
    assert done.returncode == 78 and "neither layers nor facts, nor the folder of a run" in done.stderr
    done = train(program, path, "--nproc", "4", "--mesh.pp=4", "--mesh.speeds=1,1,1,0.5", check=False)
    assert done.returncode == 78 and "a run of 2 ranks, but mesh.speeds is of 4" in done.stderr


def test_what_is_wrong_in_a_traced_run_is_pipeline_cuts_fault(program, tokens, tmp_path):
    sections = {"model": LLAMA, "mesh": {"pp": 2}, "batch": {"micro": 2, "global": 8}, "run": {"steps": 2},
                "schedule": {"warmup": 0}}
    train(program, configuration(tokens, tmp_path / "traced", **sections, monitor={"trace": 1}), "--nproc", "2")
    run = tmp_path / "traced" / "run"
    path = configuration(tokens, tmp_path / "cut", **sections, pipeline={"cut": str(run)})
    config, trace = run / "config.json", run / "trace" / "rank-1.json"
    whole = {config: config.read_text(), trace: trace.read_text()}
    cases = [(config, whole[config].replace('"layers": 6', '"layers": 0'), 78, "model.layers is 0"),
             (config, whole[config][:-9], 78, "config.json:"), (config, "", 78, "config.json:"), (config, None, 78, ""),
             (trace, whole[trace].replace('"dur"', '"dura"', 3), 78, "rank-1.json:"), (trace, "", 78, "rank-1.json"),
             (trace, "folder", 74, "rank-1.json")]
    for file, text, code, words in cases:
        file.unlink()
        if text == "folder":
            file.mkdir()
        elif text is not None:
            file.write_text(text)
        done = train(program, path, "--nproc", "2", check=False)
        assert done.returncode == code, (code, done.returncode, done.stderr)
        assert f'pipeline.cut is "{run}"' in done.stderr and words in done.stderr, done.stderr
        # The user's file is named for that key alone.
        assert ("(pipeline.cut: " in done.stderr) == (code == 78) and "model.layers: " not in done.stderr, done.stderr
        if text == "folder":
            file.rmdir()
        file.write_text(whole[file])
    train(program, path, "--nproc", "2")


def test_a_run_of_devices_is_no_trace_of_units(program, tokens, tmp_path):
    sections = {"model": LLAMA, "batch": {"micro": 2, "global": 8}, "run": {"steps": 2}, "schedule": {"warmup": 0}}
    train(program, configuration(tokens, tmp_path / "traced", **sections, mesh={"data_parallel": "dp", "dp": 2},
                                 monitor={"trace": 1}))
    path = configuration(tokens, tmp_path / "cut", **sections, mesh={"pp": 2},
                         pipeline={"cut": str(tmp_path / "traced" / "run")})
    done = train(program, path, "--nproc", "2", check=False)
    assert done.returncode == 78 and "a run with mesh.data_parallel dp" in done.stderr, done.stderr


def test_the_slow_rank_of_a_traced_run_gets_fewer_layers(program, tokens, tmp_path):
    """Every task of rank 0 is written to have taken 10 us, of rank 1 20: the head, with its loss, 30 at speed 1."""
    sections = {"model": LLAMA, "mesh": {"pp": 2}, "batch": {"micro": 2, "global": 8}, "run": {"steps": 2},
                "schedule": {"warmup": 0}}
    train(program, configuration(tokens, tmp_path / "traced", **sections, monitor={"trace": 1}), "--nproc", "2")
    folder = tmp_path / "traced" / "run"
    for rank in (0, 1):
        file = folder / "trace" / f"rank-{rank}.json"
        text, changed = re.subn(r'"dur":[0-9.e+-]+', f'"dur":{10 * (rank + 1)}', file.read_text())
        assert changed > 0
        file.write_text(text)
    path = configuration(tokens, tmp_path / "cut", **sections, pipeline={"cut": str(folder)})
    assert "stages      layers 5, 1 by " in shown(program, path)
    # The same devices, as a user tells of them.
    assert "stages      layers 5, 1 by " in shown(program, path, "--mesh.speeds=1,0.5")


REFUSED = [
    (["--mesh.speeds=1,0.5,1"], ["mesh.speeds has 3 numbers, but the world has 2 ranks", "Give 2"]),
    (["--mesh.speeds=1,0"], ["mesh.speeds is", "above 0"]),
    (["--mesh.speeds=1,-1"], ["mesh.speeds is", "above 0"]),
    (["--mesh.speeds=1,1e999"], ["mesh.speeds"]),
    (["--mesh.speeds=1,nan"], ["mesh.speeds"]),
    (["--mesh.speeds=[1,\"fast\"]"], ["mesh.speeds"]),
    (["--mesh.measure_speeds=often"], ["mesh.measure_speeds"]),
    (["--pipeline.cut="], ["pipeline.cut"]),
    (["--pipeline.cut=layer"], ["pipeline.cut is \"layer\"", "Did you mean \"layers\"?"]),
    (["--mesh.pp=8", "--mesh.speeds=1,1,1,1,1,1,1,0.5", "--nproc", "8"], ["mesh.pp (8)", "model.layers is 6"]),
]


@pytest.mark.parametrize("arguments, words", REFUSED, ids=lambda value: value[0] if isinstance(value, list) else None)
def test_bad_speeds_are_refused_before_any_rank_starts(program, tokens, tmp_path, arguments, words):
    path = configuration(tokens, tmp_path, model=LLAMA, mesh={"pp": 2})
    done = train(program, path, *([] if "--nproc" in arguments else ["--nproc", "2"]), *arguments, check=False)
    assert done.returncode == 78, done.stderr
    for word in words:
        assert word in done.stderr, done.stderr
    assert not (tmp_path / "run").exists()


def test_devices_of_one_process_have_even_shares(program, tokens, tmp_path):
    path = configuration(tokens, tmp_path, mesh={"dp": 2, "data_parallel": "dp", "speeds": HALF})
    done = train(program, path, check=False)
    assert done.returncode == 78 and "mesh.speeds is set, but with mesh.data_parallel dp" in done.stderr


@pytest.mark.parametrize("sections, words", [
    ({"mesh": {"pp": 2, "speeds": [2, 2]}}, "mesh.speeds changes nothing: all are alike"),
    ({"mesh": {"pp": 2, "speeds": HALF}, "pipeline": {"split": [3, 3]}}, "mesh.speeds changes nothing: pipeline.split"),
    ({"mesh": {"dp": 2, "speeds": HALF}, "batch": {"micro": 1}}, "of batch.micro 1 x 2 samples"),
    ({"mesh": {"pp": 2}, "pipeline": {"split": [3, 3], "cut": "facts"}}, "pipeline.cut is not used: pipeline.split"),
    ({"pipeline": {"cut": "facts"}}, "pipeline.cut is not used while mesh.pp is 1"),
])
def test_what_changes_nothing_is_told(program, tokens, tmp_path, sections, words):
    path = configuration(tokens, tmp_path, **{"model": LLAMA, **sections})
    assert words in train(program, path, "--dry-run").stderr


def test_a_plan_knows_of_speeds(program, tokens, tmp_path):
    sections = {"model": LLAMA, "mesh": {"pp": 2, "speeds": HALF}, "batch": {"micro": 1, "global": 8}}
    path = configuration(tokens, tmp_path, **sections)

    def step(*flags):
        plan = tmp_path / "plan.json"
        done = subprocess.run([str(program), "plan", path, "--draw", "--json", str(plan), *flags],
                              capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert "stages      layers " in done.stdout
        return json.loads(plan.read_text())["step"]

    assert step() < 0.8 * step("--pipeline.split=3,3")
