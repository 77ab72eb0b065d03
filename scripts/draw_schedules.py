#!/usr/bin/env python3
"""Draws every pipeline schedule: draw_schedules.py PROGRAM [FOLDER]

PROGRAM is tessera, FOLDER where the drawings go (docs/schedules). Four stages, eight micro-batches; a
forward takes as long as each of the two parts of a backward, messages take no time.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

RUN = {"model": {"layers": 16, "hidden": 64, "heads": 4, "vocab": 256, "tie_embeddings": False}, "mesh": {"pp": 4},
       "batch": {"global": 8, "micro": 1}}
# With so many chunks a rank, where a schedule takes any number.
SCHEDULES = {"naive": 1, "gpipe": 1, "1f1b": 1, "eager_1f1b": 1, "interleaved": 2, "bfs": 2, "zb_h1": 1, "zb_h2": 1,
             "interleaved_zb": 2, "zb_v": 2, "dualpipe": 2, "dualpipe_v": 2, "pipedream_2bw": 1}


def main(program, folder="docs/schedules"):
    Path(folder).mkdir(exist_ok=True)
    for name, chunks in SCHEDULES.items():
        with tempfile.TemporaryDirectory() as work:
            run = Path(work) / "run.json"
            run.write_text(json.dumps({**RUN, "pipeline": {"schedule": name, "chunks": chunks}}))
            done = subprocess.run([program, "plan", run, "--draw", "--times", "1,1,1", "--svg",
                                   Path(folder) / f"{name}.svg"], check=True, capture_output=True, text=True)
        print(name, *[line.split()[1] for line in done.stdout.splitlines() if line.startswith(("step", "bubble"))])


if __name__ == "__main__":
    main(*sys.argv[1:])
