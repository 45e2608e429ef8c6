"""Real processes that start fast: forked from one that has imported everything; killed at will, or run as ranks.

How the interpreter ends is not part of it: they leave without finalizing it.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import time
import warnings
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["sop_faiss.cli.train", "sop_faiss.verbs.training.train", "tests.forked"])

KillPoint = tuple[str, str, int, str]
"""Module, function, which call of it, and when the process kills itself: `before`, `after` or `midway`."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(
    arguments: Sequence[object],
    log: Path,
    point: KillPoint | None = None,
    ranks: int = 1,
    program: Sequence[str] = ("-m", "sop_faiss.cli.train"),
) -> list[BaseProcess]:
    """Start a program (`sop-train`) with these arguments, as one process or as some ranks.

    What they say goes to `log`, and what a single process prints on stdout to `log` with `.out`.
    """
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = []
    for rank in range(ranks):
        environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
        words = ([*program, *map(str, arguments)], environment, log, point)
        processes.append(_context.Process(target=_run, args=words))
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):  # seen by the process that all are forked from
        for process in processes:
            process.start()
    return processes


def launch(log: Path, program: Sequence[str], *arguments: object, status: int = 0) -> None:
    """Run two ranks, as torchrun does, and expect this exit status of both.

    Args:
        log: a new file for what they say.
        program: `-m` and a module, or `-c` and its text.
        arguments: of the program.
        status: other than 0 without a traceback.
    """
    statuses = end(start(arguments, log, ranks=2, program=program))
    assert statuses == [status] * 2, log.read_text()
    assert status == 0 or "Traceback" not in log.read_text()


def end(processes: Sequence[BaseProcess]) -> list[int | None]:
    """Wait for the processes; their exit statuses."""
    for process in processes:
        process.join(240)
    statuses = [process.exitcode for process in processes]
    for process in processes:
        if process.exitcode is None:
            process.kill()
            process.join()
        process.close()
    return statuses


def kill(processes: Sequence[BaseProcess]) -> list[int | None]:
    """SIGKILL; the exit statuses, 0 of those that had ended before."""
    for process in processes:
        process.kill()
    return end(processes)


def wait_for_lines(process: BaseProcess, file: Path, former: int | None, count: int) -> None:
    """Return when the process has written a file anew, with so many lines, or when it has ended.

    Args:
        process: that writes it.
        file: what it writes.
        former: the inode of a file that was there before.
        count: lines.
    """
    while process.is_alive():
        if inode(file) not in (None, former) and file.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.01)


def inode(file: Path) -> int | None:
    """Which file this is, whatever its name; None if there is none."""
    return file.stat().st_ino if file.is_file() else None


def _run(words: list[str], environment: dict[str, str], log: Path, point: KillPoint | None) -> None:
    """In the new process."""
    os.environ.update(environment)
    os.fsync = lambda descriptor: None  # as in conftest.py
    for stream, file in ((sys.stdout, log if environment else log.with_suffix(".out")), (sys.stderr, log)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream.fileno())
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run in a shell's background
    if point is not None:
        _kill_at(*point)
    kind, program, *sys.argv[1:] = words
    if kind == "-c":
        exec(program, {"__name__": "__main__"})
        return
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # the module is imported already
        runpy.run_module(program, run_name="__main__")


def _kill_at(module: str, name: str, call: int, when: str) -> None:
    """Replace a function by one that kills this process at one of its calls."""
    owner: Any = importlib.import_module(module)
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    real, calls = getattr(owner, last), 0

    def killed(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if last == "rmtree" and not Path(args[0]).exists():
            return real(*args, **kwargs)
        calls += 1
        if calls == call and when == "midway":
            _do_half(last, args)
        if calls == call and when != "after":
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **kwargs)
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, last, killed)


def _do_half(name: str, arguments: tuple[Any, ...]) -> None:
    """What these functions leave when they are killed in the midst of their work."""
    if name == "save_file":
        arguments[1].write_bytes(b"half")
    elif name == "rmtree":
        for file in sorted(Path(arguments[0]).iterdir())[:1]:
            file.unlink()
    elif name == "log":
        with (arguments[0].run / "metrics.jsonl").open("a") as stream:
            stream.write('{"step": 99999, "loss": 1.')
    else:
        raise ValueError(name)
