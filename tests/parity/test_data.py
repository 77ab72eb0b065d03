"""What may be given to data.train, as users have it: formats, files left out, refusals."""

import gzip
import json

import pytest
from runs import MODEL, configuration, metrics, train

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
