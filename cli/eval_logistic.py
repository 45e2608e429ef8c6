"""sop-eval logistic: logistic regression on frozen features."""

from __future__ import annotations

import click

from sop_faiss.cli.classifier_outputs import (
    ClassifierOutputs,
    Trained,
    classifier_output_options,
    max_bad_option,
    report_trained,
)
from sop_faiss.cli.common import run_command
from sop_faiss.cli.encoder_options import EncoderCommand, batch_size_option, workers_option
from sop_faiss.cli.idle_options import refuse_unchosen
from sop_faiss.cli.labeled_part_options import labeled_part_options
from sop_faiss.cli.labeled_sets_options import labeled_sets_options
from sop_faiss.cli.optional_encoder import optional_encoder_options
from sop_faiss.cli.progress_reporter import progress_reporter
from sop_faiss.cli.ranks import ranks_of_torchrun
from sop_faiss.evaluate.logistic_choices import PENALTIES, LogisticChoices
from sop_faiss.evaluate.sets.labeled_part import LabeledPart
from sop_faiss.model.encoders.spec import EncoderSpec

_DEFAULTS = LogisticChoices()

penalty_option = click.option(
    "--penalty",
    "penalties",
    type=float,
    multiple=True,
    default=PENALTIES,
    help="Weight of |W|^2 / 2 beside the mean loss; of several, held-out training images choose. May be repeated.",
)
"""Give a click command `penalties: tuple[float, ...]`."""


@click.command("logistic", cls=EncoderCommand, short_help="Logistic regression on frozen features, by L-BFGS.")
@optional_encoder_options
@labeled_sets_options
@penalty_option
@click.option("--iterations", default=_DEFAULTS.iterations, help="The most iterations of L-BFGS.")
@click.option("--held-out", default=_DEFAULTS.held_out, help="Share of the training images that chooses the penalty.")
@labeled_part_options
@batch_size_option
@workers_option
@max_bad_option
@classifier_output_options("Write each class's accuracy.")
@run_command
def logistic_command(
    encoder: EncoderSpec | None,
    train: str,
    test: str,
    penalties: tuple[float, ...],
    iterations: int,
    held_out: float,
    part: LabeledPart,
    batch_size: int,
    workers: int | None,
    max_bad_fraction: float,
    outputs: ClassifierOutputs,
) -> None:
    """Fit a logistic regression on frozen features: iBOT's protocol for few labels (1 %, 10 %, all).

    Held-out training images choose the penalty; the test images never do.

    \b
    Examples:
      sop-eval logistic --model runs/photos --data imagenette/ --train-share 0.1
      sop-eval logistic --train features/train --test features/test --json logistic.json
    """
    from sop_faiss.features.extract import ExtractionOptions
    from sop_faiss.verbs.scoring.eval_logistic import LogisticOptions, evaluate_logistic

    refuse_unchosen("--penalty", penalties, "held_out")
    outputs.check(train, test, encoder, part)
    choices = LogisticChoices(penalties, iterations, held_out, part.seed)
    options = LogisticOptions(choices, ExtractionOptions(batch_size, workers, max_bad_fraction), part)
    with (
        ranks_of_torchrun() as is_main,
        progress_reporter("fitting", "fits") as fitting_progress,
        progress_reporter("embedding", "images") as progress,
    ):
        result = evaluate_logistic(train, test, encoder, options, progress=progress, fitting_progress=fitting_progress)
    if not is_main:
        return
    report_trained(result, Trained("logistic regression", "penalty", "penalties", "--penalty"), outputs)
