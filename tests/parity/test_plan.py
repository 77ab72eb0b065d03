"""tessera plan: a step before it is run, and beside what ran; the fastest layout on a cluster."""

import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import termios

import pytest
from runs import started, wait_until

MODEL = {"layers": 8, "hidden": 32, "heads": 4, "vocab": 300, "max_seq": 32}
RUN = {"run": {"name": "run", "steps": 4}, "model": MODEL, "data": {"train": "text.txt", "seq_len": 16},
       "batch": {"global": 8, "micro": 1}, "monitor": {"tensorboard": False}, "checkpoint": {"every": 0}}


CLUSTER = {"nodes": 2, "devices_per_node": 4, "device": {"kind": "cpu", "tflops": 0.05, "memory_gib": 1},
           "in_node": {"latency_us": 2, "gb_per_s": 4}, "between_nodes": {"latency_us": 20, "gb_per_s": 0.5}}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(RUN))
    (tmp_path / "cluster.json").write_text(json.dumps(CLUSTER))
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return tmp_path


def plan(program, folder, *flags, code=0):
    done = subprocess.run([program, "plan", "run.json", *flags], cwd=folder, capture_output=True, text=True, timeout=300,
                          env={**os.environ, "COLUMNS": "120"})
    assert done.returncode == code, done.stderr
    return done


def planned(program, folder, *flags):
    plan(program, folder, "--draw", "--json", "plan.json", *flags)
    return json.loads((folder / "plan.json").read_text())


# The usual example: p 4, m 8, a backward of two forwards.
@pytest.mark.parametrize("flags, step", [
    (["--pipeline.schedule=naive"], 96),
    (["--pipeline.schedule=gpipe"], 33),
    (["--pipeline.schedule=1f1b"], 33),
    (["--pipeline.schedule=interleaved", "--pipeline.chunks=2"], 28.5),
    (["--pipeline.schedule=gpipe", "--recompute.mode=stage"], 44),
    (["--pipeline.schedule=zb_h1"], 27),
    (["--mesh.tp=2", "--mesh.dp=2", "--zero.stage=3", "--batch.global=16"], 33),
])
def test_steps_of_the_usual_example(program, folder, flags, step):
    found = planned(program, folder, "--mesh.pp=4", "--times", "1,1,1", *flags)
    assert found["step"] == pytest.approx(step)
    assert len(found["stages"]) == 4
    for stage in found["stages"]:
        parts = ["work", "bubble", "exposed_communication", "waits_for_files"]
        assert sum(stage[part] for part in parts) == pytest.approx(step)
        assert max(level[1] for level in stage["bytes_over_time"]) == stage["peak_bytes"] > stage["state_bytes"] > 0
        assert stage["instructions"][-1]["op"] == "OptimizerStep"


def test_what_is_shown(program, folder):
    done = plan(program, folder, "--draw", "--mesh.pp=4", "--times", "1,1,1", "--svg", "step.svg")
    assert "step        33" in done.stdout and "bubble      27.3 % of it, for other stages" in done.stdout
    assert "stage 3: rank 3 |" in done.stdout and "F0" in done.stdout
    assert (folder / "step.svg").read_text().startswith("<svg")
    assert not (folder / "runs").exists()


def test_parameters_and_those_of_a_token(program, folder):
    found = planned(program, folder)
    assert found["parameters"] == found["active_parameters"] > 0
    experts = ["--model.family=mixtral", "--model.ffn=16", "--model.moe.experts=8", "--model.moe.top_k=2"]
    more = planned(program, folder, *experts)
    assert more["parameters"] - more["active_parameters"] == 8 * 6 * 3 * 32 * 16
    assert " of them active\n" in plan(program, folder, "--draw", *experts).stdout


def test_any_world_without_ranks(program, folder):
    found = planned(program, folder, "--mesh.pp=4", "--mesh.dp=256", "--zero.stage=1", "--batch.global=2048",
                    "--device", "100,1000", "--link", "10,25", "--link", "dp_shard=5,100")
    assert found["ranks"] == 1024 and found["unit"] == "s"
    assert [stage["ranks"] for stage in found["stages"]] == [256] * 4
    assert all(stage["exposed_communication"] > 0 for stage in found["stages"])


@pytest.mark.parametrize("mesh", [["--mesh.dp_replicate=2"], ["--mesh.dp_shard=2", "--zero.stage=1"]])
def test_a_link_of_one_axis_is_that_of_its_sums(program, folder, mesh):
    axis = mesh[0].removeprefix("--mesh.").removesuffix("=2")
    costs = [*mesh, "--mesh.pp=2", "--device", "100", "--link"]
    slow = planned(program, folder, *costs, f"{axis}=0,0.001")["step"]
    assert slow > 10 * planned(program, folder, *costs, f"{axis}=0,1000")["step"]


def test_a_measured_step_lies_below(program, folder):
    done = subprocess.run([program, "train", "run.json", "--mesh.pp=2", "--nproc=2", "--ranks=threads",
                           "--monitor.trace=2"], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    done = plan(program, folder, "--draw", "--mesh.pp=2", "--trace", "runs/run", "--svg", "step.svg")
    assert "means of the traced steps" in done.stdout
    assert done.stdout.index("predicted") < done.stdout.index("measured, step ")
    assert (folder / "step.svg").read_text().count("stage 1: rank 1") == 2
    done = plan(program, folder, "--draw", "--trace", "runs/run", code=78)
    assert "2 ranks" in done.stderr


def test_one_of_the_steps_that_go_on_lies_above_a_measured_one(program, folder):
    bw = ["--mesh.pp=2", "--pipeline.schedule=pipedream_2bw"]
    assert "drawn 4 steps from fill to flush\n" in plan(program, folder, "--draw", *bw).stdout
    subprocess.run([program, "train", "run.json", *bw, "--monitor.trace=3", "--schedule.warmup=0"], cwd=folder, check=True,
                   capture_output=True, timeout=300)
    shown = plan(program, folder, "--draw", *bw, "--trace", "runs/run").stdout
    assert ", drawn one step between others\n" in shown and "\nmeasured, step " in shown, shown
    assert "L loading of samples" in shown, shown


def test_columns_are_as_many_as_the_user_says(program, folder):
    leader, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 200, 0, 0))

    def widest(environment):
        shown = b""

        def is_whole():
            nonlocal shown
            if select.select([leader], [], [], 0.1)[0]:
                shown += os.read(leader, 65536)
            return b"digits: micro-batch" in shown

        with started(program, "plan", "run.json", "--draw", "--mesh.pp=2", cwd=folder, stdout=terminal,
                     env={**environment, "NO_COLOR": "1"}) as done:
            wait_until(is_whole, seconds=120)
            assert done.wait(timeout=120) == 0
        return max(len(line) for line in shown.decode().splitlines() if line.startswith("stage "))

    without = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    try:
        assert 190 < widest(without) <= 200
        assert 90 < widest({**without, "COLUMNS": "100"}) <= 100
    finally:
        os.close(leader)
        os.close(terminal)


def searched(program, folder, *flags):
    shown = plan(program, folder, "--cluster", "cluster.json", "--json", "found.json", *flags).stdout
    return json.loads((folder / "found.json").read_text()), shown


def test_the_fastest_layout_is_found_and_trains(program, folder):
    found, shown = searched(program, folder, "--world", "2", "--top", "3", "--emit", "fast.json")
    steps = [each["step_s"] for each in found["plans"]]
    assert len(steps) == 3 and steps == sorted(steps)
    counts = ["simulated", "too_large", "refused", "ruled_out", "left"]
    assert found["layouts"] == sum(found[name] for name in counts)
    assert found["plans"][0]["layout"] in shown and "why 1" in shown
    again = json.loads(subprocess.run(
        [program, "plan", "fast.json", "--draw", "--cluster", "cluster.json", "--json", "/dev/stdout"], cwd=folder,
        check=True, capture_output=True, text=True, timeout=300).stdout.splitlines()[-1])
    assert again["step"] == pytest.approx(steps[0])
    done = subprocess.run([program, "train", "fast.json"], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    summary = json.loads((folder / "runs" / "run" / "summary.json").read_text())
    assert (summary["world_size"], summary["steps"]) == (2, 4)


def test_a_backend_that_this_build_lacks_is_planned(program, folder):
    searched(program, folder, "--world", "2", "--top", "1", "--comm.backend=nccl", "--emit", "fast.json")
    assert json.loads((folder / "fast.json").read_text())["comm"]["backend"] == "nccl"
    plan(program, folder, "--draw", "--comm.backend=nccl")


def with_deepspeeds(program, folder, values, *flags, code=0):
    """A search with a run.json that says nothing of the batch."""
    (folder / "run.json").write_text(json.dumps({**RUN, "batch": {}}))
    (folder / "ds.json").write_text(json.dumps(values))
    done = plan(program, folder, "--cluster", "cluster.json", "--world", "4", "--deepspeed", "ds.json", "--json",
                "found.json", *flags, code=code)
    return json.loads((folder / "found.json").read_text()) if code == 0 else None, done.stderr


@pytest.mark.parametrize("values, flags", [
    ({"train_batch_size": 8}, ["--batch.global=8"]),
    ({"train_batch_size": 2}, ["--batch.global=2"]),  # fewer than ranks
    ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}, ["--batch.global=8", "--batch.micro=2"]),
    ({"train_batch_size": 8, "gradient_accumulation_steps": 4}, ["--batch.global=8"]),
])
def test_a_search_takes_deepspeeds_batch_as_the_runs(program, folder, values, flags):
    found, said = with_deepspeeds(program, folder, values)
    assert ("gradient_accumulation_steps is 4, without effect on a search" in said) == (len(flags) < len(values))
    assert found == with_deepspeeds(program, folder, {}, *flags)[0]


@pytest.mark.parametrize("values", [
    {"train_micro_batch_size_per_gpu": 2},
    {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2},
])
def test_a_search_asks_for_the_batch_that_follows_from_no_mesh(program, folder, values):
    said = with_deepspeeds(program, folder, values, code=78)[1]
    assert "train_micro_batch_size_per_gpu is 2 (ds.json:1:" in said
    assert "Give train_batch_size, or batch.global." in said


def test_a_search_keeps_what_is_set(program, folder):
    found, _ = searched(program, folder, "--mesh.pp=2", "--recompute.mode=block")
    assert all("pp 2 " in each["layout"] and "recompute block" in each["layout"] for each in found["plans"])


def test_a_trillion_parameters_on_four_thousand_devices(program, folder):
    """The usual layout, tp 8 x pp 8 x data 64 with the experts over the data ranks, fits; with another tp it is faster."""
    flags = ["--model.family=mixtral", "--model.layers=64", "--model.hidden=8192", "--model.heads=64",
             "--model.kv_heads=8", "--model.ffn=10240", "--model.vocab=128000", "--model.max_seq=4096",
             "--model.moe.experts=64", "--model.moe.top_k=2", "--data.seq_len=4096", "--batch.global=1024",
             "--batch.micro=1", "--precision.compute=bf16", "--mesh.pp=8", "--mesh.cp=1", "--mesh.ep=64",
             "--zero.stage=1", "--pipeline.schedule=1f1b", "--recompute.mode=none"]
    (folder / "cluster.json").write_text(json.dumps({
        "nodes": 512, "devices_per_node": 8,
        "device": {"tflops": 600, "memory_gib": 72, "memory_gb_per_s": 3000},
        "in_node": {"latency_us": 5, "gb_per_s": 400}, "between_nodes": {"latency_us": 15, "gb_per_s": 50}}))
    usual, shown = searched(program, folder, *flags, "--mesh.tp=8", "--mesh.dp_replicate=1", "--mesh.dp_shard=64")
    assert "1.04T parameters" in shown and "ranks       4096" in shown, shown
    assert [each["mesh"].split(" = ")[0] for each in usual["plans"]] == [
        "pp 8 x dp_replicate 1 x dp_shard 64 x cp 1 x tp 8"]
    best, _ = searched(program, folder, *flags)
    assert best["plans"][0]["step_s"] < usual["plans"][0]["step_s"]
    assert "pp 8" in best["plans"][0]["layout"] and "tp 8" not in best["plans"][0]["layout"]


def test_few_microbatches_are_told(program, folder):
    done = plan(program, folder, "--draw", "--mesh.pp=4", "--batch.micro=2", "--batch.global=8")
    assert done.stderr.count("4 micro-batches for 4 stages") == 1
    for words in ["42.9 %", "11 micro-batches (batch.global 22)", "pipeline.schedule"]:
        assert words in done.stderr
    assert "micro-batches for" not in plan(program, folder, "--draw", "--mesh.pp=4").stderr
    done = subprocess.run([program, "train", "run.json", "--mesh.pp=4", "--batch.micro=2", "--dry-run"], cwd=folder,
                          capture_output=True, text=True, timeout=300)
    assert done.stderr.count("4 micro-batches for 4 stages") == 1


@pytest.mark.parametrize("flags, code, words", [
    ([], 2, ["--cluster C.json", "--draw"]),
    (["--cluster", "absent.json"], 78, ["absent.json: there is no such description"]),
    (["--cluster", "run.json"], 78, ["run.json", "unknown key"]),
    (["--cluster", "cluster.json", "--world", "9"], 78, ["--world 9", "nodes 2 x devices_per_node 4 = 8"]),
    (["--cluster", "cluster.json", "--batch.global=3", "--mesh.tp=8", "--mesh.pp=1"], 78, ["no mesh of 8 ranks"]),
    (["--cluster", "cluster.json", "--emit", "cluster.json"], 2, ["--emit names cluster.json"]),
    (["--cluster", "cluster.json", "--times", "1,1,1"], 2, ["--draw"]),
    (["--cluster", "cluster.json", "--draw", "--device", "1"], 2, ["--cluster", "--device"]),
    (["--cluster", "cluster.json", "--draw", "--emit", "fast.json"], 2, ["--emit"]),
    (["--cluster", "cluster.json", "--top", "0"], 2, ["--top"]),
    (["--draw", "--times", "1,1"], 2, ["--times 1,1", "3 to 4"]),
    (["--draw", "--times", "1,x,1"], 2, ["--times 1,x,1"]),
    (["--draw", "--device", "0"], 2, ["--device 0"]),
    (["--draw", "--times", "1,1,1", "--device", "1"], 2, ["--times and --device"]),
    (["--draw", "--link", "1,1"], 2, ["--link is in seconds"]),
    (["--draw", "--device", "1", "--link", "qp=1,1"], 2, ["no axis qp"]),
    (["--draw", "--device", "1", "--link", "tp=1,1", "--link", "tp=2,1"], 2, ["tp=2,1: this axis has one already"]),
    (["--draw", "--trace", "nowhere"], 74, ["nowhere", "monitor.trace"]),
    (["--draw", "--svg", "nowhere/step.svg"], 74, ["there is no folder"]),
    (["--draw", "--world", "0"], 2, ["--world"]),
    (["--draw", "--json", "run.json"], 2, ["run.json, which this command reads"]),
    (["--draw", "--mesh.pp=16"], 78, ["mesh.pp (16)"]),
    (["--draw", "--cluster", "cluster.json", "--mesh.dp_shard=16", "--batch.global=16"], 78,
     ["the mesh asks for 16 ranks, more than", "nodes 2 x devices_per_node 4 = 8"]),
    (["--draw", "--cluster", "cluster.json", "--world", "16", "--mesh.dp_shard=16", "--batch.global=16"], 78,
     ["--world 16 is more than"]),
    (["--draw", "--mesh.data_parallel=dp"], 78, ["mesh.data_parallel"]),
])
def test_bad_input(program, folder, flags, code, words):
    done = plan(program, folder, *flags, code=code)
    for word in words:
        assert word in done.stderr
