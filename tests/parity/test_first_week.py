"""What tripped those who tried it: names of token files, outputs over inputs, paths that are empty, templates at export,
another batch after a resume."""

import json
import re
import struct
import subprocess

import pytest
import zstandard_frames
from runs import MODEL, configuration, metrics, train

TEXT = "the cat sat on the mat.\na dog sat too.\n"
SECTIONS = {"model": {**MODEL, "vocab": 300}, "run": {"steps": 2}, "schedule": {"warmup": 0},
            "checkpoint": {"every": 2}, "data": {"format": "auto", "seq_len": 8}}


def run(program, *arguments, cwd=None):
    return subprocess.run([str(program), *map(str, arguments)], capture_output=True, text=True, timeout=300, cwd=cwd)


@pytest.fixture(scope="module")
def tokenizer(program, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "a.txt").write_text(TEXT * 20)
    done = run(program, "tokenize", "train", "--input", folder / "a.txt", "--vocab-size", 300, "--output", folder)
    assert done.returncode == 0, done.stderr
    return folder


def with_many_ids(tokenizer, folder):
    content = json.loads((tokenizer / "tokenizer.json").read_text())
    content["added_tokens"].append({"id": 70000, "content": "<far>", "single_word": False, "lstrip": False,
                                    "rstrip": False, "normalized": False, "special": True})
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def test_the_name_of_a_token_file_says_how_wide_its_ids_are(program, tokenizer, tmp_path):
    many = with_many_ids(tokenizer, tmp_path / "many")

    def encode(of, name, *flags):
        return run(program, "tokenize", "encode", "--tokenizer", of, "--input", tokenizer / "a.txt", "--output",
                   tmp_path / name, *flags)

    for of, name, dtype in (tokenizer, "a.u32", "u32"), (tokenizer, "a.bin", "u16"), (many, "b.u32", "u32"):
        done = encode(of, name)
        assert json.loads(done.stdout)["dtype"] == dtype and "takes it for" not in done.stderr, done.stderr
        inspected = run(program, "inspect", tmp_path / name, "--json").stdout
        assert json.loads(inspected)["tokens"] == json.loads(done.stdout)["tokens"]
    for name in "c.bin", "c.u16":
        done = encode(many, name)
        assert done.returncode == 2 and "Give it a name with .u32" in done.stderr
        assert not (tmp_path / name).exists()
    done = encode(tokenizer, "a.ids")
    assert done.returncode == 0 and "takes it for text by its name" in done.stderr
    done = encode(many, "d.bin", "--dtype", "u32")
    assert done.returncode == 0 and "set data.format to tokens_u32" in done.stderr
    path = configuration({"train": str(tmp_path / "d.bin")}, tmp_path, **{**SECTIONS, "model": {**MODEL, "vocab": 70001}})
    done = train(program, path, check=False)
    assert done.returncode == 78 and "do not fit into the 16 bits" in done.stderr


def test_no_output_replaces_what_is_no_such_output(program, tokenizer, tmp_path):
    mine = tmp_path / "mine.txt"
    mine.write_text(TEXT)
    done = run(program, "tokenize", "encode", "--tokenizer", tokenizer, "--input", mine, "--output", mine)
    assert done.returncode == 2 and "nothing was written" in done.stderr
    assert mine.read_text() == TEXT
    path = configuration({"train": str(tokenizer / "a.txt")}, tmp_path, **SECTIONS)
    train(program, path)
    figures = tmp_path / "run" / "metrics.jsonl"
    before = figures.read_text()
    done = run(program, "report", tmp_path / "run", "--out", figures)
    assert done.returncode == 2 and "no page of a report" in done.stderr and figures.read_text() == before
    for _ in range(2):
        assert run(program, "report", tmp_path / "run", "--out", tmp_path / "page.html").returncode == 0
    for arguments in ("convert", "--from", tmp_path / "run", "--to", ""), ("convert", "--from", "", "--to", "x"):
        done = run(program, *arguments, cwd=tmp_path)
        assert done.returncode == 2 and "a path is empty" in done.stderr, done.stderr


def test_a_convert_that_fails_leaves_nothing(program, tokenizer, tmp_path):
    train(program, configuration({"train": str(tokenizer / "a.txt")}, tmp_path, **SECTIONS))
    full = subprocess.run(["bash", "-c", f"ulimit -f 4; exec {program} convert --from {tmp_path}/run --to {tmp_path}/hf"],
                          capture_output=True, text=True, timeout=120)
    assert full.returncode == 74, full.stderr
    assert not (tmp_path / "hf").exists()
    assert run(program, "convert", "--from", tmp_path / "run", "--to", tmp_path / "hf").returncode == 0


def test_tokenizer_and_template_go_with_the_model(program, tokenizer, tmp_path):
    ids = tmp_path / "a.u16"
    run(program, "tokenize", "encode", "--tokenizer", tokenizer, "--input", tokenizer / "a.txt", "--output", ids)
    template = tmp_path / "mine.jinja"
    template.write_text("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}")
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps({"messages": [{"role": "user", "content": "who?"},
                                              {"role": "assistant", "content": "a cat"}]}) + "\n" + "\n")
    for name, data in ("files", {"train": str(ids)}), ("chats", {"train": str(chats),
                                                                 "chat_template": str(template)}):
        own = {"format": "auto", "seq_len": 16, "tokenizer": str(tokenizer), **data}
        path = configuration(data, tmp_path, **{**SECTIONS, "data": own})
        done = train(program, path, f"--run.name={name}", "--batch.global=1", check=False)
        assert done.returncode == 0, done.stderr
        done = run(program, "generate", "--model", tmp_path / name, "--prompt", "the", "--max-tokens", 2)
        assert done.returncode == 0, done.stderr
        done = run(program, "convert", "--from", tmp_path / name, "--to", tmp_path / f"{name}_hf")
        assert done.returncode == 0 and (tmp_path / f"{name}_hf" / "tokenizer.json").exists(), done.stderr
    assert (tmp_path / "chats_hf" / "chat_template.jinja").read_text() == template.read_text()


def test_weights_that_do_not_fit_are_refused_before_a_folder_is_made(program, tokenizer, tmp_path):
    text = {"train": str(tokenizer / "a.txt")}
    train(program, configuration(text, tmp_path, **SECTIONS))
    assert run(program, "convert", "--from", tmp_path / "run", "--to", tmp_path / "hf").returncode == 0
    weights, words = tmp_path / "hf" / "model.safetensors", tmp_path / "hf" / "config.json"
    whole, config = weights.read_bytes(), json.loads(words.read_text())
    path = configuration(text, tmp_path, {"from": str(tmp_path / "hf"), "load_weights": True},
                         **{key: value for key, value in SECTIONS.items() if key != "model"})
    for content, said in (whole[:-5], config), (whole, {**config, "num_hidden_layers": 3}):
        weights.write_bytes(content)
        words.write_text(json.dumps(said))
        for flags in ("--nproc", "2"), ("--dry-run",):
            done = train(program, path, "--run.name=refused", *flags, check=False)
            assert done.returncode == 74 and "rank" not in done.stderr, done.stderr
        assert not (tmp_path / "refused").exists()
    words.write_text(json.dumps(config))
    train(program, path, "--run.name=refused", "--nproc", "2")


@pytest.mark.parametrize("flag", ["--batch.global=4", "--data.seq_len=8"])
def test_a_resume_with_another_batch_goes_on_where_the_data_stood(program, tokens, tmp_path, flag):
    path = configuration(tokens, tmp_path, run={"steps": 4}, checkpoint={"every": 4}, schedule={"warmup": 0},
                         batch={"global": 8}, data={"shuffle": False})
    train(program, path)
    done = train(program, path, "--run.steps=6", flag)
    taken = sum(line["tokens"] for line in metrics(tmp_path))
    shown = re.findall(r"tokens: ([\d,]+)", done.stderr + done.stdout)
    assert int(shown[-1].replace(",", "")) == taken, (shown, taken)


def test_other_texts_to_validate_on_are_not_taken_for_other_ones_to_train_on(program, tokens, tmp_path):
    path = configuration(tokens, tmp_path, run={"steps": 2}, checkpoint={"every": 2}, schedule={"warmup": 0},
                         data={"valid": tokens["valid"]})
    train(program, path)
    with open(tokens["train"], "rb") as train_on, open(tmp_path / "other.bin", "wb") as other:
        other.write(train_on.read()[2:])
    done = train(program, path, "--run.steps=3", f"--data.valid={tmp_path / 'other.bin'}")
    assert "validation is another one now" in done.stderr and "the data is not what" not in done.stderr, done.stderr
    done = train(program, path, "--run.steps=4", f"--data.train={tmp_path / 'other.bin'}")
    assert "the data is not what the checkpoint was trained on" in done.stderr, done.stderr


# One message, before any rank: which keys, with both values, and the way out, which works.
@pytest.mark.parametrize("flags, words, has_weights", [
    (["--optimizer.type=sgd"], ['optimizer.type is "adamw" in it and "sgd" in this run'], True),
    (["--optimizer.ema=0.9", "--precision.compute=bf16"],
     ["optimizer.ema is 0.0 in it and 0.9 in", 'precision.compute is "fp32" in it and "bf16" in'], True),
    (["--model.layers=3"], ["model.layers is 2 in it and 3 in this run", "another run.name"], False),
])
def test_a_resume_with_other_states_is_refused_before_ranks_start(program, tokens, tmp_path, flags, words, has_weights):
    path = configuration(tokens, tmp_path, run={"steps": 2}, checkpoint={"every": 2}, schedule={"warmup": 0})
    train(program, path)
    step = str(tmp_path / "run" / "checkpoints" / "step-2")
    for resume in (["--nproc", "2"], ["--resume", step, "--run.name=other"]):
        done = train(program, path, "--run.steps=4", *flags, *resume, check=False)
        assert done.returncode == 78, done.stderr
        assert done.stderr.count("error: ") == 1 and "rank 0" not in done.stderr and len(done.stderr) < 1500, done.stderr
        for word in [step, *words]:
            assert word in done.stderr, done.stderr
        assert ("from its weights: " in done.stderr) == has_weights, done.stderr
    if has_weights:
        way_out = re.findall(r"--model\.\S+=\S+(?<!\.)", done.stderr.split("its weights: ")[1].split(" (")[0])
        assert way_out == [f"--model.from={step}", "--model.load_weights=true"]
        train(program, path, *flags, *way_out, "--run.name=anew")


def test_a_resume_of_no_checkpoint_says_what_to_give(program, tokens, tmp_path):
    done = train(program, configuration(tokens, tmp_path), f"--resume={tmp_path}", "--nproc", "2", check=False)
    assert done.returncode == 74 and "checkpoints/step-N" in done.stderr and done.stderr.count("error") == 1, done.stderr


# Wherever the limit on address space strikes: it has words and a code, at LibTorch's own start too.
def test_too_little_memory_is_said(program, tokens, tmp_path):
    path = configuration(tokens, tmp_path)
    said = []
    for command in (["--version"], ["train", path, "--dry-run"]):
        for kilobytes in range(320000, 640000, 40000):
            words = f'ulimit -v {kilobytes}; exec "$@"'
            done = subprocess.run(["bash", "-c", words, "sh", str(program), *command], capture_output=True, text=True)
            if done.returncode == 127:
                assert "error while loading shared libraries" in done.stderr  # the system's, before the program
            elif done.returncode != 0:
                assert done.returncode == 1 and "tessera: error: " in done.stderr, (kilobytes, done)
                said.append(done.stderr)
    assert any(re.search(r"out of memory: \d+ bytes more were needed, beside \d+ .* its limit is \d+ \(ulimit -v\)", each)
               for each in said), said


def test_ways_to_name_data(program, tokens, tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT * 20)
    path = configuration({"train": str(tmp_path / "a.txt")}, tmp_path, **SECTIONS)
    for data, complaint in ("/dev/null", "is a pipe or a device"), ("", "'' names no file"):
        done = train(program, path, f"--data.train={data}", check=False)
        assert done.returncode == 78 and complaint in done.stderr, done.stderr
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "b.txt").write_text(TEXT * 20)
    (tmp_path / "f" / "self").symlink_to("self")
    train(program, path, f"--data.train={tmp_path / 'f'}", "--run.name=links")
    (tmp_path / "z.txt.zst").write_bytes(struct.pack("<II", 0x184D2A50, 4) + b"skip" + zstandard_frames.raw(TEXT * 20))
    done = train(program, path, f"--data.train={tmp_path / 'z.txt.zst'}", "--run.name=frames", check=False)
    assert done.returncode == 0, done.stderr
    ids = list(range(60)) * 4
    (tmp_path / "m.bin").write_bytes(struct.pack(f"<{len(ids)}H", *ids))
    (tmp_path / "m.idx").write_bytes(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 1, 2) + struct.pack("<i", len(ids))
                                     + struct.pack("<q", 0) + struct.pack("<qq", 0, 1))
    train(program, path, f"--data.train={tmp_path / 'm'}", "--run.name=megatron")


# Where each number of the equation came from.
def test_a_batch_that_does_not_divide_names_the_places_of_its_numbers(program, tokens, tmp_path):
    path = configuration(tokens, tmp_path, batch={"global": 13})
    done = train(program, path, "--nproc", "4", "--mesh.tp=2", "--batch.micro=3", check=False)
    assert done.returncode == 78, done.stderr
    for word in ["batch.global 13 = batch.micro 3 x accumulation ? x data-parallel degree 2 (4 ranks, 2 to a replica)",
                 "Nearest batch.global: 12 or 18", "batch.global: " + path + ":", "batch.micro: --batch.micro=3"]:
        assert word in done.stderr, (word, done.stderr)
