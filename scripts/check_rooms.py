#!/usr/bin/env python3
"""Checks what a compiler does not: the direction of rooms and house rules.

Usage: check_rooms.py [ROOT]. Prints one line a fault; exit code 1 if any.
"""

import re
import subprocess
import sys
from pathlib import Path

# The rooms in their order, from the one list that there is.
ROOMS = re.findall(r"^tessera_room\((\w+)", Path(
    __file__, "../../CMakeLists.txt").resolve().read_text(), re.M)
INCLUDE = re.compile(r'^\s*#\s*include\s+"(tessera/([^"]+))"', re.M)
CAP = 500 * 1000  # bytes a file
WIDTH = 80
CODE = (".h", ".cpp")


def strategy(path):
    """The folder below parallel/ that a path lies in, or None."""
    parts = path.split("/")
    return parts[1] if parts[0] == "parallel" and len(parts) > 2 else None


def are_siblings(one, other):
    return one is not None and other is not None and one != other


def check_includes(name, text):
    room = name.split("/")[1]
    # A backend's folder is its own business, as detail/ is.
    is_public = name.endswith(".h") and not re.search(r"/(detail|shm|gloo|mpi|fake|algorithms)/", name)
    for whole, inside in INCLUDE.findall(text):
        other = inside.split("/")[0]
        if other == "tessera.h":
            yield f"includes {whole}, which is for users only"
        elif other not in ROOMS:
            yield f"includes {whole}, which is in no room"
        elif ROOMS.index(other) > ROOMS.index(room):
            yield f"{room} includes {whole}: upward"
        elif are_siblings(strategy(inside), strategy(name[len("tessera/"):])):
            yield f"includes {whole}: strategies do not include each other"
        if "/detail/" in inside and (is_public or other not in (room, "core")):
            yield (f"includes {whole}: detail/ is for the sources of its own "
                   "room (core/detail/ for all sources), not for public headers")


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
    in_tests = parts[0] == "tests" and len(parts) == 2
    if name.endswith("_test.cpp") and not in_room and not in_tests:
        yield "is built by no target: tests lie in a room or right in tests/"
    if name.endswith("_test.py") or (parts[-1].startswith("test_")
                                     and name.endswith(".py")):
        if not name.startswith(("tests/parity/", "tests/scripts/")):
            yield "is run by nothing: Python tests lie in tests/parity/"


def faults(root, names):
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


def main(root):
    listing = subprocess.run(
        ["git", "-C", root, "ls-files", "--cached", "--others", "--exclude-standard"],
        check=True, capture_output=True, text=True)
    found = list(faults(root, sorted(set(listing.stdout.split("\n")) - {""})))
    print("\n".join(found) or "rooms: every include runs in one direction")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "."))
