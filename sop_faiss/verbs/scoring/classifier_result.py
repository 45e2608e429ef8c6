"""What a classifier on frozen features scored, k-NN or a linear one, and how it is written down."""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sop_faiss.bootstrap import Interval, share_interval
from sop_faiss.evaluate.baselines import Baseline
from sop_faiss.evaluate.confusion import Confusion
from sop_faiss.evaluate.results import result_content
from sop_faiss.files import atomic_file


@dataclass(frozen=True)
class ClassifierResult:
    """One measurement.

    Attributes:
        command: that measured it.
        dataset: the test set as the user named it.
        protocol: every choice that changes the numbers.
        metrics: in percent.
        encoder: name and fingerprint.
        seconds: wall-clock time.
        confusion: which class was taken for which.
        baselines: what simpler features scored; empty if that was not asked for.
    """

    command: str
    dataset: str
    protocol: dict[str, Any]
    metrics: dict[str, float]
    encoder: dict[str, str]
    seconds: float
    confusion: Confusion
    baselines: list[Baseline] = field(default_factory=list)

    def intervals(self) -> dict[str, Interval]:
        """Return the 95 % interval of each metric, over other test images like these."""
        images = int(self.confusion.images().sum())
        return {name: share_interval(value, images) for name, value in self.metrics.items()}

    def content(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        intervals = {name: [each.low, each.high] for name, each in self.intervals().items()}
        details: dict[str, Any] = {"intervals": intervals, "per_class": self.confusion.per_class()}
        if self.baselines:
            details["baselines"] = {each.name: each.to_dict() for each in self.baselines}
        return result_content(
            self.command, self.dataset, self.protocol, self.metrics, self.encoder, self.seconds, details
        )

    def write_per_class(self, path: Path) -> None:
        """Write `class,images,right,top1` (percent), one line per tested class, atomically."""
        with atomic_file(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(["class", "images", "right", "top1"])
            for name, row in self.confusion.per_class().items():
                writer.writerow([name, row["images"], row["right"], f"{row['top1']:.4f}"])
