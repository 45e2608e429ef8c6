"""The command of `make demo`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import click

from sop_faiss.cli.common import CONTEXT_SETTINGS, EXIT_STOPPED, log_to_stderr, one_line, run_command
from sop_faiss.cli.path_options import NamedPath, refuse_empty
from sop_faiss.cli.progress_reporter import progress_reporter


@click.command(context_settings=CONTEXT_SETTINGS)
@click.version_option(package_name="sop-faiss")
@click.option(
    "--images",
    metavar="SRC",
    callback=refuse_empty,
    help="Your own images (folder, shards or list) instead of the built-in photographs.",
)
@click.option(
    "--out",
    type=NamedPath(),
    metavar="DIR",
    default=Path("demo"),
    help="Where the page, the run and the index go; an earlier demo there is replaced.",
)
@click.option(
    "--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True, help="Of the training's random draws."
)
@run_command
def main(images: str | None, out: Path, seed: int) -> None:
    """Train, build an index, and write a page of images found by similarity.

    On the built-in cut-outs of photos, several versions of each, it compares raw pixels, random weights, the
    pretrained encoder and its continuation, and exits with 3 unless the promised gains were reached. On your own
    images it needs no labels: it continues a pretrained encoder for some steps, and shows what was found before and
    after, and whether a difference is shown.
    """
    log_to_stderr(logging.WARNING)
    if images is not None:
        from sop_faiss.verbs.photos_demo import photos_demo

        shown = photos_demo(images, out, progress_reporter, seed)
        for line in (shown.verdict, f"page: {shown.page}", *shown.commands):
            click.echo(one_line(line))
        return
    from sop_faiss.verbs.demo import KNN_GAIN, MAP_GAIN, scenes_demo

    result = scenes_demo(out, progress_reporter, seed)
    click.echo(f"{'features':26}{'k-NN top-1':>12}{'mAP':>10}")
    for scores in result.scores:
        click.echo(f"{scores.name:26}{scores.knn_top1:>10.1f} %{scores.mean_average_precision:>8.1f} %")
    click.echo(one_line(result.verdict))
    click.echo(one_line(f"page: {result.page}"))
    if not result.reached:
        click.echo(
            f"the gains over pixels and random weights are under {KNN_GAIN:g} points (k-NN) or {MAP_GAIN:g} (mAP)",
            err=True,
        )
        sys.exit(EXIT_STOPPED)


if __name__ == "__main__":
    main()
