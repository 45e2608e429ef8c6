"""Fine-tune a network on one of the sets of the transfer table, as its authors give it out, and test it there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from sop_faiss.data.images.source import ImageSource
from sop_faiss.data.images.subset import Subset
from sop_faiss.evaluate.sets.feature_sets import FeatureSet
from sop_faiss.evaluate.sets.labeled_part import LabeledPart
from sop_faiss.evaluate.sets.labeled_sets import LabeledSets
from sop_faiss.evaluate.sets.transfer_sets import find_set, open_set
from sop_faiss.evaluate.trained.finetune_choices import FinetuneChoices
from sop_faiss.evaluate.trained.training_batches import check_workers
from sop_faiss.evaluate.trained.training_layers import size_of_recipe, trunk_of
from sop_faiss.evaluate.trained.transfer_choices import recipe_of_set
from sop_faiss.model.encoders.load import encoder_of_spec
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.progress import Stage, silent_stage
from sop_faiss.verbs.scoring.classifier_result import ClassifierResult
from sop_faiss.verbs.scoring.eval_finetune import FinetuneOptions, tune_and_test


@dataclass(frozen=True)
class TransferOptions:
    """Which set it is, how to train, and where the state is kept."""

    name: str | None = None
    """One of the sets; None: what the directory has."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `FinetuneChoices` that take the place of the recipe's."""
    part: LabeledPart = field(default_factory=LabeledPart)
    """Which training images are used."""
    most_images: int | None = None
    """An equal share of each class and evenly spaced test images, so that each set has about as many; None: all."""
    workers: int = 0
    """Processes that decode and augment; 0: this one."""
    out: Path | None = None
    """Where the state is kept after each epoch, from which the same call continues; None: nowhere."""


def evaluate_transfer(
    data: Path, encoder: EncoderSpec, options: TransferOptions | None = None, *, stage: Stage = silent_stage
) -> ClassifierResult:
    """Fine-tune an encoder on a set by DeiT's recipe, and test it once, after the last epoch.

    Args:
        data: the directory of the set.
        encoder: where training starts.
        options: the set, the recipe and the like.
        stage: announces each stage of the work.

    Raises:
        ConfigError: a choice is impossible, or `out` has a training by other choices.
        DataError: the set is missing, damaged or of another layout, or an image cannot be used.
        RunStoppedError: the loss is not finite.
        SopError: as of `encoder_of_spec` and `open_state`.
    """
    options = options or TransferOptions()
    FinetuneChoices(**options.given).check()
    check_workers(options.workers)
    options.part.check()
    name = find_set(data) if options.name is None else options.name
    train, test = open_set(data, name)
    part = options.part
    if options.most_images is not None:
        if part == LabeledPart(seed=part.seed):
            part = replace(part, train_share=min(1.0, options.most_images / len(train)))
        test = _spaced(test, options.most_images)
    sets = LabeledSets(
        FeatureSet(f"{data} ({name}, training)", train, None), FeatureSet(f"{data} ({name})", test, None), name, part
    ).images()
    network = encoder_of_spec(encoder)
    recipe = recipe_of_set(name, size_of_recipe(trunk_of(network)))
    choices = FinetuneChoices(**{**recipe, **options.given, "seed": part.seed})
    if "warmup_epochs" not in options.given and choices.epochs is not None:
        choices = replace(choices, warmup_epochs=float(min(recipe["warmup_epochs"], choices.epochs)))
    tuning = FinetuneOptions(choices, part, options.workers, options.out)
    result = tune_and_test(sets, encoder, network, tuning, "transfer", str(data), stage=stage)
    return replace(result, protocol={"set": name, **result.protocol})


def _spaced(source: ImageSource, most: int) -> ImageSource:
    """Return at most `most` images of a source, evenly spaced."""
    count = min(len(source), most)
    return Subset(source, np.arange(count) * len(source) // count)
