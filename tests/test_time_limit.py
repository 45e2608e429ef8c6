"""Runs of `train.minutes`, by a clock that the tests set: each step takes as long as they say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sop_faiss.config.study import StudyConfig
from sop_faiss.errors import ConfigError
from sop_faiss.model.checkpoint import checkpoint_directories, read_state
from sop_faiss.train import loop
from sop_faiss.train.log.monitor import read_metrics
from sop_faiss.train.time_limit import TimeLimit
from sop_faiss.verbs.study.plan import arm_configs
from sop_faiss.verbs.training.dry_run import describe_run
from sop_faiss.verbs.training.train import run_training
from tests.images import write_shards
from tests.runs import tiny_config, tiny_config_file

TIMINGS = ("images_per_second", "data_wait_share", "memory_peak_bytes")


class Clock:
    """Each step takes `seconds(step)`; what is between steps takes 1,000 seconds, which must not count."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self._seconds, self._now = seconds, 0.0

    def limit(self, state) -> TimeLimit:
        """A limit with this clock."""
        limit = TimeLimit(state, lambda: self._now)
        start, after = limit.start, limit.after_step

        def started() -> None:
            self._now += 1000
            start()

        def stepped() -> int:
            self._now += self._seconds(state.step)
            return after()

        limit.start, limit.after_step = started, stepped
        return limit


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    return write_shards(tmp_path_factory.mktemp("train"), classes=2, per_class=6, size=20)


@pytest.fixture
def train(tmp_path, shards, monkeypatch):
    def run(name: str, seconds: Callable[[int], float], *overrides: str):
        monkeypatch.setattr(loop, "TimeLimit", Clock(seconds).limit)
        small = ("optim.warmup_epochs=0.5", "model.depth=1", "train.log_every_steps=7", f"data.train={shards}")
        return run_training(tiny_config(tmp_path, *small, *overrides), tmp_path / name, resume=True)

    return run


def lines(run: Path) -> list[dict]:
    return [{key: value for key, value in line.items() if key not in TIMINGS} for line in read_metrics(run)]


def test_the_steps_fill_the_minutes_and_the_schedules_end_with_them(train, tmp_path):
    # 60 seconds; of the 10 steps before the decision, 5 took 5 s and 5 took 2 s, which is the speed
    result = train("run", lambda step: 5.0 if step <= 5 else 2.0, "train.minutes=1", "train.epochs=800")
    assert result.finished and result.step == result.steps == 10 + (60 - 35) // 2
    records = lines(tmp_path / "run")
    assert records[-1]["step"] == result.steps  # logged though no multiple of seven
    assert read_state(checkpoint_directories(tmp_path / "run")[0])["step"] == result.steps
    assert records[-1]["learning_rate"] < 0.02 * max(line["learning_rate"] for line in records)
    assert records[-1]["momentum"] == pytest.approx(1, abs=1e-4)


def test_resumed_it_goes_on_as_if_nothing_had_happened(train, tmp_path):
    """Stopped before speed is measured, while it is, when the number of steps is decided, and later."""
    whole = train("whole", lambda step: 6.0, "train.minutes=2")
    assert whole.steps == 20
    for stop in (3, 7, 10, 14):
        stopped = train("resumed", lambda step: 6.0, "train.minutes=2", f"train.stop_after_steps={stop}")
        assert stopped.step == stop and stopped.steps == (20 if stop >= 10 else None)
    assert train("resumed", lambda step: 6.0, "train.minutes=2").steps == 20
    state = read_state(checkpoint_directories(tmp_path / "resumed")[0])
    assert (state["elapsed"]["seconds"], state["decided_steps"]) == (120, 20)
    assert lines(tmp_path / "resumed") == lines(tmp_path / "whole")


def test_the_decision_holds_whatever_the_speed_is_later(train):
    """Faster: it ends sooner, with its schedules. Slower: it ends at 1.1 times the minutes."""
    long = ("train.minutes=2", "optim.warmup_epochs=9.5")
    train("run", lambda step: 6.0, *long, "train.stop_after_steps=12")
    slower = train("run", lambda step: 12.0, *long)  # it ends one step before its warm-up
    assert slower.finished and slower.step == slower.steps == 18
    assert 120 * 1.1 <= 12 * 6 + (slower.step - 12) * 12 <= 120 * 1.1 + 12
    assert train("faster", lambda step: 6.0 if step <= 10 else 1.0, "train.minutes=2").step == 20


def test_steps_longer_than_the_time_end_it(train):
    assert train("run", lambda step: 1000.0, "train.minutes=0.1").step == 2


def test_what_cannot_fit_is_one_line(train, tmp_path, shards):
    with pytest.raises(ConfigError, match=r"^optim\.warmup_epochs: .*train\.minutes = 8"):
        train("run", lambda step: 6.0, "train.minutes=8", "optim.warmup_epochs=50")
    with pytest.raises(ConfigError, match=r"^train\.minutes = 8 with train\.phases"):
        tiny_config(tmp_path, "train.minutes=8", "train.phases=[{until: 0.5, global_size: 8}]")
    for minutes in ("-1", ".nan", ".inf", "1e9"):
        with pytest.raises(ConfigError, match=r"^train\.minutes = "):
            tiny_config(tmp_path, f"train.minutes={minutes}")
    study = StudyConfig(str(tiny_config_file(tmp_path)), {"train.minutes": 8, "data.train": str(shards)})
    with pytest.raises(ConfigError, match=r"train\.minutes = 8 .* budget\.minutes"):
        arm_configs(study)


def test_scores_are_of_the_last_step_and_a_dry_run_does_not_know_it(train, tmp_path, shards):
    scored = ("evaluate.every_steps=1000", "evaluate.view_images=8", "train.minutes=2")
    assert describe_run(tiny_config(tmp_path, f"data.train={shards}", *scored))["steps"] is None
    result = train("run", lambda step: 6.0, *scored)
    assert [line["step"] for line in lines(tmp_path / "run") if "view_recall_at_1" in line] == [0, result.steps]
