"""One process at a time trains into a run directory, and no lock outlives its process."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sop_faiss.errors import ConfigError
from sop_faiss.train.checkpoints.run_lock import LOCK_NAME, RunLock
from tests.messages import assert_one_line

# Takes the lock of sys.argv[1], forks a child that lives on, says so, and waits to be killed.
HOLDER = """
import os, sys, time
from pathlib import Path
from sop_faiss.train.checkpoints.run_lock import RunLock
RunLock(Path(sys.argv[1])).acquire()
if os.fork() == 0:
    print(os.getpid(), flush=True)  # by now it has let go of the lock
time.sleep(60)
"""


def assert_taken(run: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        RunLock(run).acquire()
    assert_one_line(caught, f"another process is training into {run}", "`output`")


def test_the_second_is_refused_until_the_first_lets_go(tmp_path: Path) -> None:
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    first.acquire()
    assert first.held
    assert_taken(tmp_path)
    first.release()
    first.release()  # twice does no harm
    second.acquire()
    assert second.held and not first.held
    second.release()
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_NAME]


def test_a_killed_process_leaves_no_lock_even_if_its_child_lives_on(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        child = int(process.stdout.readline())
    try:
        assert_taken(tmp_path)
        process.kill()
        process.wait()
        lock = RunLock(tmp_path)
        lock.acquire()
        lock.release()
        os.kill(child, 0)  # it does live
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_file_system_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    lock = RunLock(tmp_path)
    lock.acquire()
    lock.release()
    assert "cannot be locked (No locks available)" in caplog.text


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        RunLock(tmp_path / "gone").acquire()
