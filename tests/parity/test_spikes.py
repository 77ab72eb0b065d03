"""A loss spike, planted as a batch of random tokens: it is told, or the run goes back to before it.

A run that went back has the bits of one that never saw what it left out.
"""

import json
import random
import re
import struct
import subprocess

import pytest
from runs import assert_same_bits, checkpoint, configuration, metrics, run, train, until

BATCH, LENGTH, STEPS, BAD = 12, 16, 100, 61
SPIKE = {"action": "rewind", "window": 32, "skip_before": 3, "skip_after": 2}
SECTIONS = {**until(STEPS), "data": {"shuffle": False}, "checkpoint": {"every": 10, "keep": 3}}


def noisy_cycle(folder, bad_batches):
    """Token file of 200 batches, of which these, from 1, are random; data.shuffle is false."""
    rng = random.Random(1)
    ids, token = [], 0
    for batch in range(1, 201):
        for _ in range(BATCH * LENGTH):
            known = batch not in bad_batches and rng.random() < 0.9
            token = (token * 7 + 3) % 61 if known else rng.randrange(61)
            ids.append(token)
    path = folder / "train.bin"
    path.write_bytes(struct.pack(f"<{len(ids)}H", *ids))
    return {"train": str(path)}


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    return noisy_cycle(tmp_path_factory.mktemp("planted"), {BAD})


def log_of(folder):
    return (folder / "run" / "logs" / "rank-0.log").read_text()


def test_it_is_told(program, planted, tmp_path):
    lines, _ = run(program, planted, tmp_path, step=STEPS, **SECTIONS, spike={"window": 32})
    told = [line for line in log_of(tmp_path).splitlines() if "loss spike" in line]
    assert len(told) == 1 and f"loss spike at step {BAD}: {lines[BAD - 1]['loss']:g}, " in told[0], told
    assert "the median of the 32 losses before" in told[0]


MESHES = {
    "one rank": ([], {}),
    "zero 3 x tp 2, async": (["--nproc=4"], {"mesh": {"dp": 2, "tp": 2}, "zero": {"stage": 3},
                                             "checkpoint": {"async": True}}),
    "pp 2 zero bubble": (["--nproc=2"], {"mesh": {"pp": 2}, "pipeline": {"schedule": "zb_h1"}}),
    "threads, one reads": (["--nproc=2", "--ranks=threads"], {"mesh": {"tp": 2}, "data": {"reader": "first"}}),
    "losses are read late": (["--nproc=2"], {"monitor": {"losses_late": 3}}),
    "from the beginning": ([], {"checkpoint": {"every": STEPS}}),
}


def merged(*all_sections):
    found = {}
    for sections in all_sections:
        for name, values in sections.items():
            found[name] = {**found.get(name, {}), **values}
    return found


@pytest.mark.parametrize("name", MESHES)
def test_a_run_that_went_back_has_never_seen_it(program, planted, tmp_path, name):
    arguments, sections = MESHES[name]
    sections = merged(SECTIONS, sections)
    back = run(program, planted, tmp_path / "back", *arguments, step=STEPS, **sections, spike=SPIKE)
    never = run(program, planted, tmp_path / "never", *arguments, f"--data.skip={BAD - 3}:{BAD + 2}", step=STEPS,
                **sections)
    text, place = log_of(tmp_path / "back"), "beginning" if name == "from the beginning" else "checkpoint after step 50"
    assert f"going back to the {place}, and on without batches {BAD - 3} to {BAD + 2} of data.train" in text, text
    assert [line["step"] for line in back[0]] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in back[0]] == [line["loss"] for line in never[0]]
    assert_same_bits(back[1], never[1])


def test_it_goes_back_to_the_memory_of_hosts(program, planted, tmp_path):
    memory = {"local_every": 10, "local_dir": str(tmp_path / "memory")}
    sections = merged(SECTIONS, {"checkpoint": {"every": STEPS}})
    _, back = run(program, planted, tmp_path / "back", "--nproc=2", step=STEPS,
                  **merged(sections, {"checkpoint": memory}), spike=SPIKE)
    _, never = run(program, planted, tmp_path / "never", "--nproc=2", f"--data.skip={BAD}:{BAD + 2}", step=STEPS,
                   **sections)
    assert "going back to the checkpoint after step 60" in log_of(tmp_path / "back")
    assert_same_bits(back, never)


def test_who_goes_on_later_leaves_it_out_too(program, planted, tmp_path):
    sections = merged(SECTIONS, {"checkpoint": {"keep": 0}})
    path = configuration(planted, tmp_path / "back", **sections, spike=SPIKE)
    train(program, path, "--run.steps=80")
    manifest = (tmp_path / "back" / "run" / "checkpoints" / "step-80" / "manifest.json").read_text()
    saved = json.loads(json.loads(manifest)["extra"])
    assert len(saved["losses"]) == SPIKE["window"] and saved["rewinds"] == 1
    assert saved["left_out"] == [[(BAD - 4) * BATCH, (BAD + 2) * BATCH]]
    assert json.loads((tmp_path / "back" / "run" / "summary.json").read_text())["rewinds"] == 1
    told = subprocess.run([program, "inspect", tmp_path / "back/run/checkpoints/step-80"], capture_output=True, text=True,
                          check=True).stdout
    assert re.search(f"left out, by spikes +batches {BAD - 3} to {BAD + 2}", told), told
    left_out = f"{BAD - 3}:{BAD + 2}"
    _, never = run(program, planted, tmp_path / "never", f"--data.skip={left_out},95", step=STEPS, **sections)
    train(program, path, "--data.skip=62,95")  # 62 is left out already
    assert_same_bits(checkpoint(tmp_path / "back", STEPS), never)
    refused = train(program, path, "--data.skip=70", f"--resume={tmp_path}/back/run/checkpoints/step-80", check=False)
    assert refused.returncode == 78 and "what it has taken cannot be left out" in refused.stderr


def test_what_is_damaged_is_not_gone_back_to(program, planted, tmp_path):
    sections = merged(SECTIONS, {"checkpoint": {"keep": 0}})
    path = configuration(planted, tmp_path / "back", **sections, spike=SPIKE)
    train(program, path, "--run.steps=60")
    [file] = (tmp_path / "back/run/checkpoints/step-50").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    done = train(program, path)
    assert f"{file.parent} is not used" in done.stderr and "going back to the checkpoint after step 40" in done.stderr
    _, never = run(program, planted, tmp_path / "never", f"--data.skip={BAD - 3}:{BAD + 2}", step=STEPS, **sections)
    assert_same_bits(checkpoint(tmp_path / "back", STEPS), never)


def test_another_line_of_steps_is_not_gone_back_to(program, planted, tmp_path):
    """The run came from a checkpoint of another folder; its own has older ones, of another learning rate."""
    sections = merged(SECTIONS, {"checkpoint": {"keep": 0}})
    train(program, configuration(planted, tmp_path / "other", **sections), "--run.steps=40")
    path = configuration(planted, tmp_path / "own", **sections, spike={**SPIKE, "skip_before": 30})
    train(program, path, "--run.steps=30", "--optimizer.lr=0.003")
    train(program, path, f"--resume={tmp_path}/other/run/checkpoints/step-40", "--run.steps=55")
    train(program, path)
    _, never = run(program, planted, tmp_path / "never", f"--data.skip=51:{BAD + 2}", step=STEPS, **sections)
    assert "going back to the checkpoint after step 50" in log_of(tmp_path / "own")
    assert_same_bits(checkpoint(tmp_path / "own", STEPS), never)


@pytest.mark.parametrize(("every", "local_every", "resumed"), [
    (50, 60, "resumed after step 50\n"),  # memory has step 60, of the line that was left
    (STEPS, 50, "resumed after step 50, from the memory of hosts"),
])
def test_a_restart_knows_that_the_run_has_gone_back(program, tmp_path, every, local_every, resumed):
    # The second spike, now in step 59, ends the run before it has saved anything.
    tokens = noisy_cycle(tmp_path, {BAD, BAD + 4})
    memory = {"every": every, "local_every": local_every, "local_dir": str(tmp_path / "memory")}
    path = configuration(tokens, tmp_path, **merged(SECTIONS, {"checkpoint": memory}),
                         spike={**SPIKE, "max_rewinds": 1})
    done = train(program, path, check=False)
    assert done.returncode == 1 and "going back to the checkpoint after step 50" in done.stderr, done.stderr
    again = train(program, path, check=False)
    assert again.returncode == 1 and "has gone back 1 times" in again.stderr, again.stderr
    assert resumed in again.stderr and "going back" not in again.stderr, again.stderr


def test_restarts_do_not_begin_to_count_anew(program, tmp_path):
    tokens = noisy_cycle(tmp_path, set(range(BAD, 201)))
    spike = {**SPIKE, "skip_before": 15, "max_rewinds": 2}
    path = configuration(tokens, tmp_path, **SECTIONS, spike=spike)
    done = train(program, path, "--nproc=2", "--max-restarts=2", check=False)
    assert done.returncode == 1, done.stderr
    assert log_of(tmp_path).count("going back to") == 2, done.stderr
    assert "all ranks were started again 2 times in a row without a new checkpoint" in done.stderr


def test_spikes_without_end_end_the_run(program, tmp_path):
    tokens = noisy_cycle(tmp_path, set(range(BAD, 201)))
    path = configuration(tokens, tmp_path, **SECTIONS, spike={**SPIKE, "max_rewinds": 2})
    done = train(program, path, check=False)
    assert done.returncode == 1, done.stderr
    assert "comes after the run has gone back 2 times, which is all that spike.max_rewinds allows" in done.stderr
    for left_out in ("58 to 63", "55 to 66"):
        assert f"going back to the checkpoint after step 50, and on without batches {left_out} of" in done.stderr


def test_noise_is_no_spike(program, tmp_path):
    """A thousand steps, over which the loss falls to what noise leaves."""
    tokens = noisy_cycle(tmp_path, set())
    train(program, configuration(tokens, tmp_path, **until(1000), checkpoint={"every": 0}))
    lines = metrics(tmp_path)
    assert len(lines) == 1000 and lines[-1]["loss"] < lines[0]["loss"] / 3
    assert "loss spike" not in log_of(tmp_path)
