#!/usr/bin/env python3
"""all_to_all between hosts that are network namespaces: straight beside aggregated.

Usage: bench/all_to_all_bench.py PROGRAM [--hosts 2] [--ranks 2] [--rate 1gbit] [--seconds 1] [--rounds 3]
Runs `tessera bench comm`, which takes turns between the two forms, and prints for each size the medians over rounds
of the times, of their ratio, and how far apart the ratios of rounds are. Needs root, ip and tc.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "parity"))
from hosts import Hosts, end_of, places  # noqa: E402

FORMS = ("straight", "aggregated")


def measure(options, hosts):
    """The time of each form at each size, in us."""
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        command = [options.program, "bench", "comm", "--op", "all_to_all", "--backend", "gloo", "--algorithm",
                   ",".join(FORMS), "--min-bytes", options.min_bytes, "--max-bytes", options.max_bytes, "--seconds",
                   options.seconds, "--json", figures]
        ranks = [hosts.start(host, command, variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
                 for host, variables in places([options.ranks] * options.hosts)]
        for code, errors in end_of(ranks, timeout=600):
            if code != 0:
                sys.exit(errors)
        times = {}
        for cell in json.loads(figures.read_text())["cells"]:
            times.setdefault(cell["size_bytes"], {})[cell["algorithm"]] = cell["time_us"]
        return times


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", type=Path)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="of each host")
    parser.add_argument("--rate", help="of a host's link, as tc has it [as fast as it goes]")
    parser.add_argument("--min-bytes", default="1K", help="of a rank")
    parser.add_argument("--max-bytes", default="4M")
    parser.add_argument("--seconds", default="1", help="a size is timed in each form")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with Hosts(options.hosts, options.rate) as hosts:
        rounds = [measure(options, hosts) for _ in range(options.rounds)]
    print(f"{options.hosts} hosts of {options.ranks} ranks, links of {options.rate or 'no rate'}")
    print("| bytes of a rank | from a host to a rank | straight, us | aggregated, us | straight / aggregated "
          "| of rounds |")
    print("| --- | --- | --- | --- | --- | --- |")
    for size in sorted(rounds[0]):
        straight, aggregated = (statistics.median(times[size][form] for times in rounds) for form in FORMS)
        ratios = [times[size]["straight"] / times[size]["aggregated"] for times in rounds]
        print(f"| {size} | {size // options.hosts} | {straight:.0f} | {aggregated:.0f} "
              f"| {statistics.median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f} |", flush=True)


if __name__ == "__main__":
    main()
