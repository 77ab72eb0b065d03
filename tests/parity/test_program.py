"""The program's contract from outside: bad input, who starts ranks, commands, folders."""

import json
import os
import resource
import shutil
import socket
import struct
import subprocess
import sys
import time

import pytest
from hosts import end_of
from runs import free_port, started, steps_written, wait_until

SMALL = {
    "run": {"name": "run", "steps": 3, "device": "cpu"},
    "model": {"layers": 1, "hidden": 32, "heads": 4, "vocab": 300, "max_seq": 32},
    "data": {"train": "text.txt", "seq_len": 16},
    "batch": {"global": 4},
    "checkpoint": {"every": 0},
    "monitor": {"tensorboard": False},
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    (tmp_path / "run.json").write_text(json.dumps(SMALL))
    return tmp_path


def run(program, folder, *arguments, env=None):
    return subprocess.run([str(program), *arguments], cwd=folder, capture_output=True, text=True,
                          timeout=300, env={**os.environ, **(env or {})})


def ids(*values):
    return struct.pack(f"<{len(values)}H", *values)


MIXTRAL = "--model.family=mixtral"
# Arguments after `train run.json`, the exit code, and words of the message.
REFUSED = [
    (["--modl.layers=2"], 78, ["modl.layers", "model.layers"]),
    (["--model.layer=2"], 78, ["model.layer", "model.layers"]),
    (["--model.layers=two"], 78, ["model.layers", "two"]),
    (["--model.layers=0"], 78, ["model.layers", "0"]),
    (["--batch.global=5", "--nproc", "2"], 78, ["batch", "5", "2", "4 or 6"]),
    (["--batch.micro=3"], 78, ["batch", "4", "3"]),
    (["--model.heads=5"], 78, ["model.hid", "32", "5"]),
    (["--model.kv_heads=3"], 78, ["kv_heads", "3"]),
    (["--data.seq_len=64"], 78, ["data.seq_len", "64", "model.max_seq", "32"]),
    (["--data.train=absent.txt"], 78, ["data.train", "absent.txt"]),
    (["--data.train=empty.txt"], 78, ["empty.txt"]),
    (["--data.train=short.txt"], 78, ["seq_len"]),
    (["--mesh.ep=2", "--nproc", "2"], 78, ["mesh.ep is 2", "model.family llama", "mixtral"]),
    ([MIXTRAL, "--model.moe.experts=3", "--mesh.ep=2", "--nproc", "2"], 78,
     ["mesh.ep (2)", "model.moe.experts (3)", "2 or 4"]),
    ([MIXTRAL, "--mesh.ep=4", "--nproc", "2"], 78, ["mesh.ep is 4", "dp_replicate 2", "divisor of 2"]),
    ([MIXTRAL, "--mesh.tp=4", "--mesh.etp=2", "--nproc", "4"], 78, ["mesh.etp is 2", "mesh.tp, 4"]),
    ([MIXTRAL, "--mesh.tp=2", "--mesh.ep=2", "--mesh.etp=2", "--nproc", "2"], 78, ["mesh.ep is 2", "divisor of 1"]),
    ([MIXTRAL, "--model.moe.experts=2", "--model.moe.top_k=3"], 78, ["model.moe.top_k (3)", "model.moe.experts (2)"]),
    (["--model.moe.experts=4"], 78, ["model.moe.experts is 4", "dense", "mixtral"]),
    (["--pipeline.schedule=pipedream_2bw", "--optimizer.skip_nonfinite=true"], 78,
     ["pipedream_2bw", "optimizer.skip_nonfinite is true", "1f1b"]),
    (["--pipeline.schedule=pipedream_2bw", "--spike.action=rewind"], 78,
     ["pipedream_2bw", "spike.action is rewind", "Use warn"]),
    (["--spike.action=rewind", "--checkpoint.every=0"], 78, ["there is no checkpoint to go back to"]),
    (["--checkpoint.dir=run.json"], 74, ["checkpoint.dir: run.json is there, and is no folder"]),
    (["--checkpoint.dir=run.json/steps"], 74, ["Set checkpoint.dir to a folder that may be written"]),
    (["--spike.window=4"], 78, ["spike.window", "8"]),
    (["--mesh.tp=3", "--nproc", "3"], 78, ["mesh.tp (3)", "model.heads (4)", "3 or 6"]),
    (["--mesh.tp=2", "--model.kv_heads=1", "--tensor.sequence_parallel=true", "--data.seq_len=15", "--nproc", "2"],
     78, ["data.seq_len (15)", "14 or 16"]),
    (["--tensor.sequence_parallel=true"], 78, ["tensor.sequence_parallel", "mesh.tp"]),
    (["--mesh.cp=2", "--data.seq_len=14", "--nproc", "2"], 78, ["mesh.cp (2)", "data.seq_len (14)", "12 or 16"]),
    (["--mesh.cp=8", "--data.seq_len=16", "--context.method=ulysses", "--nproc", "8"], 78,
     ["mesh.cp (8)", "model.heads", "Nearest mesh.cp: 4;", "ring"]),
    (["--monitor.trace=3"], 78, ["monitor.trace is 3", "run.steps is 3", "Nearest: 2."]),
    (["--run.steps=1", "--monitor.trace=1"], 78, ["monitor.trace", "Nearest: 0."]),
    (["--mesh.pp=4", "--nproc", "4"], 78, ["mesh.pp (4)", "model.layers"]),
    (["--mesh.pp=2", "--model.layers=2", "--pipeline.chunks=2", "--nproc", "2"], 78, ["pipeline.chunks", "interleaved"]),
    (["--mesh.pp=2", "--model.layers=4", "--pipeline.schedule=interleaved", "--pipeline.chunks=2", "--batch.micro=4",
      "--nproc", "2"], 78,
     ["micro-batches", "interleaved"]),
    (["--mesh.pp=2", "--model.layers=2", "--pipeline.split=[1]", "--nproc", "2"], 78, ["pipeline.split", "mesh.pp (2)"]),
    (["--mesh.dp=3", "--nproc", "2"], 78, ["3", "2"]),
    (["--data.tokenizer=big", "--model.vocab=260"], 78, ["vocab", "260"]),
    (["--data.train=outside.bin", "--data.format=tokens_u16"], 74, ["outside.bin", "999", "300"]),
    (["--data.train=odd.bin", "--data.format=tokens_u16"], 74, ["odd.bin"]),
    (["--nproc", "two"], 2, ["nproc"]),
    (["--ranks", "fibres"], 2, ["ranks"]),
    (["--resum=auto"], 2, ["--resum"]),
]


@pytest.mark.parametrize("arguments, code, words", REFUSED, ids=lambda value: "-".join(map(str, value))
                         if isinstance(value, list) else str(value))
def test_bad_input_is_refused_before_any_rank_starts(program, folder, arguments, code, words):
    (folder / "empty.txt").write_text("")
    (folder / "short.txt").write_text("abc")
    (folder / "outside.bin").write_bytes(ids(*range(100), 999, *range(100)))
    (folder / "odd.bin").write_bytes(ids(1, 2, 3) + b"x")
    if "--data.tokenizer=big" in arguments:
        run(program, folder, "tokenize", "train", "--input", "text.txt", "--vocab-size", "280", "--output", "big")
        assert (folder / "big" / "tokenizer.json").exists()
    done = run(program, folder, "train", "run.json", *arguments)
    assert done.returncode == code, done.stderr
    for word in words:
        assert word in done.stderr, done.stderr
    assert "step:" not in done.stderr
    assert "Exception raised" not in done.stderr, "a stack is no message"


@pytest.mark.parametrize("variable, value, arguments, words", [
    ("TESSERA_WITH_PASSES", "split_backwards", [], ["split_backwards", "can be asked for: split_backward."]),
    ("TESSERA_WITH_PASSES", "prefetch", [], ["prefetch", "asked for"]),
    ("TESSERA_WITHOUT_PASSES", "prefetch,units", [],
     ["units", "can be left out: split_backward, prefetch, reductions, messages."]),
    ("TESSERA_WITH_PASSES", "split_backward", ["--mesh.data_parallel=dp"], ["mesh.data_parallel dp"]),
    ("TESSERA_WITHOUT_PASSES", "messages", ["--model.layers=2", "--mesh.pp=2", "--batch.micro=1", "--nproc=2",
                                            "--pipeline.schedule=pipedream_2bw"],
     ["messages", "pipedream_2bw"]),
])
def test_passes_that_have_no_choice_are_refused(program, folder, variable, value, arguments, words):
    done = run(program, folder, "train", "run.json", *arguments, env={variable: value})
    assert done.returncode == 78, done.stderr
    for word in [variable, *words]:
        assert word in done.stderr, done.stderr


@pytest.mark.parametrize("text, words", [
    ('{"model": {"layers": 2,}}', ["run.json:1:"]),
    ('{"model": {"layers": 2, "layers": 3}}', ["layers", "run.json:1:"]),
    ('{\n "batch": {\n  "globl": 3 }}', ["run.json:3:3", "globl", "global"]),
    ('[]', ["run.json"]),
    ('', ["run.json"]),
])
def test_a_bad_file_is_refused_with_its_place(program, folder, text, words):
    (folder / "run.json").write_text(text)
    done = run(program, folder, "train", "run.json")
    assert done.returncode == 78, done.stderr
    for word in words:
        assert word in done.stderr


@pytest.mark.parametrize("prefetch, memory, words", [
    (8, "150M", ["zero.prefetch is 8", "150.0 MiB", "Nearest: 2."]),
    (3, "150M", ["zero.prefetch is 3", "Nearest: 2."]),
    (3, "100M", ["memory:", "100.0 MiB", "fewer of the ranks", "recompute.mode block"]),
    (3, "some", ["TESSERA_HOST_MEMORY", "some"]),
    (2, "150M", []),
])
def test_what_memory_does_not_hold_is_refused_before_any_rank_starts(program, folder, prefetch, memory, words):
    done = run(program, folder, "train", "run.json", "--nproc", "2", "--ranks", "threads", "--model.layers=8",
               "--model.hidden=256", "--zero.stage=3", f"--zero.prefetch={prefetch}", "--run.steps=1",
               env={"TESSERA_HOST_MEMORY": memory})
    assert done.returncode == (78 if words else 0), done.stderr
    assert ("step:" in done.stderr) == (not words)
    for word in words:
        assert word in done.stderr, done.stderr


def test_a_trace_of_a_pipeline(program, folder):
    """A process a rank, a track a lane, arrows that go forward in time."""
    done = run(program, folder, "train", "run.json", "--nproc", "2", "--mesh.pp=2", "--model.layers=2",
               "--batch.micro=1", "--monitor.trace=2")
    assert done.returncode == 0, done.stderr
    events = json.loads((folder / "runs" / "run" / "trace" / "trace.json").read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in slices} == {0, 1}
    assert {event["args"]["step"] for event in slices} == {2, 3}
    starts = {event["id"]: event["ts"] for event in events if event["ph"] == "s"}
    ends = {event["id"]: event["ts"] for event in events if event["ph"] == "f"}
    # Two steps, four micro-batches, up and down.
    assert len(starts) == 16 and starts.keys() == ends.keys()
    assert all(starts[flow] < ends[flow] for flow in starts)


def test_a_trace_that_cannot_be_written_does_not_end_the_run(program, folder):
    trace = folder / "runs" / "run" / "trace"
    (trace / "trace.json").mkdir(parents=True)
    (trace / "trace.json" / "in the way").write_text("")
    done = run(program, folder, "train", "run.json", "--monitor.trace=1")
    assert done.returncode == 0, done.stderr
    assert "no trace of this run" in done.stderr and "trace.json" in done.stderr


def test_what_units_wait_for_inside_is_exposed(program, folder):
    done = run(program, folder, "train", "run.json", "--nproc", "2", "--mesh.tp=2")
    assert done.returncode == 0, done.stderr
    with open(folder / "runs" / "run" / "metrics.jsonl") as file:
        assert all(json.loads(line)["exposed_comm_s"] > 0 for line in file)


def test_no_room_for_checkpoints(program, folder):
    done = run(program, folder, "train", "run.json", "--checkpoint.every=1", "--model.layers=10000",
               "--model.hidden=16384", "--model.heads=64")
    assert done.returncode == 78, done.stderr
    assert "checkpoint" in done.stderr


@pytest.mark.parametrize("arguments, code", [
    ([], 2), (["trian"], 2), (["--help"], 0), (["train", "--help"], 0), (["--version"], 0), (["plan", "x.json"], 2),
    (["help"], 0), (["help", "train"], 0), (["help", "trian"], 2),
    (["train", "absent.json"], 78), (["eval", "--model", "absent", "--data", "text.txt"], 74),
])
def test_exit_codes(program, folder, arguments, code):
    done = run(program, folder, *arguments)
    assert done.returncode == code, done.stderr
    if arguments[-1:] == ["trian"]:
        assert "Did you mean 'tessera train'?" in done.stderr
    if arguments == ["help", "train"]:
        assert done.stdout == run(program, folder, "train", "--help").stdout
    if arguments[:1] == ["plan"]:
        assert "--cluster" in done.stderr


def test_a_full_disk_behind_stdout_is_told(program, folder):
    with open("/dev/full", "w") as full:
        done = subprocess.run([str(program), "schema"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=300)
    assert done.returncode == 74, done.stderr
    assert "standard output" in done.stderr


def test_the_summary_of_a_failed_run_has_its_exit_code(program, folder):
    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))

    # SIGXFSZ stays ignored, as Python has it: the write fails instead.
    done = subprocess.run([str(program), "train", "run.json", "--checkpoint.every=3"], cwd=folder, timeout=300,
                          capture_output=True, text=True, restore_signals=False, preexec_fn=small_files)
    assert done.returncode == 74, done.stderr
    summary = json.loads((folder / "runs" / "run" / "summary.json").read_text())
    assert (summary["reason"], summary["exit_code"]) == ("failed", 74)
    assert "EFBIG" in summary["message"] and "Exception raised" not in summary["message"]


def test_a_path_that_the_system_refuses_is_input_or_output(program, folder):
    done = run(program, folder, "inspect", "a" * 300)
    assert done.returncode == 74, done.stderr


def losses(folder):
    with open(folder / "runs" / "run" / "metrics.jsonl") as file:
        return [json.loads(line)["loss"] for line in file]


def expected_losses(program, folder):
    assert run(program, folder, "train", "run.json", "--run.dir=alone").returncode == 0
    with open(folder / "alone" / "run" / "metrics.jsonl") as file:
        return [json.loads(line)["loss"] for line in file]


def test_torchrun_starts_it(program, folder):
    wanted = expected_losses(program, folder)
    torchrun = os.path.join(os.path.dirname(sys.executable), "torchrun")
    done = subprocess.run([torchrun, "--no-python", "--standalone", "--nproc-per-node", "2", str(program),
                           "train", "run.json"], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert losses(folder) == pytest.approx(wanted, rel=1e-5)


def open_mpi(rank):
    return {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": rank,
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}


def slurm(rank):
    return {"SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": rank, "SLURM_STEP_ID": "0",
            "SLURM_NTASKS_PER_NODE": "2", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "localhost",
            "SLURM_JOB_ID": "4711"}


@pytest.mark.parametrize("variables", [open_mpi, slurm])
def test_the_environments_of_mpi_and_slurm(program, folder, variables):
    wanted = expected_losses(program, folder)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [subprocess.Popen([str(program), "train", "run.json", "--optimizer.momentum=0.5"], cwd=folder,
                              stderr=subprocess.PIPE, text=True,
                              env={**os.environ, **address, **variables(rank)}) for rank in ("0", "1")]
    for number, (code, errors) in enumerate(end_of(ranks)):
        assert code == 0, errors
        assert ("optimizer.momentum is not used by" in errors) == (number == 0)
    assert losses(folder) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("arguments", [["--nproc=1"], ["--nproc=2", "--ranks=threads"]])
def test_a_reader_who_leaves_ends_no_run(program, folder, arguments):
    with started(program, "train", "run.json", "--monitor.every=1", *arguments, cwd=folder,
                 stderr=subprocess.PIPE) as process:
        process.stderr.close()
        assert process.wait(timeout=300) == 0
    assert len(losses(folder)) == SMALL["run"]["steps"]


# The start of a conversation with c10d's store, of which nobody hears the answer.
STRANGER = b"\x00\xce\xf7\x85\x3c" + 2 * b"\x0d\x07\x00\x00\x00"


def test_a_stranger_at_the_rendezvous_ends_no_rank(program, folder):
    port = free_port()
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}

    def start(rank):
        return started(program, "train", "run.json", cwd=folder, stderr=subprocess.PIPE, text=True,
                       env={**os.environ, **shared, "RANK": rank, "LOCAL_RANK": rank})

    def is_told():
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
                stranger.sendall(STRANGER)
            return True
        except ConnectionRefusedError:
            return False

    with start("0") as first:
        for _ in range(10):
            wait_until(is_told, first)
            time.sleep(0.02)
        with start("1") as second:
            for code, errors in end_of([first, second]):
                assert code == 0, errors


# On gloo other sizes ended a rank with SIGABRT.
@pytest.mark.parametrize("key, backend", [
    ("run.seed=77", "shm"), ("optimizer.lr=1", "shm"), ("model.rope_theta=9", "shm"), ("checkpoint.every=2", "shm"),
    ("model.ffn=64", "gloo"), ("zero.bucket_mb=1", "gloo")])
def test_ranks_that_were_started_otherwise_are_refused(program, folder, key, backend):
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    command = [str(program), "train", "run.json", f"--comm.backend={backend}"]
    ranks = [subprocess.Popen([*command, *flags], cwd=folder, stderr=subprocess.PIPE,
                              text=True, env={**os.environ, **shared, "RANK": rank, "LOCAL_RANK": rank})
             for rank, flags in (("0", []), ("1", [f"--{key}"]))]
    for code, errors in end_of(ranks):
        assert code == 78, errors
        assert f"rank 1 was started otherwise than rank 0: {key.split('=')[0]} " in errors


@pytest.mark.parametrize("line, words", [
    ("tessera rep", ["report"]), ("tessera inspect --ver", ["--verify"]),
    ("tessera train run.json --optimizer.wei", ["--optimizer.weight_decay="]),
    ("tessera train run.json --data.train=tex", ["text.txt"]), ("tessera train ru", ["run.json"])])
def test_bash_completes(program, folder, line, words):
    script = f"""
        source <({program} completion bash)
        compopt() {{ :; }}
        COMP_LINE=$1; COMP_POINT=${{#1}}; COMP_WORDS=($1); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
        _tessera; printf '%s\\n' "${{COMPREPLY[@]}}\""""
    done = subprocess.run(["bash", "-c", script, "bash", line], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == words, done.stderr


def test_a_checkpoint_folder_has_one_run(program, folder):
    shared = ["--checkpoint.dir=shared", "--checkpoint.every=3"]
    assert run(program, folder, "train", "run.json", *shared).returncode == 0
    second = run(program, folder, "train", "run.json", *shared, "--run.name=second")
    assert second.returncode == 78, second.stderr
    assert "holds checkpoints of the run \"run\", not of \"second\"" in second.stderr
    assert run(program, folder, "train", "run.json", *shared, "--run.steps=4").returncode == 0
    # The run's own folder is one too.
    own = run(program, folder, "train", "run.json", "--run.name=own", "--checkpoint.dir=runs/own", "--checkpoint.every=3")
    assert own.returncode == 0, own.stderr


def test_metrics_wait_for_room(program, folder):
    """A limit of the file's size, as a full disk: training goes on, and what was not written is said at the end."""
    done = run(program, folder, "train", "run.json", "--checkpoint.every=3", "--checkpoint.dir=elsewhere",
               "--run.steps=40")
    assert done.returncode == 0
    whole = (folder / "runs" / "run" / "metrics.jsonl").stat().st_size
    command = f"ulimit -f {whole // 2 // 1024}; exec {program} train run.json --run.name=full --run.steps=40"
    full = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, timeout=300)
    assert full.returncode == 74, full.stderr
    assert "The run goes on; lines are kept" in full.stderr and "step: 40/40" in full.stderr


def test_a_limit_of_the_files_size_is_an_error_of_the_write(program, folder):
    for command, name in ((f"{program} train run.json --run.name=small --checkpoint.every=3", "step-"),
                          (f"{program} schema > out.json", "standard output")):
        done = subprocess.run(["bash", "-c", f"ulimit -f 8; {command}"], cwd=folder, capture_output=True, text=True,
                              timeout=300)
        assert done.returncode == 74, (done.returncode, done.stderr)
        assert name in done.stderr and "error" in done.stderr, done.stderr


def test_another_model_of_the_same_shapes_does_not_resume(program, folder):
    assert run(program, folder, "train", "run.json", "--checkpoint.every=3").returncode == 0
    config = folder / "runs" / "run" / "config.json"
    before = config.read_bytes()
    done = run(program, folder, "train", "run.json", "--run.steps=6", "--model.heads=2", "--model.rope_theta=50")
    assert done.returncode == 78
    assert "is of another model: model.heads 4 -> 2" in done.stderr and "model.rope_theta" in done.stderr
    assert config.read_bytes() == before


def test_a_local_run_opens_no_network_port(program, folder):
    strace = shutil.which("strace")
    if strace is None:
        # Without strace: the run must work where there is no network at all.
        unshare = ["unshare", "--net", "--map-root-user", "--user"]
        if subprocess.run([*unshare, "true"], capture_output=True).returncode != 0:
            pytest.skip("neither strace nor user namespaces")
        command = [*unshare, str(program), "train", "run.json", "--nproc", "2"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return
    log = folder / "calls"
    subprocess.run([strace, "-f", "-e", "trace=bind,listen", "-o", str(log), str(program), "train", "run.json",
                    "--nproc", "2"], cwd=folder, check=True, capture_output=True, timeout=300)
    assert "AF_INET" not in log.read_text()


def test_commands_on_what_a_run_left(program, folder, tessera):
    assert run(program, folder, "train", "run.json", "--checkpoint.every=3").returncode == 0
    made = folder / "runs" / "run"
    assert {"config.json", "metrics.jsonl", "summary.json", "tokenizer.json", "checkpoints", "logs"} <= set(os.listdir(made))
    assert "the" in tessera("generate", "--model", made, "--prompt", "the", "--max-tokens", 5)
    result = json.loads(tessera("eval", "--model", made, "--data", folder / "text.txt").splitlines()[-1])
    assert result["loss"] > 0 and result["perplexity"] > 1
    tessera("convert", "--from", made, "--to", folder / "hf")
    again = json.loads(tessera("eval", "--model", folder / "hf", "--data", folder / "text.txt").splitlines()[-1])
    assert again["loss"] == pytest.approx(result["loss"], rel=1e-6)
    for path in (made, made / "checkpoints" / "step-3", made / "tokenizer.json", made / "config.json"):
        assert tessera("inspect", path)
    assert json.loads(tessera("schema"))["type"] == "object"


def test_a_resumed_run_that_is_done_says_so(program, folder):
    assert run(program, folder, "train", "run.json", "--checkpoint.every=3").returncode == 0
    done = run(program, folder, "train", "run.json", "--checkpoint.every=3")
    assert done.returncode == 0
    assert "nothing to do" in done.stderr
    summary = json.loads((folder / "runs" / "run" / "summary.json").read_text())
    assert summary["last_loss"] is not None, "the first run's summary stays"
    changed = run(program, folder, "train", "run.json", "--run.steps=4", "--optimizer.lr=0.5", "--run.seed=9")
    assert changed.returncode == 0, changed.stderr
    assert "optimizer.lr" in changed.stderr and "run.seed 0 -> 9" in changed.stderr
    never = run(program, folder, "train", "run.json", "--checkpoint.every=3", "--resume", "never")
    assert never.returncode == 78
    assert "run.name" in never.stderr and "rank 0" not in never.stderr, "before any rank starts"


def test_two_runs_do_not_share_a_folder(program, folder):
    with started(program, "train", "run.json", "--run.steps=100000", cwd=folder, stderr=subprocess.DEVNULL) as first:
        lock = folder / "runs" / "run" / ".lock"
        wait_until(lambda: lock.is_file() and lock.read_text(), first)
        second = run(program, folder, "train", "run.json")
        assert second.returncode == 74, second.stderr
        assert f"process {first.pid}" in second.stderr and "run.name" in second.stderr
    # A process that was killed holds nothing.
    assert run(program, folder, "train", "run.json").returncode == 0


def of_other_text(folder):
    """Flags by which a run on text learns another tokenizer."""
    (folder / "other.txt").write_text("pack my box with five dozen liquor jugs, and so on. " * 200)
    return ["--data.train=other.txt"]


def test_a_start_that_is_refused_leaves_the_tokenizer_of_the_run(program, folder, tessera):
    saved = ["--checkpoint.every=3"]
    assert run(program, folder, "train", "run.json", *saved).returncode == 0
    own = folder / "runs" / "run" / "tokenizer.json"
    before = own.read_bytes()
    (folder / "cats.txt").write_text("".join(f"There were {n} cats, who slept.\n" for n in range(2000)))
    for size in (270, 400):  # refused for too little data, and for too many ids
        run(program, folder, "tokenize", "train", "--input", "cats.txt", "--vocab-size", str(size), "--output", f"{size}")
    (folder / "short.txt").write_text("abc")
    for flags, words in ((["--data.tokenizer=270", "--data.train=short.txt"], "Give more data"),
                         (["--data.tokenizer=400"], "the tokenizer has 400 ids"), (["--data.tokenizer=absent"], "absent")):
        done = run(program, folder, "train", "run.json", *saved, *flags)
        assert done.returncode in (74, 78) and words in done.stderr and "step:" not in done.stderr, done.stderr
        assert own.read_bytes() == before, flags
    assert "the" in tessera("generate", "--model", folder / "runs" / "run", "--prompt", "the", "--max-tokens", 3)


def test_a_second_start_leaves_the_tokenizer_of_the_running_run(program, folder):
    own = folder / "runs" / "run" / "tokenizer.json"
    with started(program, "train", "run.json", "--run.steps=100000", cwd=folder, stderr=subprocess.DEVNULL) as first:
        wait_until(own.is_file, first)
        before = own.read_bytes()
        second = run(program, folder, "train", "run.json", *of_other_text(folder))
        assert second.returncode == 74 and f"process {first.pid}" in second.stderr, second.stderr
        assert own.read_bytes() == before
    # What was killed before it saved has no say.
    assert run(program, folder, "train", "run.json", *of_other_text(folder)).returncode == 0
    assert own.read_bytes() != before


def test_weights_of_another_run_keep_their_tokenizer(program, folder):
    saved = ["--checkpoint.every=3"]
    assert run(program, folder, "train", "run.json", *saved).returncode == 0
    own = folder / "runs" / "run" / "tokenizer.json"
    before = own.read_bytes()
    step = ["--resume", "runs/run/checkpoints/step-3", "--run.steps=4", *of_other_text(folder)]
    named = run(program, folder, "train", "run.json", *saved, *step, "--run.name=named", "--nproc", "2")
    assert named.returncode == 0 and "resumed after step 3" in named.stderr, named.stderr
    assert (folder / "runs" / "named" / "tokenizer.json").read_bytes() == before
    moved = run(program, folder, "train", "run.json", *saved, *step, "--checkpoint.dir=elsewhere")
    assert moved.returncode == 0 and own.read_bytes() == before, moved.stderr
    own.unlink()
    # From another's checkpoint, and from its own: the text would get other ids.
    for name, flags in ("lost", step), ("run", step[2:]):
        command = ["train", "run.json", *saved, *flags, f"--run.name={name}"]
        done = run(program, folder, *command)
        assert done.returncode == 78 and "data.tokenizer is empty" in done.stderr, done.stderr
        assert not (folder / "runs" / name / "tokenizer.json").exists() and "rank 0" not in done.stderr
        done = run(program, folder, *command, "--data.tokenizer=runs/named")
        assert done.returncode == 0 and "resumed after step 3" in done.stderr, done.stderr
        assert (folder / "runs" / name / "tokenizer.json").read_bytes() == before


@pytest.mark.parametrize("arguments", [["train", "run.json", "--data.train=pipe"],
                                       ["tokenize", "encode", "--tokenizer", "pipe", "--input", "text.txt",
                                        "--output", "out.bin"]], ids=["data", "tokenizer"])
def test_a_pipe_is_no_file(program, folder, arguments):
    os.mkfifo(folder / "pipe")
    done = run(program, folder, *arguments)
    assert done.returncode in (74, 78), done.stderr
    assert "pipe" in done.stderr


def test_a_token_file_that_is_cut_short_during_the_run_is_named(program, folder):
    (folder / "cut.bin").write_bytes(ids(*range(100)) * 100)
    with started(program, "train", "run.json", "--data.train=cut.bin", "--run.steps=1000000", cwd=folder,
                 stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: steps_written(folder / "runs"), process)
        os.truncate(folder / "cut.bin", 0)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 74, errors
    assert "cut.bin" in errors and "shorter" in errors


# torchrun and the like start ranks that nobody has prepared for.
def test_external_launchers_check_first(program, folder):
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port())}
    done = run(program, folder, "train", "run.json", "--checkpoint.every=1", "--model.layers=10000",
               "--model.hidden=16384", "--model.heads=64", env=rank)
    assert done.returncode == 78, done.stderr
    assert "checkpoint" in done.stderr


@pytest.mark.parametrize("closed", ["2>&-", ">&- 2>&-"])
def test_closed_standard_files_are_nobodys(program, folder, closed):
    command = f"exec {program} train run.json --nproc 2 --batch.global=8 {closed}"
    assert subprocess.run(["bash", "-c", command], cwd=folder, timeout=300).returncode == 0
    again = run(program, folder, "train", "run.json", "--run.name=again")
    assert again.returncode == 0, again.stderr


def test_a_set_key_may_come_before_the_file(program, folder):
    done = run(program, folder, "train", "--set", "run.steps=2", "--set", "run.seed=5", "run.json", "--print-config")
    assert done.returncode == 0, done.stderr
    assert "--set run.steps=2" in done.stdout and "--set run.seed=5" in done.stdout
