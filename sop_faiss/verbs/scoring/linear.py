"""A linear probe on the frozen features of one set of images, or feature store, tested on another."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field

from sop_faiss.evaluate.confusion import count_confusions
from sop_faiss.evaluate.labeled_part import LabeledPart
from sop_faiss.evaluate.linear import linear_probe
from sop_faiss.evaluate.linear_choices import LinearChoices
from sop_faiss.features.extract import ExtractionOptions
from sop_faiss.model.device import choose_device
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.progress import ProgressCallback
from sop_faiss.verbs.scoring.classifier_result import ClassifierResult
from sop_faiss.verbs.scoring.labeled_sets import labeled_sets

__all__ = ["LinearOptions", "evaluate_linear"]


@dataclass(frozen=True)
class LinearOptions:
    """How to train the classifier, and how to extract features where there is no store."""

    choices: LinearChoices = field(default_factory=LinearChoices)
    """Learning rates, epochs and the like."""
    extraction: ExtractionOptions = field(default_factory=ExtractionOptions)
    """How features are extracted."""
    part: LabeledPart = field(default_factory=LabeledPart)
    """Which training images are used."""


def evaluate_linear(
    train: str,
    test: str,
    encoder: EncoderSpec | None = None,
    options: LinearOptions | None = None,
    *,
    progress: ProgressCallback | None = None,
    training_progress: ProgressCallback | None = None,
) -> ClassifierResult:
    """Train a linear classifier on frozen features, and test it.

    The metrics are `top1`, and `top5` where there are five classes or more; the protocol has the accuracy of each
    learning rate on held-out images.

    Args:
        train: SRC of labeled images, or the directory of a feature store.
        test: likewise.
        encoder: which encoder; None where both are feature stores.
        options: learning rates and the like.
        progress: called with the number of images read.
        training_progress: called with the epochs trained.

    Raises:
        SopError: as of `labeled_sets` and `linear_probe`.
    """
    options = options or LinearOptions()
    options.choices.check()
    started = time.perf_counter()
    sets = labeled_sets(
        train,
        test,
        encoder,
        options.part,
        what="a linear probe",
        extraction=options.extraction,
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
    seconds = time.perf_counter() - started
    return ClassifierResult("sop-linear", test, protocol, scores.metrics, sets.encoder, seconds, confusion)
