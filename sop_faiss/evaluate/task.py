"""An evaluation task: what commands, the scores of a run and the demo all measure of an encoder, and in one way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from sop_faiss.bootstrap import Score
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.progress import ProgressCallback


@runtime_checkable
class EvaluationTask(Protocol):
    """A measurement whose data are open and whose settings are checked."""

    @property
    def names(self) -> tuple[str, ...]:
        """The scores, in order; no two tasks share a name."""
        ...

    def measure(self, encoder: Encoder) -> dict[str, float]:
        """Return each score, in percent.

        Raises:
            DataError: images cannot be read.
            FeatureError: features are not finite.
        """
        ...


class TaskOfQueries(EvaluationTask, Protocol):
    """A task whose scores are means over queries or images, so that two encoders can be compared on the same ones."""

    def measure_each(self, encoder: Encoder, progress: ProgressCallback | None = None) -> dict[str, Score]:
        """Return each score with the value of each query, in an order that is always the same; see `measure`.

        `progress` is called with the number of images read.
        """
        ...


def percents(scores: Mapping[str, Score]) -> dict[str, float]:
    """Return the scores alone."""
    return {name: score.percent for name, score in scores.items()}
