"""An evaluation task: what commands, the scores of a run and the demo all measure of an encoder, and in one way."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from sop_faiss.model.encoders.encoder import Encoder

__all__ = ["EvaluationTask"]


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
