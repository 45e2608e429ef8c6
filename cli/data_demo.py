"""sop-data demo: the built-in digits as labeled shards and as a retrieval set."""

from __future__ import annotations

from pathlib import Path

import click

from sop_faiss.cli.common import run_command
from sop_faiss.cli.path_options import NamedPath
from sop_faiss.data.demo import write_digits

__all__ = ["demo_command"]


@click.command("demo", short_help="Write the built-in digits, labeled, 32 px.")
@click.argument("out", type=NamedPath())
@run_command
def demo_command(out: Path) -> None:
    """Write the built-in demo set into the new folder OUT: scikit-learn's 1,797 scanned digits, 32 px.

    OUT/train and OUT/test hold labeled shards, OUT/retrieval queries and a database with their ground truth.

    \b
    Example:
      sop-data demo digits/ && sop-data check digits/train
    """
    summary = write_digits(out)
    click.echo(f"train      {out / 'train'}: {summary.train:,} images")
    click.echo(f"test       {out / 'test'}: {summary.test:,} images")
    click.echo(f"retrieval  {out / 'retrieval'}: {summary.queries:,} queries, {summary.database:,} database images")
