"""What may be given to data.train, as users have it: formats, files left out, refusals."""

import gzip
import json
import re
import resource
import shutil
import struct
import subprocess

import pytest
from hosts import end_of
from runs import MODEL, STEPS, configuration, metrics, run, train

SENTENCES = ["the cat sat on the mat.", "a dog sat too,\nand slept.", "the gr\u00fcn \U0001F600 bird sang.", "so it was."]
SMALL = {"model": {**MODEL, "vocab": 300}, "run": {"steps": 3}, "schedule": {"warmup": 0},
         "checkpoint": {"every": 0}}
END = "<|endoftext|>"


def run_json(folder, train_on, **data):
    """A configuration whose text gets a tokenizer of its own."""
    return configuration({"train": train_on}, folder, **SMALL,
                         data={"format": "auto", "seq_len": 8, **data})


def records(count=40, **extra):
    return [{"id": i, "text": SENTENCES[i % 4] + f" {i}", **extra} for i in range(count)]


def as_lines(rows, ascii_only=True):
    return "".join(json.dumps(row, ensure_ascii=ascii_only) + "\n" for row in rows)


def cache_of(folder):
    caches = list(folder.glob("**/tokens-*.cache"))
    assert len(caches) == 1, caches
    return caches[0]


def decoded(tessera, folder, cache):
    return tessera("tokenize", "decode", "--special-tokens", "--tokenizer", folder / "run" / "tokenizer.json",
                   "--input", cache)


def refused(program, path, *arguments, nproc=2, code=78):
    done = train(program, path, "--nproc", str(nproc), *arguments, check=False)
    assert done.returncode == code, done.stderr[-3000:]
    return done.stderr


def test_json_lines_train_on_their_texts(program, tessera, tmp_path):
    rows = records()
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.jsonl").write_text(as_lines(rows[:20]) + "\n\n")
    (tmp_path / "d" / "b.jsonl.gz").write_bytes(gzip.compress(as_lines(rows[20:30], False).encode()))
    (tmp_path / "d" / "c.ndjson").write_text(as_lines(rows[30:]))
    train(program, run_json(tmp_path, str(tmp_path / "d")))
    assert len(metrics(tmp_path)) == 3
    assert decoded(tessera, tmp_path, cache_of(tmp_path)) == END.join(row["text"] for row in rows)


def test_the_field_is_chosen(program, tessera, tmp_path):
    (tmp_path / "a.jsonl").write_text(as_lines(records(body="hello body, this is what counts")))
    train(program, run_json(tmp_path, str(tmp_path / "a.jsonl")), "--data.field=body")
    assert decoded(tessera, tmp_path, cache_of(tmp_path)).startswith("hello body")


@pytest.mark.parametrize(("line", "complaint"), [
    ('{"text": "a"', "a.jsonl:3: column 13: not JSON"),
    ("[1]", "a.jsonl:3: is a list, not an object"),
    ('{"body": "a"}', 'a.jsonl:3: the record has no field "text"; it has "body"'),
    ('{"text": 5}', 'a.jsonl:3: the field "text" is a number'),
    ('{"text": "caf\udce9"}', "a.jsonl:3: the byte 0xe9 at offset 13 of the line is not UTF-8"),
])
def test_a_bad_line_is_refused_before_ranks_start(program, tmp_path, line, complaint):
    text = '{"text": "good"}\n\n' + line + "\n"
    (tmp_path / "a.jsonl").write_bytes(text.encode(errors="surrogateescape"))
    errors = refused(program, run_json(tmp_path, str(tmp_path / "a.jsonl")), "--mesh.dp=2")
    assert complaint in errors
    assert "rank 1" not in errors


def test_json_is_read_by_what_is_in_it(program, tessera, tmp_path):
    rows = records()
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.json").write_text(json.dumps(rows[:20], indent=2))
    (tmp_path / "d" / "b.json.gz").write_bytes(gzip.compress(as_lines(rows[20:30]).encode()))
    (tmp_path / "d" / "c.json").write_text(json.dumps(rows[30:]))
    train(program, run_json(tmp_path, str(tmp_path / "d")), "--checkpoint.every=3")
    assert decoded(tessera, tmp_path, cache_of(tmp_path)) == END.join(row["text"] for row in rows)
    (tmp_path / "all.jsonl").write_text(as_lines(rows))
    of_lines, of_json = (tessera("eval", "--model", tmp_path / "run", "--data", tmp_path / name)
                         for name in ("all.jsonl", "d"))
    assert json.loads(of_lines) == json.loads(of_json)


def test_json_without_records_is_refused_with_ways_out(program, tessera, tmp_path):
    whole = json.dumps({"version": 1, "rows": records(40)}, indent=2)
    (tmp_path / "a.json").write_text(whole)
    path = run_json(tmp_path, str(tmp_path / "a.json"))
    errors = refused(program, path, "--mesh.dp=2")
    assert "a.json: is neither lines of JSON objects nor a list" in errors and "jq -c" in errors
    assert "rank 1" not in errors
    train(program, path, "--data.format=text")
    assert decoded(tessera, tmp_path, cache_of(tmp_path)) == whole
    (tmp_path / "a.json").write_text(json.dumps([{"text": "good"}, {"text": 5}], indent=2))
    assert 'a.json: record 2 (line 5): the field "text" is a number' in refused(program, path)


def test_a_refused_run_leaves_no_folder(program, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"ask": "Who?", "say": "I."}\n')
    folder = tmp_path / "runs"
    path = run_json(tmp_path, str(tmp_path / "a.jsonl"))
    for flags in (), ("--data.train=nothing.txt",), (f"--checkpoint.dir={folder}/steps", "--monitor.trace=1"):
        errors = refused(program, path, f"--run.dir={folder}", *flags)
        assert not folder.exists(), flags
        assert flags or "--data.pair=ask,say" in errors
    (folder / "run" / "logs").mkdir(parents=True)  # another's, though empty
    refused(program, path, f"--run.dir={folder}")
    assert [str(each.relative_to(folder)) for each in sorted(folder.rglob("*"))] == ["run", "run/logs"]


def test_ids_beyond_the_vocabulary_are_refused_before_a_folder_is_made(program, tmp_path):
    ids = [*range(60)] * 10
    for last, words in (60, "token 600 (byte 1200) is 60"), (59, None):
        (tmp_path / "a.u16").write_bytes(struct.pack("<601H", *ids, last))
        path = configuration({"train": str(tmp_path / "a.u16")}, tmp_path, model={**MODEL, "vocab": 60},
                             run={"steps": 1}, schedule={"warmup": 0})
        folder = tmp_path / "runs"
        if words:
            errors = refused(program, path, f"--run.dir={folder}", code=74)
            assert words in errors and "rank" not in errors
            assert not folder.exists()
        else:
            train(program, path, f"--run.dir={folder}")


def test_what_a_refused_or_killed_run_left_is_not_trained_with(program, tmp_path):
    few, more = tmp_path / "few.txt", tmp_path / "more.txt"
    few.write_text("ab")
    more.write_text(" ".join(SENTENCES) * 20)
    path, folder = run_json(tmp_path, str(more)), tmp_path / "runs"
    assert "Give more data" in refused(program, path, f"--run.dir={folder}", f"--data.train={few}")
    assert not (folder / "run").exists()  # nor the tokenizer of so little text; a token cache is good for any run
    train(program, path, f"--run.dir={tmp_path / 'fresh'}")
    learned = (tmp_path / "fresh" / "run" / "tokenizer.json").read_text()
    left = json.loads(learned)
    left["model"]["merges"] = []
    (folder / "run").mkdir(parents=True)
    (folder / "run" / "tokenizer.json").write_text(json.dumps(left))  # of a run that was killed before it saved
    (folder / "run" / "checkpoints" / "step-20.bak").mkdir(parents=True)  # set aside
    train(program, path, f"--run.dir={folder}")
    assert (folder / "run" / "tokenizer.json").read_text() == learned


def test_what_lies_beside_a_tokenizer_goes_with_it(program, tessera, tmp_path):
    """Its template, and the end of text that tokenizer_config.json alone names."""
    (tmp_path / "a.jsonl").write_text(as_lines(records()))
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    tessera("tokenize", "train", "--vocab-size", 280, "--output", theirs / "tokenizer.json", "--input",
            tmp_path / "a.jsonl")
    (theirs / "tokenizer.json").write_text((theirs / "tokenizer.json").read_text().replace(END, "<over>"))
    beside = {"tokenizer_config.json": json.dumps({"eos_token": "<over>"}), "chat_template.jinja": "{{ 1 }}"}
    for name, text in beside.items():
        (theirs / name).write_text(text)
    path = run_json(tmp_path, str(tmp_path / "a.jsonl"))

    def kept(name):
        return {file: (tmp_path / name / file).read_text() for file in beside if (tmp_path / name / file).exists()}

    train(program, path, f"--data.tokenizer={theirs / 'tokenizer.json'}", "--checkpoint.every=3")
    assert kept("run") == beside
    # Who goes on elsewhere reads the same tokens at every start.
    from_there = [f"--resume={tmp_path}/run/checkpoints/step-3", "--run.name=other", "--checkpoint.every=3"]
    train(program, path, *from_there, "--run.steps=6")
    assert kept("other") == beside
    again = train(program, path, *from_there[1:], "--run.steps=9").stderr
    assert "resumed after step 6" in again and "tokenized" not in again and "the data is not" not in again, again
    # A run of that name that begins anew, with a tokenizer of its own.
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    train(program, path)
    assert kept("run") == {}


def test_parquet_is_refused_with_a_way_out(program, tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1\x15\x04\x15\x10PAR1")
    assert "a.parquet: is Parquet" in refused(program, run_json(tmp_path, str(tmp_path / "a.parquet")))


def test_files_are_left_out_by_globs(program, tessera, tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.txt").write_text(" ".join(SENTENCES) * 20)
    (tmp_path / "d" / "old.txt").write_bytes(b"caf\xe9" * 50)
    (tmp_path / "d" / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    path = run_json(tmp_path, str(tmp_path / "d"))
    errors = refused(program, path, code=74)
    assert "old.txt: the byte 0xe9 at offset 3" in errors and "data.exclude" in errors
    errors = refused(program, path, "--data.exclude=old.txt", code=74)
    assert "picture.png: the byte 0x89 at offset 0" in errors and "data.exclude" in errors
    train(program, path, "--data.exclude=old.txt,*.png")
    assert decoded(tessera, tmp_path, cache_of(tmp_path)) == " ".join(SENTENCES) * 20


def test_two_files_by_one_flag(program, tessera, tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"{name} text. " * 60)
    train(program, run_json(tmp_path, "nothing"), f"--data.train={tmp_path}/a.txt,{tmp_path}/b.txt")
    text = decoded(tessera, tmp_path, cache_of(tmp_path))
    assert text == "a text. " * 60 + END + "b text. " * 60


def test_a_cache_is_decoded_and_inspected(program, tessera, tmp_path):
    (tmp_path / "a.txt").write_text(" ".join(SENTENCES) * 20)
    train(program, run_json(tmp_path, str(tmp_path / "a.txt")))
    cache = cache_of(tmp_path)
    seen = json.loads(tessera("inspect", "--json", cache))
    assert (seen["kind"], seen["format"]) == ("token file", "cache")
    assert seen["tokens"] == (cache.stat().st_size - 64) // 2
    assert tessera("tokenize", "decode", "--tokenizer", tmp_path / "run", "--input", cache) == " ".join(SENTENCES) * 20


def test_encode_reads_what_training_reads(tessera, tmp_path):
    (tmp_path / "a.jsonl").write_text(as_lines(records(4)))
    tessera("tokenize", "train", "--vocab-size", 270, "--output", tmp_path, "--input", tmp_path / "a.jsonl")
    lines = tessera("tokenize", "encode", "--tokenizer", tmp_path, "--input", tmp_path / "a.jsonl").splitlines()
    assert len(lines) == 4
    again = tessera("tokenize", "decode", "--tokenizer", tmp_path, "--jsonl", input="\n".join(lines))
    assert [json.loads(line) for line in again.splitlines()] == [row["text"] for row in records(4)]


def test_runs_share_the_tokens_of_their_text(program, tessera, tmp_path):
    (tmp_path / "a.txt").write_text(" ".join(SENTENCES) * 20)
    path = run_json(tmp_path, str(tmp_path / "a.txt"))
    ends = end_of([subprocess.Popen([program, "train", path, f"--run.name={name}"], stderr=subprocess.PIPE, text=True)
                   for name in ("run", "second")])
    assert [code for code, _ in ends] == [0, 0], ends
    assert cache_of(tmp_path).parent == tmp_path / "token_cache"
    assert "tokenized" not in train(program, path, "--run.name=third").stderr
    kept = sorted(path.name.split("-")[0] for path in cache_of(tmp_path).parent.iterdir())
    assert kept == ["tokenizer", "tokens"]  # and nothing half written
    assert metrics(tmp_path)[-1]["loss"] == last_loss(tmp_path, "third") == last_loss(tmp_path, "second")


def last_loss(folder, name):
    return json.loads((folder / name / "metrics.jsonl").read_text().splitlines()[-1])["loss"]


def test_what_a_killed_run_left_is_removed(program, tmp_path):
    (tmp_path / "a.txt").write_text(" ".join(SENTENCES) * 20)
    left = tmp_path / "token_cache" / "tokens-0123.cache.tmp-4000000-0"
    left.parent.mkdir()
    left.write_bytes(b"half")
    train(program, run_json(tmp_path, str(tmp_path / "a.txt")))
    assert not left.exists()


def test_many_token_files_take_few_descriptors(program, tokens, tmp_path):
    (tmp_path / "d").mkdir()
    for number in range(400):
        (tmp_path / "d" / f"{number:03}.u16").write_bytes(bytes([number % 61, 0] * 20))
    path = configuration({"train": str(tmp_path / "d")}, tmp_path, run={"steps": 1}, schedule={"warmup": 0})
    done = subprocess.run([program, "train", path], capture_output=True, text=True, timeout=120,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128)))
    assert done.returncode == 0, done.stderr[-2000:]
    assert "8000 tokens" in done.stderr


def test_eval_reads_as_training_does(program, tessera, tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.jsonl").write_text(as_lines(records(body="this is what counts")))
    (tmp_path / "d" / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    path = run_json(tmp_path, str(tmp_path / "d"), exclude=["*.png"])
    train(program, path, "--data.field=body", "--checkpoint.every=3")

    def tokens_of(*flags):
        said = tessera("eval", "--model", tmp_path / "run", "--data", tmp_path / "d", "--exclude", "*.png", *flags)
        return json.loads(said.splitlines()[-1])["tokens"]

    assert tokens_of() == tokens_of("--field", "body") != tokens_of("--field", "text")
    tessera("eval", "--model", tmp_path / "run", "--data", tmp_path / "d", code=74,
            says="picture.png: the byte 0x89 at offset 0 is not UTF-8")
    tessera("eval", "--model", tmp_path / "run", "--data", tmp_path / "d", "--exclude", "*", code=78,
            says="--data: --exclude leaves out all 2 files of ")


def test_commands_name_their_flags_and_not_the_keys(program, tessera, tmp_path):
    (tmp_path / "data.field.jsonl").write_text(as_lines(records()))
    (tmp_path / "body.jsonl").write_text(as_lines([{"body": "this is what counts"}]))
    (tmp_path / "whole.json").write_text("{\n}")
    train(program, run_json(tmp_path, str(tmp_path / "data.field.jsonl")), "--checkpoint.every=3")
    for command in (["eval", "--model", tmp_path / "run", "--data"],
                    ["tokenize", "train", "--vocab-size=300", f"--output={tmp_path}/t.json", "--input"]):
        tessera(*command, tmp_path / "body.jsonl", code=78, says='it has "body". Set --field to the one with the text.')
        tessera(*command, tmp_path / "data.field.jsonl", "--field", "no", code=78, says="/data.field.jsonl:1: the record")
        tessera(*command, tmp_path / "whole.json", code=78, says="to leave it out, --exclude.")
    tessera(*command, tmp_path / "whole.json", code=78, says="To read its bytes as they are, name the file .txt;")


def mixed(tokens, tmp_path, **data):
    """Text beside token files, whose ids are bytes: the tokenizer has no merges."""
    (tmp_path / "text.jsonl").write_text(as_lines(records(30)))
    return {"model": {**MODEL, "vocab": 257}, "precision": {"compute": "fp64"}, "schedule": {"warmup": 0},
            "data": {"train": [str(tmp_path / "text.jsonl"), tokens["train"]], "format": "auto", "seq_len": 16,
                     "tokenizer": str(tmp_path / "tokenizer.json"), "weights": [1, 3], **data}}


@pytest.fixture
def byte_tokenizer(tessera, tmp_path):
    (tmp_path / "tiny.txt").write_text("a")
    tessera("tokenize", "train", "--vocab-size", 257, "--output", tmp_path / "tokenizer.json",
            "--input", tmp_path / "tiny.txt")


def test_weights_mix_the_same_on_ranks_and_over_a_stop(program, tokens, tmp_path, byte_tokenizer):
    sections = mixed(tokens, tmp_path, valid_share=0.1)
    one, _ = run(program, tokens, tmp_path / "one", **sections)
    done = train(program, configuration(tokens, tmp_path / "two", **{**sections, "mesh": {"dp": 2}}), "--nproc", "2")
    assert "data.weights sum to 4" in done.stderr
    assert re.search(r"text.jsonl': \d+ tokens, \d+ samples, \d+ of them held out; 25% of what is taken", done.stderr)
    assert re.search(r"train.bin': 5000 tokens, 312 samples, 31 of them held out; 75% of what is taken", done.stderr)
    half = {**sections, "mesh": {"dp": 4}, "run": {"steps": 8}, "checkpoint": {"every": 8},
            "schedule": {"warmup": 0, "type": "constant"}}
    constant, _ = run(program, tokens, tmp_path / "constant", **{**half, "mesh": {}, "run": {"steps": STEPS}})
    path = configuration(tokens, tmp_path / "stopped", **half)
    train(program, path, "--nproc", "4", "--ranks", "threads")
    train(program, path, "--nproc", "4", "--ranks", "threads", f"--run.steps={STEPS}")
    for ours, other in ((one, metrics(tmp_path / "two")), (constant, metrics(tmp_path / "stopped"))):
        assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in other], rel=1e-9)
    assert one[-1]["valid_loss"] == pytest.approx(metrics(tmp_path / "two")[-1]["valid_loss"], rel=1e-9)


@pytest.mark.parametrize(("flag", "complaint"), [
    ("--data.weights=1,-1", "weights are from 0"),
    ("--data.weights=1", "data.weights has 1 numbers, and data.train 2 entries"),
    ("--data.weights=0,0", "at least one must be more than 0"),
    ("--data.weights=1,nan", "expected a list of numbers"),
    ("--data.weights=[]", "has tokens"),
    ("--data.valid_share=1", "it must be below 1"),
    ("--data.valid_share=0.001", "data.valid_share (0.001) of"),
    ("--data.valid=VALID", "Leave one of the two out"),
    ("--data.tokenizer=", "set data.tokenizer to the tokenizer.json that made them"),
    ("--data.seq_len=5000 --model.max_seq=5000", "train.bin': has 5000 tokens"),
])
def test_bad_weights_and_shares_are_refused(program, tokens, tmp_path, byte_tokenizer, flag, complaint):
    path = configuration(tokens, tmp_path / "refused", **mixed(tokens, tmp_path, valid_share=0.1))
    if "seq_len" in flag:
        (tmp_path / "text.jsonl").write_text(as_lines(records(300)))
    errors = refused(program, path, *flag.replace("VALID", tokens["valid"]).split())
    assert complaint in errors
    assert "rank 1" not in errors
