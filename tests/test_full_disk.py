"""A real disk of some hundred kilobytes: the command ends in one line, what was whole stays, a run goes on exactly."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sop_faiss.model.checkpoint import checkpoint_directories, find_checkpoint
from tests.encoders import write_run
from tests.images import write_shards
from tests.runs import tiny_config_file
from tests.test_kill_series import records

pytestmark = pytest.mark.slow

STEPS = 40

# A small disk in a namespace of its own, which ends with this script; what is on it is copied out at both stages.
SMALL_DISK = """
mount -t tmpfs -o "size=$1" none disk || exit 99
shift
"$@" > first.out 2> first.err
echo $? > first.status
cp -r disk/run full
mount -o remount,size=100m disk || exit 99
"$@" > second.out 2> second.err
echo $? > second.status
cp -r disk/run done
"""


def namespaces() -> bool:
    """Whether this user may mount a disk of his own."""
    if shutil.which("unshare") is None:
        return False
    return (
        subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode == 0
    )


@pytest.mark.parametrize("size", ["600k", "1000k"])
@pytest.mark.skipif(not namespaces(), reason="mounting a small disk is not permitted here")
def test_a_disk_that_is_full(tmp_path: Path, size: str) -> None:
    write_shards(tmp_path / "shards", classes=2, per_class=12, size=20)
    (tmp_path / "disk").mkdir()
    train = [
        sys.executable, "-m", "sop_faiss.cli.train", str(tiny_config_file(tmp_path)),
        f"data.train={tmp_path / 'shards'}",
        "train.epochs=10", "train.checkpoint_every_steps=2", "train.keep_last=100", "--resume", "--output",
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*train, str(tmp_path / "whole")], env=environment, check=True, capture_output=True)
    words = ["unshare", "-rm", "sh", "-c", SMALL_DISK, "sh", size, *train, "disk/run"]
    subprocess.run(words, cwd=tmp_path, env=environment, check=True, capture_output=True)

    assert (tmp_path / "first.status").read_text() == "1\n"
    errors = (tmp_path / "first.err").read_text()
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and errors.endswith(lines[0] + "\n") and "Traceback" not in errors, errors
    assert lines[0].startswith("error: No space left on device: disk/run")
    assert lines[0].endswith("; free space, then --resume")
    kept = [path.name for path in checkpoint_directories(tmp_path / "full")]
    assert 0 < len(kept) < STEPS / 2 and find_checkpoint(tmp_path / "full").name == kept[0]

    assert (tmp_path / "second.status").read_text() == "0\n", (tmp_path / "second.err").read_text()
    assert f"resuming at step {int(kept[0].removeprefix('step_'))}" in (tmp_path / "second.err").read_text()
    assert records(tmp_path / "done") == records(tmp_path / "whole")
    assert len(checkpoint_directories(tmp_path / "done")) == STEPS / 2


EXPORT = """
mount -t tmpfs -o "size=$1" none disk || exit 99
shift
"$@" 2> err
echo $? > status
ls -A disk > left
"""


@pytest.mark.parametrize(("size", "options"), [("8k", []), ("28k", []), ("72k", ["--torch-export"])])
@pytest.mark.skipif(not namespaces(), reason="mounting a small disk is not permitted here")
def test_an_export_onto_a_disk_that_is_full(tmp_path: Path, size: str, options: list[str]) -> None:
    run = write_run(tmp_path / "run")
    (tmp_path / "disk").mkdir()
    export = [sys.executable, "-m", "sop_faiss.cli.export", str(run), "disk/out", *options]
    words = ["unshare", "-rm", "sh", "-c", EXPORT, "sh", size, *export]
    subprocess.run(words, cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "status").read_text() == "1\n"
    (line,) = (tmp_path / "err").read_text().splitlines()
    assert line.startswith("error: No space left on device: disk/out")
    assert (tmp_path / "left").read_text() == ""
