"""The events that a run writes, read by TensorBoard itself.

tensorboard_driver.cpp takes steps 1 to 5, and then, as a run that was resumed
from step 3, steps 4 to 6; metrics.jsonl holds the same records.
"""

import json
import subprocess

import pytest
from tensorboard.backend.event_processing import event_accumulator


@pytest.fixture(scope="module")
def run(program, tmp_path_factory):
    """The scalars by tag, and the lines of metrics.jsonl."""
    folder = tmp_path_factory.mktemp("events")
    driver = program.parents[1] / "tests" / "tensorboard_driver"
    subprocess.run([driver, folder], check=True)
    events = event_accumulator.EventAccumulator(str(folder))
    events.Reload()
    scalars = {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
    with open(folder / "metrics.jsonl", encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    return scalars, lines


def test_every_step_is_there_once(run):
    scalars, lines = run
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    losses = scalars["loss_metrics/global_avg_loss"]
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("tag, field", [
    ("loss_metrics/global_avg_loss", "loss"),
    ("grad_norm", "grad_norm"),
    ("lr", "lr"),
    ("time_metrics/end_to_end(s)", "step_s"),
])
def test_scalars_are_those_of_the_metrics(run, tag, field):
    scalars, lines = run
    assert [value for _, value in scalars[tag]] == pytest.approx(
        [line[field] for line in lines], rel=2**-23)


def test_tags_and_units_are_torchtitans(run):
    scalars, _ = run
    assert scalars["throughput(tps)"][0] == (1, 16384)  # of one of two ranks
    assert scalars["mfu(%)"][0] == (1, 25)
    assert scalars["memory/max_active(GiB)"][0] == (1, 0.5)
    assert scalars["memory/max_active(%)"][0] == (1, 25)
    assert scalars["validation_metrics/loss"] == [(2, 0.5), (4, 0.5), (6, 0.5)]
    assert "tflops" not in scalars  # unknown
