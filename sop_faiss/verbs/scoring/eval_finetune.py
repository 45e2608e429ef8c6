"""Fine-tune a network on one set of labeled images, or part of it, and test it on another."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from sop_faiss.errors import ConfigError
from sop_faiss.evaluate.classifier import top_metrics
from sop_faiss.evaluate.confusion import count_confusions
from sop_faiss.evaluate.sets.labeled_part import LabeledPart
from sop_faiss.evaluate.sets.labeled_sets import LabeledImages, open_labeled_images
from sop_faiss.evaluate.trained.finetune import fine_tune, rank_classes
from sop_faiss.evaluate.trained.finetune_choices import FinetuneChoices
from sop_faiss.evaluate.trained.finetune_model import filled_choices, first_layer_of
from sop_faiss.evaluate.trained.training_batches import check_readable, check_workers
from sop_faiss.evaluate.trained.training_state import digest_of_images, open_state
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.encoders.load import encoder_of_spec
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.progress import Stage, silent_stage
from sop_faiss.verbs.scoring.classifier_result import ClassifierResult


@dataclass(frozen=True)
class FinetuneOptions:
    """How to train, on what, and where the state is kept."""

    choices: FinetuneChoices = field(default_factory=FinetuneChoices)
    """The recipe."""
    part: LabeledPart = field(default_factory=LabeledPart)
    """Which training images are used."""
    workers: int = 0
    """Processes that decode and augment; 0: this one."""
    out: Path | None = None
    """Where the state is kept after each epoch, from which the same call continues; None: nowhere."""


def evaluate_finetune(
    train: str,
    test: str,
    encoder: EncoderSpec,
    options: FinetuneOptions | None = None,
    *,
    stage: Stage = silent_stage,
) -> ClassifierResult:
    """Fine-tune an encoder with a linear classifier, and test it once, after the last epoch.

    Args:
        train: SRC of labeled images.
        test: as `train`.
        encoder: where training starts.
        options: the recipe and the like.
        stage: announces each stage of the work.

    Raises:
        ConfigError: a choice is impossible, or `out` has a fine-tuning by other choices.
        RunStoppedError: the loss is not finite.
        SopError: as of `open_labeled_images`, `encoder_of_spec`, `open_state` and `fine_tune`.
    """
    options = options or FinetuneOptions()
    options.choices.check()
    check_workers(options.workers)
    sets = open_labeled_images(train, test, "fine-tuning", options.part)
    network = encoder_of_spec(encoder)
    return tune_and_test(sets, encoder, network, options, "finetune", test, stage=stage)


def tune_and_test(
    sets: LabeledImages,
    encoder: EncoderSpec,
    network: Encoder,
    options: FinetuneOptions,
    task: str,
    dataset: str,
    *,
    stage: Stage = silent_stage,
) -> ClassifierResult:
    """Fine-tune an encoder that is there on sets that are open, and test it once; errors as of `evaluate_finetune`.

    Args:
        sets: labeled images.
        encoder: where training starts.
        network: made of it; it stays as it is.
        options: the recipe and the like.
        task: the command after `sop-eval`.
        dataset: what it is measured on, as the user named it.
        stage: announces each stage of the work.
    """
    started = time.perf_counter()
    _require_plain(network)
    choices = filled_choices(network, options.choices)
    first_layer = first_layer_of(encoder, network) if choices.head_layer == "first" else None
    check_readable(sets.test_images, top_value=network.preprocess.top_value, workers=options.workers)
    classes, targets = np.unique(sets.train_labels, return_inverse=True)
    settings = {
        "encoder": f"{network.name} {network.fingerprint}",
        "pooling": network.pooling,
        "preprocess": network.preprocess.to_dict(),
        "training images": digest_of_images(sets.train_images, sets.train_labels),
        **asdict(choices),
    }
    workers, everything = options.workers, np.arange(len(sets.test_images))
    with open_state(options.out, settings, task) as state, stage("training", "steps") as progress:
        tuned = fine_tune(
            network,
            sets.train_images,
            targets,
            choices,
            state,
            first_layer=first_layer,
            workers=workers,
            progress=progress,
        )
    with stage("testing", "images") as progress:
        numbers = rank_classes(tuned.model, network, sets.test_images, everything, workers=workers, progress=progress)
    ranked = classes[numbers]
    protocol = {
        **asdict(choices),
        "learning_rates": list(choices.learning_rates),
        "learning_rate": tuned.learning_rate,
        "held_out_top1": {str(rate): value for rate, value in tuned.held_out_top1.items()},
        "held_out_images": tuned.held_out_images,
        "steps": tuned.steps,
        **sets.choices,
        "preprocess": network.preprocess.to_dict(),
        "pooling": network.pooling,
    }
    return ClassifierResult(
        command=f"sop-eval {task}",
        dataset=dataset,
        protocol=protocol,
        metrics=top_metrics(ranked, sets.test_labels, len(classes)),
        encoder={"name": network.name, "fingerprint": network.fingerprint},
        seconds=time.perf_counter() - started,
        confusion=count_confusions(sets.test_labels, ranked[:, 0], sets.class_names),
    )


def _require_plain(encoder: Encoder) -> None:
    for name, given in (
        ("whitening", encoder.whitening is not None),
        ("cache", encoder.cache is not None),
        ("scales", encoder.preprocess.scales != (1.0,)),
        ("mirrored", encoder.preprocess.mirrored),
    ):
        if given:
            raise ConfigError(
                f"`{name}` does not apply to fine-tuning, which trains the network: leave it out, or name the encoder "
                "itself"
            )
