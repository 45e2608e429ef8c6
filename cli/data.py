"""`sop-data`: pack images into shards, check shards, see the views of them, write the demo set."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import click

from sop_faiss.cli.common import CONTEXT_SETTINGS, EXIT_USER, progress_reporter, run_command, say_written, with_options
from sop_faiss.cli.path_options import NamedPath, force_option, refuse_empty
from sop_faiss.data.check import CheckReport, check
from sop_faiss.data.digits import write_digits
from sop_faiss.data.images.decode import MAX_PIXELS
from sop_faiss.data.pack import DUPLICATES_NAME, SAMPLES_PER_SHARD, PackSummary, pack
from sop_faiss.errors import one_line
from sop_faiss.files import write_json
from sop_faiss.verbs.output_paths import check_outputs, source_files

__all__ = ["main"]

_top_value_option = click.option(
    "--top-value",
    default=0.0,
    metavar="VALUE",
    help="White in grayscale of 16 bits or floats, such as 4095.  [default: what the file states, else 65535]",
)
_SHOWN = 10  # lines of bad images; the rest is in the manifest or the JSON


@click.group(context_settings=CONTEXT_SETTINGS)
@click.version_option(package_name="sop-faiss")
def main() -> None:
    """Images in: pack them into shards, check shards, see what training makes of them, write a small demo set.

    \b
    Example:
      sop-data pack photos/ shards/ && sop-data check shards/
    """


@main.command("pack", short_help="Images into webdataset shards.")
@click.argument("src", callback=refuse_empty)
@click.argument("out", type=NamedPath())
@click.option("--samples-per-shard", default=SAMPLES_PER_SHARD, show_default=True, help="Images per shard at most.")
@click.option("--resize", type=int, metavar="PX", help="Shrink larger images to this shorter side.")
@click.option("--name", default="photos", show_default=True, help="First part of the names of the shards.")
@click.option("--workers", type=int, help="Threads.  [default: one per processor, 8 at most]")
@click.option(
    "--max-bad", default=1.0, show_default=True, metavar="SHARE", help="Fail above this share of bad images (0 to 1)."
)
@click.option("--max-pixels", default=MAX_PIXELS, show_default=True, help="Drop images with more pixels than this.")
@_top_value_option
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


@main.command("check", short_help="Verify shards and every image in them.")
@click.argument("shards", callback=refuse_empty)
@click.option("--workers", type=int, help="Threads.  [default: one per processor, 8 at most]")
@click.option("--max-pixels", default=MAX_PIXELS, show_default=True, help="Images with more pixels are bad.")
@_top_value_option
@click.option("--duplicates", is_flag=True, help="Count images that are there twice; --json lists them.")
@click.option("--json", "json_path", type=NamedPath(), metavar="FILE", help="Write the report there too.")
@force_option
@run_command
def check_command(
    shards: str,
    workers: int | None,
    max_pixels: int,
    top_value: float,
    duplicates: bool,
    json_path: Path | None,
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
    check_outputs({"--json": json_path}, source_files(shards), force=force)
    with progress_reporter("checking", "images") as progress:
        report = check(
            shards,
            workers=workers,
            max_pixels=max_pixels,
            top_value=top_value,
            find_duplicates=duplicates,
            progress=progress,
        )
    if json_path is not None:
        write_json(json_path, {"command": "sop-data check", **report.to_dict()})
    _print_report(report)
    say_written("JSON", json_path)
    if report.problems:
        sys.exit(EXIT_USER)


@main.command("preview", short_help="A figure of the views that training would see.")
@click.argument("shards", callback=refuse_empty)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--config", required=True, metavar="C", help="YAML file or packaged configuration: views and masks.")
@click.option("--out", required=True, type=NamedPath(), metavar="FILE.png", help="The figure to write.")
@click.option("--images", default=4, show_default=True, help="How many to draw.")
@click.option("--epoch", default=0, show_default=True, help="Whose order, views and masks.")
@click.option("--seed", type=int, help="In place of the configuration's train.seed.")
@force_option
@run_command
def preview_command(
    shards: str,
    overrides: tuple[str, ...],
    config: str,
    out: Path,
    images: int,
    epoch: int,
    seed: int | None,
    force: bool,
) -> None:
    """Draw the views and masks that a training on SHARDS with the configuration C would see.

    One row an image, the first ones of the epoch: the source with its crops, the global views as the teacher sees them
    whole and the student masked, and the local views; pixel for pixel what training on a CPU gets. SHARDS may also be a
    folder or list of images. Settings are overridden by KEY=VALUE as in sop-train.

    \b
    Examples:
      sop-data preview shards/ --config photos_demo --out views.png
      sop-data preview my_photos/ --config vits16 --out views.png --epoch 3 masks.kind=random views.local_count=4
    """
    from sop_faiss.config import load_config
    from sop_faiss.verbs.output_paths import check_outputs, source_files
    from sop_faiss.verbs.training.preview import draw_preview

    check_outputs({"--out": out}, source_files(shards), figures=["--out"], force=force)
    if seed is not None:
        overrides = (*overrides, f"train.seed={seed}")
    resolved = load_config(config, overrides)
    resolved = replace(resolved, data=replace(resolved.data, train=shards))
    preview = draw_preview(resolved, out, images=images, epoch=epoch)
    click.echo(f"drew {_number(len(preview.keys), 'image')} with {_number(preview.views, 'view')} each: {out}")
    for sample in preview.bad:
        click.echo(one_line(f"  {sample.key}: {sample.message}; {sample.replacement} took its place"))


@main.command("demo", short_help="Write the built-in digits, labeled, 32 px.")
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


def _print_summary(summary: PackSummary) -> None:
    shards = _number(len(summary.shards), "shard")
    images = _number(summary.samples, "image")
    click.echo(one_line(f"packed {images} into {shards}, {_megabytes(summary.bytes)}: {summary.out}"))
    classes = f" in {_number(summary.classes, 'class', 'classes')}" if summary.classes else ""
    click.echo(f"labeled {summary.labeled:,}{classes}; resized {summary.resized:,}")
    exact, near = summary.duplicates["exact"], summary.duplicates["near"]
    if exact or near:
        fate = "left out" if summary.duplicates["exact_are_left_out"] else "kept"
        click.echo(f"duplicates: {exact:,} exact ({fate}), {near:,} near (kept), listed in {DUPLICATES_NAME}")
    if summary.dropped:
        click.echo(f"dropped {len(summary.dropped):,} ({_counts(summary.dropped_by_reason)}), listed in manifest.json")
        for item in summary.dropped[:_SHOWN]:
            click.echo(one_line(f"  {item.image}: {item.reason}"))
        _print_rest(len(summary.dropped))
    _print_notices(summary.notices)


def _print_report(report: CheckReport) -> None:
    where = f" in {_number(report.shards, 'shard')}, {_megabytes(report.bytes)}" if report.shards else ""
    click.echo(f"{one_line(report.source)}: {_number(report.samples, 'image')}{where}, {report.good:,} good")
    classes = f" in {_number(len(report.label_counts), 'class', 'classes')}" if report.labeled else ""
    click.echo(f"labeled {report.labeled:,}{classes}; formats: {_counts(report.formats)}")
    if report.shorter_side is not None:
        side = report.shorter_side
        click.echo(f"shorter side {side.smallest} to {side.largest} px, median {side.median}")
    if report.ignored_members:
        click.echo(f"members that are never read: {_counts(report.ignored_members)}")
    if report.repeated_keys:
        click.echo(f"keys in more than one shard: {report.repeated_keys:,} (prefixed with the shard when read)")
    if report.duplicates is not None:
        counts = {kind: report.duplicates[kind]["images_beyond_the_first"] for kind in ("exact", "near")}
        click.echo(f"duplicates: {_counts(counts)}")
    if report.shards:
        click.echo("manifest.json agrees" if report.has_manifest and not report.problems else _manifest_line(report))
    for item in report.bad[:_SHOWN]:
        click.echo(one_line(f"  {item.member}{' in ' + item.shard if item.shard else ''}: {item.reason}"))
    _print_rest(len(report.bad))
    _print_notices(report.notices)
    for problem in report.problems:
        click.echo(one_line(f"problem: {problem}"))
    click.echo(_number(len(report.problems), "problem") if report.problems else "no problems")


def _manifest_line(report: CheckReport) -> str:
    return "manifest.json read" if report.has_manifest else "no manifest.json, so nothing to hold the shards against"


def _print_notices(notices: Sequence[str]) -> None:
    for notice in notices:
        click.echo(f"notice: {with_options(notice)}")


def _print_rest(count: int) -> None:
    if count > _SHOWN:
        click.echo(f"  and {count - _SHOWN:,} more")


def _number(count: int, one: str, many: str | None = None) -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def _counts(counts: Mapping[str, int]) -> str:
    return one_line(", ".join(f"{what} {count:,}" for what, count in counts.items()) or "none")


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


if __name__ == "__main__":
    main()
