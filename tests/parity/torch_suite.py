"""PyTorch's own distributed tests, over the backend "tessera".

Usage: torch_suite.py WORLD_SIZE [TEST...]. Runs those of
torch.testing._internal.distributed.distributed_test as PyTorch's
test_distributed_spawn.py does: every test in WORLD_SIZE processes of its own,
under its own checks and time-outs. One line a test on standard output:
"passed NAME", "skipped NAME | REASON", "failed NAME", with what failed before it.

The processes are forked from one that has imported torch, not spawned: that
takes the seconds out of each test and nothing else.

The suite knows the backends of PyTorch by name and skips what it has not seen
pass on one. Those rules are lifted here (see _lift_rules_by_name): what does not
apply is in torch_suite_not_applicable.txt, with the reason, and nowhere else.
"""

import gc
import os
import sys
import unittest
from pathlib import Path
from time import sleep
from unittest import mock

BACKEND = "tessera"
NOT_APPLICABLE = Path(__file__).with_name("torch_suite_not_applicable.txt")
# Asked for GPUs by their decorator alone.
NEED_NO_GPU = ("test_new_subgroups_by_enumeration_negative_input_rank",
               "test_new_subgroups_group_size_exceeds_world_size")
# Skips that stay: those for the number of ranks.
OTHER_WORLD_SIZE = ("Test requires a world size", "Test requires an exact world size",
                    "Skipped due to small world size")


def not_applicable():
    """Test names and why they do not apply."""
    lines = NOT_APPLICABLE.read_text().splitlines()
    pairs = (line.split(" | ") for line in lines if line and line[0] != "#")
    return {name.strip(): reason.strip() for name, reason in pairs}


def _as_it_is(test):
    return test


def _lift_rules_by_name(common_utils):
    """To be called before the suite is imported: its decorators run then."""
    skip = common_utils.skip_but_pass_in_sandcastle
    common_utils.skip_but_pass_in_sandcastle = (
        lambda reason: skip(reason) if reason.startswith(OTHER_WORLD_SIZE) else _as_it_is)
    common_utils.skip_but_pass_in_sandcastle_if = lambda condition, reason: _as_it_is


def load(world_size):
    """The suite's class of tests, for this many ranks."""
    os.environ.update(BACKEND=BACKEND, WORLD_SIZE=str(world_size),
                      OMP_NUM_THREADS="1", INIT_METHOD="file://")
    import torch
    from torch.testing._internal import common_distributed, common_utils

    import tessera_torch  # noqa: F401  registers the backend

    torch.set_num_threads(1)
    common_distributed.TIMEOUT_DEFAULT = 60
    _lift_rules_by_name(common_utils)
    for feature in ("ddp", "subgroup", "gpu"):
        common_distributed.DistTestCases.backend_feature[feature].add(BACKEND)
    common_distributed.DistTestCases.backend_feature["plugin"].add(BACKEND)
    from torch.testing._internal.distributed import distributed_test

    for backends in (distributed_test.PROFILING_SUPPORTED_BACKENDS,
                     distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS):
        backends.append(BACKEND)
    # Groups of the ranks 1 and 2 are tried from 3 ranks on, where the suite
    # waits for 8, unless the backend is MPI.
    if world_size > 2:
        os.environ["BACKEND"] = "mpi"

    class TesseraTest(distributed_test.TestDistBackend,
                      distributed_test.DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            distributed_test.INIT_METHOD = os.environ["INIT_METHOD"]
            self._start_processes(
                torch.multiprocessing.get_context("fork").Process)

        # The suite polls every 0.1 s, several times a test.
        def _barrier(self, *arguments, **options):
            with mock.patch("time.sleep", lambda _: sleep(0.005)):
                super()._barrier(*arguments, **options)

        def _join_processes(self, test):
            with mock.patch("time.sleep", lambda _: sleep(0.01)):
                super()._join_processes(test)
            # Of the first rank alone PyTorch asks how it ended.
            self.assertEqual([process.exitcode for process in self.processes],
                             [0] * len(self.processes))

        # DDP's logger calls every backend from outside PyTorch "custom".
        def test_ddp_logging_data_cpu(self):
            with mock.patch.object(torch.distributed, "get_backend", lambda group: "custom"):
                super().test_ddp_logging_data_cpu()

        # Its body makes a model on the CPU for those of PyTorch's backends.
        def _test_accumulate_gradients_no_sync(self, *arguments, **options):
            with mock.patch.object(distributed_test, "BACKEND", "gloo"):
                super()._test_accumulate_gradients_no_sync(*arguments, **options)

        def tearDown(self):
            super().tearDown()
            Path(self.file_name).unlink(missing_ok=True)

    for name in NEED_NO_GPU:
        setattr(TesseraTest, name, getattr(TesseraTest, name).__wrapped__)
    return TesseraTest


class Result(unittest.TestResult):
    """Says how each test ended, as soon as it is known."""

    def addSuccess(self, test):
        print("passed", test._testMethodName, flush=True)

    def addSkip(self, test, reason):
        print("skipped", test._testMethodName, "|", reason, flush=True)

    def addFailure(self, test, error):
        print(self._exc_info_to_string(error, test))
        print("failed", test._testMethodName, flush=True)

    addError = addFailure


def main(world_size, names):
    suite = load(int(world_size))
    all_names = unittest.defaultTestLoader.getTestCaseNames(suite)
    gc.freeze()  # what forked ranks share stays shared
    chosen = names or [n for n in all_names if n not in not_applicable()]
    unittest.TestSuite(map(suite, chosen)).run(Result())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
