#!/usr/bin/env python3
"""Whether the order that 'tessera plan' gives to layouts is the order in which they run.

Usage: bench/plan_bench.py PROGRAM [--rounds 3] [--steps 6] [--layout NAME]...
The model is that of bench/step_bench.py, on two ranks of one core. The cluster is described by figures of this
machine: the rate of the model's products and the link as a run's summary.json has them, the memory's rate by a copy.
In every round each layout runs in turn; measured is the median over rounds of what a round's median step took,
planned what 'tessera plan --draw' says of the same configuration. Below the table: of all pairs of layouts that
differ by more than a tenth as measured, how many the plan has in the same order; and the search's first among them.
"""

import argparse
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from step_bench import configuration

PP = ["--mesh.pp=2", "--batch.micro=1"]
LAYOUTS = {
    "ddp": ["--mesh.dp=2"],
    "ddp, micro 1": ["--mesh.dp=2", "--batch.micro=1"],
    "zero 1": ["--mesh.dp=2", "--zero.stage=1"],
    "zero 2": ["--mesh.dp=2", "--zero.stage=2"],
    "zero 3": ["--mesh.dp=2", "--zero.stage=3"],
    "zero 3, micro 1": ["--mesh.dp=2", "--zero.stage=3", "--batch.micro=1"],
    "zero 3, block": ["--mesh.dp=2", "--zero.stage=3", "--recompute.mode=block"],
    "tp": ["--mesh.tp=2"],
    "sp": ["--mesh.tp=2", "--tensor.sequence_parallel=true"],
    "cp ring": ["--mesh.cp=2"],
    "cp ulysses": ["--mesh.cp=2", "--context.method=ulysses"],
    "pp naive": [*PP, "--pipeline.schedule=naive"],
    "pp gpipe": [*PP, "--pipeline.schedule=gpipe"],
    "pp 1f1b": PP,
    "pp 1f1b, micro 4": ["--mesh.pp=2", "--batch.micro=4"],
    "pp interleaved": [*PP, "--pipeline.schedule=interleaved", "--pipeline.chunks=2"],
    "pp zb_v": [*PP, "--pipeline.schedule=zb_v", "--pipeline.chunks=2"],
}


def memory_gb_per_s():
    """Of one core: a copy, which reads and writes."""
    torch.set_num_threads(1)
    one, other = torch.ones(2**25), torch.empty(2**25)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        other.copy_(one)
        seconds.append(time.perf_counter() - began)
    return 2 * one.nbytes / min(seconds) / 1e9


class Bench:
    def __init__(self, program, folder, steps):
        self.program, self.folder = program, folder
        self.path = configuration(folder, ["--run.threads=1"], steps, "fp32")
        keys = json.loads(self.path.read_text())
        del keys["batch"]["micro"]
        self.path.write_text(json.dumps(keys))

    def tessera(self, *arguments):
        done = subprocess.run([self.program, *map(str, arguments)], cwd=self.folder, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(done.stderr)

    def trained(self, *configured):
        """Seconds of a step, and the run's summary."""
        self.tessera("train", *configured, "--nproc", 2, "--resume", "never")
        run = self.folder / "run"
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        summary = json.loads((run / "summary.json").read_text())
        shutil.rmtree(run)
        return statistics.median(line["step_s"] for line in lines[1:]), summary

    def cluster(self):
        """This machine, from the run of ddp."""
        _, summary = self.trained(self.path, *LAYOUTS["ddp"])
        [link] = summary["links"]
        link = {"latency_us": link["latency_us"], "gb_per_s": link["gbps"]}
        path = self.folder / "cluster.json"
        path.write_text(json.dumps({
            "nodes": 1, "devices_per_node": 2, "in_node": link, "between_nodes": link,
            "device": {"kind": "cpu", "tflops": summary["peak_tflops"], "memory_gib": 8,
                       "memory_gb_per_s": memory_gb_per_s()}}))
        return path

    def planned(self, cluster, *configured):
        self.tessera("plan", *configured, "--draw", "--cluster", cluster, "--json", "plan.json")
        return json.loads((self.folder / "plan.json").read_text())["step"]

    def first(self, cluster):
        """The search's first: its name and its configuration."""
        self.tessera("plan", self.path, "--cluster", cluster, "--top", 1, "--json", "found.json", "--emit", "first.json")
        [plan] = json.loads((self.folder / "found.json").read_text())["plans"]
        return f"the search's first: {plan['layout']}", self.folder / "first.json"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=lambda text: str(Path(text).resolve()))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--layout", action="append", choices=LAYOUTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        bench = Bench(options.program, Path(text), options.steps)
        cluster = bench.cluster()
        print(cluster.read_text(), flush=True)
        configured = {name: [bench.path, *LAYOUTS[name]] for name in options.layout or LAYOUTS}
        first, path = bench.first(cluster)
        configured[first] = [path]
        planned = {name: bench.planned(cluster, *each) for name, each in configured.items()}
        seconds = {name: [] for name in configured}
        for _ in range(options.rounds):
            for name, each in configured.items():
                seconds[name].append(bench.trained(*each)[0])
    measured = {name: statistics.median(each) for name, each in seconds.items()}
    print("| layout | planned, s | measured, s | measured / planned |\n| --- | --- | --- | --- |")
    for name in sorted(planned, key=planned.get):
        print(f"| {name} | {planned[name]:.3f} | {measured[name]:.3f} | {measured[name] / planned[name]:.2f} |")
    apart = [pair for pair in itertools.combinations(measured, 2)
             if abs(measured[pair[0]] - measured[pair[1]]) > 0.1 * max(measured[name] for name in pair)]
    alike = sum((planned[one] < planned[other]) == (measured[one] < measured[other]) for one, other in apart)
    print(f"\n{alike} of {len(apart)} pairs in the same order; the search's first takes "
          f"{measured[first] / min(measured.values()):.2f} of the fastest's time")


if __name__ == "__main__":
    main()
