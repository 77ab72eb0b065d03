#!/usr/bin/env python3
"""What quickstart's run learned, beside what needs no context.

Usage: quickstart_summary.py METRICS_JSONL TOKENS   (16-bit ids of the text that
it was validated on). The unigram entropy of the text, in nats a token, is the
loss of a model that knows how often each token occurs and nothing more: what is
below it was learned from context.
"""

import array
import collections
import json
import math
import sys


def unigram_entropy(ids):
    counts = collections.Counter(ids)
    total = sum(counts.values())
    return -sum(n / total * math.log(n / total) for n in counts.values())


def read_tokens(path):
    ids = array.array("H")
    with open(path, "rb") as file:
        ids.frombytes(file.read())
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def main(metrics, tokens):
    with open(metrics) as file:
        steps = [json.loads(line) for line in file]
    valid = [step["valid_loss"] for step in steps if "valid_loss" in step]
    entropy = unigram_entropy(read_tokens(tokens))
    print(f"loss of the first step    {steps[0]['loss']:.3f} nats a token")
    print(f"unigram entropy           {entropy:.3f}   (token frequencies alone)")
    print(f"validation loss           {valid[-1]:.3f}   (text that was not trained on)")


if __name__ == "__main__":
    main(*sys.argv[1:3])
