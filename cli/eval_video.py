"""sop-eval video: objects followed through the videos of DAVIS-2017 by patch tokens."""

from __future__ import annotations

from pathlib import Path

import click

from sop_faiss.cli.common import run_command, say_written
from sop_faiss.cli.encoder_options import EncoderCommand, encoder_options
from sop_faiss.cli.json_output import json_option, put_json
from sop_faiss.cli.path_options import NamedPath, force_option
from sop_faiss.cli.progress_reporter import progress_reporter
from sop_faiss.cli.ranks import ranks_of_torchrun
from sop_faiss.cli.tables import print_table
from sop_faiss.evaluate.video_choices import QUICK_FRAMES, QUICK_SIZE, VideoChoices
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.verbs.output_paths import STDOUT, check_outputs, encoder_files

_DEFAULTS = VideoChoices()
_FINE = 16
"""Pixels from token to token in most published numbers."""
_HEADINGS = {
    "j_and_f": "J&F",
    "j_mean": "J mean",
    "j_recall": "J recall",
    "j_decay": "J decay",
    "f_mean": "F mean",
    "f_recall": "F recall",
    "f_decay": "F decay",
}


@click.command("video", cls=EncoderCommand, short_help="Objects followed through videos (DAVIS-2017): J&F.")
@encoder_options
@click.option("--data", required=True, type=NamedPath(), metavar="DIR", help="A folder laid out as DAVIS-2017.")
@click.option(
    "--frames", default=_DEFAULTS.frames, help="Frames before each one whose labels are propagated, beside the first."
)
@click.option("--radius", default=_DEFAULTS.radius, help="Rows and columns of tokens from which labels come; 0: all.")
@click.option("--top", default=_DEFAULTS.top, help="Most similar tokens that count.")
@click.option(
    "--stride",
    type=int,
    metavar="PIXELS",
    help="From token to token: of convolutional networks, which map is taken.  [default: the last]",
)
@click.option(
    "--out",
    type=NamedPath(),
    metavar="DIR",
    help="Write the masks as DAVIS's evaluator reads them; a killed evaluation continues from there.",
)
@click.option(
    "--quick",
    is_flag=True,
    help=f"The first {QUICK_FRAMES} frames of each sequence, of {QUICK_SIZE} pixels unless --size is given.",
)
@json_option
@force_option
@run_command
def video_command(
    encoder: EncoderSpec,
    data: Path,
    frames: int,
    radius: int,
    top: int,
    stride: int | None,
    out: Path | None,
    quick: bool,
    json_file: Path | None,
    force: bool,
) -> None:
    """Follow the objects of each video's first frame by its patch tokens: DINO's protocol on DAVIS-2017.

    --size is the shorter side of the frames (480). J compares regions, F boundaries, as the official evaluator does.

    \b
    Examples:
      sop-eval video --model runs/photos --data DAVIS/ --out masks/
      sop-eval video --model lite0 --stride 16 --data DAVIS/ --quick
    """
    from sop_faiss.verbs.scoring.eval_video import VideoOptions, evaluate_video

    check_outputs({"--json": json_file}, [data, *encoder_files(encoder)], to_stdout=["--json"], force=force)
    size = encoder.size
    if size is None:
        size = QUICK_SIZE if quick else _DEFAULTS.size
    choices = VideoChoices(size, frames, radius, top, stride, QUICK_FRAMES if quick else None)
    with ranks_of_torchrun() as is_main, progress_reporter("following objects", "frames") as progress:
        result = evaluate_video(data, encoder, VideoOptions(choices, out), progress=progress)
    if not is_main:
        return
    put_json(json_file, result.content())
    if json_file != STDOUT:
        protocol, details = result.protocol, result.details
        rows = {each["sequence"] + f" {each['object']}": each for each in details["per_object"]}
        rows = {"all objects": result.metrics, "first mask kept": details["first_mask_kept"], **rows}
        low, high = details["j_and_f_interval"]
        print_table(
            f"{result.encoder['name']}: {protocol['sequences']:,} sequences, {protocol['objects']:,} objects, "
            f"tokens every {protocol['stride']} pixels of {protocol['size']}; "
            f"J&F {result.metrics['j_and_f']:.1f}, 95 % of the objects' bootstrap {low:.1f} to {high:.1f}",
            ["video", *_HEADINGS.values()],
            [[name, *(f"{row[key]:.1f}" for key in _HEADINGS)] for name, row in rows.items()],
        )
    if result.protocol["stride"] > _FINE:
        click.echo(
            f"tokens are {result.protocol['stride']} pixels apart: --stride {_FINE} takes a finer map, if there is one",
            err=True,
        )
    say_written("JSON", json_file)
    say_written("masks", out)
