"""data.reader first: hosts without the data train too. Hosts are folders that ranks are started in; paths are relative."""

import json
import os
import random
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
import tokenizers
import year_model
from fuzz import verify
from hosts import Hosts, end_of, places, why_not
from runs import MODEL, assert_same_bits, checkpoint, configuration, free_port, metrics

FIRST, EVERY = {"reader": "first"}, {"reader": "every"}
# Ranks of one group on one host: all of the second host have their reader there.
BY_GROUP = ["dp_replicate", "dp_shard", "pp", "cp", "tp"]
MESHES = {
    "pp 2": ([1, 1], {"mesh": {"pp": 2}, "batch": {"micro": 2}}),
    "dp 2 x pp 2": ([2, 2], {"mesh": {"pp": 2, "dp": 2}, "batch": {"micro": 2}}),
    "pp 2 x cp 2, dualpipe": ([1, 3], {"mesh": {"pp": 2, "cp": 2}, "batch": {"micro": 2},
                                       "pipeline": {"schedule": "dualpipe"}}),
    "zero 3, dp 2 x tp 2": ([2, 2], {"mesh": {"dp": 2, "tp": 2, "order": ["tp", "pp", "cp", "dp_replicate", "dp_shard"]},
                                     "zero": {"stage": 3}}),
}


def write_ids(path, count, seed):
    rng = random.Random(seed)
    path.write_bytes(struct.pack(f"<{count}H", *(rng.randrange(61) for _ in range(count))))


def write_pairs(path, count):
    rng = random.Random(5)
    path.write_text("".join(
        json.dumps({"prompt": f"In the year {rng.randrange(1800, 1860)}", "completion": " ".join(
            ["the river rose"] * rng.randrange(1, 4))}) + "\n" for _ in range(count)))


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """The folder of a host that has the data."""
    folder = tmp_path_factory.mktemp("full")
    data = folder / "data"
    data.mkdir()
    for seed, (name, count) in enumerate({"a": 4000, "b": 900, "valid": 700}.items()):
        write_ids(data / f"{name}.bin", count, seed)
    (data / "text.txt").write_text(year_model.TEXT)
    (data / "lines.jsonl").write_text("".join(json.dumps({"text": line}) + "\n"
                                              for line in year_model.TEXT.splitlines()))
    write_pairs(data / "pairs.jsonl", 120)
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([year_model.TEXT], vocab_size=300, show_progress=False,
                                  special_tokens=["<|endoftext|>"])
    tokenizer.save(str(data / "tokenizer.json"))
    return folder


TEXT = {"model": {"vocab": 300, "max_seq": 32}, "monitor": {"sample": 10, "sample_tokens": 5}}
DATA = {
    "mixture": {"data": {"train": ["data/a.bin", "data/b.bin"], "weights": [0.7, 0.3], "valid_share": 0.1},
                "validate": {"every": 7, "samples": 27}},
    "text": {"data": {"train": "data/text.txt", "format": "auto", "seq_len": 32, "valid_share": 0.2},
             "validate": {"every": 5}, **TEXT},
    "documents": {"data": {"train": "data/lines.jsonl", "format": "auto", "seq_len": 32, "valid_share": 0.2,
                           "tokenizer": "data/tokenizer.json", "intra_document_masking": True},
                  "validate": {"every": 5}, **TEXT},
    "chats": {"data": {"train": "data/pairs.jsonl", "format": "chat", "chat_template": "none", "seq_len": 32,
                       "valid_share": 0.2, "tokenizer": "data/tokenizer.json"}, "validate": {"every": 5}, **TEXT},
    "packed chats": {"data": {"train": "data/pairs.jsonl", "format": "chat", "chat_template": "none", "seq_len": 32,
                              "valid_share": 0.2, "tokenizer": "data/tokenizer.json", "packing": True},
                     "validate": {"every": 5}, **TEXT},
}


def merged(*all_sections):
    sections = {}
    for each in all_sections:
        for name, values in each.items():
            sections.setdefault(name, {}).update(values)
    return sections


def configured(folder, *sections):
    found = merged({"data": {"train": "data/a.bin", "valid": "data/valid.bin"}, "validate": {"every": 5, "samples": 10}},
                   *sections)
    if "valid_share" in found["data"]:
        del found["data"]["valid"]
    return configuration({"train": ""}, folder, dict(MODEL) | found.pop("model", {}), **found)


def start(program, path, folders, per_host, *arguments, of_hosts=({}, {})):
    """A rank is started in the folder of its host, with the host's variables."""
    port = free_port()
    return [subprocess.Popen([str(program), "train", str(path), *arguments], cwd=folders[host], text=True,
                             stderr=subprocess.PIPE, env={**os.environ, **variables, **of_hosts[host]})
            for host, variables in places(per_host, port, "127.0.0.1")]


def run(program, path, folders, per_host, *arguments, **options):
    ends = end_of(start(program, path, folders, per_host, *arguments, **options))
    for code, errors in ends:
        assert code == 0, errors[-3000:]
    return [errors for _, errors in ends]


def assert_same_run(one, other):
    keys = ("step", "loss", "grad_norm", "valid_loss", "tokens", "epoch")
    assert [[line.get(key) for key in keys] for line in metrics(one)] == \
        [[line.get(key) for key in keys] for line in metrics(other)]
    assert_same_bits(checkpoint(one), checkpoint(other))


def texts(folder):
    return [{key: value for key, value in json.loads(line).items() if key != "seconds"}
            for line in Path(folder, "run", "samples.jsonl").read_text().splitlines()]


@pytest.fixture
def empty(tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_host_without_the_files_trains_to_the_same_bits(program, full, empty, tmp_path, mesh):
    per_host, sections = MESHES[mesh]
    run(program, configured(tmp_path / "every", sections, {"data": EVERY}), [full, full], per_host)
    run(program, configured(tmp_path / "first", sections, {"data": FIRST}), [full, empty], per_host)
    assert_same_run(tmp_path / "every", tmp_path / "first")
    assert not list(empty.iterdir())


@pytest.mark.parametrize("data", DATA, ids=str)
def test_whatever_the_data(program, full, empty, tmp_path, data):
    mesh = {"mesh": {"dp": 2, "pp": 2}, "batch": {"micro": 2}}
    for what, reader, second in (("every", EVERY, full), ("first", FIRST, empty)):
        run(program, configured(tmp_path / what, mesh, DATA[data], {"data": reader}), [full, second], [2, 2])
    assert_same_run(tmp_path / "every", tmp_path / "first")
    assert any("valid_loss" in line for line in metrics(tmp_path / "first"))
    if "monitor" in DATA[data]:
        assert texts(tmp_path / "every") == texts(tmp_path / "first")


def test_a_run_goes_on_where_it_stopped(program, full, empty, tmp_path):
    sections = merged(MESHES["dp 2 x pp 2"][1], DATA["chats"], {"data": FIRST, "schedule": {"steps": 20}})
    whole = configured(tmp_path / "whole", sections)
    run(program, whole, [full, empty], [2, 2])
    path = configured(tmp_path / "parts", sections)
    run(program, path, [full, empty], [2, 2], "--run.steps=9")
    # By another way of reading, too.
    run(program, path, [full, full], [2, 2], "--run.steps=14", "--data.reader=every")
    run(program, path, [full, empty], [2, 2])
    assert_same_bits(checkpoint(tmp_path / "whole"), checkpoint(tmp_path / "parts"))


def test_a_reader_without_files_is_refused(program, full, empty, tmp_path):
    path = configured(tmp_path / "run", MESHES["dp 2 x pp 2"][1], {"data": FIRST})
    ends = end_of(start(program, path, [empty, full], [2, 2]))
    for code, errors in ends:
        assert code == 78 and "'data/a.bin' does not exist" in errors, errors
    for words in ("data.reader is first, and rank 0 on", "'data/a.bin' does not exist", str(empty),
                  "Put the files there too"):
        assert words in ends[0][1], ends[0][1]


def test_every_rank_that_reads_needs_the_files(program, full, empty, tmp_path):
    path = configured(tmp_path / "run", MESHES["pp 2"][1], {"data": EVERY})
    for code, errors in end_of(start(program, path, [full, empty], [1, 1])):
        assert code == 78 and "'data/a.bin' does not exist" in errors, errors


def test_two_readers_with_other_files_are_told(program, full, empty, tmp_path):
    (empty / "data").mkdir()
    for name in ("a.bin", "valid.bin"):
        (empty / "data" / name).write_bytes((full / "data/b.bin").read_bytes())
    sections = {"batch": {"micro": 2}, "data": FIRST}
    # Each host a group: both read.
    path = configured(tmp_path / "told", sections, {"mesh": {"pp": 2, "dp": 2, "order": BY_GROUP}})
    for code, errors in end_of(start(program, path, [full, empty], [2, 2])):
        assert code == 74, errors
        assert "ranks read different data" in errors and "on rank 0" in errors and "on rank 2" in errors, errors
    # Nobody of the second host reads: whatever lies there.
    run(program, configured(tmp_path / "fine", sections, {"mesh": {"pp": 2, "dp": 2}}), [full, empty], [2, 2])


def test_tokens_of_another_day_are_told(program, full, tmp_path):
    """In two time zones whose days are never the same, by a template that writes the day."""
    early, late = {"TZ": "UTC+12"}, {"TZ": "UTC-14"}
    hosts = [tmp_path / "one", tmp_path / "two"]
    for host in hosts:
        shutil.copytree(full / "data", host / "data")
        (host / "data/dated.jinja").write_text(
            "{{ strftime_now('%d') }} {% for m in messages %}{{ m.content }} {% endfor %}")
    path = configured(tmp_path, MESHES["pp 2"][1], DATA["chats"], {
        "run": {"dir": "runs"}, "checkpoint": {"dir": str(tmp_path / "checkpoints"), "every": 5},
        "data": {"chat_template": "data/dated.jinja"} | EVERY})
    for code, errors in end_of(start(program, path, hosts, [1, 1], of_hosts=[early, late])):
        assert code == 74, errors
        for words in ("ranks read different data: file 0 is runs/token_cache/tokens-", "on rank 0", "on rank 1",
                      "strftime_now", "Remove them on every host", "run.dir"):
            assert words in errors, errors

    def remove_caches():
        for host in hosts:
            shutil.rmtree(host / "runs/token_cache")

    said = "the tokens of the data are not those"
    remove_caches()
    run(program, path, hosts, [1, 1], "--run.steps=5", of_hosts=[early, early])
    again = run(program, path, hosts, [1, 1], "--run.steps=10", of_hosts=[late, late])
    assert "resumed after step 5" in again[0] and said not in again[0], again[0]
    remove_caches()
    again = run(program, path, hosts, [1, 1], "--run.steps=15", of_hosts=[late, late])
    assert "resumed after step 10" in again[0] and said in again[0] and "the data is not" not in again[0], again[0]


@pytest.mark.parametrize("mesh", ["pp 2", "dp 2 x pp 2"], ids=str)
def test_hosts_by_the_network(program, full, tmp_path, mesh):
    """Namespaces, and a folder of the second that is empty there: over shm and gloo."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    per_host, sections = MESHES[mesh]
    at_home = configured(tmp_path / "home", sections, {"data": EVERY, "precision": {"compute": "fp64"}})
    run(program, at_home, [full, full], per_host)
    path = configured(tmp_path / "away", sections, {"data": FIRST, "precision": {"compute": "fp64"}})
    hidden = f"mount -t tmpfs none {full}/data && exec {program} train {path}"
    with Hosts(2) as hosts:
        ranks = [hosts.start(host, ["unshare", "-m", "bash", "-c", hidden] if host else [program, "train", path],
                             variables, cwd=full, stderr=subprocess.PIPE, text=True)
                 for host, variables in places(per_host)]
        for code, errors in end_of(ranks):
            assert code == 0, errors[-3000:]
    for one, other in zip(metrics(tmp_path / "home"), metrics(tmp_path / "away"), strict=True):
        for key in {"loss", "grad_norm", "valid_loss"} & one.keys():
            assert one[key] == pytest.approx(other[key], rel=1e-10), (one["step"], key)


VERIFIED = {
    "dp 2 x pp 2, a step in 3 micro-batches": {"mesh": {"pp": 2, "dp": 2}, "batch": {"global": 6, "micro": 1}},
    "pp 2 x cp 2 x tp 2, documents, dualpipe": {
        "mesh": {"pp": 2, "cp": 2, "tp": 2}, "batch": {"global": 4, "micro": 1}, "pipeline": {"schedule": "dualpipe"},
        "data": {"intra_document_masking": True}},
    "dp 2 x tp 2, ZeRO 3, in files": {"mesh": {"dp": 2, "tp": 2}, "batch": {"global": 4, "micro": 1},
                                      "zero": {"stage": 3, "offload": "all"}},
    "pp 3 of chunks, reversed axes": {
        "mesh": {"pp": 3, "dp": 2, "order": ["tp", "cp", "dp_shard", "dp_replicate", "pp"]}, "model": {"layers": 6},
        "batch": {"global": 6, "micro": 1}, "pipeline": {"schedule": "interleaved_zb", "chunks": 2}},
}


@pytest.mark.parametrize("name", VERIFIED, ids=str)
def test_a_mesh_whose_data_one_rank_reads_equals_one_rank(program, disk_path, name):
    path = configured(disk_path / "run", VERIFIED[name], {"data": FIRST})
    fault = verify(program, path, "--steps", "4", "--precision", "fp64")
    assert not fault, fault


def test_what_is_no_way_to_read(program, full, tmp_path):
    path = configured(tmp_path / "run")
    done = subprocess.run([str(program), "train", path, "--data.reader=sideways"], cwd=full, capture_output=True,
                          text=True, check=False)
    assert done.returncode == 78
    assert "data.reader" in done.stderr and "sideways" in done.stderr and "every" in done.stderr, done.stderr
    # One rank has nobody to read for.
    done = subprocess.run([str(program), "train", path, "--data.reader=first", "--run.steps=5"], cwd=full,
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "data.reader changes nothing" in done.stderr, done.stderr
