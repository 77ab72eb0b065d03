#!/usr/bin/env python3
"""Runs clang-tidy; see lint.sh.

Usage: lint.py BUILD [FILE...]. FILEs are checked one by one. Without any, all
sources but tests are, and faster: most of the time goes into LibTorch's headers,
which are the same for all, so the sources of a room that have the same options
are read as one. Where that has a finding, or where two of them use one name for
two things, each is checked by itself, and that counts.
"""

import concurrent.futures
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TIDY = ROOT / ".venv/bin/clang-tidy"
AT_ONCE = 16  # sources read as one: enough that the headers no longer count


def commands(build):
    """How each source is compiled, in words that clang knows.

    It cannot read gcc's precompiled header, and parsing what that holds takes
    longer than what a source itself includes; it has no omp.h. Nor does it know all of gcc's
    warnings: .clang-tidy says what is asked here.
    """
    entries = json.loads((build / "compile_commands.json").read_text())
    for entry in entries:
        entry["command"] = re.sub(
            r" -W\S*| -include \S*cmake_pch\.hxx| -fuse-ld=mold| -fopenmp", "", entry["command"])
    return {entry["file"]: entry for entry in entries}


def sources():
    listed = subprocess.run(
        ["git", "ls-files", "tessera/*.cpp", "cli/*.cpp", "bindings/*.cpp"],
        cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    return [str(ROOT / name) for name in listed if not name.endswith("_test.cpp")]


def groups(files, compiled):
    """The files of a room with the same options, at most AT_ONCE together."""
    alike = {}
    for file in files:
        room = Path(file).relative_to(ROOT).parent.parts[:2]
        # What is not built here stays alone: clang-tidy guesses its options.
        options = file
        if file in compiled:
            options = re.sub(r" -o \S+", "", compiled[file]["command"].replace(file, ""))
        alike.setdefault((room, options), []).append(file)
    for same in alike.values():
        size = math.ceil(len(same) / math.ceil(len(same) / AT_ONCE))
        yield from (same[at:at + size] for at in range(0, len(same), size))


def tidy(folder, file):
    return subprocess.run(
        [TIDY, "-p", folder, "--quiet", f"--config-file={ROOT}/.clang-tidy", file],
        capture_output=True, text=True)


def passes_as_one(lint, number, files, compiled):
    folder = lint / str(number)
    folder.mkdir(exist_ok=True)
    whole = folder / "sources.cpp"
    whole.write_text("".join(
        f'#line 1 "{file}"\n{Path(file).read_text()}' for file in files))
    command = compiled[files[0]]["command"].replace(files[0], str(whole))
    (folder / "compile_commands.json").write_text(json.dumps(
        [{**compiled[files[0]], "file": str(whole), "command": command}]))
    return tidy(folder, whole).returncode == 0


def main(build, *named):
    lint = build / "lint"
    lint.mkdir(exist_ok=True)
    compiled = commands(build)
    (lint / "compile_commands.json").write_text(json.dumps(list(compiled.values())))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        alone = [str(Path(name).resolve()) for name in named]
        if not named:
            parts = sorted(groups(sources(), compiled), key=len, reverse=True)
            passed = pool.map(lambda number, files: len(files) > 1 and passes_as_one(
                lint, number, files, compiled), range(len(parts)), parts)
            alone = [file for files, good in zip(parts, passed) if not good for file in files]
        faulty = 0
        for file, done in zip(alone, pool.map(lambda file: tidy(lint, file), alone)):
            if done.returncode != 0:
                faulty += 1
                print(f"{file}:\n{done.stdout}{done.stderr}")
    print(f"{len(alone)} sources checked by themselves, {faulty} with findings")
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), *sys.argv[2:]))
