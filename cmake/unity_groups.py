#!/usr/bin/env python3
"""Which sources of a target are compiled as one: unity_groups.py SOURCE..., or --check BUILD

Most of what a source costs to compile is LibTorch's headers, over and over. But
sources that are read as one must not use one name for two things: two go together
whose unnamed namespaces, aliases and macros share no name, and of which neither
calls a function by a name that is the other's own. Prints the number of its group
before each source; a group has at most AT_ONCE. --check ends with 1 where edits since
BUILD was configured made two of a group use one name.
"""

import itertools
import json
import re
import sys
from pathlib import Path

AT_ONCE = 8  # enough that the headers no longer count
# As clang-format leaves them: what a namespace declares begins its line.
NAMESPACE = re.compile(r"namespace([\w: ]*) \{$")
ALIAS = re.compile(r"(?:using|namespace) (?:(\w+) =|[\w:]+::(\w+);)")
ATTRIBUTES = re.compile(r"(?:\[\[.*?\]\]|__attribute__\(\(.*?\)\)|::)\s*")
CONSTANT = re.compile(r"\b(k[A-Z]\w*)(?:\[.*?\])* = ")
DECLARED = [ALIAS, *map(re.compile, (
    r"(?:struct|class|union|enum(?: class)?)(?: alignas\(.*?\))? (\w+)",
    r"TORCH_MODULE\((\w+)\)",
    r"#define (\w+)",
    r"(?!TEST|INSTANTIATE|TYPED_TEST|template|static_assert|using)[^(={;]*?(\w+)(?:\[[^\]]*\])*(?: = |\{|;|\()"))]


CALL = re.compile(r"(?<![\w.>:~])(\w+)(?:<[^<>()]*>)?\(")


def names(source):
    """What a source declares for itself: in which namespace what name, with the line that does."""
    found, inside = {}, []
    lines = source.read_text().splitlines() if source.is_file() else []
    for line, following in zip(lines, [*lines[1:], ""]):
        if opened := NAMESPACE.match(line):
            inside.append(opened[1].strip())
        elif line.startswith("}  // namespace") and inside:
            inside.pop()
        elif re.match(r"[\w[:]", line) and ("" in inside or line.startswith(("namespace ", "static "))) or line[:1] == "#":
            # A long declaration goes on in the next line.
            whole = line if re.search(r"[({;]", line) else f"{line} {following.strip()}"
            whole = ATTRIBUTES.sub("", whole, count=1) if line[0] in "[:_" else whole
            while whole != (whole := re.sub(r"(?<=\w)<[^<>]*>", "", whole)):
                pass  # arguments of templates, with parentheses of their own
            match = next(filter(None, (pattern.match(whole) for pattern in DECLARED)), None)
            for name in filter(None, [*(match.groups() if match else []), *CONSTANT.findall(whole)]):
                found["" if line[0] == "#" else "::".join(inside), name] = whole if ALIAS.match(line) else line
    return found


class Uses:
    """What a source calls its own, and what it calls: by a name of its own it may mean a header's."""

    def __init__(self, source):
        self.names = names(source)
        self.own = {name for (_, name), line in self.names.items() if line[0] != "#" and not ALIAS.match(line)}
        self.calls = set(CALL.findall(source.read_text())) if source.is_file() else set()


def go_together(one, other):
    return (all(name not in other.names or other.names[name] == line and ALIAS.match(line)
                for name, line in one.names.items())
            and one.own.isdisjoint(other.calls) and other.own.isdisjoint(one.calls))


def groups(sources, at_once=AT_ONCE, heeds_calls=True):
    """Each source goes into the first group in which there is room for it."""
    made = []
    for source in sources:
        uses = Uses(source)
        if not heeds_calls:
            uses.calls.clear()
        fitting = [group for group in made
                   if len(group) < at_once and all(go_together(uses, other) for _, other in group)]
        if not fitting:
            made.append([])
        (fitting or made[-1:])[0].append((source, uses))
    return [[source for source, _ in group] for group in made]


def is_unity(file):
    """Whether CMake made this file of others."""
    return file.suffix == ".cxx" and file.parent.name == "Unity"


def holds(build):
    """Whether what a build folder compiles as one still goes together, after edits."""
    compiled = [Path(entry["file"]) for entry in json.loads((build / "compile_commands.json").read_text())]
    for unity in filter(is_unity, compiled):
        used = [Uses(Path(name)) for name in re.findall(r'#include "(.*)"', unity.read_text())]
        if not all(itertools.starmap(go_together, itertools.combinations(used, 2))):
            return False
    return True


if __name__ == "__main__":
    if sys.argv[1] == "--check":
        sys.exit(not holds(Path(sys.argv[2])))
    for number, group in enumerate(groups([Path(name) for name in sys.argv[1:]])):
        for source in group:
            print(f"{number} {source}")
