"""Whether training beat step 0, and the words for it: from the scores that a run keeps in its checkpoints.

The difference is that of the best later teacher to the teacher of step 0 on the same queries, with a paired bootstrap
interval (`bootstrap`). Choosing the best of several scores favors luck, so that the interval is widened by the number
of scores that the run takes (Bonferroni): all of them together are right in 95 % of runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from sop_faiss.bootstrap import Interval

_WITHOUT_LABELS = ("view_recall_at_1", "assignment_entropy")  # of `evaluate/view_recall_task.py`, which stands above
_CAUTION = (
    "without labels this says that images are distinguished better, not that those of one kind are found together"
)


class Outcome(StrEnum):
    """What the interval of a difference to step 0 says."""

    BEAT = "beat step 0"
    NOT_SHOWN = "no difference shown"
    WORSE = "worse than step 0"


class Verdict(NamedTuple):
    """An outcome, and a line with the numbers."""

    outcome: Outcome
    text: str


def outcome_of(difference: Interval) -> Outcome:
    """Return what the interval says: 0 must be outside of it for a difference to be shown."""
    if difference.low > 0:
        return Outcome.BEAT
    return Outcome.WORSE if difference.high < 0 else Outcome.NOT_SHOWN


def describe_difference(difference: Interval) -> str:
    """Write a difference with its interval, in points."""
    return f"{difference.mean:+.2f} points [{difference.low:+.2f}, {difference.high:+.2f}]"


def effect_on(start: str, difference: Interval) -> str:
    """Write what a training did to the encoder that it started from, as in `made lite0 better: +2.00 points [...]`."""
    done = {
        Outcome.BEAT: f"made {start} better",
        Outcome.NOT_SHOWN: f"shows no difference to {start}",
        Outcome.WORSE: f"made {start} worse",
    }
    return f"{done[outcome_of(difference)]}: {describe_difference(difference)}"


def verdict_of(scores: Mapping[str, Any], heading: Callable[[str], str] = str) -> Verdict | None:
    """Return the verdict on a run.

    Args:
        scores: `best_by`, `first_score`, `best_score`, `best_step` and `difference` (mean, low, high), as in the
            `state.json` of a checkpoint.
        heading: gives the name that readers see of a score.

    Returns:
        None if nothing was compared: a score is missing, or the run is of a version that kept no values of queries.
    """
    metric, first, best = (scores.get(name) for name in ("best_by", "first_score", "best_score"))
    shown = scores.get("difference")
    if metric is None or first is None or best is None or shown is None:
        return None
    difference = Interval(*map(float, shown))
    outcome, step = outcome_of(difference), scores.get("best_step")
    place = "later" if step is None else f"at step {step:,}"
    numbers = f"{heading(metric)} was {first:.2f} % at step 0 and {best:.2f} % {place}, the best of the later scores"
    said = {
        Outcome.BEAT: "training beat step 0",
        Outcome.NOT_SHOWN: "no difference to step 0 is shown",
        Outcome.WORSE: "training is worse than step 0",
    }
    caution = f"; {_CAUTION}" if metric in _WITHOUT_LABELS and outcome is Outcome.BEAT else ""
    return Verdict(outcome, f"{said[outcome]}: {describe_difference(difference)}; {numbers}{caution}")
