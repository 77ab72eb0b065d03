"""The page for man names every command, flag and key, and groff has nothing to say of it."""

import json
import re
import subprocess

import pytest


@pytest.fixture(scope="module")
def page(tessera):
    return tessera("schema", "--man")


def as_read(page):
    text = re.sub(r"\\f[BIR]|\\&", "", page)
    for roff, character in ((r"\-", "-"), (r"\(aq", "'"), (r"\(dq", '"'), (r"\e", "\\")):
        text = text.replace(roff, character)
    return text


def keys_of(schema, prefix=""):
    for name, below in schema["properties"].items():
        if "properties" in below:
            yield from keys_of(below, f"{prefix}{name}.")
        elif not name.startswith("$"):
            yield prefix + name


def help_pages(tessera, *command):
    """What --help says of a command and of those below it."""
    text = tessera(*command, "--help")
    yield command, text
    for below in re.findall(r"^  (\w+) ", text.partition("\nSubcommands:\n")[2].split("\n\n")[0], re.M):
        yield from help_pages(tessera, *command, below)


def test_every_key_has_an_entry(tessera, page):
    keys = list(keys_of(json.loads(tessera("schema"))))
    assert len(keys) > 90
    entries = set(re.findall(r"^\.TP\n(\S+) = ", as_read(page), re.M))
    assert entries == set(keys)


def test_every_command_and_flag_has_an_entry(tessera, page):
    chapters = re.split(r"^\.S[SH] ", as_read(page), flags=re.M)
    pages = dict(help_pages(tessera))
    assert len(pages) > 15
    flags = 0
    for command, text in pages.items():
        title = f'"tessera {" ".join(command)}"' if command else "OPTIONS"
        [chapter] = [chapter for chapter in chapters if chapter.startswith(title + "\n")]
        entries = re.findall(r"--[a-z][a-z-]*", "\n".join(re.findall(r"^\.TP\n(.*)$", chapter, re.M)))
        told = re.findall(r"^  (?:-\w,)?(--[a-z][a-z-]*)", text, re.M)
        expected = told if not command else [flag for flag in told if flag not in ("--help", "--help-all")]
        assert set(expected) <= set(entries), command
        flags += len(expected)
    assert flags > 60


def test_groff_has_nothing_to_say(page):
    done = subprocess.run(["groff", "-man", "-ww", "-Tutf8", "-rCHECKSTYLE=3", "-z"], input=page, capture_output=True,
                          text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
