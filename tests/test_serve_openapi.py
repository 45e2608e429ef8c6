"""The endpoints against their own OpenAPI description, by schemathesis: no undescribed status, no other content."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers_of_indices import serve_index, write_served

pytestmark = pytest.mark.slow


def test_what_is_answered_is_what_is_described(tmp_path: Path) -> None:
    """Random bytes fit the description of an image's body and are refused all the same: that one check is left out."""
    pytest.importorskip("schemathesis")
    place = write_served(tmp_path, per_class=4)
    command = Path(sys.executable).parent / "schemathesis"
    with serve_index(place / "index", "--model", place / "run") as (address, process):
        done = subprocess.run(
            [
                command,
                "run",
                f"{address}openapi.json",
                "--checks=all",
                "--exclude-checks=positive_data_acceptance",
                "--max-examples=60",
                "--seed=1",
                "--generation-database=none",
                "--no-color",
            ],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=900,
        )
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
        assert process.poll() is None
