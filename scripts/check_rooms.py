#!/usr/bin/env python3
"""Checks what a compiler does not: the direction of rooms and house rules.

- A room includes only rooms before it in CMakeLists.txt, and its DEPENDS there
  are exactly the rooms that its own files, tests too, include by name: what
  comes through another room neither counts nor excuses.
- The folders of a room have an order: no ring of includes among them. A detail/
  counts as the folder that it lies in; tests may use all of their room.
- No ring of includes among files. Strategies do not include each other.
- Public headers include no private folder; detail/ is its own room's alone.
- House rules: ASCII, size of files and lines, TODO(#N), TS_CHECK, tests that a
  target builds.

Usage: check_rooms.py [ROOT]. Prints one line a fault; exit code 1 if any.
"""

import re
import subprocess
import sys
from pathlib import Path

CMAKE = Path(__file__, "../../CMakeLists.txt").resolve().read_text()
INCLUDE = re.compile(r'^\s*#\s*include\s+"(tessera/([^"]+))"', re.M)
CAP = 500 * 1000  # bytes a file
WIDTH = 80
CODE = (".h", ".cpp", ".inc", ".cu", ".cuh")


def depends_of(cmake):
    """{room: the rooms that it declares}, in the order of the rooms."""
    calls = re.findall(r"^tessera_room\((\w+)([^)]*)\)", cmake, re.M)
    lists = {room: re.search(r"\bDEPENDS((?:\s+[a-z_]+)*)", rest) for room, rest in calls}
    return {room: set(found[1].split() if found else ()) for room, found in lists.items()}


def private_of(cmake):
    """The folders below tessera/ whose headers are not installed."""
    return tuple(re.search(r"TESSERA_PRIVATE_FOLDERS([^)]*)\)", cmake)[1].split())


DEPENDS = depends_of(CMAKE)
ROOMS = list(DEPENDS)  # each may include those before it
PRIVATE = private_of(CMAKE)


def is_private(name):
    """Of a path below tessera/."""
    return "/detail/" in name or name.startswith(tuple(f"{folder}/" for folder in PRIVATE))


def strategy(path):
    """The folder below parallel/ that a path lies in, or None."""
    parts = path.split("/")
    return parts[1] if parts[0] == "parallel" and len(parts) > 2 else None


def are_siblings(one, other):
    return one is not None and other is not None and one != other


def check_includes(name, text):
    name = name.removeprefix("tessera/")
    room = name.split("/")[0]
    is_public = name.endswith(".h") and not is_private(name)
    for whole, inside in INCLUDE.findall(text):
        other = inside.split("/")[0]
        if other == "tessera.h":
            yield f"includes {whole}, which is for users only"
        elif other not in ROOMS:
            yield f"includes {whole}, which is in no room"
        elif ROOMS.index(other) > ROOMS.index(room):
            yield f"{room} includes {whole}: upward"
        elif are_siblings(strategy(inside), strategy(name)):
            yield f"includes {whole}: strategies do not include each other"
        if is_public and is_private(inside):
            yield f"includes {whole}: a public header, what is private"
        elif "/detail/" in inside and other not in (room, "core"):
            yield (f"includes {whole}: detail/ is for the sources of its own "
                   "room (core/detail/ for all sources)")


def rings(edges):
    """Of a graph {node: nodes}: ways from a node to itself, if there are any."""
    done, way = set(), []

    def visit(node):
        if node in way:
            yield [*way[way.index(node):], node]
        elif node not in done:
            way.append(node)
            for other in sorted(edges.get(node, ())):
                yield from visit(other)
            way.pop()
            done.add(node)

    for node in sorted(edges):
        yield from visit(node)


def folder_of(name):
    return re.sub("/detail/.*", "/", name).rpartition("/")[0]


def check_tree(includes, depends):
    """Of {file: the files that it includes}, all below tessera/."""
    folders, used = {}, {}
    for name, others in includes.items():
        room = name.split("/")[0]
        rooms = {other.split("/")[0] for other in others}
        used[room] = used.get(room, set()) | rooms - {room}
        if not name.endswith("_test.cpp"):
            near = {folder_of(other) for other in others if other.startswith(f"{room}/")}
            folders.setdefault(folder_of(name), set()).update(near - {folder_of(name)})
    for what, graph in ("files", includes), ("folders", folders):
        for ring in rings(graph):
            yield f"a ring of {what}: {' -> '.join(ring)}"
    for room, declared in depends.items():
        for other in sorted(used.get(room, set()) - declared):
            yield f"{room} includes {other}, and DEPENDS does not say so"
        for other in sorted(declared - used.get(room, set())):
            yield f"{room} DEPENDS on {other}, and includes nothing of it"


def check_text(name, data):
    if len(data) > CAP:
        yield f"is larger than {CAP} bytes"
    if b"\0" in data:
        return
    if not data.isascii():
        line = next(i for i, text in enumerate(data.split(b"\n"), 1)
                    if not text.isascii())
        yield f"line {line} is not ASCII"
    if name.endswith(CODE):
        for number, text in enumerate(data.decode(errors="replace").split("\n"), 1):
            if len(text) > WIDTH and "://" not in text:
                yield f"line {number} is longer than {WIDTH} characters"
            if re.search(r"\bTODO\b(?!\(#\d)", text):
                yield f"line {number} has a TODO without the issue: TODO(#N)"
            if "throw std::" in text and not name.startswith("tessera/core/"):
                yield f"line {number} throws a std:: exception: use TS_CHECK"


# clang-tidy reads several sources at once (lint.py), and would take another's use
# of a name for this one's.
def check_usings(text):
    for line, used in re.findall(r"^(using (?:\w+::)+(\w+);)", text, re.M):
        if len(re.findall(rf"\b{used}\b", text)) == 1:
            yield f"'{line}' is not needed"


def check_test(name):
    parts = name.split("/")
    in_room = parts[0] == "tessera" and len(parts) > 2 and parts[1] in ROOMS
    in_tests = parts[0] == "tests" and (
        len(parts) == 2 or (parts[1] == "device" and len(parts) == 3))
    if name.endswith("_test.cpp") and not in_room and not in_tests:
        yield "is built by no target: tests lie in a room, right in tests/ or in tests/device/"
    if name.endswith("_test.py") or (parts[-1].startswith("test_")
                                     and name.endswith(".py")):
        if not name.startswith(("tests/parity/", "tests/scripts/")):
            yield "is run by nothing: Python tests lie in tests/parity/"


def faults(root, names):
    """Of each file by itself."""
    for name in names:
        path = Path(root, name)
        if not path.is_file():
            continue  # deleted, not yet committed
        data = path.read_bytes()
        complaints = list(check_text(name, data)) + list(check_test(name))
        text = data.decode(errors="replace") if name.endswith(CODE) else ""
        if name.startswith("tessera/") and name.count("/") > 1:
            complaints += check_includes(name, text)
        if name.endswith(".cpp"):
            complaints += check_usings(text)
        for complaint in complaints:
            yield f"{name}: {complaint}"


def includes_of(root, names):
    texts = {name.removeprefix("tessera/"): Path(root, name).read_text()
             for name in names if name.startswith("tessera/") and name.count("/") > 1
             and name.endswith(CODE) and Path(root, name).is_file()}
    return {name: {inside for _, inside in INCLUDE.findall(text)}
            for name, text in texts.items()}


def main(root):
    listing = subprocess.run(
        ["git", "-C", root, "ls-files", "--cached", "--others", "--exclude-standard"],
        check=True, capture_output=True, text=True)
    names = sorted(set(listing.stdout.split("\n")) - {""})
    found = list(faults(root, names))
    found += check_tree(includes_of(root, names), DEPENDS)
    print("\n".join(found) or "rooms: every include runs in one direction")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "."))
