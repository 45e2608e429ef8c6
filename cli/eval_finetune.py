"""sop-eval finetune: the complete network trained on labeled images, or on few of them."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sop_faiss.cli.classifier_outputs import (
    ClassifierOutputs,
    Trained,
    classifier_output_options,
    report_trained,
)
from sop_faiss.cli.common import run_command, say_written
from sop_faiss.cli.encoder_options import EncoderCommand, encoder_options
from sop_faiss.cli.idle_options import refuse_unchosen
from sop_faiss.cli.labeled_part_options import labeled_part_options
from sop_faiss.cli.labeled_sets_options import labeled_sets_options
from sop_faiss.cli.progress_reporter import progress_reporter
from sop_faiss.cli.ranks import ranks_of_torchrun
from sop_faiss.cli.recipe_options import recipe_options, spelled
from sop_faiss.evaluate.sets.labeled_part import LabeledPart
from sop_faiss.evaluate.trained.finetune_choices import (
    LEARNING_RATES,
    QUICK,
    QUICK_SIZE,
    FinetuneChoices,
)
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.progress import silent_stage

if TYPE_CHECKING:
    from sop_faiss.verbs.scoring.classifier_result import ClassifierResult

FINETUNE_OPTIONS = {
    "learning_rates": "Peak learning rate at a batch of 1024, scaled with the batch; of several, held-out training "
    f"images choose. May be repeated.  [default: {', '.join(f'{rate:g}' for rate in LEARNING_RATES)}]",
    "epochs": "Passes over the training images.  [default: 200; ViT-B 100, ViT-L 50]",
    "sweep_epochs": "Epochs for each --lr that is tried.  [default: a tenth]",
    "batch_size": "",
    "warmup_epochs": "Epochs in which the learning rate rises.  [default: BEiT's share]",
    "layer_decay": "Learning rate of a layer relative to the one above.  [default: 0.75; ViT-B 0.65]",
    "drop_path": "Stochastic depth of the last block.  [default: 0.1; ViT-B 0.2, ViT-L 0.4]",
    "weight_decay": "",
    "mixup": "Alpha of mixup; 0: off.",
    "cutmix": "Alpha of CutMix; 0: off.",
    "smoothing": "Label smoothing.",
    "randaugment": "Magnitude of RandAugment; 0: off.",
    "erasing": "Probability of random erasing.",
    "min_crop": "Smallest share of the image that a random crop takes; 1: no random crops.",
    "flip": "",
    "repeats": "Differently augmented copies of an image in a batch (DeiT's recipe: 3).",
    "end_rate": "Learning rate at the end, of the classifier.",
    "head_layer": "first: the classifier is on the first layer of the run's projection head, as iBOT has it for few "
    "labels; none: on the features.",
    "ema": "Decay of a moving average of the weights, which is then tested; 0: none.",
    "held_out": "Share of the training images that chooses the learning rate.",
    "precision": "",
}


@click.command("finetune", cls=EncoderCommand, short_help="The complete network trained on labels (BEiT's recipe).")
@encoder_options
@functools.partial(labeled_sets_options, stores=False)
@recipe_options(FinetuneChoices(), FINETUNE_OPTIONS, f"--size {QUICK_SIZE}, {spelled(QUICK)}")
@labeled_part_options
@classifier_output_options("Write each class's accuracy.")
@run_command
def finetune_command(
    encoder: EncoderSpec,
    train: str,
    test: str,
    given: dict[str, Any],
    quick: bool,
    part: LabeledPart,
    workers: int,
    out: Path | None,
    outputs: ClassifierOutputs,
) -> None:
    """Train the complete network and a classifier on it by BEiT's recipe, as iBOT's evaluation does.

    Held-out training images choose the learning rate; the test images are seen once, after the last epoch.
    Semi-supervised: --labels 1% or --train-list, and --head-layer first (docs/downstream.md has iBOT's recipe).

    \b
    Examples:
      sop-eval finetune --model runs/photos --data imagenette/ --out tuned
      sop-eval finetune --model runs/photos --data imagenette/ --train-share 0.1 --epochs 1000
    """
    from sop_faiss.verbs.scoring.eval_finetune import FinetuneOptions, evaluate_finetune

    outputs.check(train, test, encoder, part)
    if quick and encoder.size is None:
        encoder = replace(encoder, size=QUICK_SIZE)
    choices = FinetuneChoices(**{**(QUICK if quick else {}), **given}, seed=part.seed)
    refuse_unchosen("--lr", choices.learning_rates, "held_out", "sweep_epochs")
    with ranks_of_torchrun() as is_main:
        stage = progress_reporter if is_main else silent_stage
        result = evaluate_finetune(train, test, encoder, FinetuneOptions(choices, part, workers, out), stage=stage)
    if not is_main:
        return
    report_trained(result, words_of(result), outputs)
    say_written("state", out)


def words_of(result: ClassifierResult) -> Trained:
    """Return how a fine-tuning's result is put into words."""
    count = result.protocol["epochs"]
    note = f"{count:,} epoch{'s' if count > 1 else ''}, "
    return Trained("fine-tuning", "learning rate", "learning rates", "--lr", note)
