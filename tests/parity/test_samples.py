"""monitor.sample: texts that a model writes while it trains, on any mesh, at no cost to training."""

import json
import struct
import subprocess

import pytest
from runs import MODEL, assert_same_bits, checkpoint, configuration, metrics, train
from tensorboard.backend.event_processing import event_accumulator
from tensorboard.util.tensor_util import make_ndarray

TEXT = "the cat sat on the mat. a dog sat too, and slept. the bird sang. so it was.\n" * 40
MESHES = {
    "one rank": (1, {}),
    "dp 2 x tp 2, ZeRO 3": (4, {"mesh": {"dp": 2, "tp": 2}, "zero": {"stage": 3},
                                "tensor": {"sequence_parallel": True}}),
    "pp 2 x cp 2": (4, {"mesh": {"pp": 2, "cp": 2}, "batch": {"micro": 4}}),
    "dp on threads": (1, {"mesh": {"dp": 2, "data_parallel": "dp"}}),
    "adapters": (2, {"mesh": {"dp": 2}, "zero": {"stage": 3},
                     "model": {**MODEL, "vocab": 300, "lora": {"rank": 4}}}),
}


def text_run(folder, **sections):
    folder.mkdir(exist_ok=True)
    (folder / "text.txt").write_text(TEXT)
    base = {"model": {**MODEL, "vocab": 300}, "run": {"steps": 6}, "batch": {"global": 8}, "schedule": {"warmup": 0},
            "precision": {"compute": "fp64"}, "checkpoint": {"every": 3},
            "data": {"format": "auto", "valid_share": 0.1}, "validate": {"every": 2},
            "monitor": {"sample": 2, "sample_tokens": 9, "tensorboard": False}}
    for section, values in sections.items():
        base[section] = {**base.get(section, {}), **values}
    return configuration({"train": str(folder / "text.txt")}, folder, **base)


def samples(folder):
    return [json.loads(line) for line in (folder / "run" / "samples.jsonl").read_text().splitlines()]


def figures(folder):
    return [{key: line.get(key) for key in ("step", "loss", "grad_norm", "valid_loss")} for line in metrics(folder)]


@pytest.mark.parametrize("mesh", MESHES)
def test_training_has_the_bits_that_it_has_without(mesh, program, tmp_path):
    world, sections = MESHES[mesh]
    ranks = ["--nproc", str(world), "--ranks", "threads"]
    train(program, text_run(tmp_path / "with", **sections), *ranks)
    train(program, text_run(tmp_path / "without", **sections), *ranks, "--monitor.sample=0")
    assert figures(tmp_path / "with") == figures(tmp_path / "without")
    assert_same_bits(checkpoint(tmp_path / "with", 6), checkpoint(tmp_path / "without", 6))
    assert not (tmp_path / "without" / "run" / "samples.jsonl").exists()
    assert [each["step"] for each in samples(tmp_path / "with")] == [2, 4, 6]
    assert [line["step"] for line in metrics(tmp_path / "with") if "sample_s" in line] == [2, 4, 6]


def test_texts_are_those_of_one_rank(program, tmp_path):
    texts = {}
    for mesh, (world, sections) in MESHES.items():
        if mesh == "adapters":
            continue  # another model
        train(program, text_run(tmp_path / mesh, **sections), "--nproc", str(world), "--ranks", "threads")
        texts[mesh] = [(each["step"], each["prompt"], each["text"]) for each in samples(tmp_path / mesh)]
        assert texts[mesh] == texts["one rank"], mesh
    assert len({text for _, _, text in texts["one rank"]}) == 3  # each step draws anew
    assert all(prompt for _, prompt, _ in texts["one rank"])


def test_documents_that_are_kept_apart(program, tmp_path):
    """A prompt is of one document, and so is what follows it."""
    lines = "".join(json.dumps({"text": f"{word} sat on the mat"}) + "\n" for word in ("cat", "dog", "bird") * 90)
    (tmp_path / "text.jsonl").write_text(lines)
    for mesh, (world, sections) in MESHES.items():
        if mesh == "adapters":
            continue
        path = text_run(tmp_path / mesh, **sections)
        train(program, path, "--nproc", str(world), "--ranks", "threads", f"--data.train={tmp_path}/text.jsonl",
              "--data.intra_document_masking=true")
    texts = {mesh: [(each["prompt"], each["text"]) for each in samples(tmp_path / mesh)]
             for mesh in MESHES if mesh != "adapters"}
    assert all(each == texts["one rank"] for each in texts.values())
    assert all("<|endoftext|>" not in prompt.removesuffix("<|endoftext|>") for prompt, _ in texts["one rank"])


def test_a_run_that_is_stopped_goes_on_with_the_same_texts(program, tmp_path):
    path = text_run(tmp_path / "whole")
    train(program, path, "--nproc", "2", "--mesh.dp=2", "--zero.stage=3")
    path = text_run(tmp_path / "parts")
    train(program, path, "--nproc", "2", "--mesh.dp=2", "--zero.stage=3", "--run.steps=5", "--schedule.steps=6")
    # From step 3 on another mesh: the lines of steps 4 and 5 are written again.
    train(program, path, "--nproc", "2", "--mesh.pp=2", "--resume", str(tmp_path / "parts/run/checkpoints/step-3"))
    whole, parts = samples(tmp_path / "whole"), samples(tmp_path / "parts")
    for each in whole + parts:
        del each["seconds"]
    assert whole == parts


def test_a_prompt_is_gone_on_from(program, tessera, tmp_path):
    path = text_run(tmp_path, run={"steps": 40}, monitor={"sample": 40, "tensorboard": True})
    done = train(program, path, "--monitor.sample_prompt=the cat", "--monitor.sample_temperature=0")
    (written,) = samples(tmp_path)
    assert (written["step"], written["prompt"]) == (40, "the cat")
    assert f"| the cat{written['text']}".splitlines()[0] in done.stderr
    assert written["text"].startswith(" sat on the mat.")
    # What `generate` writes from the same weights.
    assert tessera("generate", "--model", tmp_path / "run", "--prompt", "the cat", "--temperature", 0, "--dtype", "fp64",
                   "--max-tokens", 9).startswith("the cat" + written["text"].split("\n")[0])
    events = event_accumulator.EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    (event,) = events.Tensors("sample")
    assert event.step == 40
    assert make_ndarray(event.tensor_proto).item().decode() == "    " + ("the cat" + written["text"]).replace("\n", "\n    ")
    page = tmp_path / "page.html"
    tessera("report", tmp_path / "run", "--out", page)
    assert "What the model wrote" in page.read_text()


def test_a_conversation_is_answered(program, tessera, tmp_path):
    pair = {"prompt": "who are you", "completion": "a machine"}
    (tmp_path / "chats.jsonl").write_text((json.dumps(pair) + "\n") * 8)
    (tmp_path / "text.txt").write_text("who are you a machine " * 20)
    tessera("tokenize", "train", "--vocab-size", 257, "--input", tmp_path / "text.txt", "--output", tmp_path / "t.json")
    path = configuration(
        {"train": str(tmp_path / "chats.jsonl")}, tmp_path, model={**MODEL, "vocab": 257, "max_seq": 48},
        run={"steps": 60}, batch={"global": 4}, checkpoint={"every": 0}, optimizer={"lr": 0.02},
        data={"format": "chat", "chat_template": "none", "tokenizer": str(tmp_path / "t.json"), "seq_len": 48},
        monitor={"sample": 60, "sample_temperature": 0})
    train(program, path)
    (written,) = samples(tmp_path)
    # The whole question, and no more than an answer: what ends one ends the text.
    assert (written["prompt"], written["text"]) == ("who are you", "a machine")


def test_what_cannot_be_written_is_refused_before_ranks_start(program, tokens, tmp_path):
    path = configuration(tokens, tmp_path, monitor={"sample": 10})
    done = train(program, path, "--nproc", "2", check=False)
    assert done.returncode == 78 and "rank" not in done.stderr.split("tokens mean")[0].split("error")[1]
    assert "monitor.sample is 10" in done.stderr and "data.tokenizer" in done.stderr
    # Of token files that another tokenizer has made: before the first step.
    (tmp_path / "few.txt").write_text("abc" * 40)
    program_of = [program, "tokenize", "train", "--vocab-size", "257", "--input", tmp_path / "few.txt", "--output"]
    subprocess.run([*program_of, tmp_path / "few.json"], check=True)
    struct.pack_into("<H", high := bytearray(2000), 0, 299)
    (tmp_path / "high.u16").write_bytes(high)
    other = configuration({"train": str(tmp_path / "high.u16")}, tmp_path / "other",
                          model={**MODEL, "vocab": 300}, monitor={"sample": 10}, checkpoint={"every": 0},
                          data={"tokenizer": str(tmp_path / "few.json"), "shuffle": False})
    done = train(program, other, "--nproc", "2", "--mesh.dp=2", check=False)
    assert done.returncode == 78 and "has the token 299, but the tokenizer's ids are below 257" in done.stderr
    path = text_run(tmp_path / "long")
    done = train(program, path, f"--monitor.sample_prompt={'long ' * 40}", check=False)
    assert done.returncode == 78 and "monitor.sample_prompt has" in done.stderr
    done = train(program, path, "--monitor.sample=0", "--monitor.sample_tokens=5")
    assert "monitor.sample_tokens is not used while monitor.sample is 0" in done.stderr
