"""What a message to the user must look like."""

from __future__ import annotations

import pytest
from click import Command
from click.testing import CliRunner

from sop_faiss.errors import SopError


def assert_one_line(error: pytest.ExceptionInfo[SopError], *parts: str) -> None:
    """The message is one line and holds each of the parts."""
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


def command_fails(command: Command, *arguments: object) -> str:
    """Run a command; check that it ends with one line on stderr, nothing on stdout and status 1; return the line."""
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in result.stderr
    assert result.stderr.rstrip("\n").endswith(lines[0])
    return lines[0]
