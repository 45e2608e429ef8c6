"""Real runs killed at many moments, and stopped by signals: resumed, they are the run that nothing has happened to."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from sop_faiss.model.checkpoint import checkpoint_directories, find_checkpoint
from sop_faiss.train.log.monitor import read_metrics
from sop_faiss.train.stop import REQUEUE_NAME
from tests.forked import KillPoint, end, inode, kill, start, wait_for_lines
from tests.images import write_shards
from tests.runs import tiny_config_file

pytestmark = pytest.mark.slow

TIMINGS = ("images_per_second", "data_wait_share", "memory_peak_bytes")
SETTINGS = (
    "train.epochs=40", "train.keep_last=2", "train.keep_every_steps=12", "data.workers=1",
    "data.holdout_share=0.25", "evaluate.test=holdout", "evaluate.every_steps=5", "evaluate.k=5",
)  # fmt: skip
STEPS = 120
KILLS = 20


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("series")
    write_shards(folder / "shards", classes=2, per_class=12, size=20)
    tiny_config_file(folder)
    return folder


@pytest.fixture(scope="module")
def whole(place: Path) -> Path:
    """The run that nothing happens to."""
    assert end(start(words(place, "whole"), place / "whole.log")) == [0], (place / "whole.log").read_text()
    assert [line["step"] for line in read_metrics(place / "whole") if "loss" in line] == list(range(1, STEPS + 1))
    return place / "whole"


def words(place: Path, name: str, *more: str) -> list[object]:
    return [
        place / "tiny.yaml",
        f"data.train={place / 'shards'}",
        *SETTINGS,
        *more,
        "--output",
        place / name,
        "--resume",
    ]


def records(run: Path) -> list[dict[str, object]]:
    return [{key: value for key, value in line.items() if key not in TIMINGS} for line in read_metrics(run)]


def checksums(checkpoint: Path) -> dict[str, str]:
    checksums: dict[str, str] = json.loads((checkpoint / "state.json").read_text())["sha256"]
    return checksums


def assert_same(run: Path, whole: Path) -> None:
    """Every loss and score to the bit, all tensors of the last checkpoint and of the best teacher, and no litter."""
    lines, wanted = records(run), records(whole)
    for line, expected in zip(lines, wanted, strict=False):
        assert line == expected
    assert len(lines) == len(wanted)
    for place in (run, whole):
        assert (place / "latest").read_text() == checkpoint_directories(place)[0].name + "\n"
    assert checksums(checkpoint_directories(run)[0]) == checksums(checkpoint_directories(whole)[0])
    assert checksums(run / "best") == checksums(whole / "best")
    for folder in ("", "checkpoints"):
        assert sorted(path.name for path in (run / folder).iterdir()) == sorted(
            path.name for path in (whole / folder).iterdir()
        )


def saved_lines(run: Path, whole: Path) -> int:
    """Lines of the whole run up to the newest checkpoint of another."""
    found = checkpoint_directories(run) if run.is_dir() else []
    step = int(found[0].name.removeprefix("step_")) if found else 0
    return sum(1 for line in read_metrics(whole) if 0 < step >= line["step"])


def test_a_run_killed_at_20_random_moments_is_the_run_that_was_not(place: Path, whole: Path) -> None:
    """Kills while it starts, trains, scores and saves, each at a moment that the clock and the draws decide."""
    draws = random.Random(0)
    run, killed, series = place / "killed0", 0, 0
    while killed < KILLS:
        former, ready = inode(run / "metrics.jsonl"), saved_lines(run, whole)
        started = time.monotonic()
        (process,) = start(words(place, run.name), place / "killed.log")
        if killed % 5 == 4:
            time.sleep(draws.uniform(0.0, 2.0))
        else:
            wait_for_lines(process, run / "metrics.jsonl", former, ready + draws.randint(0, 14))
            time.sleep(draws.uniform(0.0, 0.1))
        (status,) = kill([process])
        assert status in (0, -signal.SIGKILL), (place / "killed.log").read_text()
        if status == 0:  # it came to its end before: once more from the start
            assert_same(run, whole)
            series += 1
            run = place / f"killed{series}"
        killed += status != 0
        assert time.monotonic() - started < 240
    assert end(start(words(place, run.name), place / "killed.log")) == [0]
    assert_same(run, whole)


POINTS: list[KillPoint] = [
    ("sop_faiss.train.checkpoints.checkpoint", "write_json", 2, "before"),  # of the best teacher
    ("sop_faiss.train.state", "RunState.tensors", 1, "after"),
    ("sop_faiss.train.checkpoints.checkpoint", "save_file", 2, "midway"),
    ("sop_faiss.train.checkpoints.checkpoint", "sha256_file", 7, "before"),
    ("sop_faiss.files", "_sync_file", 4, "before"),
    ("sop_faiss.files", "_put_in_place", 1, "before"),
    ("sop_faiss.files", "_put_in_place", 2, "after"),
    ("sop_faiss.train.checkpoints.saver", "write_checkpoint", 1, "after"),
    ("sop_faiss.train.checkpoints.saver", "prune_checkpoints", 2, "after"),
    ("sop_faiss.train.checkpoints.checkpoint", "shutil.rmtree", 2, "before"),
    ("sop_faiss.train.checkpoints.checkpoint", "shutil.rmtree", 2, "midway"),
    ("sop_faiss.train.log.monitor", "Monitor.log", 3, "midway"),
    ("sop_faiss.train.log.monitor", "keep_lines_until", 1, "before"),
    ("sop_faiss.verbs.training.run_directory", "clear_leftovers", 1, "after"),
]


def test_kills_in_the_midst_of_writing_renaming_and_pruning(place: Path, whole: Path) -> None:
    for point in POINTS:
        assert end(start(words(place, "points"), place / "points.log", point)) == [-signal.SIGKILL], point
    assert end(start(words(place, "points"), place / "points.log")) == [0]
    assert_same(place / "points", whole)
    assert "damaged" not in (place / "points.log").read_text()  # never was one looked at that was not whole


def test_a_kill_before_the_run_has_its_configuration(place: Path) -> None:
    more = ("train.stop_after_steps=3",)
    point = ("sop_faiss.verbs.training.run_directory", "to_yaml", 1, "before")
    assert end(start(words(place, "early", *more), place / "early.log", point)) == [-signal.SIGKILL]
    assert not (place / "early" / "config.yaml").exists()
    assert end(start(words(place, "early", *more), place / "early.log")) == [0], (place / "early.log").read_text()
    assert find_checkpoint(place / "early").name == "step_00000003"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_exits_75_and_is_resumed_exactly(place: Path, whole: Path, number: signal.Signals) -> None:
    name, draws = number.name, random.Random(number)
    for lines in (7, 40):
        former = inode(place / name / "metrics.jsonl")
        (process,) = start(words(place, name), place / f"{name}.log")
        wait_for_lines(process, place / name / "metrics.jsonl", former, lines)
        time.sleep(draws.uniform(0.0, 0.1))
        assert process.pid is not None
        os.kill(process.pid, number)
        assert end([process]) == [75], (place / f"{name}.log").read_text()
        assert (place / name / REQUEUE_NAME).exists()
        saved = int(find_checkpoint(place / name).name.removeprefix("step_"))
        assert saved == read_metrics(place / name)[-1]["step"] < STEPS
    assert end(start(words(place, name), place / f"{name}.log")) == [0]
    assert records(place / name) == records(whole)
    assert checksums(find_checkpoint(place / name)) == checksums(find_checkpoint(whole))
    assert not (place / name / REQUEUE_NAME).exists()


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_killed_together_go_on_as_ranks_that_were_not(place: Path, ranks: int) -> None:
    """Two can be summed in one order only, three cannot."""
    draws, more = random.Random(1), ("train.stop_after_steps=45",)
    log, whole, run = place / f"{ranks}.log", place / f"{ranks}_whole", place / f"{ranks}_killed"
    assert end(start(words(place, whole.name, *more), log, ranks=ranks)) == [0] * ranks, log.read_text()
    for _ in range(4):
        former, ready = inode(run / "metrics.jsonl"), saved_lines(run, whole)
        processes = start(words(place, run.name, *more), log, ranks=ranks)
        wait_for_lines(processes[0], run / "metrics.jsonl", former, ready + draws.randint(2, 8))
        time.sleep(draws.uniform(0.0, 0.1))
        assert kill(processes) == [-signal.SIGKILL] * ranks, log.read_text()
    assert end(start(words(place, run.name, *more), log, ranks=ranks)) == [0] * ranks, log.read_text()
    assert_same(run, whole)
