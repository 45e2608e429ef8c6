"""Weighted k-NN classification of one set of pictures, or feature store, by another."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from sop_faiss.errors import ConfigError
from sop_faiss.evaluate.confusion import Confusion, count_confusions
from sop_faiss.evaluate.knn import knn_scores
from sop_faiss.evaluate.knn_choices import KS, TEMPERATURE, check_choices, used_ks
from sop_faiss.evaluate.labelled_part import LabelledPart
from sop_faiss.model.spec import EncoderSpec
from sop_faiss.pipeline.classifier_result import ClassifierResult
from sop_faiss.pipeline.labelled_sets import LabelledSets, labelled_sets
from sop_faiss.progress import ProgressCallback

__all__ = ["KnnOptions", "evaluate_knn"]


@dataclass(frozen=True)
class KnnOptions:
    """How to classify, and how to extract features where there is no store."""

    ks: tuple[int, ...] | None = None
    """Numbers of neighbours, none above the number of training pictures. None: DINO's 10, 20, 100 and 200, of which
    those above it use all training pictures."""
    temperature: float = TEMPERATURE
    """Of the votes: weight exp(similarity / temperature)."""
    batch_size: int = 64
    """Pictures per forward pass."""
    workers: int | None = None
    """Threads that read and decode; None: one per CPU, at most 8."""
    max_bad_fraction: float = 0.01
    """Share of unusable pictures that is dropped; more is an error."""
    part: LabelledPart = field(default_factory=LabelledPart)
    """Which training pictures vote."""


def evaluate_knn(
    train: str,
    test: str,
    encoder: EncoderSpec | None = None,
    options: KnnOptions | None = None,
    *,
    progress: ProgressCallback | None = None,
) -> ClassifierResult:
    """Classify the test pictures by their nearest training pictures.

    The metrics are `top1_k20` and so on, and `top1_best`; the confusion is that at the best k.

    Args:
        train: SRC of labelled pictures, or the directory of a feature store.
        test: likewise.
        encoder: which encoder; None where both are feature stores.
        options: numbers of neighbours and the like.
        progress: called with the number of pictures read.

    Raises:
        ConfigError: the encoder is missing or idle, or an option is impossible.
        SopError: as of `labelled_sets`.
    """
    options = options or KnnOptions()
    check_choices(KS if options.ks is None else options.ks, options.temperature)
    started = time.perf_counter()
    sets = labelled_sets(
        train,
        test,
        encoder,
        options.part,
        what="k-NN",
        batch_size=options.batch_size,
        workers=options.workers,
        max_bad_fraction=options.max_bad_fraction,
        progress=progress,
    )
    metrics, protocol, confusion = _classify(sets, options)
    seconds = time.perf_counter() - started
    return ClassifierResult("sop-knn", test, protocol, metrics, sets.encoder, seconds, confusion)


def _classify(sets: LabelledSets, options: KnnOptions) -> tuple[dict[str, float], dict[str, Any], Confusion]:
    """The metrics, the protocol that they depend on, and what was taken for what."""
    count = len(sets.train_features)
    if options.ks is not None and max(options.ks) > count:
        raise ConfigError(
            f"k = {max(options.ks)} neighbours asked, but {count} training pictures vote: wanted k <= {count}"
        )
    used = used_ks(KS if options.ks is None else options.ks, count)
    scores = knn_scores(
        sets.train_features,
        sets.train_labels,
        sets.test_features,
        sets.test_labels,
        list(used),
        options.temperature,
    )
    best = max(used, key=lambda k: scores.metrics[f"top1_k{k}"])
    protocol = {
        "ks": list(used),
        "ks_clamped_to_train_images": {str(k): rows for k, rows in used.items() if rows < k},
        "best_k": best,
        "temperature": options.temperature,
        **sets.choices,
    }
    confusion = count_confusions(sets.test_labels, scores.predicted[best], sets.class_names)
    return {**scores.metrics, "top1_best": scores.metrics[f"top1_k{best}"]}, protocol, confusion
