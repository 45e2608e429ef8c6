"""sop-linear: a linear probe on frozen features."""

from __future__ import annotations

import click

from sop_faiss.cli.classifier_outputs import (
    ClassifierOutputs,
    Trained,
    classifier_output_options,
    max_bad_option,
    report_trained,
)
from sop_faiss.cli.common import CONTEXT_SETTINGS, run_command
from sop_faiss.cli.encoder_options import EncoderCommand, batch_size_option, workers_option
from sop_faiss.cli.idle_options import refuse_unchosen
from sop_faiss.cli.labeled_part_options import labeled_part_options
from sop_faiss.cli.labeled_sets_options import labeled_sets_options
from sop_faiss.cli.optional_encoder import optional_encoder_options
from sop_faiss.cli.progress_reporter import progress_reporter
from sop_faiss.cli.ranks import ranks_of_torchrun
from sop_faiss.evaluate.linear_choices import LEARNING_RATES, LinearChoices
from sop_faiss.evaluate.sets.labeled_part import LabeledPart
from sop_faiss.model.encoders.spec import EncoderSpec

_DEFAULTS = LinearChoices()


@click.command(cls=EncoderCommand, context_settings=CONTEXT_SETTINGS, no_args_is_help=True)
@click.version_option(package_name="sop-faiss")
@optional_encoder_options
@labeled_sets_options
@click.option(
    "--lr",
    "learning_rates",
    type=float,
    multiple=True,
    default=LEARNING_RATES,
    help="Learning rate for batches of 256; of several, held-out training images choose. May be repeated.",
)
@click.option("--epochs", default=_DEFAULTS.epochs, help="Passes over the training images; the rate falls as a cosine.")
@click.option("--train-batch", default=_DEFAULTS.batch_size, help="Training images per step.")
@click.option("--momentum", default=_DEFAULTS.momentum, help="Momentum of SGD.")
@click.option("--weight-decay", default=_DEFAULTS.weight_decay, help="Weight decay of SGD.")
@click.option(
    "--held-out", default=_DEFAULTS.held_out, help="Share of the training images that chooses the learning rate."
)
@labeled_part_options
@batch_size_option
@workers_option
@max_bad_option
@classifier_output_options("Write each class's accuracy.")
@run_command
def main(
    encoder: EncoderSpec | None,
    train: str,
    test: str,
    learning_rates: tuple[float, ...],
    epochs: int,
    train_batch: int,
    momentum: float,
    weight_decay: float,
    held_out: float,
    part: LabeledPart,
    batch_size: int,
    workers: int | None,
    max_bad_fraction: float,
    outputs: ClassifierOutputs,
) -> None:
    """Train one linear layer on frozen features: how much of the classes can be read off them?

    DINO's protocol (SGD, 100 epochs, cosine, no weight decay) on features that are computed once, without random crops
    and flips. Held-out training images choose the learning rate; the test images never do.

    \b
    Examples:
      sop-linear --model runs/photos --train shards/train --test shards/test
      sop-linear --model runs/photos --data imagenette/
      sop-linear --train features/train --test features/test --json linear.json
      sop-linear --train features/train --test features/test --train-share 0.1 --per-class classes.csv
    """
    from sop_faiss.features.extract import ExtractionOptions
    from sop_faiss.verbs.scoring.linear import LinearOptions, evaluate_linear

    refuse_unchosen("--lr", learning_rates, "held_out")
    outputs.check(train, test, encoder, part)
    choices = LinearChoices(learning_rates, epochs, train_batch, momentum, weight_decay, held_out, part.seed)
    extraction = ExtractionOptions(batch_size, workers, max_bad_fraction)
    options = LinearOptions(choices, extraction, part)
    with (
        ranks_of_torchrun() as is_main,
        progress_reporter("training", "epochs") as training_progress,
        progress_reporter("embedding", "images") as progress,
    ):
        result = evaluate_linear(train, test, encoder, options, progress=progress, training_progress=training_progress)
    if not is_main:
        return
    report_trained(result, Trained("linear probe", "learning rate", "learning rates", "--lr"), outputs)


if __name__ == "__main__":
    main()
