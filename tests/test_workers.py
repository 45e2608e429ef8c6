"""Worker processes: values in order, errors as they are, and a death that is told at once, wherever it happens."""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sop_faiss.data.workers import Workers, this_worker
from sop_faiss.errors import DataError, UnreachableError, WorkerDiedError
from sop_faiss.model.checkpoint import checkpoint_directories, find_checkpoint
from tests.forked import start
from tests.images import write_shards
from tests.messages import assert_one_line
from tests.runs import tiny_config_file

KILLS = 50
PATIENCE_SECONDS = 10.0


def children(process: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def tensors(number: int) -> tuple[int, torch.Tensor, tuple[int, int] | None]:
    return number, torch.full((3,), number), this_worker()


@pytest.mark.parametrize("finish", [None, lambda value: value])
def test_values_come_in_order_each_from_its_worker(finish: Callable[..., object] | None) -> None:
    values = list(Workers(tensors, 3).map(range(4, 15), finish))
    assert [number for number, _, _ in values] == list(range(4, 15))
    assert all(tensor.tolist() == [number] * 3 for number, tensor, _ in values)
    assert [worker for _, _, worker in values] == [(place % 3, 3) for place in range(11)]
    assert this_worker() is None


def test_two_values_of_each_worker_are_made_ahead(tmp_path: Path) -> None:
    values = Workers(lambda number: (tmp_path / str(number)).touch(), 2).map(range(20))
    for taken in range(1, 4):
        next(values)
        time.sleep(0.3)
        assert len(list(tmp_path.iterdir())) == taken + 4
    values.close()


def test_values_are_finished_in_another_thread() -> None:
    threads = list(Workers(lambda _: None, 1).map(range(3), lambda _: threading.current_thread()))
    assert len({*threads, threading.main_thread()}) == 2


@pytest.mark.parametrize(
    "error",
    [DataError("bad"), UnreachableError("gone"), OSError(28, "No space left on device", "there"), MemoryError()],
)
def test_errors_are_raised_as_they_are(error: Exception) -> None:
    def fail(number: int) -> int:
        if number == 3:
            raise error
        return number

    values = Workers(fail, 2).map(range(9))
    assert [next(values) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(type(error)) as caught:
        next(values)
    assert str(caught.value) == str(error) and not hasattr(caught.value, "__notes__")


def test_a_bug_says_where() -> None:
    def wrong_function(number: int) -> int:
        raise KeyError(number)

    with pytest.raises(KeyError) as caught:
        list(Workers(wrong_function, 1).map(range(2)))
    assert "in wrong_function" in caught.value.__notes__[0]


@pytest.mark.parametrize("finish", [None, lambda value: value])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS])
def test_a_death_is_an_error_at_once(number: signal.Signals, finish: Callable[[int], int] | None) -> None:
    def die(step: int) -> int:
        if step == 5:
            faulthandler.disable()  # of the tests
            os.kill(os.getpid(), number)
        if step == 4:
            time.sleep(60)  # the other worker is busy meanwhile
        return step

    values = Workers(die, 2).map(range(9), finish)
    assert [next(values) for _ in range(4)] == [0, 1, 2, 3]
    started = time.monotonic()
    with pytest.raises(WorkerDiedError) as caught:
        next(values)
    assert_one_line(caught, number.name)
    assert ("/dev/shm" in str(caught.value)) == (number == signal.SIGBUS)
    assert time.monotonic() - started < PATIENCE_SECONDS


def test_leaving_early_ends_the_workers_also_a_busy_one() -> None:
    before = children(os.getpid())  # from which other tests fork
    values = Workers(lambda number: time.sleep(60 * (number == 2)), 2).map(range(9))
    next(values)
    started = time.monotonic()
    workers = set(children(os.getpid())) - set(before)
    values.close()
    assert workers and time.monotonic() - started < PATIENCE_SECONDS and not workers & set(children(os.getpid()))


LEFT = """
import os, signal, time
from sop_faiss.data.workers import Workers
values = Workers(lambda number: time.sleep(number), 3).map([0, 0, 0, 0, 0, 1])
next(values)
print(*open(f"/proc/self/task/{os.getpid()}/children").read().split(), flush=True)
{}
"""


@pytest.mark.parametrize("end", ["raise SystemExit(0)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_workers_end_with_the_process_that_started_them(end: str) -> None:
    words = [sys.executable, "-c", LEFT.replace("{}", end)]
    result = subprocess.run(words, capture_output=True, text=True, timeout=120)
    workers = result.stdout.split()
    assert len(workers) == 3 and result.stderr == ""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while any(Path(f"/proc/{worker}/cmdline").exists() for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_killed_worker_of_a_run_is_one_line_and_status_1(tmp_path: Path) -> None:
    """At many moments: while the workers start, while a step is made, while a checkpoint is written."""
    write_shards(tmp_path / "shards", classes=2, per_class=12, size=20)
    config, moments = tiny_config_file(tmp_path), random.Random(0)
    settings = ["train.epochs=4000", "train.checkpoint_every_steps=2", "data.workers=2"]
    for kill in range(KILLS):
        run, log = tmp_path / f"run{kill}", tmp_path / f"log{kill}"
        (process,) = start([config, f"data.train={tmp_path / 'shards'}", *settings, "--output", run], log)
        assert process.pid is not None
        while process.is_alive() and len(children(process.pid)) < 2:
            time.sleep(0.005)
        time.sleep(moments.random() ** 2)
        os.kill(moments.choice(children(process.pid)), signal.SIGKILL)
        process.join(PATIENCE_SECONDS)
        status, said = process.exitcode, log.read_text()
        if status is None:
            process.kill()
        assert status == 1, (kill, status, said)
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and "SIGKILL" in errors[0] and said.endswith(f"{errors[0]}\n"), (kill, said)
        assert "Traceback" not in said and "Warning" not in said, (kill, said)
        if checkpoint_directories(run):
            find_checkpoint(run)
