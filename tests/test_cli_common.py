"""Every failure of a command is one line and the right status; progress goes to stderr only."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import click
import pytest
import torch
from click.testing import CliRunner

from sop_faiss.cli import common
from sop_faiss.cli.common import one_line, progress_reporter, run_command
from sop_faiss.errors import CheckpointError, DataError, RunStoppedError


def run(error: BaseException) -> tuple[int, str, str]:
    @click.command()
    @run_command
    def command() -> None:
        click.echo("result so far")
        raise error

    result = CliRunner().invoke(command)
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (DataError("two\nlines  and \x1b[31mcolour"), 1, "error: two lines and ?[31mcolour\n"),
        (CheckpointError("x"), 1, "error: x\n"),
        (RunStoppedError("collapse at step 7"), 3, "error: collapse at step 7\n"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out.tar"), 1, "error: No space left on device: out.tar\n"),
        (PermissionError(errno.EACCES, "Permission denied"), 1, "error: Permission denied\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (MemoryError(), 1, "error: out of memory: lower the batch size"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."),
            1,
            "error: out of GPU memory (CUDA out",
        ),
    ],
)
def test_errors_are_one_line(error: BaseException, status: int, message: str) -> None:
    code, stdout, stderr = run(error)
    assert code == status and stdout == "result so far\n"
    assert stderr.startswith(message) and stderr.count("\n") == 1


def test_bugs_keep_their_traceback() -> None:
    @click.command()
    @run_command
    def command() -> None:
        raise ZeroDivisionError

    assert isinstance(CliRunner().invoke(command).exception, ZeroDivisionError)


def test_a_closed_pipe_is_quiet() -> None:
    code = (
        "import click\nfrom sop_faiss.cli.common import run_command\n"
        "@click.command()\n@run_command\ndef main():\n    for n in range(200000):\n        click.echo(str(n))\nmain()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == b""
    process.wait(timeout=60)


def test_plain_progress(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with progress_reporter("packing", "pictures") as progress:
        for done in range(1, 1001):
            progress(done, 1000)
    out, err = capsys.readouterr()
    assert out == "" and err == "packing: 1,000 of 1,000 pictures, 0 s\n"
    monkeypatch.setattr(common, "PLAIN_INTERVAL_SECONDS", 0.0)
    with progress_reporter("x", "y") as progress:
        progress(1, 2)
        progress(2, 2)
    assert capsys.readouterr().err == "x: 1 of 2 y, 0 s\nx: 2 of 2 y, 0 s\n"
    with progress_reporter("x", "y"):
        pass
    assert capsys.readouterr().err == ""


def test_bar_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress_reporter("packing", "pictures") as progress:
        progress(3, 7)
    out, err = capsys.readouterr()
    assert out == "" and "packing" in err and "3/7" in err


def test_one_line() -> None:
    assert one_line("a\n  b\tc\0\udce9é写") == "a b c??é写"
