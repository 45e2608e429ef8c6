"""sop-data pack: images into webdataset shards."""

from __future__ import annotations

from pathlib import Path

import click

from sop_faiss.cli.common import run_command
from sop_faiss.cli.data_output import SHOWN, counted, megabytes, number, print_notices, print_rest, top_value_option
from sop_faiss.cli.path_options import NamedPath, refuse_empty
from sop_faiss.cli.progress_reporter import progress_reporter
from sop_faiss.data.images.decode import MAX_PIXELS
from sop_faiss.data.pack import DUPLICATES_NAME, SAMPLES_PER_SHARD, PackSummary, pack
from sop_faiss.errors import one_line


@click.command("pack", short_help="Images into webdataset shards.")
@click.argument("src", callback=refuse_empty)
@click.argument("out", type=NamedPath())
@click.option("--samples-per-shard", default=SAMPLES_PER_SHARD, help="Images per shard at most.")
@click.option("--resize", type=int, metavar="PX", help="Shrink larger images to this shorter side.")
@click.option("--name", default="photos", help="First part of the names of the shards.")
@click.option("--workers", type=int, help="Threads.  [default: one per processor, 8 at most]")
@click.option("--max-bad", default=1.0, metavar="SHARE", help="Fail above this share of bad images (0 to 1).")
@click.option("--max-pixels", default=MAX_PIXELS, help="Drop images with more pixels than this.")
@top_value_option
@click.option("--drop-exact-duplicates", is_flag=True, help="Of images with the same bytes keep the first only.")
@run_command
def pack_command(
    src: str,
    out: Path,
    samples_per_shard: int,
    resize: int | None,
    name: str,
    workers: int | None,
    max_bad: float,
    max_pixels: int,
    top_value: float,
    drop_exact_duplicates: bool,
) -> None:
    """Pack the images SRC into webdataset shards and a manifest.json in the new folder OUT.

    SRC is a folder (its sub-folders, if any, are classes), a .txt or .csv list of path[,label] lines, or shards. Each
    image is verified by decoding it; bad ones are dropped, counted, and listed in the manifest. JPEG, PNG and WebP
    keep their bytes unless they are shrunk or --top-value makes them 8 bits deep. Images that are there twice, by
    their bytes or nearly by their looks, are listed in duplicates.json; they stay, unless --drop-exact-duplicates.

    \b
    Examples:
      sop-data pack photos/ shards/
      sop-data pack photos.csv shards/ --resize 256 --max-bad 0.01 --drop-exact-duplicates
    """
    with progress_reporter("packing", "images") as progress:
        summary = pack(
            src,
            out,
            samples_per_shard=samples_per_shard,
            resize=resize,
            name=name,
            workers=workers,
            max_bad_fraction=max_bad,
            max_pixels=max_pixels,
            top_value=top_value,
            drop_exact_duplicates=drop_exact_duplicates,
            progress=progress,
        )
    _print_summary(summary)


def _print_summary(summary: PackSummary) -> None:
    shards = number(len(summary.shards), "shard")
    images = number(summary.samples, "image")
    click.echo(one_line(f"packed {images} into {shards}, {megabytes(summary.bytes)}: {summary.out}"))
    classes = f" in {number(summary.classes, 'class', 'classes')}" if summary.classes else ""
    labeled = [f"labeled {summary.labeled:,}{classes}"] if summary.labeled else []
    resized = [f"resized {summary.resized:,}"] if summary.resized else []
    if labeled or resized:
        click.echo("; ".join(labeled + resized))
    exact, near = summary.duplicates["exact"], summary.duplicates["near"]
    if exact or near:
        fate = "left out" if summary.duplicates["exact_are_left_out"] else "kept"
        click.echo(f"duplicates: {exact:,} exact ({fate}), {near:,} near (kept), listed in {DUPLICATES_NAME}")
    if summary.dropped:
        click.echo(f"dropped {len(summary.dropped):,} ({counted(summary.dropped_by_reason)}), listed in manifest.json")
        for item in summary.dropped[:SHOWN]:
            click.echo(one_line(f"  {item.image}: {item.reason}"))
        print_rest(len(summary.dropped))
    print_notices(summary.notices)
