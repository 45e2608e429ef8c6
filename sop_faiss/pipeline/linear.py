"""A linear probe on the frozen features of one set of pictures, or feature store, tested on another."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sop_faiss.evaluate.confusion import Confusion, count_confusions
from sop_faiss.evaluate.labelled_part import LabelledPart
from sop_faiss.evaluate.linear import linear_probe
from sop_faiss.evaluate.linear_choices import LinearChoices
from sop_faiss.evaluate.results import write_result
from sop_faiss.model.device import choose_device
from sop_faiss.model.spec import EncoderSpec
from sop_faiss.pipeline.labelled_sets import labelled_sets
from sop_faiss.progress import ProgressCallback

__all__ = ["LinearOptions", "LinearResult", "evaluate_linear"]


@dataclass(frozen=True)
class LinearOptions:
    """How to train the classifier, and how to extract features where there is no store."""

    choices: LinearChoices = field(default_factory=LinearChoices)
    """Learning rates, epochs and the like."""
    batch_size: int = 64
    """Pictures per forward pass of the encoder."""
    workers: int | None = None
    """Threads that read and decode; None: one per CPU, at most 8."""
    max_bad_fraction: float = 0.01
    """Share of unusable pictures that is dropped; more is an error."""
    part: LabelledPart = field(default_factory=LabelledPart)
    """Which training pictures are used."""


@dataclass(frozen=True)
class LinearResult:
    """One measurement, as `write` puts it into JSON.

    Attributes:
        dataset: the test set as the user named it.
        protocol: every choice that changes the numbers, with the accuracy of each learning rate on held-out images.
        metrics: `top1`, and `top5` where there are five classes or more, in percent.
        encoder: name and fingerprint.
        seconds: wall-clock time.
        confusion: which class was taken for which.
    """

    dataset: str
    protocol: dict[str, Any]
    metrics: dict[str, float]
    encoder: dict[str, str]
    seconds: float
    confusion: Confusion

    def write(self, path: Path) -> None:
        """Write the result as JSON."""
        details = {"per_class": self.confusion.per_class()}
        write_result(path, "sop-linear", self.dataset, self.protocol, self.metrics, self.encoder, self.seconds, details)


def evaluate_linear(
    train: str,
    test: str,
    encoder: EncoderSpec | None = None,
    options: LinearOptions | None = None,
    *,
    progress: ProgressCallback | None = None,
    training_progress: ProgressCallback | None = None,
) -> LinearResult:
    """Train a linear classifier on frozen features, and test it.

    Args:
        train: SRC of labelled pictures, or the directory of a feature store.
        test: likewise.
        encoder: which encoder; None where both are feature stores.
        options: learning rates and the like.
        progress: called with the number of pictures read.
        training_progress: called with the epochs trained.

    Raises:
        SopError: as of `labelled_sets` and `linear_probe`.
    """
    options = options or LinearOptions()
    options.choices.check()
    started = time.perf_counter()
    sets = labelled_sets(
        train,
        test,
        encoder,
        options.part,
        what="a linear probe",
        batch_size=options.batch_size,
        workers=options.workers,
        max_bad_fraction=options.max_bad_fraction,
        progress=progress,
    )
    scores = linear_probe(
        sets.train_features,
        sets.train_labels,
        sets.test_features,
        sets.test_labels,
        options.choices,
        device="cpu" if encoder is None else str(choose_device(encoder.device)),
        progress=training_progress,
    )
    protocol = {
        **asdict(options.choices),
        "learning_rates": list(options.choices.learning_rates),
        "learning_rate": scores.learning_rate,
        "held_out_top1": {str(rate): value for rate, value in scores.held_out_top1.items()},
        "held_out_images": scores.held_out_images,
        "augmentation": "none",
        **sets.choices,
    }
    confusion = count_confusions(sets.test_labels, scores.predicted, sets.class_names)
    return LinearResult(test, protocol, scores.metrics, sets.encoder, time.perf_counter() - started, confusion)
