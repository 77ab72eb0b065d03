#!/usr/bin/env python3
"""Memory against time of every way of recomputing, over the depth of a model: a table, and a picture.

recompute_bench.py [PROGRAM] [--rounds N] [--svg OUT]: one rank, one thread; every way and depth once a round, by
`tessera bench step`, in turns. Time is the median of the rounds; memory is what tensors hold at most in a step
beyond parameters, gradients and the optimizer, which is the same in every round.
"""

import argparse
import json
import math
import statistics
import subprocess
import tempfile
from pathlib import Path

MODEL = {"hidden": 256, "heads": 4, "ffn": 704, "vocab": 256, "max_seq": 512}
DEPTHS = [4, 9, 16, 25]
WAYS = {
    "none": lambda depth: ["none"],
    "selective": lambda depth: ["selective"],
    "block, every 2": lambda depth: ["block", 2],
    "block": lambda depth: ["block"],
    "stage": lambda depth: ["stage"],
    "stage, every root of n": lambda depth: ["stage", math.isqrt(depth)],
    "minimal": lambda depth: ["minimal"],
}
COLOURS = ["#444444", "#2563eb", "#0891b2", "#16a34a", "#ca8a04", "#dc2626", "#9333ea"]


def measure(program, folder, depth, mode, every=0):
    """(seconds, MiB) of a step."""
    config = folder / "run.json"
    config.write_text(json.dumps({
        "run": {"device": "cpu", "threads": 1}, "model": {**MODEL, "layers": depth}, "data": {"seq_len": 512},
        "batch": {"global": 4, "micro": 4}, "recompute": {"mode": mode, "every": every}}))
    subprocess.run([program, "bench", "step", config, "--rounds", "1", "--json", folder / "step.json"], check=True,
                   capture_output=True)
    step = json.loads((folder / "step.json").read_text())
    held = step["bytes"]
    states = held["parameters"] + held["gradients"] + held["optimizer"]
    return step["step_s"]["median"], (held["at_most"] - states) / 2**20


def measure_all(program, rounds):
    """By way: for each depth (seconds, MiB)."""
    seconds = {way: {depth: [] for depth in DEPTHS} for way in WAYS}
    memory = {way: {} for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for depth in DEPTHS:
                for way, arguments in WAYS.items():
                    time, memory[way][depth] = measure(program, Path(folder), depth, *arguments(depth))
                    seconds[way][depth].append(time)
    return {way: [(statistics.median(seconds[way][depth]), memory[way][depth]) for depth in DEPTHS] for way in WAYS}


def table(found):
    print("| way | " + " | ".join(f"{depth} layers: s | MiB" for depth in DEPTHS) + " |")
    print("| --- |" + " --- | --- |" * len(DEPTHS))
    for way, points in found.items():
        print(f"| {way} | " + " | ".join(f"{time:.3f} | {held:.1f}" for time, held in points) + " |")


WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 420, 64, 16, 190, 44


def steps_of(values):
    """Round numbers from below the least to above the largest."""
    low, high = min(values), max(values)
    ticks = [m * 10.0**e for e in range(-3, 6) for m in (1, 2, 5)]
    first = max(i for i, tick in enumerate(ticks) if tick <= low)
    last = min(i for i, tick in enumerate(ticks) if tick >= high)
    return ticks[first:last + 1]


def picture(found, caption):
    points = [point for curve in found.values() for point in curve]
    xs, ys = (steps_of([point[axis] for point in points]) for axis in (0, 1))

    def place(value, ticks, begin, end):
        share = math.log(value / ticks[0]) / math.log(ticks[-1] / ticks[0])
        return begin + (end - begin) * share

    x_of = lambda value: place(value, xs, LEFT, WIDTH - RIGHT)
    y_of = lambda value: place(value, ys, HEIGHT - BOTTOM, TOP)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
             f'font-size="12">', f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
    for y in ys:
        parts.append(f'<path d="M{LEFT} {y_of(y):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>'
                     f'<text x="{LEFT - 6}" y="{y_of(y) + 4:.1f}" text-anchor="end">{y:g}</text>')
    for x in xs:
        parts.append(f'<path d="M{x_of(x):.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#eee"/>'
                     f'<text x="{x_of(x):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{x:g}</text>')
    for i, (way, curve) in enumerate(found.items()):
        colour = COLOURS[i]
        line = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in curve)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts += [f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="3" fill="{colour}"/>' for x, y in curve]
        at = TOP + 14 + 18 * i
        parts.append(f'<path d="M{WIDTH - RIGHT + 14} {at - 4}h18" stroke="{colour}" stroke-width="2"/>'
                     f'<text x="{WIDTH - RIGHT + 38}" y="{at}">{way}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">seconds a step '
                 f'({caption})</text>'
                 f'<text transform="translate(14 {HEIGHT / 2:.0f}) rotate(-90)" text-anchor="middle">'
                 'MiB beyond model states, at most</text></svg>\n')
    return "\n".join(parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", nargs="?", default="build/dev/cli/tessera")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--svg", type=Path)
    arguments = parser.parse_args()
    found = measure_all(arguments.program, arguments.rounds)
    table(found)
    if arguments.svg:
        depths = ", ".join(str(depth) for depth in DEPTHS[:-1])
        arguments.svg.write_text(picture(found, f"points: {depths} and {DEPTHS[-1]} layers"))


if __name__ == "__main__":
    main()
