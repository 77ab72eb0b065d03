#!/usr/bin/env python3
"""Tables of peers_bench by the state of the machine: `near` and `far` cores change within seconds.

Usage: bench/peers_table.py build/dev/bench/peers_bench [--ranks 2] [--runs 6] [peers_bench's options]
Runs peers_bench again and again, and writes Markdown: of every verb, state and size the median over
the runs, with the calls that it stands on.
"""

import argparse
import os
import re
import statistics
import subprocess
from collections import defaultdict

ROW = re.compile(r"(\w+)\s+(\d+)\s+(near|far|any)\s+(\d+) calls\s+trip\s+(\d+) ns")
FIGURE = re.compile(r"(\w+)\s+([\d.]+) \(")


def run(program, ranks, options):
    environment = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    command = ["mpirun", "--oversubscribe", "-np", str(ranks), program, *options]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--runs", type=int, default=6)
    arguments, options = parser.parse_known_args()

    rows = defaultdict(list)
    for _ in range(arguments.runs):
        for line in run(arguments.program, arguments.ranks, options).splitlines():
            if found := ROW.match(line):
                verb, size, state, calls, trip = found.groups()
                figures = {name: float(us) for name, us in FIGURE.findall(line)}
                rows[verb, state, int(size)].append(dict(figures, calls=int(calls), trip=int(trip)))

    shown = None
    for (verb, state, size), runs in sorted(rows.items()):
        us = {name: statistics.median(one[name] for one in runs) for name in runs[0]}
        names = [name for name in us if name not in ("calls", "trip")]
        if shown != (verb, state):
            shown = verb, state
            place = "" if state == "any" else f", {state}"
            print(f"\n### {verb}, {arguments.ranks} ranks{place}\n")
            heads = ["bytes", "calls", "trip (ns)", *names]
            heads += [f"{name} / shm" for name in names if name in ("mpi", "gloo")]
            heads += [f"{name} / registered" for name in names if name in ("mpi", "bound")]
            print("| " + " | ".join(heads) + " |\n|" + " --- |" * len(heads))
        cells = [size, sum(one["calls"] for one in runs), f"{us['trip']:.0f}", *(f"{us[name]:.1f}" for name in names)]
        cells += [f"{us[name] / us['shm']:.2f}" for name in ("mpi", "gloo") if name in us]
        cells += [f"{us[name] / us['registered']:.2f}" for name in ("mpi", "bound") if name in us]
        print("| " + " | ".join(str(cell) for cell in cells) + " |")


if __name__ == "__main__":
    main()
