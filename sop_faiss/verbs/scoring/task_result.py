"""What a task of `sop-eval` measured of an encoder, and how it is written down."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sop_faiss.evaluate.results import result_content


@dataclass(frozen=True)
class TaskResult:
    """One measurement.

    Attributes:
        command: that measured it.
        dataset: what it was measured on, as the user named it.
        protocol: every choice that changes the numbers.
        metrics: in percent, unless the task says otherwise.
        encoder: name and fingerprint.
        seconds: wall-clock time.
        details: more than the metrics: by class, by video and the like.
    """

    command: str
    dataset: str
    protocol: dict[str, Any]
    metrics: dict[str, float]
    encoder: dict[str, str]
    seconds: float
    details: dict[str, Any] = field(default_factory=dict)

    def content(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return result_content(
            self.command, self.dataset, self.protocol, self.metrics, self.encoder, self.seconds, self.details
        )
