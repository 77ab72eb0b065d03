#!/usr/bin/env python3
"""Every schedule of a pipeline with real compute: its step and bubble, measured and simulated, and over 1F1B's.

Usage: bench/pipeline_bench.py PROGRAM [--rounds 3] [--steps 8] [--pp 2] [--microbatches 8] [--schedule NAME]...
A Llama of 8 layers of 256, two samples of 256 tokens a micro-batch, a rank of one thread a stage. In every round each
schedule runs in turn, traced; the simulator (`tessera plan --draw --trace`) is given what its instructions took on
average and says when they would begin and end. A figure is the median over rounds; a bubble is the mean over ranks.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

from step_bench import configuration

SCHEDULES = {"gpipe": 1, "1f1b": 1, "eager_1f1b": 1, "interleaved": 2, "bfs": 2, "zb_h1": 1, "zb_h2": 1,
             "interleaved_zb": 2, "zb_v": 2, "dualpipe": 2, "dualpipe_v": 2, "pipedream_2bw": 1}


def measure(options, folder, schedule):
    """Of one run: its step and bubble, and those that the simulator makes of its instructions' times."""
    path = configuration(folder, [
        "--model.hidden=256", "--model.heads=4", "--model.ffn=704", "--model.vocab=1024", "--run.threads=1",
        f"--batch.global={2 * options.microbatches}", "--batch.micro=2", f"--mesh.pp={options.pp}",
        f"--pipeline.schedule={schedule}", f"--pipeline.chunks={SCHEDULES[schedule]}",
        f"--monitor.trace={options.steps - 2}"], options.steps, "fp32")
    run = folder / "run"
    subprocess.run([options.program, "train", path, "--nproc", str(options.pp)], check=True, capture_output=True)
    subprocess.run([options.program, "plan", run / "config.json", "--draw", "--trace", run, "--json",
                    folder / "plan.json"], check=True, capture_output=True)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][2:]
    plan = json.loads((folder / "plan.json").read_text())
    subprocess.run(["rm", "-r", run], check=True)
    return {"step": statistics.median(line["step_s"] for line in lines), "simulated": plan["step"],
            "bubble": statistics.median(line["bubble"] for line in lines), "simulated bubble": plan["bubble"],
            "loss": lines[-1]["loss"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=lambda text: Path(text).resolve())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--schedule", action="append", choices=SCHEDULES)
    options = parser.parse_args()
    schedules = ["1f1b", *(each for each in options.schedule or SCHEDULES if each != "1f1b")]
    found = {schedule: [] for schedule in schedules}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            for schedule in schedules:
                found[schedule].append(measure(options, Path(folder), schedule))
    print("| schedule | step, s | simulated | off | bubble | simulated | 1f1b over it | simulated |")
    print("| --- |" + " --- |" * 7)
    for schedule, rounds in found.items():
        middle = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        over, simulated = (statistics.median(base[key] / each[key]
                                             for base, each in zip(found["1f1b"], rounds, strict=True))
                           for key in ("step", "simulated"))
        print(f"| {schedule} | {middle['step']:.3f} | {middle['simulated']:.3f} | "
              f"{100 * (middle['step'] / middle['simulated'] - 1):+.1f} % | {100 * middle['bubble']:.1f} % | "
              f"{100 * middle['simulated bubble']:.1f} % | {over:.3f} | {simulated:.3f} |")


if __name__ == "__main__":
    main()
