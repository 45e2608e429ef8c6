"""What a study measures of each run's last teacher: k-NN, a linear probe, retrieval, by the tasks of the commands."""

from __future__ import annotations

from pathlib import Path

from sop_faiss.config import Config
from sop_faiss.config.study import FinalConfig
from sop_faiss.data.images.subset import Subset
from sop_faiss.data.shards.shard_stream import ShardStream
from sop_faiss.errors import ConfigError, spell_arguments
from sop_faiss.evaluate.knn_task import KnnTask
from sop_faiss.evaluate.linear_choices import LinearChoices
from sop_faiss.evaluate.linear_task import LinearTask
from sop_faiss.evaluate.retrieval import choose_protocol
from sop_faiss.evaluate.retrieval_task import RetrievalTask
from sop_faiss.evaluate.sets.feature_sets import FeatureSet, open_feature_set
from sop_faiss.evaluate.sets.labeled_sets import LabeledSets
from sop_faiss.evaluate.sets.retrieval_set import open_retrieval_set
from sop_faiss.evaluate.task import EvaluationTask
from sop_faiss.features.extract import ExtractionOptions
from sop_faiss.verbs.training.training_images import open_training_images


def open_final_tasks(final: FinalConfig, config: Config) -> list[EvaluationTask]:
    """Open what is measured of a run's last teacher.

    Args:
        final: which tasks, on which data.
        config: of the run; its section `evaluate` names the data that `final` does not.

    Raises:
        ConfigError: a task has no data, or a choice is impossible.
        DataError: images or ground truth are missing, damaged or without labels.
    """
    tasks: list[EvaluationTask] = []
    try:
        if {"knn", "linear"} & {*final.tasks}:
            sets = _labeled_sets(final, config)
            if "knn" in final.tasks:
                tasks.append(KnnTask(sets, final.ks))
            if "linear" in final.tasks:
                tasks.append(LinearTask(sets, LinearChoices(epochs=final.linear_epochs)))
    except ConfigError as error:
        raise ConfigError(spell_arguments(str(error), {"ks": "final.ks"}.get, " = ")) from None
    if "retrieval" in final.tasks:
        tasks.append(_retrieval(final, config))
    return tasks


def _labeled_sets(final: FinalConfig, config: Config) -> LabeledSets:
    train, test = final.train or config.evaluate.train, final.test or config.evaluate.test
    if not final.test and config.evaluate.test == "holdout":
        source, trained, held_out = open_training_images(config)
        if isinstance(source, ShardStream):
            raise ConfigError("final.tasks needs single images, which data.access = sequential does not have")
        sets = [
            FeatureSet(part.description, part, None) for part in (Subset(source, trained), Subset(source, held_out))
        ]
    elif train and test:
        sets = [open_feature_set(train), open_feature_set(test)]
    else:
        raise ConfigError(
            f"final.tasks = {list(final.tasks)} needs labeled images: set final.train and final.test, or "
            "evaluate.train and evaluate.test"
        )
    extraction = ExtractionOptions(config.evaluate.batch_size, max_bad_fraction=config.data.max_bad_fraction)
    return LabeledSets(sets[0], sets[1], "a final task", extraction=extraction)


def _retrieval(final: FinalConfig, config: Config) -> RetrievalTask:
    settings = config.evaluate
    name = final.retrieval or settings.retrieval
    if not name:
        raise ConfigError("final.tasks has retrieval without a data set: set final.retrieval or evaluate.retrieval")
    root = Path(settings.retrieval_root) if settings.retrieval_root else None
    data = open_retrieval_set(name, root)
    chosen = None if settings.retrieval_protocol == "auto" else settings.retrieval_protocol
    extraction = ExtractionOptions(settings.batch_size)
    return RetrievalTask(data, choose_protocol(chosen, data.truth), extraction=extraction)
