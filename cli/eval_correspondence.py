"""sop-eval correspondence: patches that match between two images or two views, as a figure and a share."""

from __future__ import annotations

from pathlib import Path

import click

from sop_faiss.cli.common import run_command, say_written
from sop_faiss.cli.encoder_options import EncoderCommand, encoder_options
from sop_faiss.cli.json_output import json_option, put_json
from sop_faiss.cli.path_options import NamedPath, force_option, refuse_empty
from sop_faiss.cli.progress_reporter import progress_reporter
from sop_faiss.cli.tables import print_table
from sop_faiss.files import write_file
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.verbs.output_paths import STDOUT, check_outputs, encoder_files, source_files


@click.command("correspondence", cls=EncoderCommand, short_help="Matching patches of two images or two views.")
@click.argument("src", metavar="SRC", callback=refuse_empty)
@click.argument("other", metavar="[IMAGE2]", required=False, callback=refuse_empty)
@encoder_options
@click.option("--out", required=True, type=NamedPath(), metavar="FILE.png", help="The figure.")
@click.option("--top", default=12, metavar="N", help="The most similar matches are drawn.")
@click.option(
    "--stride",
    type=int,
    metavar="PIXELS",
    help="From token to token: of convolutional networks, which map is taken.  [default: the last]",
)
@click.option("--limit", default=50, help="The most images, spread evenly over SRC.")
@click.option("--seed", default=0, help="Seed of the views.")
@json_option
@force_option
@run_command
def correspondence_command(
    src: str,
    other: str | None,
    encoder: EncoderSpec,
    out: Path,
    top: int,
    stride: int | None,
    limit: int,
    seed: int,
    json_file: Path | None,
    force: bool,
) -> None:
    """Draw which patches of two images match: mutual nearest tokens by cosine, as in iBOT's figure.

    With SRC alone, two random crops of each image are matched; since it is known where they were taken, the share of
    right matches (within one patch) is printed, beside that of guessing. The figure has the first images.

    \b
    Examples:
      sop-eval correspondence a.jpg b.jpg --model runs/photos --out matches.png
      sop-eval correspondence photos/ --model lite0 --stride 16 --out views.png
    """
    from sop_faiss.verbs.scoring.eval_correspondence import CorrespondenceOptions, match_images, match_views

    files = [*source_files(src), *source_files(other), *encoder_files(encoder)]
    check_outputs({"--json": json_file, "--out": out}, files, to_stdout=["--json"], figures=["--out"], force=force)
    options = CorrespondenceOptions(top, stride, limit, seed)
    if other is not None:
        result, figure = match_images(src, other, encoder, options)
    else:
        with progress_reporter("matching", "images") as progress:
            result, figure = match_views(src, encoder, options, progress=progress)
    put_json(json_file, result.content())
    write_file(out, figure)
    if json_file != STDOUT and other is not None:
        metrics = result.metrics
        click.echo(f"{metrics['matches']:,.0f} mutual matches, mean cosine {metrics['mean_cosine']:.3f}")
    elif json_file != STDOUT:
        metrics, interval = result.metrics, result.details["right_interval"]
        known = f", 95 % interval {interval[0]:.1f} to {interval[1]:.1f}" if interval else ""
        print_table(
            f"{result.encoder['name']}: two views of {result.protocol['images']:,} images, tokens every "
            f"{result.protocol['stride']} pixels of {result.protocol['size']}; "
            f"right matches {metrics['right']:.1f} %{known}",
            ["correspondence", "right %"],
            [
                [f"mutual matches ({metrics['matches']:.1f} an image)", f"{metrics['right']:.2f}"],
                ["nearest token of every common patch", f"{metrics['right_nearest']:.2f}"],
                ["guessing", f"{metrics['chance']:.2f}"],
            ],
        )
    if dropped := result.protocol.get("images_dropped"):
        click.echo(f"{dropped:,} unreadable images were left out", err=True)
    say_written("JSON", json_file)
    say_written("image", out)
