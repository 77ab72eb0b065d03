#!/usr/bin/env python3
"""Sums what ./dev test ran: gtest's and pytest's XML, and the steps.

Usage: summarize_tests.py RESULTS ALLOWED_SKIPS. Lists skips by reason; a reason
that no line of ALLOWED_SKIPS (regular expressions) matches counts as a failure,
and so does a program that ended without writing its results. The last line is
'N passed, N failed'.
"""

import collections
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def reason_of(skipped):
    """pytest gives the reason; gtest 'file:line' and then the reason."""
    lines = (skipped.get("message") or "").strip().split("\n")
    return lines[-1] or "no reason given"


def cases(results):
    """Yields (verdict, reason) for each test case of each XML file."""
    for path in sorted(Path(results).glob("*.xml")):
        try:
            root = ElementTree.parse(path).getroot()
        except ElementTree.ParseError:
            yield "failed", f"{path.name} was not written whole"
            continue
        for case in root.iter("testcase"):
            skipped = case.find("skipped")
            if case.find("failure") is not None or case.find("error") is not None:
                yield "failed", f"{case.get('classname')}.{case.get('name')}"
            elif skipped is not None:
                yield "skipped", reason_of(skipped)
            elif case.get("status") == "notrun":
                yield "skipped", "disabled: " + case.get("name")
            else:
                yield "passed", ""


def steps(results):
    """Yields (verdict, name) for each line of steps.txt."""
    for line in Path(results, "steps.txt").read_text().splitlines():
        verdict, name = line.split(" ", 1)
        yield ("passed" if verdict == "ok" else "failed"), f"step {name}"


def main(results, allowed_skips):
    allowed = [line for line in Path(allowed_skips).read_text().splitlines()
               if line and not line.startswith("#")]
    verdicts = collections.Counter()
    skips = collections.Counter()
    for verdict, reason in [*cases(results), *steps(results)]:
        verdicts[verdict] += 1
        if verdict == "failed":
            print("failed:", reason)
        if verdict == "skipped":
            skips[reason] += 1
    for reason, count in sorted(skips.items()):
        is_allowed = any(re.search(pattern, reason) for pattern in allowed)
        print(f"skipped ({'allowed' if is_allowed else 'NOT ALLOWED'}): "
              f"{count} x {reason}")
        if not is_allowed:
            verdicts["failed"] += count
    print(f"{verdicts['passed']} passed, {verdicts['failed']} failed")
    return 1 if verdicts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
