"""Time spent training: without scores and start-up, once for steps that are made twice, and stopped at its limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from sop_faiss.verbs.study.clock import StepClock, read_clock


class Time:
    """A time that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_steps(clock: StepClock, time: Time, steps: range, last: int, seconds=lambda step: 1.0) -> None:
    time.now += 50.0  # starting up
    for step in steps:
        time.now += seconds(step)
        clock(step, last)


def test_scores_and_starting_up_cost_nothing(tmp_path):
    time = Time()
    clock = StepClock(tmp_path / "clock", score_every=5, now=time)
    make_steps(clock, time, range(1, 13), 12, lambda step: 31.0 if step in (5, 10, 12) else 1.0)
    assert clock.seconds == pytest.approx(12.0) and clock.step == 12


def test_a_resumed_run_counts_each_step_once(tmp_path):
    """Killed after step 9, continued from the checkpoint of step 6."""
    time, file = Time(), tmp_path / "clock"
    make_steps(StepClock(file, save_every=3, now=time), time, range(1, 10), 12)
    assert read_clock(file)[-1] == (9, pytest.approx(9.0))
    clock = StepClock(file, save_every=3, now=time)
    assert clock.seconds == pytest.approx(9.0)  # what is known before it continues
    make_steps(clock, time, range(7, 13), 12)
    clock.write()
    assert clock.seconds == pytest.approx(12.0)
    lines = read_clock(file)
    assert [step for step, _ in lines] == sorted({step for step, _ in lines}) and lines[-1] == (12, pytest.approx(12))


def test_a_line_that_a_kill_has_cut_is_left_out(tmp_path):
    file: Path = tmp_path / "clock"
    make_steps(StepClock(file, save_every=3, now=(time := Time())), time, range(1, 7), 12)
    file.write_text(file.read_text() + '{"step": 9, "sec')
    assert read_clock(file)[-1][0] == 6
    make_steps(clock := StepClock(file, save_every=3, now=time), time, range(7, 13), 12)
    assert clock.seconds == pytest.approx(12.0)


def test_at_the_limit_it_asks_to_stop_and_a_later_session_knows(tmp_path):
    time, asked = Time(), []
    clock = StepClock(tmp_path / "clock", limit_seconds=4.5, stop=lambda: asked.append(clock.step), now=time)
    make_steps(clock, time, range(1, 7), 100)
    clock.write()
    assert asked[0] == 5 and clock.is_over
    assert StepClock(tmp_path / "clock", limit_seconds=4.5).is_over
    assert not StepClock(tmp_path / "clock", limit_seconds=9.0).is_over
    assert not StepClock(tmp_path / "clock").is_over


def test_steps_that_a_kill_has_lost_do_not_use_up_the_limit(tmp_path):
    """Killed at the limit, before that step was saved: the last checkpoint is of step 3."""
    time, file = Time(), tmp_path / "clock"
    make_steps(StepClock(file, save_every=3, limit_seconds=4.5, now=time), time, range(1, 6), 100)
    clock = StepClock(file, save_every=3, limit_seconds=4.5, now=time)
    assert clock.is_over
    clock.rewind(3)
    assert (clock.step, clock.seconds, clock.is_over) == (3, pytest.approx(3.0), False)
    assert read_clock(file)[-1][0] == 3
    clock.rewind(0)  # nothing was saved
    assert (clock.step, clock.seconds) == (0, 0.0)
