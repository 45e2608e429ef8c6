"""sop-eval finetune: the complete network trained on labeled images, or on few of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from sop_faiss.cli.classifier_outputs import (
    ClassifierOutputs,
    Trained,
    classifier_output_options,
    report_trained,
)
from sop_faiss.cli.common import progress_reporter, run_command, say_written
from sop_faiss.cli.encoder_options import EncoderCommand, encoder_options
from sop_faiss.cli.labeled_part_options import labeled_part_options
from sop_faiss.cli.labeled_sets_options import labeled_sets_options
from sop_faiss.cli.path_options import NamedPath
from sop_faiss.evaluate.finetune_choices import (
    LEARNING_RATES,
    QUICK,
    QUICK_SIZE,
    FinetuneChoices,
)
from sop_faiss.evaluate.labeled_part import LabeledPart
from sop_faiss.model.encoders.spec import EncoderSpec

R = TypeVar("R")
_DEFAULTS = FinetuneChoices()
_NUMBERS = (
    ("warmup_epochs", "Epochs in which the learning rate rises.  [default: BEiT's share]"),
    ("layer_decay", "Learning rate of a layer relative to the one above.  [default: 0.75; ViT-B 0.65]"),
    ("drop_path", "Stochastic depth of the last block.  [default: 0.1; ViT-B 0.2, ViT-L 0.4]"),
    ("weight_decay", "Weight decay of AdamW."),
    ("mixup", "Alpha of mixup; 0: off."),
    ("cutmix", "Alpha of CutMix; 0: off."),
    ("smoothing", "Label smoothing."),
    ("randaugment", "Magnitude of RandAugment; 0: off."),
    ("erasing", "Probability of random erasing."),
    ("min_crop", "Smallest share of the image that a random crop takes; 1: no random crops."),
    ("flip", "Probability of a mirrored image."),
    ("ema", "Decay of a moving average of the weights, which is then tested; 0: none."),
    ("held_out", "Share of the training images that chooses the learning rate."),
)
_OPTIONS = (
    click.option(
        "--lr",
        "learning_rates",
        type=float,
        multiple=True,
        metavar="RATE",
        help="Peak learning rate at a batch of 1024, scaled with the batch; of several, held-out training images "
        f"choose. May be repeated.  [default: {', '.join(f'{rate:g}' for rate in LEARNING_RATES)}]",
    ),
    click.option("--epochs", type=int, metavar="N", help="[default: 200; ViT-B 100, ViT-L 50]"),
    click.option(
        "--sweep-epochs", type=int, metavar="N", help="Epochs for each --lr that is tried.  [default: a tenth]"
    ),
    click.option("--batch-size", type=int, metavar="N", help=f"Images of a step.  [default: {_DEFAULTS.batch_size}]"),
    *(
        click.option(
            f"--{name.replace('_', '-')}",
            type=int if name == "randaugment" else float,
            help=text if getattr(_DEFAULTS, name) is None else f"{text}  [default: {getattr(_DEFAULTS, name):g}]",
        )
        for name, text in _NUMBERS
    ),
    click.option(
        "--precision", default=_DEFAULTS.precision, show_default=True, metavar="NAME", help="fp32, or bf16 (autocast)."
    ),
    click.option(
        "--quick",
        is_flag=True,
        help=f"A short training. Where not given: --size {QUICK_SIZE}, --lr 0.12, --epochs 10, --batch-size 32, "
        "--layer-decay 0.9, --min-crop 0.5, --randaugment 0, --erasing 0.",
    ),
)
_NAMES = ("learning_rates", "epochs", "sweep_epochs", "batch_size", *(name for name, _ in _NUMBERS), "precision")


def _recipe_options(command: Callable[..., R]) -> Callable[..., R]:
    """Give a click command the options of the recipe; it receives `choices: FinetuneChoices` and `quick: bool`."""

    @functools.wraps(command)
    def with_choices(*args: Any, quick: bool, **options: Any) -> R:
        chosen = {name: options.pop(name) for name in _NAMES}
        given = {name: value for name, value in chosen.items() if value is not None and value != ()}
        return command(*args, choices=FinetuneChoices(**{**(QUICK if quick else {}), **given}), quick=quick, **options)

    decorated: Callable[..., R] = with_choices
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated


@click.command("finetune", cls=EncoderCommand, short_help="The complete network trained on labels (BEiT's recipe).")
@encoder_options
@functools.partial(labeled_sets_options, stores=False)
@_recipe_options
@labeled_part_options
@click.option("--workers", type=int, default=0, show_default=True, help="Processes that decode; 0: this one alone.")
@click.option(
    "--out",
    type=NamedPath(),
    metavar="DIR",
    help="Keep the state after each epoch; the same command continues from it, exactly.",
)
@classifier_output_options("Write each class's accuracy.")
@run_command
def finetune_command(
    encoder: EncoderSpec,
    train: str,
    test: str,
    choices: FinetuneChoices,
    quick: bool,
    part: LabeledPart,
    workers: int,
    out: Path | None,
    outputs: ClassifierOutputs,
) -> None:
    """Train the complete network and a classifier on it by BEiT's recipe, as iBOT's evaluation does.

    Held-out training images choose the learning rate; the test images are seen once, after the last epoch.
    Semi-supervised: --train-share or --train-list, and more epochs.

    \b
    Examples:
      sop-eval finetune --model runs/photos --data imagenette/ --out tuned
      sop-eval finetune --model runs/photos --data imagenette/ --train-share 0.1 --epochs 1000
    """
    from sop_faiss.verbs.scoring.eval_finetune import FinetuneOptions, evaluate_finetune

    outputs.check(train, test, encoder, part)
    if quick and encoder.size is None:
        encoder = replace(encoder, size=QUICK_SIZE)
    options = FinetuneOptions(replace(choices, seed=part.seed), part, workers, out)
    with progress_reporter("testing", "images") as testing, progress_reporter("training", "steps") as progress:
        result = evaluate_finetune(train, test, encoder, options, progress=progress, testing_progress=testing)
    count = result.protocol["epochs"]
    words = Trained(
        "fine-tuning", "learning rate", "learning rates", "--lr", f"{count:,} epoch{'s' if count > 1 else ''}, "
    )
    report_trained(result, words, outputs)
    say_written("state", out)
