"""Checkpoints that were edited, cut or replaced, and disks that fill up: the run's last good checkpoint is used."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from sop_faiss.cli.train import main
from sop_faiss.errors import CheckpointError
from sop_faiss.files import sha256_file
from sop_faiss.model.checkpoint import find_checkpoint, read_state
from sop_faiss.train import state as resuming
from sop_faiss.train.checkpoints import checkpoint as writing
from sop_faiss.train.checkpoints.checkpoint import clear_leftovers, write_best, write_checkpoint
from sop_faiss.train.log.monitor import Monitor, read_metrics
from sop_faiss.train.state import RunState
from sop_faiss.verbs.training.train import run_training
from tests.images import write_shards
from tests.runs import tiny_config, tiny_config_file

NEWEST = "checkpoints/step_00000006"
NO_ROOM = "Error while serializing: I/O error: No space left on device (os error 28)"


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    return write_shards(tmp_path_factory.mktemp("data"), classes=2, per_class=6, size=20)


@pytest.fixture(scope="module")
def whole(shards, tmp_path_factory) -> Path:
    """A run of 8 steps, stopped at step 6, with checkpoints at 3 and 6."""
    folder = tmp_path_factory.mktemp("run")
    run_training(tiny_config(folder, *settings(shards), "train.stop_after_steps=6"), folder / "run")
    return folder / "run"


@pytest.fixture
def run(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def settings(shards: Path) -> tuple[str, ...]:
    return (f"data.train={shards}", "train.epochs=4")


def resume(run: Path, shards: Path) -> int:
    return run_training(tiny_config(run.parent, *settings(shards)), run, resume=True).step


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    state = json.loads(path.read_text())
    change(state)
    path.write_text(json.dumps(state))


# state.json

EDITS: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "step of another": ("step", lambda state: state.update(step=3)),
    "negative step": ("step", lambda state: state.update(step=-6)),
    "step a float": ("step", lambda state: state.update(step=6.5)),
    "step a truth": ("step", lambda state: state.update(step=True)),
    "no step": ("step", lambda state: state.pop("step")),
    "images a text": ("images_seen", lambda state: state.update(images_seen="36")),
    "no images": ("images_seen", lambda state: state.pop("images_seen")),
    "endless images": ("images_seen", lambda state: state.update(images_seen=10**400)),
    "bad null": ("bad_samples", lambda state: state.update(bad_samples=None)),
    "score a list": ("best_score", lambda state: state.update(best_score=[1])),
    "score NaN": ("best_score", lambda state: state.update(best_score=float("nan"))),
    "no score": ("best_score", lambda state: state.pop("best_score")),
    "a device": ("sha256", lambda state: state["sha256"].update({"/dev/zero": "0" * 64})),
    "outside": ("sha256", lambda state: state["sha256"].update({"../../config.yaml": "0" * 64})),
    "no files": ("sha256", lambda state: state.update(sha256={})),
    "no optimizer": ("sha256", lambda state: state["sha256"].pop("optimizer.safetensors")),
    "no teacher": ("sha256", lambda state: state["sha256"].pop("teacher.safetensors")),
    "files a list": ("is not of the format", lambda state: state.update(sha256=["teacher.safetensors"])),
    "another format": ("is not of the format", lambda state: state.update(format="sop_faiss checkpoint 2")),
    "a checksum null": ("is damaged", lambda state: state["sha256"].update({"teacher.safetensors": None})),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_state_is_damaged_and_the_checkpoint_before_is_used(run, name, caplog):
    message, change = EDITS[name]
    edit(run / NEWEST / "state.json", change)
    assert find_checkpoint(run).name == "step_00000003"
    (record,) = caplog.records
    said = record.getMessage()
    assert message in said and "step_00000006" in said and "using the checkpoint before" in said and "\n" not in said
    with pytest.raises(CheckpointError, match=message):
        find_checkpoint(run / NEWEST)


@pytest.mark.parametrize("content", ["", "[]", "null", "[" * 100_000, "9" * 5000, "{"])
def test_a_state_that_is_no_state(run, content, caplog):
    (run / NEWEST / "state.json").write_text(content)
    assert find_checkpoint(run).name == "step_00000003"
    assert len(caplog.records) == 1


@pytest.mark.parametrize("file", ["state.json", "student.safetensors", "objective.safetensors"])
def test_a_deleted_file(run, file):
    (run / NEWEST / file).unlink()
    assert find_checkpoint(run).name == "step_00000003"


def test_a_run_goes_on_from_the_checkpoint_before(run, shards):
    edit(run / NEWEST / "state.json", lambda state: state.update(step=3))
    assert resume(run, shards) == 8
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "step_00000003", "step_00000006", "step_00000008"
    ]  # fmt: skip
    assert find_checkpoint(run / NEWEST) == run / NEWEST  # made again


def test_all_checkpoints_damaged(run):
    for checkpoint in (run / "checkpoints").iterdir():
        edit(checkpoint / "state.json", lambda state: state.update(step="x"))
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints"):
        find_checkpoint(run)


def test_other_checkpoints_need_a_teacher_alone(run, tmp_path):
    teacher = load_file(run / NEWEST / "teacher.safetensors")
    write_best(tmp_path, 6, {"teacher": teacher}, {"knn_top1_k5": 50.0})
    assert read_state(tmp_path / "best")["scores"] == {"knn_top1_k5": 50.0}
    edit(tmp_path / "best" / "state.json", lambda state: state.pop("step"))
    with pytest.raises(CheckpointError, match=r"step in state\.json"):
        read_state(tmp_path / "best")
    write_best(tmp_path, 6, {"student": teacher}, {})
    with pytest.raises(CheckpointError, match=r"sha256 in state\.json"):
        read_state(tmp_path / "best")


def test_a_run_of_very_many_steps(tmp_path):
    for step in (99_999_999, 100_000_000):
        content = {name: {"a": torch.zeros(1)} for name in ("student", "teacher", "optimizer", "objective")}
        write_checkpoint(tmp_path, step, content, {"images_seen": 1, "bad_samples": 0, "best_score": None})
    assert find_checkpoint(tmp_path).name == "step_100000000"


@pytest.mark.parametrize("line", ["{", "3", "[]", "{}", '{"step": "x"}', "[" * 100_000, "9" * 5000])
def test_metrics_are_read_up_to_a_line_that_is_no_record(run, line):
    path = run / "metrics.jsonl"
    whole = read_metrics(run)
    assert [record["step"] for record in whole] == [1, 2, 3, 4, 5, 6]
    records = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*records[:4], line + "\n", *records[4:]]))
    assert read_metrics(run) == whole[:4]
    Monitor(run, resumed_step=3).close()
    assert read_metrics(run) == whole[:3]


# tensors, with a checksum that fits them


@pytest.fixture(scope="module")
def state(whole, shards) -> RunState:
    """What is resumed; that a load which fails has begun to fill it does not matter here."""
    state = RunState(tiny_config(whole.parent, *settings(shards)), torch.device("cpu"), 12)
    state.data_digest = json.loads((whole / NEWEST / "state.json").read_text())["data_digest"]
    state.resume(whole / NEWEST)
    assert state.step == 6
    return state


def replace_tensors(checkpoint: Path, name: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(checkpoint / f"{name}.safetensors")
    change(tensors)
    save_file(tensors, checkpoint / f"{name}.safetensors")
    seal(checkpoint, f"{name}.safetensors")


def seal(checkpoint: Path, file: str) -> None:
    edit(checkpoint / "state.json", lambda state: state["sha256"].update({file: sha256_file(checkpoint / file)}))


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"\x02\0\0\0\0\0\0\0{}", b"\x08\0\0\0\0\0\0\0{" + b"a" * 7])
@pytest.mark.parametrize("file", ["student", "optimizer", "objective"])
def test_files_of_nonsense_are_one_line(run, state, file, content):
    (run / NEWEST / f"{file}.safetensors").write_bytes(content)
    seal(run / NEWEST, f"{file}.safetensors")
    if file == "optimizer" and content.endswith(b"{}"):
        pytest.skip("no state yet is what the optimizer starts with")
    with pytest.raises(CheckpointError) as caught:
        state.resume(find_checkpoint(run / NEWEST))
    assert "\n" not in str(caught.value)
    assert (run / NEWEST).exists()


def first_of(tensors: dict[str, torch.Tensor], ending: str) -> str:
    return next(name for name in tensors if name.endswith(ending))


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("student", lambda t: t.pop(first_of(t, "weight"))),
        ("student", lambda t: t.update({first_of(t, "weight"): torch.zeros(3)})),
        ("optimizer", lambda t: t.pop(first_of(t, "exp_avg"))),
        ("optimizer", lambda t: t.pop(first_of(t, "step"))),
        ("optimizer", lambda t: t.update({first_of(t, "exp_avg"): torch.zeros(3)})),
        ("optimizer", lambda t: t.update({first_of(t, "exp_avg"): torch.tensor(0.0)})),
        ("optimizer", lambda t: t.update({(name := first_of(t, "exp_avg")): t[name].long()})),
        ("optimizer", lambda t: t.update({"nobody|exp_avg": torch.zeros(3)})),
        ("optimizer", lambda t: t.update({first_of(t, "exp_avg").replace("exp_avg", "other"): torch.tensor(0.0)})),
        ("objective", lambda t: t.pop("patch_generator")),
        ("objective", lambda t: t.update(patch_generator=torch.zeros(3))),
        ("objective", lambda t: t.update(patch_generator=torch.zeros(3, dtype=torch.uint8))),
        ("objective", lambda t: t.pop("cls.memory.position")),
        ("objective", lambda t: t.update({"cls.memory.position": torch.zeros(5)})),
        ("objective", lambda t: t.pop("cls.memory.image_ids")),
        ("objective", lambda t: t.update({"cls.memory.image_ids": torch.zeros(7)})),
        ("objective", lambda t: t.update({"cls.memory.embeddings": torch.zeros(7)})),
        ("objective", lambda t: t.pop("cls.maker.generator")),
    ],
)
def test_tensors_that_do_not_fit_are_one_line(run, state, file, change):
    replace_tensors(run / NEWEST, file, change)
    with pytest.raises(CheckpointError) as caught:
        state.resume(find_checkpoint(run / NEWEST))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), MemoryError()]
)
def test_too_little_memory_is_not_a_changed_checkpoint(run, state, error, monkeypatch):
    def fail(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(resuming, "load_network", fail)
    with pytest.raises(type(error)):
        state.resume(find_checkpoint(run / NEWEST))
    broken = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(resuming, "load_network", lambda *arguments: (_ for _ in ()).throw(broken))
    with pytest.raises(torch.AcceleratorError):
        state.resume(find_checkpoint(run / NEWEST))


# a full disk


def last_line(result) -> str:
    assert result.exit_code == 1 and "Traceback" not in result.stderr and result.stdout == ""
    assert [line.startswith("error: ") for line in result.stderr.splitlines()].count(True) == 1
    return result.stderr.splitlines()[-1]


def train(run: Path, shards: Path, *more: str):
    arguments = [str(tiny_config_file(run.parent)), *settings(shards), *more, "--output", str(run), "--resume"]
    return CliRunner().invoke(main, arguments)


def test_a_disk_that_fills_up_at_a_checkpoint(run, shards, monkeypatch):
    def no_room(tensors: dict[str, torch.Tensor], file: Path) -> None:
        file.write_bytes(b"half")
        if file.name == "optimizer.safetensors":
            raise SafetensorError(NO_ROOM)

    monkeypatch.setattr(writing, "save_file", no_room)
    wanted = run / "checkpoints" / "step_00000008" / "optimizer.safetensors"
    assert last_line(train(run, shards)) == (f"error: No space left on device: {wanted}; free space, then --resume")
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_00000003", "step_00000006"]
    monkeypatch.undo()
    assert train(run, shards).exit_code == 0
    assert find_checkpoint(run).name == "step_00000008"


def test_a_disk_that_fills_up_at_the_best_teacher_keeps_the_one_before(tmp_path, monkeypatch):
    write_best(tmp_path, 3, {"teacher": {"a": torch.ones(3)}}, {"score": 1.0})

    def no_room(tensors: dict[str, torch.Tensor], file: Path) -> None:
        raise SafetensorError(NO_ROOM)

    monkeypatch.setattr(writing, "save_file", no_room)
    with pytest.raises(OSError) as caught:
        write_best(tmp_path, 6, {"teacher": {"a": torch.zeros(3)}}, {"score": 2.0})
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(tmp_path / "best" / "teacher.safetensors")
    assert read_state(tmp_path / "best")["step"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_other_errors_of_the_library_stay(tmp_path, monkeypatch):
    def fail(tensors: dict[str, torch.Tensor], file: Path) -> None:
        raise SafetensorError("shared memory")

    monkeypatch.setattr(writing, "save_file", fail)
    with pytest.raises(SafetensorError, match="shared memory"):
        write_best(tmp_path, 6, {"teacher": {"a": torch.zeros(3)}}, {})


def test_a_disk_that_fills_up_at_the_metrics(run, shards, monkeypatch):
    def no_room(self: Monitor, metrics: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Monitor, "log", no_room)
    assert last_line(train(run, shards)) == f"error: No space left on device: {run}; free space, then --resume"
    assert find_checkpoint(run).name == "step_00000006"


LIMITED = """
import resource, sys
from sop_faiss.cli.train import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
main(sys.argv[2:])
"""


@pytest.mark.slow
def test_the_kernel_refuses_a_checkpoint(run, shards):
    """As a full disk, but real: no file may be longer than the student's."""
    limit = (run / NEWEST / "student.safetensors").stat().st_size + 1000
    arguments = [str(tiny_config_file(run.parent)), *settings(shards), "--output", str(run), "--resume"]
    words = [sys.executable, "-c", LIMITED, str(limit), *arguments]
    done = subprocess.run(words, capture_output=True, text=True)
    wanted = run / "checkpoints" / "step_00000008" / "optimizer.safetensors"
    assert done.returncode == 1 and done.stdout == "" and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == f"error: File too large: {wanted}"
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_00000003", "step_00000006"]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != limit
    assert resume(run, shards) == 8


# what kills leave


def test_a_best_teacher_that_a_kill_has_left_aside_comes_back(tmp_path):
    write_best(tmp_path, 3, {"teacher": {"a": torch.ones(3)}}, {"score": 1.0})
    (tmp_path / "best").rename(tmp_path / ".best.0123abcd.old")
    (tmp_path / ".best.0123abcd.tmp").mkdir()
    for name in ("metrics.jsonl", "prototypes.jsonl", "bad_samples.jsonl", "stopped.json"):
        (tmp_path / f".{name}.0123abcd.tmp").write_text("half")
    clear_leftovers(tmp_path, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    assert read_state(tmp_path / "best")["step"] == 3
