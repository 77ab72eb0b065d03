"""tessera launch: ranks of any program."""

import subprocess
import time

import pytest
from runs import started, wait_until


def launch(program, tmp_path, *arguments):
    return subprocess.run([program, "launch", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120)


def test_launch_starts_ranks_of_any_program(program, tmp_path):
    script = 'echo "$TESSERA_RANK of $TESSERA_WORLD_SIZE: $1"'
    done = launch(program, tmp_path, "-n", "3", "--", "sh", "-c", script, "sh", "-n")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 of 3: -n", "1 of 3: -n", "2 of 3: -n"]


def test_launch_ends_with_the_first_failure(program, tmp_path):
    script = '[ "$TESSERA_RANK" != 1 ] || { echo broken >&2; exit 7; }; sleep 30'
    start = time.monotonic()
    done = launch(program, tmp_path, "-n", "2", "--log-dir", "logs", "--", "sh", "-c", script)
    assert done.returncode == 7 and time.monotonic() - start < 20
    assert "rank 1 of 2" in done.stderr and "exit code 7" in done.stderr
    assert (tmp_path / "logs" / "rank-1.log").read_text() == "broken\n"


def test_launch_starts_ranks_again(program, tmp_path):
    # Rank 1 fails twice, then all are done.
    script = """echo "$TESSERA_RANK $TESSERA_RESTARTS" >&2
                [ "$TESSERA_RANK" != 1 ] || [ "$TESSERA_RESTARTS" = 2 ] || exit 7"""
    done = launch(program, tmp_path, "-n", "2", "--max-restarts", "3", "--log-dir", "logs", "--", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "logs" / "rank-1.log").read_text() == "1 0\n1 1\n1 2\n"
    assert "all ranks are started again, 2 of 3 times" in done.stderr and "3 of 3" not in done.stderr
    done = launch(program, tmp_path, "-n", "2", "--max-restarts", "1", "--", "sh", "-c", script)
    assert done.returncode == 7 and "ended: all ranks were started again 1 times" in done.stderr


@pytest.mark.parametrize("code", [2, 74, 75, 78])
def test_launch_starts_nothing_again_that_would_be_refused(program, tmp_path, code):
    done = launch(program, tmp_path, "-n", "2", "--max-restarts", "3", "--", "sh", "-c", f"exit {code}")
    assert done.returncode == code and "started again" not in done.stderr, done.stderr


def test_launch_starts_nothing_again_after_a_signal(program, tmp_path):
    with started(program, "launch", "-n", "2", "--max-restarts", "3", "--", "sh", "-c", "touch up; exec sleep 60",
                 cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        wait_until((tmp_path / "up").exists, process)
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + 15 and "started again" not in errors, errors


@pytest.mark.parametrize(("arguments", "words"), [
    (["--", "true"], "--nproc is required"),
    (["-n", "2"], "program is required"),
    (["-n", "0", "--", "true"], "--nproc"),
    (["-n", "2", "--", "./none"], "cannot start './none'"),
])
def test_launch_refuses(program, tmp_path, arguments, words):
    done = launch(program, tmp_path, *arguments)
    assert done.returncode == 2 and words in done.stderr, done.stderr


def test_launch_refuses_to_be_a_rank(program, tmp_path):
    done = launch(program, tmp_path, "-n", "2", "--", str(program), "launch", "-n", "2", "--", "true")
    assert done.returncode == 2 and "this process is a rank itself, started by tessera" in done.stderr
