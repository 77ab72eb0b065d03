"""The loops for GPUs are compiled by NVRTC as they are on a machine with one, for Ampere and Hopper."""

import os
import subprocess
from pathlib import Path

import nvidia
import pytest


@pytest.fixture(scope="module")
def compiled(program):
    folder = next(Path(each) / "cu13" / "lib" for each in nvidia.__path__)

    def run(*architectures, found=True):
        environment = {**os.environ, "LD_LIBRARY_PATH": str(folder) if found else ""}
        return subprocess.run([program.parents[1] / "tests" / "gpu_loops_driver", *architectures], env=environment,
                              capture_output=True, text=True, timeout=600, check=False)

    return run


def test_every_architecture_is_compiled_for(compiled):
    done = compiled("sm_80", "sm_90")
    assert done.returncode == 0, done.stderr
    for line, name in zip(done.stdout.splitlines(), ("sm_80", "sm_90"), strict=True):
        architecture, size = line.split()
        assert architecture == name
        assert int(size) > 10_000


def test_what_nvrtc_refuses_is_said_in_its_words(compiled):
    done = compiled("sm_1")
    assert done.returncode == 1
    assert "NVRTC refuses loops.cu for sm_1: " in done.stderr
    assert "gpu-architecture" in done.stderr


def test_without_nvrtc_it_is_said_what_is_missing(compiled):
    done = compiled("sm_90", found=False)
    assert done.returncode == 1
    assert "no libnvrtc.so.13" in done.stderr
