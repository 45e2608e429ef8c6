"""Damaged index directories: none opens silently wrong, none crashes the process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.corruption import build_all, run_cases

ROOT = Path(__file__).resolve().parent.parent
CASES, CASES_PER_PROCESS = 10_000, 2_500


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("indices")
    build_all(folder)
    return folder


def test_some_damaged_indices(folder: Path, tmp_path: Path) -> None:
    counts = run_cases(folder, tmp_path, CASES, CASES + 200)
    assert sum(counts.values()) == 200 and counts["refused"] > 190


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, CASES, CASES_PER_PROCESS))
def test_ten_thousand_damaged_indices(folder: Path, tmp_path: Path, first: int) -> None:
    words = [folder, tmp_path, first, first + CASES_PER_PROCESS]
    done = subprocess.run(
        [sys.executable, "-m", "tests.corruption", *map(str, words)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stderr[-2000:]}"
    counts = json.loads(done.stdout.splitlines()[-1])
    assert sum(counts.values()) == CASES_PER_PROCESS and counts["refused"] > 0.95 * CASES_PER_PROCESS
