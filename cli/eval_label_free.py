"""sop-eval label-free: numbers of an encoder that need no labels."""

from __future__ import annotations

from pathlib import Path

import click

from sop_faiss.cli.classifier_outputs import max_bad_option
from sop_faiss.cli.common import run_command, say_written
from sop_faiss.cli.encoder_options import EncoderCommand, batch_size_option, encoder_options
from sop_faiss.cli.json_output import json_option, put_json
from sop_faiss.cli.path_options import force_option, refuse_empty
from sop_faiss.cli.progress_reporter import progress_reporter
from sop_faiss.cli.tables import print_table
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.verbs.output_paths import STDOUT, check_outputs, encoder_files, source_files


@click.command("label-free", cls=EncoderCommand, short_help="RankMe, LiDAR, alpha-ReQ and others, without labels.")
@encoder_options
@click.option("--data", required=True, metavar="SRC", callback=refuse_empty, help="Images; labels are not read.")
@click.option("--images", default=1000, help="The most images, a seeded draw: compare equal numbers.")
@click.option("--colors", is_flag=True, help="Change the colors of the views, too, as training does.")
@batch_size_option
@max_bad_option
@json_option
@force_option
@run_command
def label_free_command(
    encoder: EncoderSpec,
    data: str,
    images: int,
    colors: bool,
    batch_size: int,
    max_bad_fraction: float,
    json_file: Path | None,
    force: bool,
) -> None:
    """Measure an encoder without labels, on two random crops of each of some images.

    Recall between views, RankMe, LiDAR, alpha-ReQ and the entropy of assignments. docs/metrics.md says what they are,
    and how often they pick the better encoder.

    \b
    Examples:
      sop-eval label-free --model runs/photos --data photos/
      sop-eval label-free --model runs/photos/checkpoints/step_00001000 --data photos/ --json numbers.json
    """
    from sop_faiss.verbs.scoring.eval_label_free import evaluate_label_free

    read = [*source_files(data), *encoder_files(encoder)]
    check_outputs({"--json": json_file}, read, to_stdout=["--json"], force=force)
    with progress_reporter("embedding", "images") as progress:
        result = evaluate_label_free(
            data,
            encoder,
            images=images,
            colors=colors,
            batch_size=batch_size,
            max_bad_fraction=max_bad_fraction,
            progress=progress,
        )
    put_json(json_file, result.content())
    if json_file != STDOUT:
        units = result.protocol["units"]
        print_table(
            f"{result.encoder['name']}: two views of {result.protocol['images']:,} images of {data}",
            [f"{name} ({unit})" for name, unit in units.items()],
            [[f"{result.metrics[name]:.2f}" if name in result.metrics else "-" for name in units]],
        )
    say_written("JSON", json_file)
