"""What make installs, and when: with a stand-in for the Python of .venv that only prints its arguments."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("python", "ruff", "codespell"):
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    return tmp_path


def installed(clone: Path, *targets: str) -> list[str]:
    """Run make, and return the extras that it installed."""
    done = subprocess.run(["make", *targets], cwd=clone, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if "pip install" in line]
    return [line.rpartition("'.[")[2].removesuffix("]'") for line in lines]


def change(clone: Path) -> None:
    for stamp in (clone / ".venv").glob(".installed*"):
        os.utime(stamp, (1, 1))


def test_a_user_gets_no_tools_of_the_checks(clone: Path) -> None:
    assert installed(clone, "demo") == ["demo,serve,encoder,heic"]
    assert installed(clone, "demo", "setup") == []
    assert installed(clone, "lint") == ["dev"]
    assert installed(clone, "lint", "demo") == []


def test_the_checks_install_what_a_user_needs_too(clone: Path) -> None:
    assert installed(clone, "lint", "demo") == ["dev"]
    change(clone)
    assert installed(clone, "demo") == ["demo,serve,encoder,heic"]
    assert installed(clone, "lint") == ["dev"]
    assert installed(clone, "demo", "lint") == []
