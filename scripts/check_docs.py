#!/usr/bin/env python3
"""Checks what the documentation says of the project's files.

- Links of a page lead to files, and what a page names as a file is there: in
  backticks a path with a suffix, or a folder with a slash at its end, whole or
  the end of one; {a,b} and * as in a shell, NAME for any name.
- docs/README.md lists every page.
- Each row of the first table of docs/parallelism.md names where it is read.
- docs/guides/figures.md defines each field of metrics.jsonl, once, and no other.

Usage: check_docs.py [ROOT]. Prints one line a fault; exit code 1 if any.
"""

import fnmatch
import re
import subprocess
import sys
from pathlib import Path

LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
FENCED = re.compile(r"^```.*?^```", re.M | re.S)
PATH = re.compile(r"[\w.+-]*[\w{},*+-]*(?:/[\w.{},*+-]+)+/?")
# What is named but made: by a build, a run, a user, or of another project.
MADE = re.compile(r"^(build|runs?|RUN|RUN_DIR|PREFIX|IN|OUT|texts|drafts|books|code|hf|model_files|checkpoints|logs|trace"
                  r"|token_cache|token-cache|dev|proc|etc|mnt|lib|include|bench/results/out|docs/reference)(/|$)")
SUFFIX = re.compile(r"\.(h|cpp|cc|py|md|sh|json|txt|cmake|svg|in|supp)$")


def expanded(name):
    """'a/{b,c}.h' -> a/b.h, a/c.h."""
    found = re.search(r"\{([^{}]*)\}", name)
    if not found:
        return [name]
    return [each for part in found[1].split(",")
            for each in expanded(name[:found.start()] + part.strip() + name[found.end():])]


def files_named(text):
    """Of a page without its fenced blocks: what can only be a file or folder of the project."""
    for words in CODE.findall(FENCED.sub("", text)):
        if not PATH.fullmatch(words) or words.startswith("/") or MADE.match(words):
            continue
        if SUFFIX.search(words) or words.endswith("/") or words.startswith(("tessera/", "tests/", "scripts/", "cli/")):
            yield words


def is_there(files, name):
    pattern = re.sub(r"\bNAME\b", "*", name)
    if name.endswith("/"):
        pattern += "*"
    return any(fnmatch.fnmatch(file, each) for file in files for each in (pattern, f"*/{pattern}"))


def check_page(root, files, page, text):
    for link in LINK.findall(FENCED.sub("", text)):
        if "://" not in link and not link.startswith("#"):
            target = (root / page).parent / link.split("#")[0]
            if not target.exists():
                yield f"{page}: the link {link} leads nowhere"
    for words in files_named(text):
        for name in expanded(words):
            if not is_there(files, name):
                yield f"{page}: `{name}` is not there"


def table(text, heading):
    """The rows of the first table whose head begins so, cell by cell."""
    rows = text.split(heading, 1)[1].split("\n\n")[0].split("\n")[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


def check_strategies(text):
    heading = "| kind | keys | what a rank holds | when | read it here |"
    if heading not in text:
        return [f"docs/parallelism.md: has no table {heading}"]
    return [f"docs/parallelism.md: {row[0]}: nothing says where it is read"
            for row in table(text, heading) if not list(files_named(row[-1]))]


def check_figures(page, fields, record):
    """Names in the table of `page` against those of fields.cpp and of what json_lines.cpp adds."""
    written = set(re.findall(r'^\s+\{"(\w+)",', fields, re.M))
    written |= set(re.findall(r'line\.(?:object|numbers)\("(\w+)"', record))
    defined = [row[0].strip("`") for row in table(page, "| name | unit | what it is |")]
    for name in sorted(written - set(defined)):
        yield f"docs/guides/figures.md: {name} of metrics.jsonl is not defined"
    for name in defined:
        if name not in written or defined.count(name) > 1:
            yield f"docs/guides/figures.md: {name} is no field of metrics.jsonl, or is there twice"


def check_index(root, pages):
    index = (root / "docs/README.md").read_text()
    linked = {str((Path("docs") / link.split("#")[0])) for link in LINK.findall(index)}
    for page in pages:
        if page.startswith("docs/") and page != "docs/README.md" and page not in linked:
            yield f"docs/README.md: does not list {page}"


def faults(root):
    root = Path(root)
    listing = subprocess.run(
        ["git", "-C", root, "ls-files", "--cached", "--others", "--exclude-standard"],
        check=True, capture_output=True, text=True)
    files = [name for name in sorted(set(listing.stdout.split("\n")) - {""}) if (root / name).is_file()]
    pages = [name for name in files if name.endswith(".md")]
    for page in pages:
        yield from check_page(root, files, page, (root / page).read_text())
    yield from check_index(root, pages)
    yield from check_strategies((root / "docs/parallelism.md").read_text())
    yield from check_figures((root / "docs/guides/figures.md").read_text(),
                             (root / "tessera/monitor/fields.cpp").read_text(),
                             (root / "tessera/monitor/json_lines.cpp").read_text())


def main(root):
    found = list(faults(root))
    print("\n".join(found) or "docs: every file that is named is there")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "."))
