"""sop-eval backgrounds: accuracy before other backgrounds, on ImageNet-9."""

from __future__ import annotations

from pathlib import Path

import click

from sop_faiss.cli.classifier_outputs import max_bad_option, say_left_out, say_more_values
from sop_faiss.cli.common import run_command, say_written
from sop_faiss.cli.encoder_options import EncoderCommand, batch_size_option, encoder_options, workers_option
from sop_faiss.cli.eval_logistic import penalty_option
from sop_faiss.cli.json_output import json_option, put_json
from sop_faiss.cli.path_options import NamedPath, force_option, refuse_empty
from sop_faiss.cli.progress_reporter import progress_reporter
from sop_faiss.cli.ranks import ranks_of_torchrun
from sop_faiss.cli.tables import print_table
from sop_faiss.evaluate.logistic_choices import LogisticChoices
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.verbs.output_paths import STDOUT, check_outputs, encoder_files, source_files


@click.command("backgrounds", cls=EncoderCommand, short_help="Accuracy before other backgrounds (ImageNet-9).")
@encoder_options
@click.option(
    "--data", required=True, type=NamedPath(), metavar="DIR", help="ImageNet-9, laid out as SET/val/CLASS/IMAGE."
)
@click.option(
    "--train",
    metavar="SRC",
    callback=refuse_empty,
    help="The images to learn from, unchanged ones of the same classes.  [default: original/train of DIR]",
)
@penalty_option
@batch_size_option
@workers_option
@max_bad_option
@json_option
@force_option
@run_command
def backgrounds_command(
    encoder: EncoderSpec,
    data: Path,
    train: str | None,
    penalties: tuple[float, ...],
    batch_size: int,
    workers: int | None,
    max_bad_fraction: float,
    json_file: Path | None,
    force: bool,
) -> None:
    """Fit a logistic regression on unchanged images, and test it on objects before other backgrounds.

    The gap is mixed_same - mixed_rand: what is lost where the background no longer fits the class.

    \b
    Example:
      sop-eval backgrounds --model runs/photos --data bg_challenge/ --train in9/original/train
    """
    from sop_faiss.features.extract import ExtractionOptions
    from sop_faiss.verbs.scoring.eval_backgrounds import BackgroundsOptions, evaluate_backgrounds

    check_outputs(
        {"--json": json_file}, [data, *source_files(train), *encoder_files(encoder)], to_stdout=["--json"], force=force
    )
    extraction = ExtractionOptions(batch_size, workers, max_bad_fraction)
    options = BackgroundsOptions(LogisticChoices(penalties), extraction)
    with (
        ranks_of_torchrun() as is_main,
        progress_reporter("embedding", "images") as progress,
        progress_reporter("fitting", "fits") as fitting,
    ):
        result = evaluate_backgrounds(data, train, encoder, options, progress=progress, fitting_progress=fitting)
    if not is_main:
        return
    put_json(json_file, result.content())
    protocol, intervals = result.protocol, result.details["intervals"]
    if json_file != STDOUT:
        print_table(
            f"{result.encoder['name']}: {protocol['train_images']:,} training images, {protocol['classes']:,} classes, "
            f"penalty {protocol['penalty']:g}",
            ["backgrounds", "images", "top-1 %", "95 % interval"],
            [
                [
                    "gap: mixed_same - mixed_rand" if name == "bg_gap" else name,
                    f"{protocol['test_images'].get(name, '')}",
                    f"{value:.2f}",
                    "{:.2f} to {:.2f}".format(*intervals[name]),
                ]
                for name, value in result.metrics.items()
            ],
        )
    say_more_values(result, "penalty", "penalties", "--penalty")
    say_left_out(protocol)
    say_written("JSON", json_file)
