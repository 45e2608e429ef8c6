"""Progress goes to stderr only: a bar on a terminal, else lines with the time that is left."""

from __future__ import annotations

import sys

import pytest

from sop_faiss.cli import progress_reporter as reporter
from sop_faiss.cli.progress_reporter import progress_reporter


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the reporter sees, in seconds; a test sets it."""
    seconds = [0.0]
    monkeypatch.setattr(reporter.time, "monotonic", lambda: seconds[0])
    return seconds


def test_plain_progress(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with progress_reporter("packing", "images") as progress:
        for done in range(1, 1001):
            progress(done, 1000)
    out, err = capsys.readouterr()
    assert out == "" and err == "packing: 1,000 of 1,000 images, 0 s\n"
    monkeypatch.setattr(reporter, "PLAIN_INTERVAL_SECONDS", 0.0)
    with progress_reporter("x", "y") as progress:
        progress(1, 2)
        progress(2, 2)
    assert capsys.readouterr().err == "x: 1 of 2 y, 0 s\nx: 2 of 2 y, 0 s\n"  # one count alone gives no speed
    with progress_reporter("x", "y"):
        pass
    assert capsys.readouterr().err == ""


def test_plain_progress_guesses_what_is_left(capsys: pytest.CaptureFixture[str], clock: list[float]) -> None:
    with progress_reporter("training", "steps") as progress:
        for seconds, done in ((40.0, 500), (60.0, 510), (80.0, 540), (120.0, 1_000)):  # a resumed run, 40 s of start-up
            clock[0] = seconds
            progress(done, 1_000)
    assert capsys.readouterr().err.splitlines() == [
        "training: 500 of 1,000 steps, 40 s",
        "training: 510 of 1,000 steps, 60 s, about 16 min left",  # 490 more at 2 s each
        "training: 540 of 1,000 steps, 80 s, about 8 min left",  # 460 more at 1 s each
        "training: 1,000 of 1,000 steps, 120 s",
    ]


def test_a_start_without_progress_does_not_count(capsys: pytest.CaptureFixture[str], clock: list[float]) -> None:
    with progress_reporter("training", "steps") as progress:
        for seconds, done in ((1.0, 0), (100.0, 0), (120.0, 10), (130.0, 20)):  # the first runs score step 0
            clock[0] = seconds
            progress(done, 20)
    assert capsys.readouterr().err.splitlines()[1] == "training: 10 of 20 steps, 120 s, about 20 s left"


def test_the_speed_of_a_stage_does_not_count_stages_within(
    capsys: pytest.CaptureFixture[str], clock: list[float]
) -> None:
    with progress_reporter("training", "steps") as progress:
        for done in range(1, 5):
            clock[0] += 20.0
            if done == 3:
                with progress_reporter("scoring step 3", "images") as inner:
                    inner(1, 2)
                    clock[0] += 1_000.0
                    inner(2, 2)
            progress(done, 5)
    assert [line for line in capsys.readouterr().err.splitlines() if "left" in line or "scoring" in line] == [
        "training: 2 of 5 steps, 40 s, about 60 s left",
        "scoring step 3: 2 of 2 images, 1000 s",
        "training: 3 of 5 steps, 1060 s, about 40 s left",
        "training: 4 of 5 steps, 1080 s, about 20 s left",
    ]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.2, "10 s"),
        (40.0, "40 s"),
        (41.0, "50 s"),
        (89.0, "90 s"),
        (91.0, "2 min"),
        (3_600.0, "60 min"),
        (30_600.0, "8.5 h"),
    ],
)
def test_guessed_times_are_round(seconds: float, said: str) -> None:
    assert reporter._about(seconds) == f"about {said}"


def test_bar_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress_reporter("packing", "images") as progress:
        progress(3, 7)
    out, err = capsys.readouterr()
    assert out == "" and "packing" in err and "3/7" in err
    with progress_reporter("training", "steps"), progress_reporter("scoring", "images") as progress:  # one within
        progress(2, 9)
    assert not reporter._bars
