#!/usr/bin/env python3
"""Runs clang-tidy; see lint.sh.

Usage: lint.py BUILD [FILE...]. FILEs are checked one by one. Without any, all
sources but tests are, and faster: most of the time goes into LibTorch's headers,
which are the same for all, so the sources of a room that have the same options
are read as one. Where that has a finding each half is, and so on: what one has by
itself counts.

What passed is not read again, in no checkout: the user's cache holds of each source a hash of all that its
verdict follows from, itself, the headers of the project that it includes, its options, .clang-tidy, and the
versions of clang-tidy and of what lies outside.
"""

import concurrent.futures
import functools
import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "cmake"))
import unity_groups  # noqa: E402
TIDY = ROOT / ".venv/bin/clang-tidy"
INCLUDE = re.compile(rb'^\s*#\s*include\s+"([^"]+)"', re.M)
PASSED = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tessera" / "lint-passed.json"
MOST_PASSED = 10000  # verdicts that are kept: a megabyte
AT_ONCE = 16  # sources read as one: enough that the headers no longer count
# Includes headers of CUDA, which a LibTorch without has not.
BESIDE_CUDA = ["tessera/comm/nccl/nccl_backend.cpp"]


def commands(build):
    """How each source is compiled, in words that clang knows.

    It cannot read gcc's precompiled header, and parsing what that holds takes
    longer than what a source itself includes; it has no omp.h. Nor does it know all of gcc's
    warnings: .clang-tidy says what is asked here.
    """
    compiled = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        command = re.sub(r" -o \S+| -W\S*| -include \S*cmake_pch\.hxx| -fuse-ld=mold| -fopenmp", "", entry["command"])
        built = Path(entry["file"])
        together = INCLUDE.findall(built.read_bytes()) if unity_groups.is_unity(built) else []
        for file in [name.decode() for name in together] or [entry["file"]]:
            compiled[file] = {**entry, "file": file, "command": command.replace(entry["file"], file)}
    return compiled


def sources():
    listed = subprocess.run(
        ["git", "ls-files", "tessera/*.cpp", "cli/*.cpp", "bindings/*.cpp"],
        cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    return [str(ROOT / name) for name in listed if not name.endswith("_test.cpp") and name not in BESIDE_CUDA]


class Fingerprints:
    """Hashes of what a source's verdict follows from."""

    def __init__(self, root, generated, compiled, versions):
        self.root, self.folders, self.compiled, self.versions = root, [root, generated], compiled, versions

    @functools.cache
    def read(self, file):
        """The hash of a file, and the files of the project that it includes."""
        text = file.read_bytes()
        places = [[folder / name.decode() for folder in (file.parent, *self.folders)] for name in INCLUDE.findall(text)]
        found = [next((place for place in each if place.is_file()), None) for each in places]
        return hashlib.sha256(text).hexdigest(), [place.resolve() for place in found if place]

    def of(self, file):
        seen, ahead = {}, [Path(file).resolve()]
        while ahead:
            now = ahead.pop()
            if now not in seen:
                seen[now], included = self.read(now)
                ahead += included
        command = self.compiled.get(file, {}).get("command", "")
        words = [self.versions, file, command, *(f"{path} {seen[path]}" for path in sorted(seen))]
        # Where the checkout lies is no part of it.
        return hashlib.sha256("\n".join(words).replace(str(self.root), ".").encode()).hexdigest()


def tidy_version():
    return subprocess.run([TIDY, "--version"], check=True, capture_output=True, text=True).stdout


def versions(compiled):
    """Of what is no part of the project: pinned, as all in .venv is, or as it was installed."""
    pinned = [ROOT / name for name in (".clang-tidy", "requirements.txt", "requirements-lint.txt", "scripts/lint.py")]
    outside = {folder for entry in compiled.values() for folder in re.findall(r"-isystem (\S+)", entry["command"])}
    installed = [*Path("/usr/include/c++").glob("*"),
                 *(Path(folder) for folder in sorted(outside) if not folder.startswith(f"{ROOT}/.venv/"))]
    return "\n".join([tidy_version(), *(path.read_text() for path in pinned),
                      *(f"{path} {path.stat().st_mtime_ns}" for path in installed if path.exists())])


def known(cache):
    """Of hashes that passed, whose they are; what was asked for last comes last."""
    try:
        return json.loads(cache.read_text())
    except (OSError, ValueError):
        return {}


def note(cache, passed):
    """Adds to what is known, beside others who do."""
    older = {key: file for key, file in known(cache).items() if key not in passed}
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        new = cache.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(dict([*older.items(), *passed.items()][-MOST_PASSED:]), indent=0))
        new.replace(cache)
    except OSError as error:
        print(f"All is read again next time: {error}")


def groups(files, compiled):
    """The files of a room with the same options, at most AT_ONCE together, none of them with a name of another's."""
    alike = {}
    for file in files:
        room = Path(file).relative_to(ROOT).parent.parts[:2]
        # What is not built here stays alone: clang-tidy guesses its options.
        options = file
        if file in compiled:
            options = compiled[file]["command"].replace(file, "")
        alike.setdefault((room, options), []).append(file)
    for same in alike.values():
        # Which overload a call means is the compiler's matter.
        for group in unity_groups.groups(map(Path, same), AT_ONCE, heeds_calls=False):
            yield list(map(str, group))


def tidy(folder, file):
    return subprocess.run(
        [TIDY, "-p", folder, "--quiet", f"--config-file={ROOT}/.clang-tidy", file],
        capture_output=True, text=True)


def tidy_as_one(folder, files, compiled):
    folder.mkdir(exist_ok=True)
    whole = folder / "sources.cpp"
    whole.write_text("".join(
        f'#line 1 "{file}"\n{Path(file).read_text()}' for file in files))
    command = compiled[files[0]]["command"].replace(files[0], str(whole))
    (folder / "compile_commands.json").write_text(json.dumps(
        [{**compiled[files[0]], "file": str(whole), "command": command}]))
    return tidy(folder, whole)


def read_in_parts(parts, read):
    """Reads parts, halves of those with findings, and so on: gives what passed together, and what is found by itself."""
    readings = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        while parts:
            readings += len(parts)
            smaller = []
            for part, done in zip(parts, pool.map(read, parts)):
                if done.returncode == 0:
                    yield part, None
                elif len(part) == 1:
                    yield part, done.stdout + done.stderr
                else:
                    half = len(part) // 2
                    smaller += [part[:half], part[half:]]
            parts = smaller
    print(f"{readings} readings")


def main(build, *named):
    lint = build / "lint"
    lint.mkdir(exist_ok=True)
    compiled = commands(build)
    (lint / "compile_commands.json").write_text(json.dumps(list(compiled.values())))
    prints = Fingerprints(ROOT, build / "generated", compiled, versions(compiled))
    wanted = {file: prints.of(file) for file in (str(Path(name).resolve()) for name in named or sources())}
    before = known(PASSED)
    files = [file for file, key in wanted.items() if key not in before]
    parts = [[file] for file in files] if named else sorted(groups(files, compiled), key=len, reverse=True)
    numbers = itertools.count()

    def read(part):
        if len(part) == 1:
            return tidy(lint, part[0])
        return tidy_as_one(lint / str(next(numbers)), part, compiled)

    passed, faulty = set(wanted) - set(files), 0
    for part, findings in read_in_parts(parts, read):
        if findings is None:
            passed |= set(part)
        else:
            faulty += 1
            print(f"{part[0]}:\n{findings}")
    # Of what this build does not compile the options are guessed, by what it does.
    note(PASSED, {wanted[file]: os.path.relpath(file, ROOT) for file in passed if file in compiled})
    print(f"{len(wanted) - len(files)} sources passed before as they are, {len(files)} were read, {faulty} with findings")
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), *sys.argv[2:]))
