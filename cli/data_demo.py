"""sop-data demo: a built-in set as labeled shards and as a retrieval set."""

from __future__ import annotations

from pathlib import Path

import click

from sop_faiss.cli.common import run_command
from sop_faiss.cli.path_options import NamedPath
from sop_faiss.data.demo import write_digits
from sop_faiss.data.demo_scenes import write_scenes


@click.command("demo", short_help="Write a built-in labeled set: digits or scenes.")
@click.argument("out", type=NamedPath())
@click.option(
    "--set",
    "name",
    type=click.Choice(["digits", "scenes"]),
    default="digits",
    help="Scanned digits of 32 px, or cut-outs of color photos of 48 px, several versions of each.",
)
@run_command
def demo_command(out: Path, name: str) -> None:
    """Write a built-in demo set into the new folder OUT; nothing is downloaded.

    digits: OUT/train and OUT/test hold labeled shards of scikit-learn's 1,797 scanned digits, OUT/retrieval queries and
    a database with their ground truth.

    scenes: cut-outs of 8 photos, each in several versions (shifted, scaled, turned, in other light and colors).
    OUT/train holds those of some cut-outs; OUT/known and OUT/asked, labeled by cut-out, those of others, and
    OUT/retrieval the ones asked for as queries in the known ones.

    \b
    Examples:
      sop-data demo digits/ && sop-data check digits/train
      sop-data demo --set scenes scenes/
    """
    if name == "scenes":
        scenes = write_scenes(out)
        click.echo(f"train      {out / 'train'}: {scenes.train:,} images of {scenes.train_things:,} things")
        click.echo(f"known      {out / 'known'}: {scenes.known:,} images of {scenes.test_things:,} other things")
        click.echo(f"asked      {out / 'asked'}: {scenes.asked:,} images of the same {scenes.test_things:,} things")
        click.echo(f"retrieval  {out / 'retrieval'}: {scenes.asked:,} queries, {scenes.known:,} database images")
        return
    summary = write_digits(out)
    click.echo(f"train      {out / 'train'}: {summary.train:,} images")
    click.echo(f"test       {out / 'test'}: {summary.test:,} images")
    click.echo(f"retrieval  {out / 'retrieval'}: {summary.queries:,} queries, {summary.database:,} database images")
