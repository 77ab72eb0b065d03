"""The backend "tessera" of torch.distributed, in the hands of PyTorch.

torch_suite.py runs PyTorch's own tests, torch_ranks.py what users do: training
with DDP and FSDP2 beside Gloo, functional collectives, groups, checkpoints.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch_suite

HERE = Path(__file__).parent
WORLD_SIZES = (2, 3, 4)
FEATURES = ("functional_collectives", "groups_and_objects", "crossing_messages",
            "futures", "refusals", "checkpoint")


def with_package(environment, folder):
    others = environment.get("PYTHONPATH")
    return {**environment, "PYTHONPATH": str(folder) + (os.pathsep + others if others else "")}


@pytest.fixture(scope="module")
def environment(program):
    """In which tessera_torch is found, as it was built."""
    other = os.environ.get("TESSERA_TORCH")
    if other and not Path(other).samefile(Path(torch.__file__).parent):
        pytest.skip("needs the LibTorch of this Python; TESSERA_TORCH names another")
    package = program.parents[1] / "bindings" / "python"
    assert list(package.glob("tessera_torch/_C.*.so")), (
        f"{package} holds no tessera_torch: cmake says why, as 'No tessera_torch'")
    return with_package({**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"},
                        package)


@pytest.fixture(scope="module")
def suites(environment, tmp_path_factory):
    """How PyTorch's tests ended: {world size: {name: (verdict, reason)}}, and the logs."""
    folder = tmp_path_factory.mktemp("suite")
    running = {}
    for size in WORLD_SIZES:
        (folder / str(size)).mkdir()
        with open(folder / f"{size}.log", "w") as log:
            running[size] = subprocess.Popen(
                [sys.executable, HERE / "torch_suite.py", str(size)], stdout=log,
                stderr=subprocess.STDOUT, env={**environment, "TMPDIR": str(folder / str(size))})
    verdicts = {}
    for size, process in running.items():
        process.wait(timeout=900)
        text = (folder / f"{size}.log").read_text(errors="replace")
        found = re.findall(r"^(passed|failed|skipped) (test_\w+)(?: \| (.*))?$", text, re.M)
        verdicts[size] = {name: (verdict, reason) for verdict, name, reason in found}
        assert process.returncode == 0, text[-4000:]
    return verdicts, folder


@pytest.mark.parametrize("size", WORLD_SIZES)
def test_pytorchs_own_tests_pass(suites, size):
    verdicts, folder = suites
    failed = [name for name, (verdict, _) in verdicts[size].items() if verdict == "failed"]
    skips = {name: reason for name, (verdict, reason) in verdicts[size].items()
             if verdict == "skipped"}
    print(f"{size} ranks: {len(verdicts[size]) - len(failed) - len(skips)} passed, "
          f"{len(skips)} need another number of ranks, {len(failed)} failed")
    log = (folder / f"{size}.log").read_text(errors="replace")
    assert not failed, f"{failed}\n{log[-20000:]}"
    others = {name: reason for name, reason in skips.items()
              if not reason.startswith(torch_suite.OTHER_WORLD_SIZE)}
    assert not others, f"skipped for other reasons than the number of ranks: {others}"


def test_every_test_of_pytorch_ran_or_is_listed(suites):
    verdicts, _ = suites
    ran = {name for size in WORLD_SIZES
           for name, (verdict, _) in verdicts[size].items() if verdict == "passed"}
    listed = set(torch_suite.not_applicable())
    tried = {name for size in WORLD_SIZES for name in verdicts[size]}
    assert len(ran) > 110
    assert tried - ran == set(), "passed with no number of ranks"
    assert tried & listed == set()


def run_ranks(environment, folder, ranks, backend, *scenarios, launcher=()):
    out = folder / "results.json"
    done = subprocess.run(
        [sys.executable, *launcher, HERE / "torch_ranks.py",
         "0" if launcher else str(ranks), backend, out, *scenarios],
        env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads(out.read_text())


@pytest.fixture(scope="module", params=[2, 4])
def over_tessera(request, environment, tmp_path_factory):
    """All scenarios on 2 ranks under torchrun, on 4 without."""
    ranks = request.param
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2") if ranks == 2 else ()
    return ranks, run_ranks(environment, tmp_path_factory.mktemp("ranks"), ranks, "tessera",
                            "lists", *FEATURES, "ddp", "fsdp2", launcher=torchrun)


def test_features(over_tessera):
    _, results = over_tessera
    assert results.keys() >= {"lists", *FEATURES}


def test_ddp_and_fsdp2_train_as_over_gloo(over_tessera, environment, tmp_path):
    ranks, ours = over_tessera
    gloo = run_ranks(environment, tmp_path, ranks, "gloo", "ddp", "fsdp2")
    assert ours["ddp"][-1] < 0.1 * ours["ddp"][0], "nothing was learned"
    for strategy in ("ddp", "fsdp2"):
        if ranks == 2:  # a + b has one order
            assert ours[strategy] == gloo[strategy]
        # Sums in another order; twenty steps let the difference grow.
        assert ours[strategy] == pytest.approx(gloo[strategy], rel=1e-5)


def test_features_under_debug_detail(environment, tmp_path):
    environment = {**environment, "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    run_ranks(environment, tmp_path, 2, "tessera", "mismatch", *FEATURES, "ddp")


def test_pip_installs_it(program, environment, tmp_path):
    """Into a folder, from the build folder that is there; and it runs beside another
    backend, as in "cpu:tessera,cuda:nccl" but with one that needs no GPU."""
    site = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps",
         "--quiet", "--target", site, HERE.parents[1] / "bindings" / "python"],
        env={**environment, "TESSERA_BUILD_DIR": str(program.parents[1])}, check=True,
        timeout=300)
    installed = {path.name for path in (site / "tessera_torch").iterdir()}
    assert "__init__.py" in installed
    assert not any("torch" in name for name in installed), "carries a library of torch"
    run_ranks(with_package(environment, site), tmp_path, 2, "cpu:tessera,meta:fake",
              "crossing_messages", "ddp")
