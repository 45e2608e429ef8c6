"""The scores of a teacher in training: k-NN, mAP, and recall@1 between views, as the evaluate section asks for them.

Everything is opened and checked before the run; what is handed to the loop only looks at a network.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from sop_faiss.config import Config
from sop_faiss.data.images.source import ImageSource, open_source
from sop_faiss.data.images.subset import Subset
from sop_faiss.data.shards.shard_stream import ShardStream
from sop_faiss.data.stream import split_holdout
from sop_faiss.data.views.view_pairs import ViewPairs
from sop_faiss.errors import ConfigError, DataError, spell_arguments
from sop_faiss.evaluate.knn import knn_classify
from sop_faiss.evaluate.retrieval import choose_protocol, score_retrieval
from sop_faiss.evaluate.retrieval_set import open_retrieval_set
from sop_faiss.evaluate.view_recall import view_recall_at_1
from sop_faiss.features.extract import ExtractionOptions, embed_images, extract_features
from sop_faiss.model.encoders.encoder import Encoder, encoder_of_backbone
from sop_faiss.model.networks import Network
from sop_faiss.verbs.scoring.feature_sets import FeatureSet
from sop_faiss.verbs.scoring.labeled_sets import in_training_numbers

__all__ = ["OnlineEvaluation", "open_evaluation"]

_REPORTED = ("", "medium", "hard")
"""Difficulties whose mAP is a score; what is easy says little of a training."""
_FIELDS = {
    "protocol": "evaluate.retrieval_protocol",
    "data_root": "evaluate.retrieval_root",
    "gnd": "evaluate.retrieval",
}
"""What configurations call the arguments of a retrieval set."""


@dataclass(frozen=True)
class _Part:
    """Scores that are measured together: their names, and how."""

    names: tuple[str, ...]
    measure: Callable[[Encoder], dict[str, float]]


@dataclass(frozen=True)
class OnlineEvaluation:
    """Scores a network's backbone; safe in a thread beside training, if the network stays as it is.

    Attributes:
        config: of the run.
        parts: what is measured, in order.
        best_by: the score that `best/` follows.
    """

    config: Config
    parts: tuple[_Part, ...]
    best_by: str

    @property
    def names(self) -> tuple[str, ...]:
        """Of all scores, in order."""
        return tuple(name for part in self.parts for name in part.names)

    def __call__(self, teacher: Network) -> dict[str, float]:
        """All scores in percent.

        Raises:
            DataError: images cannot be read.
            FeatureError: features are not finite.
        """
        encoder = encoder_of_backbone(teacher.backbone, self.config, "teacher")
        return {name: score for part in self.parts for name, score in part.measure(encoder).items()}


def open_evaluation(
    config: Config,
    source: ImageSource | ShardStream,
    trained: Int64[np.ndarray, " m"],
    held_out: Int64[np.ndarray, " h"],
) -> OnlineEvaluation | None:
    """Open what the evaluate section names; None where nothing is to be scored.

    Args:
        config: of the run.
        source: its training images.
        trained: positions of those that are trained on.
        held_out: positions of those left out.

    Raises:
        ConfigError: a score is impossible, or `evaluate.best_by` is not among them.
        DataError: images or ground truth are missing, damaged or without labels.
    """
    settings = config.evaluate
    if not settings.every_steps:
        return None
    parts = []
    if settings.test:
        parts.append(_open_knn(config, source, trained, held_out))
    if settings.retrieval:
        parts.append(_open_retrieval(config))
    if settings.view_recall == "always" or (settings.view_recall == "auto" and not parts):
        parts.append(_open_view_recall(config, source, held_out if len(held_out) else trained))
    names = [name for part in parts for name in part.names]
    best_by = settings.best_by or names[0]
    if best_by not in names:
        raise ConfigError(f"evaluate.best_by = {best_by} is not measured: wanted one of {', '.join(names)}")
    return OnlineEvaluation(config, tuple(parts), best_by)


def _open_knn(
    config: Config,
    source: ImageSource | ShardStream,
    trained: Int64[np.ndarray, " m"],
    held_out: Int64[np.ndarray, " h"],
) -> _Part:
    """k-NN top-1 on labeled images."""
    settings = config.evaluate
    if settings.test == "holdout" and not isinstance(source, ShardStream):
        gallery: ImageSource = Subset(source, trained)
        queries: ImageSource = Subset(source, held_out)
    else:
        access = replace(config.data, access="auto", samples_per_epoch=0)
        gallery, queries = open_source(settings.train, access), open_source(settings.test, access)
    if settings.max_train_images:
        gallery = Subset(gallery, _sample(np.arange(len(gallery)), settings.max_train_images, config.train.seed))
    if settings.k > len(gallery):
        raise ConfigError(f"evaluate.k = {settings.k} exceeds the {len(gallery)} gallery images: lower it")
    voters, tested = (FeatureSet(images.description, images, None) for images in (gallery, queries))
    in_training_numbers(voters, tested, "k-NN")

    def measure(encoder: Encoder) -> dict[str, float]:
        extraction = ExtractionOptions(settings.batch_size, max_bad_fraction=config.data.max_bad_fraction)
        train, test = (extract_features(encoder, images, extraction) for images in (gallery, queries))
        assert train.labels is not None
        labels, _, _ = in_training_numbers(replace(voters, store=train), replace(tested, store=test), "k-NN")
        scores = knn_classify(train.features, train.labels, test.features, labels, ks=(settings.k,))
        return {f"knn_top1_k{settings.k}": float(scores[f"top1_k{settings.k}"])}

    return _Part((f"knn_top1_k{settings.k}",), measure)


def _open_retrieval(config: Config) -> _Part:
    """mAP on a data set with ground truth, of whole images whose longer side is that of a global view."""
    settings = config.evaluate
    root = Path(settings.retrieval_root) if settings.retrieval_root else None
    chosen = None if settings.retrieval_protocol == "auto" else settings.retrieval_protocol
    try:
        data = open_retrieval_set(settings.retrieval, root)
        rules = choose_protocol(chosen, data.truth)
    except DataError as error:
        raise DataError(spell_arguments(str(error), _FIELDS.get)) from None
    data.queries.top_value = config.data.top_value
    queries = data.whole_queries if rules.box == "ignored" else data.queries
    counted = [
        difficulty
        for difficulty in rules.difficulties
        if difficulty.name in _REPORTED
        and any(len(query.lists[name]) for query in data.truth.queries for name in difficulty.relevant)
    ]
    if not counted:
        raise DataError(f"{data.truth.path}: no query has a relevant image, so there is no mAP to measure")
    names = {difficulty.metric("mAP"): difficulty.metric("map") for difficulty in counted}

    def measure(encoder: Encoder) -> dict[str, float]:
        asked, gallery = (
            extract_features(
                encoder,
                images,
                ExtractionOptions(settings.batch_size, max_bad_fraction=0.0),
                preprocess=encoder.preprocess.keeping_aspect(),
            )
            for images in (queries, data.gallery)
        )
        metrics = score_retrieval(asked.features, gallery.features, data.truth, rules).metrics
        return {name: float(metrics[metric]) for metric, name in names.items()}

    return _Part(tuple(names.values()), measure)


def _open_view_recall(config: Config, source: ImageSource | ShardStream, positions: Int64[np.ndarray, " n"]) -> _Part:
    """Recall@1 between two views of the run's own images."""
    if isinstance(source, ShardStream):
        instead = (
            "set evaluate.view_recall=auto"
            if config.evaluate.view_recall == "always"
            else "name evaluate.test or evaluate.retrieval, or set evaluate.every_steps=0"
        )
        raise ConfigError(f"view_recall_at_1 reads single images, and data.access = sequential has none: {instead}")
    if len(positions) < 2:
        raise ConfigError(f"view_recall_at_1 of {len(positions)} image: raise data.holdout_share, or set it to 0")
    pairs = ViewPairs(source, _sample(positions, config.evaluate.view_images, seed=0), config)
    images_per_pass = max(1, config.evaluate.batch_size // 2)

    def measure(encoder: Encoder) -> dict[str, float]:
        as_they_are = replace(encoder.preprocess, resize=encoder.preprocess.crop)  # views have their size already
        features, waiting = [], iter(pairs)
        while part := list(itertools.islice(waiting, images_per_pass)):
            views = [pair[number] for number in (0, 1) for pair in part]
            embedded = embed_images(encoder, views, preprocess=as_they_are, batch_size=len(views))
            features.append(embedded.reshape(2, len(part), -1))
        first, second = np.concatenate([np.empty((2, 0, encoder.feature_dim), np.float32), *features], axis=1)
        return {"view_recall_at_1": view_recall_at_1(first, second)}

    return _Part(("view_recall_at_1",), measure)


def _sample(positions: Int64[np.ndarray, " n"], most: int, seed: int) -> Int64[np.ndarray, " m"]:
    """At most so many of the positions, a seeded draw."""
    return positions[split_holdout(len(positions), min(1.0, most / len(positions)), seed)[1]]
