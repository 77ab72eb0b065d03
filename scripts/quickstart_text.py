#!/usr/bin/env python3
"""Makes quickstart's two text files, train.txt and valid.txt.

Usage: quickstart_text.py OUT kjv < verses      (as Debian's bible prints them)
       quickstart_text.py OUT FOLDER            (any folder with text in it)
A file, or a chapter, is for validation when the hash of its name says so: the
same ones every time, about one in forty, and never in both files. Where there
are few files, the end of each is for validation.
"""

import hashlib
import re
import sys
from pathlib import Path

SUFFIXES = set(".txt .md .rst .tex .org .py .c .cc .cpp .cu .h .hpp .hh .java "
               ".js .ts .go .rs .sh .pl .rb .lua .scala .swift .kt .f90 .m "
               ".html .css .sql .jl .r".split())
MOST = 40_000_000  # bytes of text, the first ones: more than a few minutes can read
LEAST = 100_000
VALID_MOST = 120_000  # enough to measure by, and read in seconds
FEW = 40  # documents
ONE_IN = 40


def hash_of(name):
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def chapters(lines):
    """(name, text) of each chapter of the King James Bible, a verse a line."""
    verses = {}
    for line in lines:
        found = re.match(r"(\S+):\d+ (.*)", line)
        if found:
            verses.setdefault(found[1], []).append(found[2])
    return [(name, "\n".join(text) + "\n\n") for name, text in verses.items()]


def files(folder):
    """(name, text) of the text files in a folder, by the hash of their names."""
    paths = [path for path in Path(folder).rglob("*")
             if path.suffix.lower() in SUFFIXES and path.is_file()
             and not any(part.startswith(".")
                         for part in path.relative_to(folder).parts)]
    documents, left = [], MOST
    for path in sorted(paths, key=lambda path: hash_of(str(path.relative_to(folder)))):
        if left == 0:
            break
        with path.open("rb") as file:
            data = file.read(left)
        if b"\0" in data:
            continue
        left -= len(data)
        documents.append((str(path.relative_to(folder)),
                          data.decode("utf-8", errors="ignore") + "\n\n"))
    return documents


def split(documents):
    """Texts for training and for validation."""
    if len(documents) >= FEW:
        train = [text for name, text in documents if hash_of(name) % ONE_IN]
        valid = [text for name, text in documents if hash_of(name) % ONE_IN == 0]
        if valid:
            return train, valid
    train, valid = [], []
    for _, text in documents:
        most = len(text) - len(text) // ONE_IN
        cut = text.rfind("\n", most // 2, most) + 1 or most  # of a long line: within it
        train.append(text[:cut])
        valid.append(text[cut:])
    return train, valid


def main(out, source):
    if source == "kjv":
        documents = chapters(sys.stdin)
    elif Path(source).is_dir():
        documents = files(source)
    else:
        sys.exit(f"quickstart: {source} is not a folder.")
    total = sum(len(text.encode()) for _, text in documents)
    if total < LEAST:
        sys.exit(f"quickstart: {source} holds {total} bytes of text in "
                 f"{len(documents)} files; a model needs {LEAST} or more to learn "
                 f"from. Files count whose names end with {' '.join(sorted(SUFFIXES))}.")
    Path(out).mkdir(parents=True, exist_ok=True)
    for name, texts in zip(("train.txt", "valid.txt"), split(documents)):
        text = "".join(texts).encode()
        if name == "valid.txt":
            text = text[:VALID_MOST].decode(errors="ignore").encode()
        Path(out, name).write_bytes(text)
        print(f"quickstart: {name}: {len(text):,} bytes")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:3])
