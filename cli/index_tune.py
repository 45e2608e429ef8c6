"""sop-index tune: which settings of an encoder find a user's images best."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from sop_faiss.cli.common import one_line, run_command, say_written
from sop_faiss.cli.encoder_options import EncoderCommand
from sop_faiss.cli.optional_encoder import optional_encoder_options, source_argument
from sop_faiss.cli.path_options import NamedPath, force_option
from sop_faiss.cli.progress_reporter import progress_reporter
from sop_faiss.cli.tables import print_table
from sop_faiss.errors import ConfigError
from sop_faiss.model.encoders.spec import EncoderSpec

if TYPE_CHECKING:
    from sop_faiss.verbs.finding.index_tune import Tuned

_SHOWN, _SHOWN_CLASSES = 12, 5
_BY = {
    "labels": "each looks for the others of its class: mAP",
    "views": "no labels: two crops of each look for each other, a proxy for what you search: recall@1",
}


@click.command("tune", cls=EncoderCommand, short_help="Choose size, pooling, scales and whitening on your images.")
@source_argument
@optional_encoder_options
@click.option(
    "--out", required=True, type=NamedPath(), metavar="FILE.json", help="The choice, for --model of all commands."
)
@click.option("--images", default=500, help="Images that are compared, drawn at random.")
@click.option("--no-labels", is_flag=True, help="Leave out labels and folders that are not what you search for.")
@force_option
@run_command
def tune_command(
    data: str | None, encoder: EncoderSpec | None, out: Path, images: int, no_labels: bool, force: bool
) -> None:
    """Compare the settings of an encoder on your images: size, scales, pooling, last blocks, whitening.

    By class folders, labels or groups, if SRC has any; else by whether two crops of an image find each other. The
    encoder's own settings are kept unless others are better beyond doubt. Encoder options change what is started from.
    Without --model the encoder is lite0.

    \b
    Examples:
      sop-index tune photos/ --out photos.encoder.json
      sop-index build photos/ --model photos.encoder.json --out photos.index
      sop-index tune photos/ --model runs/photos --images 2000 --out run.encoder.json
    """
    from sop_faiss.verbs.finding.index_tune import tune

    if data is None:
        raise ConfigError("name the images: SRC, a folder, .tar shards or a list")
    tuned = tune(data, out, encoder, images=images, labels=not no_labels, force=force, stage=progress_reporter)
    _print(tuned)
    if tuned.classes:
        shown = ", ".join(tuned.classes[:_SHOWN_CLASSES]) + (", ..." if len(tuned.classes) > _SHOWN_CLASSES else "")
        click.echo(one_line(f"classes: {shown}; if these are not what you search for, use --no-labels"), err=True)
    if tuned.bad:
        click.echo(one_line(f"{len(tuned.bad):,} images cannot be used (first {tuned.bad[0]})"), err=True)
    say_written("choice", out)


def _print(tuned: Tuned) -> None:
    own = tuned.candidates[0]
    rows = [
        [
            each.name,
            f"{each.scores.mean():.1f}",
            f"{each.scores.mean() - own.scores.mean():+.1f}" if each is not own else "own",
            f"{each.milliseconds:.0f}",
            "chosen" if each is tuned.chosen else "",
        ]
        for each in tuned.candidates[: _SHOWN + 1]
    ]
    columns = ["setting", "score %", "gain", "ms/image", ""]
    print_table(f"{tuned.images:,} images, {len(own.scores):,} queries; {_BY[tuned.by]}", columns, rows)
    if (hidden := len(tuned.candidates) - len(rows)) > 0:
        click.echo(f"{hidden} more settings are in the file.")
    if tuned.difference is None:
        click.echo("The encoder's own setting is the best.")
        return
    gain = tuned.difference.difference
    interval = f"{gain.low:+.1f} to {gain.high:+.1f}, 95 % for {len(tuned.candidates) - 1} comparisons"
    kept = "clear, so it is chosen" if tuned.chosen is not own else "not clear, so the own setting is kept"
    click.echo(f"The best has {gain.mean:+.1f} over the own setting ({interval}): {kept}.")
