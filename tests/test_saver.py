"""Saving in the background: a copy of the step's state, one write at a time, and errors that come to the loop."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from sop_faiss.cli.train import main
from sop_faiss.model.checkpoint import find_checkpoint, read_tensors
from sop_faiss.train.checkpoints import saver as saving
from sop_faiss.train.checkpoints.saver import CheckpointSaver
from sop_faiss.train.state import RunState
from tests.forked import launch
from tests.images import write_shards
from tests.runs import tiny_config, tiny_config_file

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")


class Gate:
    """Stands in for `write_checkpoint`: says when it was called, and goes on or fails when it is let."""

    def __init__(self, real: Callable[..., Any]) -> None:
        self.real = real
        self.entered, self.open = threading.Semaphore(0), threading.Semaphore(0)
        self.calls: list[tuple[int, str]] = []
        self.error: Exception | None = None

    def __call__(self, run: Path, step: int, *more: Any) -> Any:
        self.calls.append((step, threading.current_thread().name))
        self.entered.release()
        assert self.open.acquire(timeout=60)
        if self.error is not None:
            raise self.error
        return self.real(run, step, *more)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate(saving.write_checkpoint)
    monkeypatch.setattr(saving, "write_checkpoint", gate)
    return gate


@pytest.fixture
def state(tmp_path: Path) -> RunState:
    return RunState(tiny_config(tmp_path, "sop.anchors=fixed_vectors"), torch.device("cpu"), 24)


@pytest.fixture
def saver(state: RunState, tmp_path: Path) -> Iterator[CheckpointSaver]:
    saver = CheckpointSaver(state, tmp_path / "run")
    yield saver
    saver.close()


def change(state: RunState) -> None:
    """What the steps after a save do to all that is saved."""
    for content in state.tensors().values():
        for value in content.values():
            value.add_(1)
    state.objective.terms["cls"].memory.store(torch.ones(6, 8), torch.arange(6))
    state.objective.stored_patch_generator.manual_seed(7)
    for parameter in state.student.parameters():
        parameter.data.mul_(2)
    state.step += 1
    state.images_seen += 6


def test_what_is_written_is_what_was_there_at_the_save(
    state: RunState, saver: CheckpointSaver, gate: Gate, tmp_path: Path
) -> None:
    state.step = 3
    wanted = {
        file: {name: value.clone() for name, value in content.items()} for file, content in state.tensors().items()
    }
    saver.save(wait=False)
    assert gate.entered.acquire(timeout=60)
    change(state)  # while it is written
    gate.open.release()
    saver.finish()
    checkpoint = find_checkpoint(tmp_path / "run")
    assert json.loads((checkpoint / "state.json").read_text())["images_seen"] == 0 and state.images_seen == 6
    for file, content in wanted.items():
        found = read_tensors(checkpoint, file)
        assert found.keys() == content.keys()
        assert all(torch.equal(found[name], content[name]) for name in content), file
    assert not torch.equal(
        state.student.state_dict()["heads.shared.mlp.0.bias"], wanted["student"]["heads.shared.mlp.0.bias"]
    )
    assert gate.calls == [(3, "checkpoint")]


def test_one_write_at_a_time(state: RunState, saver: CheckpointSaver, gate: Gate, tmp_path: Path) -> None:
    state.step = 1
    saver.save(wait=False)
    assert gate.entered.acquire(timeout=60)
    state.step = 2
    second = threading.Thread(target=saver.save, kwargs={"wait": True})
    second.start()
    assert not gate.entered.acquire(timeout=0.3)  # the second waits for the first
    gate.open.release()
    assert gate.entered.acquire(timeout=60)
    assert second.is_alive()
    gate.open.release()
    second.join()
    assert [step for step, _ in gate.calls] == [1, 2]
    assert find_checkpoint(tmp_path / "run").name == "step_00000002"


def test_copies_are_made_once(state: RunState, saver: CheckpointSaver, tmp_path: Path) -> None:
    places = []
    for step in (1, 2):
        state.step = step
        saver.save(wait=True)
        places.append({(file, name): value.data_ptr() for file, content in saver._copies.items()
                       for name, value in content.items()})  # fmt: skip
    assert places[0] == places[1] and len(places[0]) > 50
    live = [value.data_ptr() for content in state.tensors().values() for value in content.values()]
    assert not set(places[0].values()) & set(live)
    state.objective.terms["cls"].maker.draw()  # fixed anchors come into being, and the optimizer's moments may
    saver.save(wait=True)
    assert "cls.maker.fixed_vectors" in read_tensors(find_checkpoint(tmp_path / "run"), "objective")


def test_a_failure_is_told_by_the_next_save_once(state: RunState, saver: CheckpointSaver, gate: Gate) -> None:
    gate.error = FULL
    gate.open.release()
    saver.save(wait=False)
    while not saver.failed:
        time.sleep(0.01)
    with pytest.raises(OSError, match="somewhere"):
        saver.save(wait=False)
    assert not saver.failed and len(gate.calls) == 1  # nothing new is begun
    saver.close()


def test_a_failure_while_the_run_ends_for_another_reason_is_logged(
    state: RunState, saver: CheckpointSaver, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    gate.error = FULL
    gate.open.release()
    saver.save(wait=False)
    saver.close()
    (record,) = caplog.records
    assert record.getMessage().startswith("the last checkpoint was not written: [Errno 28]")


def test_without_the_background_the_caller_writes(tmp_path: Path, gate: Gate) -> None:
    state = RunState(tiny_config(tmp_path, "train.background_save=false"), torch.device("cpu"), 24)
    saver = CheckpointSaver(state, tmp_path / "run")
    gate.open.release()
    saver.save(wait=False)
    assert gate.calls == [(0, threading.current_thread().name)] and not saver._copies
    gate.error = FULL
    gate.open.release()
    with pytest.raises(OSError, match="somewhere"):
        saver.save(wait=False)


# in a run


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("data"), classes=2, per_class=6, size=20)


def arguments(folder: Path, shards: Path, *more: str) -> list[str]:
    common = [f"data.train={shards}", "train.epochs=8", "train.checkpoint_every_steps=4"]
    return [str(tiny_config_file(folder)), *common, *more, "--output", str(folder / "run"), "--resume"]


@pytest.mark.parametrize("background", ["true", "false"])
def test_a_full_disk_in_the_midst_of_a_run(
    tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch, background: str
) -> None:
    real = saving.write_checkpoint

    def no_room(run: Path, step: int, *more: Any) -> Path:
        if step == 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(run / "checkpoints" / "step_00000008"))
        return real(run, step, *more)

    monkeypatch.setattr(saving, "write_checkpoint", no_room)
    words = arguments(tmp_path, shards, f"train.background_save={background}")
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 1 and "Traceback" not in done.stderr and done.stdout == ""
    wanted = tmp_path / "run" / "checkpoints" / "step_00000008"
    assert done.stderr.splitlines()[-1] == f"error: No space left on device: {wanted}; free space, then --resume"
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000004"]
    monkeypatch.undo()
    assert CliRunner().invoke(main, words).exit_code == 0
    assert find_checkpoint(tmp_path / "run").name == "step_00000016"


FULL_AT_8 = """
import errno, sys
from sop_faiss.train.checkpoints import saver
real = saver.write_checkpoint
def no_room(run, step, *more):
    if step == 8:
        raise OSError(errno.ENOSPC, "No space left on device", str(run / "checkpoints"))
    return real(run, step, *more)
saver.write_checkpoint = no_room
"""
NO_THREAD_LEFT = """
from pathlib import Path
from sop_faiss.cli.train import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    names = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    # where they outlive the interpreter, the process may be aborted, whatever its status was to be
    raise SystemExit(9 if any("gloo" in name for name in names) else end.code)
"""


@pytest.mark.distributed
def test_a_full_disk_ends_all_ranks_cleanly(tmp_path: Path, shards: Path) -> None:
    launch(tmp_path / "log", ["-c", FULL_AT_8 + NO_THREAD_LEFT], *arguments(tmp_path, shards), status=1)
    assert find_checkpoint(tmp_path / "run").name == "step_00000004"
