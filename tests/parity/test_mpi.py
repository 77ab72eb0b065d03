"""Training under a real mpirun: over shared memory and over MPI."""

import os
import shutil
import subprocess

import pytest

from runs import configuration, metrics, train

# More ranks than cores, also as root: as Open MPI 4 and 5 want it said.
ALLOWED = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
           "PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
           "OMPI_MCA_rmaps_base_oversubscribe": "1",
           "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}


@pytest.fixture
def mpirun(program):
    """Runs the program on some ranks, under the mpirun of the MPI that it was built with."""
    version = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
    if "mpi yes" not in version or shutil.which("mpirun") is None:
        pytest.skip("needs MPI, which was not built in, or its mpirun")

    def run(ranks, *arguments):
        return subprocess.run(["mpirun", "-np", str(ranks), str(program), *arguments], capture_output=True,
                              text=True, timeout=300, env={**os.environ, **ALLOWED})

    return run


@pytest.mark.parametrize("backend", ["auto", "mpi"])
@pytest.mark.parametrize("mesh", [{"dp": 4}, {"pp": 2, "tp": 2}], ids=["dp4", "pp2tp2"])
def test_mpirun_trains_what_nproc_trains(program, mpirun, tokens, tmp_path, backend, mesh):
    sections = {"mesh": mesh, "zero": {"stage": 2 if "dp" in mesh else 0}}
    train(program, configuration(tokens, tmp_path / "nproc", **sections), "--nproc", "4")
    path = configuration(tokens, tmp_path / "mpirun", comm={"backend": backend}, **sections)
    done = mpirun(4, "train", path)
    assert done.returncode == 0, done.stderr[-3000:]
    for one, other in zip(metrics(tmp_path / "nproc"), metrics(tmp_path / "mpirun"), strict=True):
        for key in ("loss", "grad_norm"):
            if backend == "auto":  # the same sums in the same order
                assert one[key] == other[key], (key, one["step"])
            assert abs(one[key] - other[key]) <= 1e-5 * abs(one[key]), (key, one["step"])


def test_a_wrong_configuration_ends_with_its_code_and_words(mpirun, tokens, tmp_path):
    path = configuration(tokens, tmp_path, mesh={"dp": 2})
    done = mpirun(3, "train", path, "--comm.backend=mpi")
    assert done.returncode == 78, done.stderr
    assert "mesh" in done.stderr and "3" in done.stderr
    assert "MPI_ABORT" not in done.stderr


def test_mpi_without_mpirun_is_refused_with_the_way_out(program, tokens, tmp_path):
    path = configuration(tokens, tmp_path, comm={"backend": "mpi"}, mesh={"dp": 2})
    done = train(program, path, "--nproc", "2", check=False)
    assert done.returncode == 78, done.stderr
    assert "comm.backend" in done.stderr and "mpi" in done.stderr
