"""tessera bench comm, from outside: figures, drawing, and what it refuses."""

import json
import os
import subprocess
import xml.etree.ElementTree as xml

import pytest
from hosts import Hosts, end_of, places, why_not
from runs import free_port, started

SVG = "{http://www.w3.org/2000/svg}"
OPERATIONS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv", "barrier"]
SIZES = [4096, 16384, 65536]


def run(program, *arguments, env=None, cwd=None):
    return subprocess.run([str(program), "bench", "comm", *map(str, arguments)], capture_output=True, text=True,
                          timeout=300, cwd=cwd, env={**os.environ, **(env or {})})


def test_every_operation_of_two_backends(program, tmp_path):
    done = run(program, "--nproc", 2, "--backend", "shm,gloo", "--max-bytes", "64K", "--iters", 2,
               "--warmup", 1, "--json", "figures.json", "--plot", "drawing.svg", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["ranks"] == 2 and figures["cores"] >= 1
    assert figures["command"].startswith("tessera bench comm --nproc 2")
    cells = {(cell["operation"], cell["backend"], cell["size_bytes"]): cell for cell in figures["cells"]}
    assert set(cells) == {(operation, backend, size) for operation in OPERATIONS for backend in ("shm", "gloo")
                          for size in (SIZES if operation != "barrier" else [0])}
    for (operation, _, size), cell in cells.items():
        assert cell["wrong"] == 0 and cell["timings"] == 2 and cell["time_us"] > 0, cell
        if operation == "all_reduce":
            assert cell["count"] == size // 4
            assert cell["busbw_gbps"] == pytest.approx(size / cell["time_us"] / 1e3)
        if operation in ("all_gather", "reduce_scatter", "all_to_all"):
            assert cell["count"] == size // 8
            assert cell["busbw_gbps"] == pytest.approx(cell["algbw_gbps"] / 2)
        if operation == "barrier":
            assert cell["algbw_gbps"] is None
        if os.cpu_count() > 1 and len(os.sched_getaffinity(0)) > 1:
            assert cell["line_ns_before"] > 1 and cell["state"] in ("near", "far", "changed")
    drawing = xml.parse(tmp_path / "drawing.svg").getroot()
    assert len(drawing.findall(f"{SVG}g")) == 6, "a panel an operation"
    assert len(drawing.findall(f"{SVG}g/{SVG}polyline")) == 12, "a line a backend"
    for operation in OPERATIONS:
        assert f"# {operation}, gloo\n" in done.stdout
        assert f"# {operation}, side by side\n" in done.stdout
    assert "#wrong" in done.stdout and "busbw(GB/s)" in done.stdout


def test_ranks_as_threads(program, tmp_path):
    done = run(program, "--ranks", "threads", "--registered", "--op", "all_reduce,barrier", "--max-bytes", "4K", "--iters", 1,
               "--json", "figures.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["ranks"] == 2 and figures["ranks_are"] == "threads"
    assert [(cell["registered"], cell["wrong"]) for cell in figures["cells"]] == [(False, 0), (True, 0)] * 2


def test_a_table_of_the_fastest_algorithms_is_written_and_read(program, tmp_path):
    done = run(program, "--nproc", 3, "--backend", "gloo", "--op", "all_reduce,broadcast", "--min-bytes", "64K",
               "--max-bytes", "256K", "--iters", 2, "--json", "figures.json", "--tune", "table.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    cells = json.loads((tmp_path / "figures.json").read_text())["cells"]
    assert {(cell["operation"], cell["algorithm"]) for cell in cells} == {
        ("all_reduce", "auto"), ("all_reduce", "ring"), ("all_reduce", "recursive_doubling"), ("all_reduce", "tree"),
        ("broadcast", "auto"), ("broadcast", "tree")}
    assert [cell["wrong"] for cell in cells] == [0] * len(cells)
    for entry in json.loads((tmp_path / "table.json").read_text())["entries"]:
        assert entry["backend"] == "gloo" and entry["ranks"] == 3 and entry["algorithm"] != "auto"
    done = run(program, "--nproc", 3, "--backend", "gloo", "--op", "all_reduce", "--min-bytes", "64K", "--max-bytes",
               "64K", "--iters", 1, env={"TESSERA_COMM_TABLE": str(tmp_path / "table.json")})
    assert done.returncode == 0, done.stderr


def test_types_and_reductions_of_an_uneven_world(program, tmp_path):
    done = run(program, "--nproc", 3, "--op", "all_reduce,reduce_scatter", "--dtype", "bf16,int64", "--redop",
               "max,product", "--min-bytes", 1000, "--max-bytes", 2000, "--step-factor", 2, "--iters", 1,
               "--json", "figures.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    cells = json.loads((tmp_path / "figures.json").read_text())["cells"]
    assert [cell["wrong"] for cell in cells] == [0] * 16
    assert {(cell["type"], cell["redop"]) for cell in cells} == {
        (dtype, redop) for dtype in ("bf16", "int64") for redop in ("max", "product")}
    assert {cell["size_bytes"] for cell in cells if cell["operation"] == "reduce_scatter"} == {996, 1998, 984, 1992}


def test_ranks_of_another_launcher(program, tmp_path):
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}

    def start(rank):
        return started(program, "bench", "comm", "--op", "all_reduce", "--max-bytes", "4K", "--iters", 1, "--json",
                       "figures.json", cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                       env={**os.environ, **shared, "RANK": rank, "LOCAL_RANK": rank})

    with start("0") as first, start("1") as second:
        for number, rank in enumerate((first, second)):
            shown, errors = rank.communicate(timeout=300)
            assert rank.returncode == 0, errors
            assert ("# all_reduce, shm" in shown) == (number == 0)
    assert json.loads((tmp_path / "figures.json").read_text())["ranks_are"] == "processes of torchrun"


def on_hosts(program, folder, per_host, *arguments, variables=None):
    """The ends of the ranks of `bench comm` on hosts that are network namespaces."""
    command = [program, "bench", "comm", "--op", "all_to_all", "--backend", "gloo", "--iters", "3", "--max-bytes", "64K",
               *arguments]
    with Hosts(len(per_host)) as hosts:
        return end_of([hosts.start(host, command, {**place, **(variables or {})}, cwd=folder,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
                       for host, place in places(per_host)])


def test_the_forms_of_all_to_all_between_hosts(program, tmp_path):
    if why_not():
        pytest.skip(why_not())
    forms = ["--algorithm", "straight,aggregated", "--json", "figures.json"]
    for code, errors in on_hosts(program, tmp_path, [2, 2], "--tune", "forms.json", *forms):
        assert code == 0, errors
    cells = json.loads((tmp_path / "figures.json").read_text())["cells"]
    assert [(cell["algorithm"], cell["size_bytes"], cell["wrong"]) for cell in cells] == [
        (form, size, 0) for size in SIZES for form in ("straight", "aggregated")]
    entries = json.loads((tmp_path / "forms.json").read_text())["entries"]
    assert {(entry["verb"], entry["backend"], entry["ranks"]) for entry in entries} == {("all_to_all", "gloo", 2)}
    assert {entry["algorithm"] for entry in entries} <= {"straight", "aggregated"}
    for code, errors in on_hosts(program, tmp_path, [2, 2], "--algorithm", "hierarchical",
                                 variables={"TESSERA_COMM_TABLE": str(tmp_path / "forms.json")}):
        assert code == 0, errors
    for code, errors in on_hosts(program, tmp_path, [1, 1], "--tune", "none.json"):
        assert code == 2 and "two or more" in errors, errors


def test_hosts_that_are_one_have_no_forms(program, tmp_path):
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    ranks = [subprocess.Popen([str(program), "bench", "comm", "--op", "all_to_all", "--backend", "gloo", "--tune",
                               "none.json"], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                              env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank % 2)})
             for rank in range(4)]
    for code, errors in end_of(ranks):
        assert code in (2, 69), errors
        assert "all ranks are on one host" in errors, errors
    assert not (tmp_path / "none.json").exists()


# Arguments, the exit code, and words of the message.
REFUSED = [
    (["--backend", "smh"], 2, ["smh", "shm", "gloo"]),
    (["--backend", "shm,nccl"], 78, ["nccl", "CPU"]),
    (["--backend", "shm,mpi"], 2, ["--backend mpi", "mpirun -np 2"]),
    (["--op", "allreduce"], 2, ["allreduce", "all_reduce"]),
    (["--dtype", "float"], 2, ["float", "fp32"]),
    (["--redop", "avg"], 2, ["avg", "mean"]),
    (["--redop", "mean", "--dtype", "int32"], 2, ["mean", "int32"]),
    (["--min-bytes", "4X"], 2, ["--min-bytes", "4X", "64K"]),
    (["--max-bytes", "0"], 2, ["--max-bytes", "above 0"]),
    (["--min-bytes", "1M", "--max-bytes", "64K"], 2, ["1M", "64K"]),
    (["--step-factor", "1"], 2, ["step-factor"]),
    (["--nproc", "1"], 2, ["nproc"]),
    (["--nproc", "16", "--max-bytes", "4T", "--min-bytes", "4T"], 78, ["16 ranks", "--max-bytes"]),
    (["--iters", "3", "--seconds", "1"], 2, ["--iters", "--seconds"]),
    (["--ranks", "fibres"], 2, ["ranks"]),
    (["--algorithm", "rings"], 2, ["rings", "recursive_doubling"]),
    (["--algorithm", "tree", "--op", "all_gather"], 2, ["tree", "all_gather", "--algorithm auto"]),
    (["--tune", "t.json", "--dtype", "fp32,bf16"], 2, ["--tune", "one --dtype"]),
    (["--tune", "t.json", "--op", "barrier"], 2, ["--tune", "barrier"]),
    (["--tune", "t.json", "--op", "all_to_all"], 2, ["--tune of all_to_all", "between hosts", "launcher"]),
    (["--tune", "t.json", "--op", "all_to_all", "--algorithm", "straight"], 2, ["--algorithm straight,aggregated"]),
    (["--tune", "t.json", "--op", "all_to_all,broadcast"], 2, ["a table of its own", "name it alone"]),
    (["--algorithm", "aggregated", "--op", "all_reduce"], 2, ["aggregated", "all_reduce", "--algorithm auto"]),
    (["--tune", "t.json", "--algorithm", "ring", "--op", "all_reduce"], 2, ["--tune", "--algorithm auto"]),
    (["--tune", "absent/t.json"], 74, ["--tune", "absent"]),
    (["--backend", "gloo", "--registered"], 2, ["--registered", "--backend shm"]),
    (["--tune", "t.json", "--registered"], 2, ["--tune", "--registered"]),
    (["--json", "."], 2, ["--json", "folder"]),
    (["--plot", "absent/x.svg"], 74, ["--plot", "absent"]),
]


@pytest.mark.parametrize("arguments, code, words", REFUSED, ids=lambda value: "-".join(value).replace("/", "")
                         if isinstance(value, list) else str(value))
def test_bad_input_is_refused_before_any_rank_starts(program, tmp_path, arguments, code, words):
    done = run(program, *arguments, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    for word in words:
        assert word in done.stderr, done.stderr
    assert done.stdout == "" and "Exception raised" not in done.stderr


@pytest.mark.parametrize("table, code, words", [(None, 74, ["table.json"]), ('{"x": 1}', 78, ["table.json:1", "x"])],
                         ids=["absent", "unknown-key"])
def test_no_table_is_refused_before_any_rank_starts(program, tmp_path, table, code, words):
    path = tmp_path / "table.json"
    if table:
        path.write_text(table)
    done = run(program, "--max-bytes", "8K", env={"TESSERA_COMM_TABLE": str(path)})
    assert done.returncode == code and done.stdout == "", done.stdout
    for word in words:
        assert word in done.stderr, done.stderr


def test_nproc_under_another_launcher_is_refused(program):
    done = run(program, "--nproc", 2, env={"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
                                           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
    assert done.returncode == 2, done.stderr
    assert "--nproc" in done.stderr and "torchrun" in done.stderr


def test_bench_asks_what_to_measure(program):
    done = subprocess.run([str(program), "bench"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "subcommand is required" in done.stderr
