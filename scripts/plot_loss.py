#!/usr/bin/env python3
"""Draws the loss of a run as an SVG: plot_loss.py METRICS_JSONL OUT_SVG [ENTROPY]

ENTROPY, in nats a token, is drawn as a line: what token frequencies alone tell.
"""

import json
import sys

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 640, 300, 50, 14, 14, 36
BELOW = 24  # of a point to its label: clear of a line that goes up and down


def points(values, scale_x, scale_y):
    return " ".join(f"{scale_x(x):.1f},{scale_y(y):.1f}" for x, y in values)


def draw(steps, entropy):
    loss = [(step["step"], step["loss"]) for step in steps]
    valid = [(step["step"], step["valid_loss"]) for step in steps if "valid_loss" in step]
    last = loss[-1][0]
    low = int(min(y for _, y in loss + valid))
    high = int(max(y for _, y in loss)) + 1
    scale_x = lambda x: LEFT + (WIDTH - LEFT - RIGHT) * x / last
    scale_y = lambda y: TOP + (HEIGHT - TOP - BOTTOM) * (high - y) / (high - low)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
             'font-family="sans-serif" font-size="12">',
             f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
    for y in range(low, high + 1):
        parts.append(f'<path d="M{LEFT} {scale_y(y):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>'
                     f'<text x="{LEFT - 8}" y="{scale_y(y) + 4:.1f}" text-anchor="end">{y}</text>')
    for x in range(0, last + 1, max(1, last // 5)):
        parts.append(f'<text x="{scale_x(x):.1f}" y="{HEIGHT - BOTTOM + 18}" '
                     f'text-anchor="middle">{x}</text>')
    parts.append(f'<text x="{WIDTH // 2}" y="{HEIGHT - 4}" text-anchor="middle">step</text>')
    if entropy is not None:
        parts.append(f'<path d="M{LEFT} {scale_y(entropy):.1f}H{WIDTH - RIGHT}" stroke="#888" '
                     'stroke-dasharray="5 4"/>'
                     f'<text x="{WIDTH - RIGHT}" y="{scale_y(entropy) - 5:.1f}" text-anchor="end" '
                     f'fill="#666">unigram entropy {entropy:.2f}</text>')
    parts.append(f'<polyline points="{points(loss, scale_x, scale_y)}" fill="none" '
                 'stroke="#2563eb" stroke-width="1.5"/>')
    for x, y in valid:
        parts.append(f'<circle cx="{scale_x(x):.1f}" cy="{scale_y(y):.1f}" r="4" fill="#dc2626"/>'
                     f'<text x="{scale_x(x):.1f}" y="{scale_y(y) + BELOW:.1f}" text-anchor="end" '
                     f'fill="#dc2626">validation {y:.2f}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT - 8}" y="{TOP + 16}" text-anchor="end" fill="#2563eb">'
                 'training loss, nats a token</text></svg>\n')
    return "\n".join(parts)


def main(metrics, out, entropy=None):
    with open(metrics) as file:
        steps = [json.loads(line) for line in file]
    with open(out, "w") as file:
        file.write(draw(steps, None if entropy is None else float(entropy)))


if __name__ == "__main__":
    main(*sys.argv[1:])
