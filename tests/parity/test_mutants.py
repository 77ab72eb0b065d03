"""Faults in a test build: each is found, by `verify` with parameter and axis, or by a proof with its rule."""

import json
import os
import re
import subprocess

import mutants
import pytest


@pytest.fixture(scope="module")
def verify(program, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mutants")
    driver = program.parents[1] / "tests" / "verify_driver"
    without = {}  # faults, of each configuration

    def run(mutant, switched_on):
        if switched_on:
            return verified(mutant, mutant.name)
        key = json.dumps([mutant.config, mutant.with_passes], sort_keys=True)
        if key not in without:
            without[key] = verified(mutant, "")
        return without[key]

    def verified(mutant, switch):
        path = folder / f"{mutant.name}.json"
        path.write_text(json.dumps(mutant.config))
        return subprocess.run([driver, path], capture_output=True, text=True, timeout=300,
                              env={**os.environ, "TESSERA_MUTANT": switch,
                                   "TESSERA_WITH_PASSES": mutant.with_passes})

    return run


def test_there_are_thirty():
    assert len({mutant.name for mutant in mutants.MUTANTS}) >= 30


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_is_found_and_named(verify, mutant):
    found = verify(mutant, switched_on=True)
    assert found.returncode == 1, found.stdout + found.stderr
    named_first = found.stdout.splitlines()[:3]
    assert any(re.search(mutant.says, line) for line in named_first), found.stdout
    without = verify(mutant, switched_on=False)
    assert without.returncode == 0, without.stdout + without.stderr
