"""Weighted k-NN classification of one set of pictures, or feature store, by another."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from sop_faiss.errors import DataError
from sop_faiss.evaluate.knn import knn_classify
from sop_faiss.evaluate.knn_choices import KS, TEMPERATURE, check_choices, used_ks
from sop_faiss.evaluate.results import write_result
from sop_faiss.features.store import FeatureStore
from sop_faiss.model.spec import EncoderSpec
from sop_faiss.pipeline.feature_sets import FeatureSet, fill_stores, open_feature_set, require_encoder_or_stores
from sop_faiss.progress import ProgressCallback

__all__ = ["KnnOptions", "KnnResult", "evaluate_knn"]


@dataclass(frozen=True)
class KnnOptions:
    """How to classify, and how to extract features where there is no store."""

    ks: tuple[int, ...] = KS
    """Numbers of neighbours."""
    temperature: float = TEMPERATURE
    """Of the votes: weight exp(similarity / temperature)."""
    batch_size: int = 64
    """Pictures per forward pass."""
    workers: int | None = None
    """Threads that read and decode; None: one per CPU, at most 8."""
    max_bad_fraction: float = 0.01
    """Share of unusable pictures that is dropped; more is an error."""


@dataclass(frozen=True)
class KnnResult:
    """One measurement, as `write` puts it into JSON.

    Attributes:
        dataset: the test set as the user named it.
        protocol: every choice that changes the numbers.
        metrics: `top1_k20` and so on, and `top1_best`, in percent.
        encoder: name and fingerprint.
        seconds: wall-clock time.
    """

    dataset: str
    protocol: dict[str, Any]
    metrics: dict[str, float]
    encoder: dict[str, str]
    seconds: float

    def write(self, path: Path) -> None:
        """Write the result as JSON."""
        write_result(path, "sop-knn", self.dataset, self.protocol, self.metrics, self.encoder, self.seconds)


def evaluate_knn(
    train: str,
    test: str,
    encoder: EncoderSpec | None = None,
    options: KnnOptions | None = None,
    *,
    progress: ProgressCallback | None = None,
) -> KnnResult:
    """Classify the test pictures by their nearest training pictures.

    Args:
        train: SRC of labelled pictures, or the directory of a feature store.
        test: likewise.
        encoder: which encoder; None where both are feature stores.
        options: numbers of neighbours and the like.
        progress: called with the number of pictures read.

    Raises:
        ConfigError: the encoder is missing or idle, or an option is impossible.
        DataError: a source is unusable or lacks labels, or both are the same.
        FeatureError: a store is damaged, or the two were made by different encoders, preprocessings or poolings.
        SopError: as `EncoderSpec.load` and `extract_features`.
    """
    options = options or KnnOptions()
    check_choices(options.ks, options.temperature)
    started = time.perf_counter()
    if Path(train).resolve() == Path(test).resolve():
        raise DataError(f"training and test set are both {train}: every picture would find itself, name two")
    sets = [open_feature_set(train), open_feature_set(test)]
    for each in sets:
        _require_labels(each)
    require_encoder_or_stores(sets, encoder)
    if encoder is not None:
        sets = fill_stores(
            sets,
            encoder.load(),
            batch_size=options.batch_size,
            workers=options.workers,
            max_bad_fraction=options.max_bad_fraction,
            progress=progress,
        )
    metrics, protocol = _classify(sets[0], sets[1], options)
    made_by = _store(sets[0]).manifest["encoder"]
    encoder_of_both = {"name": str(made_by.get("name")), "fingerprint": str(made_by["fingerprint"])}
    return KnnResult(test, protocol, metrics, encoder_of_both, time.perf_counter() - started)


def _require_labels(feature_set: FeatureSet) -> Int64[np.ndarray, " n"]:
    labels = feature_set.labels
    without = 0 if labels is None else int((labels < 0).sum())
    if labels is None or without:
        got = "none has one" if labels is None else f"{without} of {len(labels)} have none"
        raise DataError(
            f"{feature_set.name}: k-NN needs a label for every picture, but {got}; wanted class sub-folders, .cls "
            "members, or a label column"
        )
    return labels


def _classify(train: FeatureSet, test: FeatureSet, options: KnnOptions) -> tuple[dict[str, float], dict[str, Any]]:
    """The metrics, and the protocol that they depend on."""
    train_store, test_store = _store(train), _store(test)
    train_labels = _require_labels(train)
    test_labels, compared_by = _in_training_numbers(test, train.class_names)
    metrics = knn_classify(
        train_store.features, train_labels, test_store.features, test_labels, options.ks, options.temperature
    )
    used = used_ks(options.ks, len(train_store))
    best = max(used, key=lambda k: metrics[f"top1_k{k}"])
    protocol = {
        "train": train.name,
        "test": test.name,
        "ks": list(used),
        "ks_clamped_to_train_images": {str(k): count for k, count in used.items() if count < k},
        "best_k": best,
        "temperature": options.temperature,
        "train_images": len(train_store),
        "test_images": len(test_store),
        "train_dropped": _dropped(train_store),
        "test_dropped": _dropped(test_store),
        "classes": len(np.unique(train_labels)),
        "labels_compared_by": compared_by,
        "test_images_of_unseen_classes": int((~np.isin(test_labels, train_labels)).sum()),
        "preprocess": train_store.manifest["preprocess"],
        "pooling": train_store.manifest["pooling"],
    }
    return {**metrics, "top1_best": metrics[f"top1_k{best}"]}, protocol


def _in_training_numbers(test: FeatureSet, train_names: list[str] | None) -> tuple[Int64[np.ndarray, " n"], str]:
    """Test labels in the numbers of the training set, and what tied them: `name`, or `number` where names are unknown.

    Folders number their classes by sorted name, so a class that one side lacks shifts all others. A class that the
    training set does not have gets a number of its own there.
    """
    labels, test_names = _require_labels(test), test.class_names
    if train_names is None or test_names is None:
        return labels, "number"
    if labels.max() >= len(test_names):
        raise DataError(f"{test.name} has a label {labels.max()}, but names only {len(test_names)} classes")
    numbers = {name: number for number, name in enumerate(train_names)}
    translated = [numbers.setdefault(name, len(train_names) + len(numbers)) for name in test_names]
    return np.array(translated, dtype=np.int64)[labels], "name"


def _store(feature_set: FeatureSet) -> FeatureStore:
    assert feature_set.store is not None  # `require_encoder_or_stores` and `fill_stores` saw to it
    return feature_set.store


def _dropped(store: FeatureStore) -> int:
    """How many pictures extraction could not use."""
    dropped = store.manifest.get("dropped")
    return int(dropped.get("count", 0)) if isinstance(dropped, dict) else 0
