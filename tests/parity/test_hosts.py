"""Training over several hosts: network namespaces, slow links, cut links, a store behind a bad line."""

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hosts import Hosts, end_of, ip, places, start_ranks, why_not
from proxy import Proxy
from runs import configuration, free_port, metrics, steps_written, train, wait_until

FP64 = {"precision": {"compute": "fp64"}}
# Twelve: a share for each of 4 or 6 ranks.
EXPERTS = {"model": {"family": "mixtral", "moe": {"experts": 12, "top_k": 2, "aux_loss": 0.1}}}
# Meshes of 4 ranks: what goes between hosts is a sum, shards, or activations.
MESHES = {
    "ddp": {"mesh": {"dp": 4}},
    "zero 3": {"mesh": {"dp": 4}, "zero": {"stage": 3}},
    "pp 2 x tp 2": {"mesh": {"pp": 2, "tp": 2}},
    "dp 2 x cp 2, ulysses": {"mesh": {"dp": 2, "cp": 2}, "context": {"method": "ulysses"}},
}


@pytest.fixture(scope="session")
def namespaces():
    reason = why_not()
    if reason:
        pytest.skip(reason)


def assert_equal_losses(folder, wanted, bound=1e-10):
    found = metrics(folder)
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted):
        for key in ("loss", "grad_norm"):
            assert one[key] == pytest.approx(other[key], rel=bound), (one["step"], key)


@pytest.fixture(scope="session")
def wanted(program, tokens, tmp_path_factory):
    """The steps of one rank."""
    folder = tmp_path_factory.mktemp("one")
    train(program, configuration(tokens, folder, **FP64))
    return metrics(folder)


def on_hosts(program, tokens, folder, per_host, *arguments, rate=None, line=None, **sections):
    """Trains and returns the bytes that left each host."""
    path = configuration(tokens, folder, **sections)
    with Hosts(len(per_host), rate, line) as hosts:
        for code, errors in end_of(start_ranks(hosts, program, per_host, path, *arguments)):
            assert code == 0, errors[-3000:]
        return [hosts.sent(host) for host in range(len(per_host))]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_two_hosts_train_the_model_of_one(program, tokens, wanted, tmp_path, namespaces, mesh):
    on_hosts(program, tokens, tmp_path / "two", [2, 2], **FP64, **MESHES[mesh], monitor={"reruns": 10})
    assert_equal_losses(tmp_path / "two", wanted)


def test_replicas_that_lie_on_hosts_in_other_ways_do_not_compute_for_each_other(program, tokens, wanted, tmp_path,
                                                                               namespaces):
    on_hosts(program, tokens, tmp_path / "two", [3, 1], **FP64, mesh={"dp": 2, "tp": 2}, monitor={"reruns": 10})
    assert_equal_losses(tmp_path / "two", wanted)
    log = (tmp_path / "two" / "run" / "logs" / "rank-0.log").read_text()
    assert "the ranks of a model lie on hosts in several ways" in log and "several times" not in log, log


def test_so_do_two_of_which_one_takes_its_own_name_for_its_loopback(program, tokens, wanted, tmp_path, namespaces):
    path = configuration(tokens, tmp_path / "two", mesh={"dp": 2}, **FP64)
    with Hosts(2) as hosts:
        names = [hosts.name(f"host{host}") for host in range(2)]
        folders = [Path("/etc/netns") / name for name in names]
        try:
            # As Debian writes it on node0 itself.
            for name, folder, address in zip(names, folders, ["127.0.1.1", hosts.address(0)]):
                folder.mkdir(parents=True)
                (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} node0\n")
                ip("-n", name, "route", "add", "default", "dev", "eth0")
            ranks = [hosts.start(host, [program, "train", path], variables, stderr=subprocess.PIPE, text=True)
                     for host, variables in places([1, 1], master="node0")]
            for code, errors in end_of(ranks):
                assert code == 0, errors[-3000:]
        finally:
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)
    assert_equal_losses(tmp_path / "two", wanted)


STRANGER = """
import datetime, sys, torch.distributed as dist
store = dist.TCPStore(sys.argv[1], int(sys.argv[2]), is_master=False, timeout=datetime.timedelta(seconds=3))
store.set("stranger", "was here")
print(store.num_keys())
"""


def listens(process, port):
    """Whether somebody does on this port, of the process's host."""
    rows = [row.split() for kind in ("tcp", "tcp6")
            for row in Path(f"/proc/{process.pid}/net/{kind}").read_text().splitlines()[1:]]
    return any(row[3] == "0A" and int(row[1].rsplit(":", 1)[1], 16) == port for row in rows)


# Without a token the same stranger gets in: it is the token that keeps it out.
@pytest.mark.parametrize("has_token", [False, True])
def test_with_a_token_no_stranger_gets_into_the_store(program, tokens, wanted, tmp_path, namespaces, has_token):
    path = configuration(tokens, tmp_path / "two", mesh={"dp": 2}, **FP64)
    secret = secrets.token_hex(32)
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text(secret + "\n")
    more = {"TESSERA_JOIN_TIMEOUT_S": "60", **({"TESSERA_TOKEN_FILE": str(token)} if has_token else {})}
    with Hosts(3) as hosts:
        (_, first), (_, second) = places([1, 1])

        def start(host, variables):
            return hosts.start(host, [program, "train", path], {**variables, **more}, stderr=subprocess.PIPE, text=True)

        ranks = [start(0, first)]
        try:
            wait_until(lambda: listens(ranks[0], int(first["MASTER_PORT"])), ranks[0])
            stranger = hosts.start(2, [sys.executable, "-c", STRANGER, hosts.address(0), first["MASTER_PORT"]], {},
                                   stderr=subprocess.PIPE, text=True)
            stranger.communicate(timeout=100)
            assert (stranger.returncode == 0) != has_token
            ranks.append(start(1, second))
        finally:
            ends = end_of(ranks)
    for code, errors in ends:
        assert code == 0, errors[-3000:]
    assert ("10.77.0.3 did not prove that it knows the job's token" in ends[0][1]) == has_token
    assert_equal_losses(tmp_path / "two", wanted)
    told = [errors for _, errors in ends] + [f.read_text(errors="replace") for f in (tmp_path / "two").rglob("*")
                                             if f.is_file() and f.suffix in (".log", ".json", ".jsonl")]
    assert not any(secret in text for text in told)


@pytest.fixture(scope="session")
def wanted_of_experts(program, tokens, tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    train(program, configuration(tokens, folder, **FP64, **EXPERTS))
    return metrics(folder)


# Rows go to experts in the form that their size asks for, and in each; of hosts that are not equal, straight.
@pytest.mark.parametrize("per_host, algorithm", [
    ([2, 2], "auto"), ([2, 2], "straight"), ([2, 2], "aggregated"), ([2, 2, 2], "aggregated"), ([1, 3], "aggregated")],
    ids=str)
def test_experts_of_several_hosts_train_the_model_of_one(program, tokens, wanted_of_experts, tmp_path, namespaces,
                                                         per_host, algorithm):
    ranks = sum(per_host)
    on_hosts(program, tokens, tmp_path / "more", per_host, f"--comm.algorithm={algorithm}", **FP64, **EXPERTS,
             mesh={"dp": ranks, "ep": ranks})
    assert_equal_losses(tmp_path / "more", wanted_of_experts)


@pytest.mark.parametrize("per_host", [[2, 2, 2], [1, 3], [3, 2, 1]], ids=str)
def test_so_do_three_and_uneven_ones_over_a_slow_link(program, tokens, wanted, tmp_path, namespaces, per_host):
    mesh = {"mesh": {"dp": sum(per_host)}, "zero": {"stage": 2}}
    on_hosts(program, tokens, tmp_path / "more", per_host, rate="100mbit", **FP64, **mesh)
    assert_equal_losses(tmp_path / "more", wanted)


@pytest.mark.parametrize("seed", [1])
def test_so_do_two_whose_line_delays_and_loses_frames(program, tokens, wanted, tmp_path, namespaces, seed):
    on_hosts(program, tokens, tmp_path / "two", [2, 2], line=(seed, 0.002, 0.02), **FP64, **MESHES["ddp"])
    assert_equal_losses(tmp_path / "two", wanted)


@pytest.mark.parametrize("algorithm", ["ring", "recursive_doubling", "tree", "hierarchical", "aggregated"])
def test_every_algorithm_trains_the_same_model(program, tokens, wanted, tmp_path, algorithm):
    path = configuration(tokens, tmp_path / "run", mesh={"dp": 3}, zero={"stage": 1}, **FP64)
    train(program, path, "--nproc", "3", "--comm.backend=gloo", f"--comm.algorithm={algorithm}")
    assert_equal_losses(tmp_path / "run", wanted)


def test_hierarchical_moves_fewer_bytes_between_hosts(program, tokens, tmp_path, namespaces):
    big = {"model": {"hidden": 128, "ffn": 256}, "run": {"steps": 6}, "checkpoint": {"every": 0}, "mesh": {"dp": 4}}
    auto = sum(on_hosts(program, tokens, tmp_path / "auto", [2, 2], **big))
    flat = {what: sum(on_hosts(program, tokens, tmp_path / what, [2, 2], *arguments, **big)) for what, arguments in
            {"gloo": ["--comm.backend=gloo"], "ring": ["--comm.algorithm=ring"]}.items()}
    # 2 (H - 1)/H = 1 copy of the gradients out of a host; a flat ring of p = 4 takes 2 (p - 1)/p = 1.5.
    for what, bytes_sent in flat.items():
        assert auto < 0.75 * bytes_sent, (what, auto, bytes_sent)


def test_hosts_that_do_not_share_the_run_folder_are_refused(program, tokens, tmp_path, namespaces):
    path = configuration(tokens, tmp_path / "run", mesh={"dp": 2})
    alone = f"mkdir -p {tmp_path}/run/run && mount -t tmpfs none {tmp_path}/run/run && exec {program} train {path}"
    for arguments, codes in (((), [78, 78]), (("--checkpoint.every=0",), [0, 0])):
        with Hosts(2) as hosts:
            commands = [[program, "train", path, *arguments],
                        ["unshare", "-m", "bash", "-c", " ".join([alone, *arguments])]]
            ranks = [hosts.start(host, commands[host], variables, stderr=subprocess.PIPE, text=True)
                     for host, variables in places([1, 1])]
            ends = end_of(ranks)
        assert [code for code, _ in ends] == codes, ends
        assert ("rank 1 on" in ends[0][1] and "does not see what rank 0 on" in ends[0][1]) == bool(codes[0])
        assert not list((tmp_path / "run/run/checkpoints").iterdir())


def test_ranks_with_another_table_are_refused(program, tokens, tmp_path, namespaces):
    path = configuration(tokens, tmp_path, mesh={"dp": 2})
    table = tmp_path / "table.json"
    table.write_text('{"format": "tessera-comm-table", "version": 1, "entries": [{"verb": "all_reduce", '
                     '"backend": "gloo", "ranks": 2, "min_bytes": 0, "algorithm": "tree"}]}')
    with Hosts(2) as hosts:
        ranks = [hosts.start(host, [program, "train", path],
                             {**variables, **({"TESSERA_COMM_TABLE": str(table)} if host else {})},
                             stderr=subprocess.PIPE, text=True) for host, variables in places([1, 1])]
        ends = end_of(ranks)
    assert [code for code, _ in ends] == [69, 78]
    assert "auto with table" in ends[1][1] and "no table on rank 0" in ends[1][1], ends[1][1]


def start_apart(program, paths, *arguments):
    """A rank on a host of its own for each configuration, as torchrun would start them."""
    port = free_port()
    return [subprocess.Popen([str(program), "train", path, *arguments], text=True, stderr=subprocess.PIPE,
                             env={**os.environ, **variables})
            for path, (_, variables) in zip(paths, places([1] * len(paths), port, "127.0.0.1"))]


# What one host has otherwise: refused as it is read, as a whole, when the host prepares, when ranks connect.
ALONE_WRONG = {
    "no key": ({"mesh": {"pd": 3}}, "unknown key"),
    "a batch": ({"batch": {"global": 13}}, "batch.global 13"),
    "no data": ({"data": {"train": "nowhere.bin"}}, "'nowhere.bin' does not exist"),
    "a backend": ({"comm": {"backend": "shm"}}, "comm.backend=shm serves one host"),
}


@pytest.mark.parametrize("wrong", [0, 2])
@pytest.mark.parametrize("what", ALONE_WRONG, ids=str)
def test_what_one_host_is_refused_for_ends_all(program, tokens, tmp_path, what, wrong):
    sections, words = ALONE_WRONG[what]
    common = {"mesh": {"dp": 3}, "comm": {"backend": "gloo"}}
    paths = [configuration(tokens, tmp_path / str(rank), **common) for rank in range(3)]
    config = json.loads(Path(paths[wrong]).read_text())
    for section, values in sections.items():
        config[section].update(values)
    Path(paths[wrong]).write_text(json.dumps(config))
    # Long before the time-out of ten minutes.
    for rank, (code, errors) in enumerate(end_of(start_apart(program, paths), timeout=120)):
        assert words in errors, (rank, errors)
        assert rank == wrong or f"rank {wrong} " in errors, (rank, errors)
        # Whose file it is, and no place in this one's.
        assert what != "no key" or "mesh.dp: " not in errors, (rank, errors)
        assert code == 78 or (what == "a backend" and rank != wrong and code == 69), (rank, code, errors)


def wait_for_steps(folder, ranks):
    wait_until(lambda: steps_written(folder), *ranks)


def test_a_cut_link_ends_all_ranks_and_is_named(program, tokens, tmp_path, namespaces):
    path = configuration(tokens, tmp_path, mesh={"dp": 4}, run={"steps": 1000000}, checkpoint={"every": 0})
    with Hosts(2) as hosts:
        ranks = start_ranks(hosts, program, [2, 2], path, "--comm.timeout_s=3")
        try:
            wait_for_steps(tmp_path, ranks)
            hosts.cut(1)
        except BaseException:
            end_of(ranks, timeout=0)
            raise
        ends = end_of(ranks, timeout=120)
    for rank, (code, errors) in enumerate(ends):
        assert code == 69, (rank, errors)
        assert "on group" in errors and "shm+gloo" in errors and "time-out 3 s" in errors, errors
    assert any("a message from rank" in errors or "a message to rank" in errors for _, errors in ends)


@pytest.mark.parametrize("what", ["a cut line", "a stopped rank", "a stopped rank 0"])
def test_silence_is_told_long_before_the_time_out(program, tokens, tmp_path, namespaces, what):
    """Of a rank of another host, and of rank 0, which serves the store."""
    path = configuration(tokens, tmp_path, mesh={"dp": 4}, run={"steps": 1000000}, checkpoint={"every": 0})
    silent = {"a cut line": [2, 3], "a stopped rank": [2], "a stopped rank 0": [0]}[what]
    with Hosts(2) as hosts:
        ranks = start_ranks(hosts, program, [2, 2], path, "--comm.silence_s=3")
        try:
            wait_for_steps(tmp_path, ranks)
            began = time.monotonic()
            if what == "a cut line":
                hosts.cut(1)
            else:
                ranks[silent[0]].send_signal(signal.SIGSTOP)
            others = [rank for number, rank in enumerate(ranks) if what == "a cut line" or number not in silent]
            ends = end_of(others, timeout=60)
            assert time.monotonic() - began < 30  # and not 600
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    assert [code for code, _ in ends] == [69] * len(ends), ends
    told = "\n".join(errors for _, errors in ends)
    if what == "a stopped rank 0":
        assert "rank 0" in told and "is stopped" in told, told
    else:
        assert re.search(r"rank 2 \(pid \d+ on \S+\) has given no sign of life for 3 s", told), told
    if what == "a cut line":
        assert "the store of the rendezvous has not answered for 3 s" in told, told


def wait_for_words(rank, words, timeout=90):
    """Reads what a rank says until `words`, a pattern, come; the line."""
    late = threading.Timer(timeout, rank.kill)
    late.start()
    try:
        for line in rank.stderr:
            if re.search(words, line):
                return line
        raise AssertionError(f"the rank ended without '{words}', or said nothing of it for {timeout} s")
    finally:
        late.cancel()


def test_a_line_that_becomes_slow_is_named(program, tokens, tmp_path, namespaces):
    path = configuration(tokens, tmp_path, mesh={"dp": 2}, run={"steps": 1000000}, checkpoint={"every": 0})
    with Hosts(2, rate="1gbit") as hosts:
        ranks = start_ranks(hosts, program, [1, 1], path, "--monitor.every=20")
        try:
            wait_for_words(ranks[0], r"step: +100/")
            hosts.set_rate(0, "20mbit")
            slow = wait_for_words(ranks[0], "links: ")
            assert "between rank 0 (on " in slow and "and rank 1 (on " in slow and "times in a row" in slow, slow
            hosts.set_rate(0, "1gbit")
            assert "GB/s again" in wait_for_words(ranks[0], "links: ")
            at = len(metrics(tmp_path))
        finally:
            for rank in ranks:
                rank.terminate()
            ends = end_of(ranks, timeout=60)
    assert [code for code, _ in ends] == [75, 75], ends
    # A round is every 20 steps, and a slow one is measured twice more at once.
    assert at < 1000, at


def test_a_killed_host_ends_the_other(program, tokens, tmp_path, namespaces):
    path = configuration(tokens, tmp_path, mesh={"dp": 4}, run={"steps": 1000000}, checkpoint={"every": 0})
    with Hosts(2) as hosts:
        ranks = start_ranks(hosts, program, [2, 2], path)
        try:
            wait_for_steps(tmp_path, ranks)
        finally:
            for rank in ranks[2:]:
                rank.kill()
        # Long before the time-out of ten minutes.
        ends = end_of(ranks, timeout=120)
    for code, errors in ends[:2]:
        assert code == 69, errors
        assert "on group" in errors, errors


def start_through(proxy, port, program, path, *arguments, join_s=30):
    """Two ranks; the second reaches the store of the first through the proxy."""
    return [subprocess.Popen([str(program), "train", path, "--comm.backend=gloo", *arguments], text=True,
                             stderr=subprocess.PIPE,
                             env={**os.environ, **variables, "MASTER_PORT": str(proxy.port if rank else port),
                                  "TESSERA_JOIN_TIMEOUT_S": str(join_s)})
            for rank, (_, variables) in enumerate(places([2], master="127.0.0.1"))]


@pytest.mark.parametrize("seed", [1])
def test_a_store_behind_a_bad_line(program, tokens, wanted, tmp_path, seed):
    path = configuration(tokens, tmp_path / "two", mesh={"dp": 2}, **FP64)
    port = free_port()
    with Proxy(("127.0.0.1", port), seed, delay=0.02, loss=0.05) as proxy:
        for code, errors in end_of(start_through(proxy, port, program, path)):
            assert code == 0, errors[-3000:]
        assert proxy.passed > 0 and proxy.lost > 0
    assert_equal_losses(tmp_path / "two", wanted)


@pytest.mark.parametrize("cut_after", [10, 400])
def test_a_cut_line_to_the_store_is_an_error(program, tokens, tmp_path, cut_after):
    path = configuration(tokens, tmp_path, mesh={"dp": 2}, run={"steps": 1000000}, checkpoint={"every": 0})
    port = free_port()
    with Proxy(("127.0.0.1", port), delay=0.002, cut_after=cut_after) as proxy:
        ranks = start_through(proxy, port, program, path, "--comm.timeout_s=5", join_s=5)
        ends = end_of(ranks, timeout=100)
    assert [code for code, _ in ends] == [69, 69], ends
    assert "rendezvous" in ends[1][1] or "store" in ends[1][1], ends[1][1]
