"""The scores of a teacher in training: k-NN, mAP, and recall@1 between views, as the evaluate section asks for them.

Everything is opened and checked before the run; what the loop is given only reads a network.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from sop_faiss.bootstrap import Score
from sop_faiss.config import Config
from sop_faiss.data.images.source import ImageSource, open_source
from sop_faiss.data.images.subset import Subset
from sop_faiss.data.shards.shard_stream import ShardStream
from sop_faiss.data.stream import split_holdout
from sop_faiss.data.views.view_pairs import ViewPairs
from sop_faiss.errors import ConfigError, DataError, spell_arguments
from sop_faiss.evaluate.knn_task import KnnTask
from sop_faiss.evaluate.label_free import UNITS
from sop_faiss.evaluate.retrieval import choose_protocol
from sop_faiss.evaluate.retrieval_task import RetrievalTask
from sop_faiss.evaluate.sets.feature_sets import FeatureSet
from sop_faiss.evaluate.sets.labeled_sets import LabeledSets
from sop_faiss.evaluate.sets.retrieval_set import open_retrieval_set
from sop_faiss.evaluate.task import TaskOfQueries
from sop_faiss.evaluate.view_recall_task import ViewRecallTask
from sop_faiss.features.extract import ExtractionOptions
from sop_faiss.model.backbones.backbone import Backbone
from sop_faiss.model.encoders.encoder import Encoder, encoder_of_backbone
from sop_faiss.model.networks import Network
from sop_faiss.train.scoring import Announce, unannounced

_FIELDS = {
    "protocol": "evaluate.retrieval_protocol",
    "data_root": "evaluate.retrieval_root",
    "gnd": "evaluate.retrieval",
    "ks": "evaluate.k",
}
"""What configurations call the arguments of the tasks."""


@dataclass(frozen=True)
class OnlineEvaluation:
    """Scores a network's backbone; safe in a thread next to training, if the network stays as it is.

    Attributes:
        config: of the run.
        tasks: what is measured, in order.
        best_by: the score that `best/` follows.
    """

    config: Config
    tasks: tuple[TaskOfQueries, ...]
    best_by: str

    @property
    def names(self) -> tuple[str, ...]:
        """All scores, in order."""
        return tuple(name for task in self.tasks for name in task.names)

    def __call__(self, teacher: Network, announce: Announce = unannounced) -> dict[str, Score]:
        """Return all scores, in percent, with the value of each query.

        Args:
            teacher: to score.
            announce: each task is announced as a part.

        Raises:
            DataError: images cannot be read.
            FeatureError: features are not finite.
        """
        encoder = scored_encoder(teacher.backbone, self.config)
        scores: dict[str, Score] = {}
        for task in self.tasks:
            with announce() as progress:
                scores |= task.measure_each(encoder, progress)
        return scores


def scored_encoder(backbone: Backbone, config: Config) -> Encoder:
    """Return a backbone as it is scored.

    Raises:
        ConfigError: `evaluate.pooling` is not one of the backbone's.
    """
    settings = config.evaluate
    return encoder_of_backbone(backbone, config, "teacher", pooling=settings.pooling, mirrored=settings.mirrored)


def open_evaluation(
    config: Config,
    source: ImageSource | ShardStream,
    trained: Int64[np.ndarray, " m"],
    held_out: Int64[np.ndarray, " h"],
) -> OnlineEvaluation | None:
    """Open what the evaluate section names; None where nothing is to be scored.

    Args:
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
    tasks: list[TaskOfQueries] = []
    if settings.test:
        tasks.append(_open_knn(config, source, trained, held_out))
    if settings.retrieval:
        tasks.append(_open_retrieval(config))
    if settings.label_free or settings.view_recall == "always" or (settings.view_recall == "auto" and not tasks):
        tasks.append(_open_view_recall(config, source, held_out if len(held_out) else trained))
    names = [name for task in tasks for name in task.names if name not in UNITS]
    best_by = settings.best_by or names[0]
    if best_by not in names:
        raise ConfigError(f"evaluate.best_by = {best_by} is not measured: wanted one of {', '.join(names)}")
    return OnlineEvaluation(config, tuple(tasks), best_by)


def _open_knn(
    config: Config,
    source: ImageSource | ShardStream,
    trained: Int64[np.ndarray, " m"],
    held_out: Int64[np.ndarray, " h"],
) -> KnnTask:
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
    voters, tested = (FeatureSet(images.description, images, None) for images in (gallery, queries))
    extraction = ExtractionOptions(settings.batch_size, max_bad_fraction=config.data.max_bad_fraction)
    try:
        return KnnTask(LabeledSets(voters, tested, "k-NN", extraction=extraction), (settings.k,))
    except ConfigError as error:
        raise ConfigError(spell_arguments(str(error), _FIELDS.get, " = ")) from None


def _open_retrieval(config: Config) -> RetrievalTask:
    """mAP on a data set with ground truth, of whole images whose longer side is that of a global view."""
    settings = config.evaluate
    root = Path(settings.retrieval_root) if settings.retrieval_root else None
    chosen = None if settings.retrieval_protocol == "auto" else settings.retrieval_protocol
    try:
        data = open_retrieval_set(settings.retrieval, root)
        extraction = ExtractionOptions(settings.batch_size)
        task = RetrievalTask(data, choose_protocol(chosen, data.truth), extraction=extraction)
    except DataError as error:
        raise DataError(spell_arguments(str(error), _FIELDS.get)) from None
    if not task.names:
        raise DataError(f"{data.truth.path}: no query has a relevant image, so there is no mAP to measure")
    return task


def _open_view_recall(
    config: Config, source: ImageSource | ShardStream, positions: Int64[np.ndarray, " n"]
) -> ViewRecallTask:
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
    return ViewRecallTask(pairs, config.evaluate.batch_size, config.evaluate.label_free)


def _sample(positions: Int64[np.ndarray, " n"], most: int, seed: int) -> Int64[np.ndarray, " m"]:
    """At most `most` of the positions, a seeded draw."""
    return positions[split_holdout(len(positions), min(1.0, most / len(positions)), seed)[1]]
