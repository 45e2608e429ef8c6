"""sop-data check: shards and every image in them, verified."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from sop_faiss.cli.common import EXIT_USER, run_command, say_written
from sop_faiss.cli.data_output import SHOWN, counted, megabytes, number, print_notices, print_rest, top_value_option
from sop_faiss.cli.json_output import json_option, put_json
from sop_faiss.cli.path_options import force_option, refuse_empty
from sop_faiss.cli.progress_reporter import progress_reporter
from sop_faiss.data.check import CheckReport, check
from sop_faiss.data.images.decode import MAX_PIXELS
from sop_faiss.errors import one_line
from sop_faiss.verbs.output_paths import STDOUT, check_outputs, source_files


@click.command("check", short_help="Verify shards and every image in them.")
@click.argument("shards", callback=refuse_empty)
@click.option("--workers", type=int, help="Threads.  [default: one per processor, 8 at most]")
@click.option("--max-pixels", default=MAX_PIXELS, help="Images with more pixels are bad.")
@top_value_option
@click.option("--duplicates", is_flag=True, help="Count images that are there twice; --json lists them.")
@json_option
@force_option
@run_command
def check_command(
    shards: str,
    workers: int | None,
    max_pixels: int,
    top_value: float,
    duplicates: bool,
    json_file: Path | None,
    force: bool,
) -> None:
    """Verify SHARDS: headers, keys, labels, every image, and manifest.json where there is one.

    SHARDS is a folder of shards, one .tar, or a pattern such as 'shards/photos-{000000..000012}.tar'; a folder or list
    of images works too. Prints a report; exit status 1 when there is any problem.

    The label of KEY.jpg is KEY.cls, an integer; webdataset's KEY.image.jpg with KEY.cls and KEY.input.jpg with
    KEY.label.cls are understood. Hidden members and __MACOSX/ are passed over. Links cannot be read: make tars with
    --dereference --hard-dereference.

    \b
    Examples:
      sop-data check shards/
      sop-data check shards/ --duplicates --json report.json
    """
    check_outputs({"--json": json_file}, source_files(shards), to_stdout=["--json"], force=force)
    with progress_reporter("checking", "images") as progress:
        report = check(
            shards,
            workers=workers,
            max_pixels=max_pixels,
            top_value=top_value,
            find_duplicates=duplicates,
            progress=progress,
        )
    put_json(json_file, {"command": "sop-data check", **report.to_dict()})
    if json_file != STDOUT:
        _print_report(report)
    say_written("JSON", json_file)
    if report.problems:
        sys.exit(EXIT_USER)


def _print_report(report: CheckReport) -> None:
    where = f" in {number(report.shards, 'shard')}, {megabytes(report.bytes)}" if report.shards else ""
    click.echo(f"{one_line(report.source)}: {number(report.samples, 'image')}{where}, {report.good:,} good")
    classes = f" in {number(len(report.label_counts), 'class', 'classes')}" if report.labeled else ""
    click.echo(f"labeled {report.labeled:,}{classes}; formats: {counted(report.formats)}")
    if report.shorter_side is not None:
        side = report.shorter_side
        click.echo(f"shorter side {side.smallest} to {side.largest} px, median {side.median}")
    if report.ignored_members:
        click.echo(f"members that are never read: {counted(report.ignored_members)}")
    if report.repeated_keys:
        click.echo(f"keys in more than one shard: {report.repeated_keys:,} (prefixed with the shard when read)")
    if report.duplicates is not None:
        counts = {kind: report.duplicates[kind]["images_beyond_the_first"] for kind in ("exact", "near")}
        click.echo(f"duplicates: {counted(counts)}")
    if report.shards:
        click.echo("manifest.json agrees" if report.has_manifest and not report.problems else _manifest_line(report))
    for item in report.bad[:SHOWN]:
        click.echo(one_line(f"  {item.member}{' in ' + item.shard if item.shard else ''}: {item.reason}"))
    print_rest(len(report.bad))
    print_notices(report.notices)
    for problem in report.problems:
        click.echo(one_line(f"problem: {problem}"))
    click.echo(number(len(report.problems), "problem") if report.problems else "no problems")


def _manifest_line(report: CheckReport) -> str:
    return "manifest.json read" if report.has_manifest else "no manifest.json, so nothing to hold the shards against"
