"""sop-index duplicates: groups of images that are nearly the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sop_faiss.cli.common import one_line, page_footer, run_command, say_written
from sop_faiss.cli.index_output import for_stdout
from sop_faiss.cli.json_output import put_json
from sop_faiss.cli.path_options import NamedPath, force_option
from sop_faiss.cli.progress_reporter import progress_reporter
from sop_faiss.files import write_file
from sop_faiss.verbs.output_paths import STDOUT, check_outputs

if TYPE_CHECKING:
    from sop_faiss.index.duplicates import DuplicateGroup
    from sop_faiss.index.search import FeatureIndex

_FILE = NamedPath(allow_dash=True)
_FOLDER = NamedPath()
_SHOWN_GROUPS, _SHOWN_KEYS = 20, 8


@click.command("duplicates", short_help="Find groups of images that are nearly the same.")
@click.argument("index", type=_FOLDER)
@click.option(
    "--threshold",
    default=0.95,
    metavar="COSINE",
    help="Similarity of a pair: with lite0 0.99 finds copies that were saved again, 0.95 also shots of one burst, and "
    "0.9 also smaller copies and other photos of the same thing.",
)
@click.option("--json", "json_file", type=_FILE, metavar="FILE", help="Write all groups as JSON; - is stdout.")
@click.option("--csv", "csv_file", type=_FILE, metavar="FILE", help="Write one line per image; - is stdout.")
@click.option("--html", "html_file", type=_FOLDER, metavar="FILE", help="Write a page of the largest groups.")
@click.option("--images-root", type=_FOLDER, metavar="DIR", help="Where the index's images are, if they moved.")
@force_option
@run_command
def duplicates_command(
    index: Path,
    threshold: float,
    json_file: Path | None,
    csv_file: Path | None,
    html_file: Path | None,
    images_root: Path | None,
    force: bool,
) -> None:
    """Find groups of images of an index that are nearly the same, the largest group first.

    INDEX is the directory that sop-index build wrote. Images are grouped by pairs whose cosine reaches the threshold;
    a group's ends may be further apart. Groups are exact (all have the same bytes), partly (some have) or similar. A
    file that is there twice by links is counted once; the page marks exact copies and nearly identical images for
    removal, never a link. A Flat index finds all pairs, others those that a search finds.

    \b
    Examples:
      sop-index duplicates photos.index --html duplicates.html
      sop-index duplicates photos.index --threshold 0.98 --csv -
    """
    from sop_faiss.index.duplicates import find_duplicates
    from sop_faiss.index.encoder_doubts import ALIKE
    from sop_faiss.index.search import FeatureIndex
    from sop_faiss.verbs.finding.index_duplicates import duplicates_as_csv, duplicates_as_records, write_duplicates_page

    outputs = {"--json": json_file, "--csv": csv_file, "--html": html_file}
    check_outputs(outputs, [index], to_stdout=("--json", "--csv"), force=force)
    opened = FeatureIndex.open(index)
    with progress_reporter("comparing", "images") as progress:
        groups = find_duplicates(opened, threshold, images_root=images_root, progress=progress)
    if csv_file == STDOUT:
        click.echo(for_stdout(duplicates_as_csv(opened, groups)), nl=False)
    elif csv_file is not None:
        write_file(csv_file, duplicates_as_csv(opened, groups))
    if html_file is not None:
        with progress_reporter("drawing", "images") as progress:
            footer = page_footer("sop-index duplicates")
            write_duplicates_page(
                html_file, opened, groups, threshold, images_root=images_root, footer=footer, progress=progress
            )
    if groups and 2 * len(groups[0].rows) > len(opened):
        cosine = opened.mean_cosine
        alike_anyway = cosine is not None and cosine >= ALIKE
        cause = f"the encoder is the cause, random pairs have a mean cosine of {cosine:.3f}" if alike_anyway else None
        click.echo(f"one group holds most of the images: {cause or 'raise --threshold'}", err=True)
    if json_file is not None:
        content = {
            "command": "sop-index duplicates",
            "index": str(index),
            "encoder": opened.manifest.encoder,
            "threshold": threshold,
            "images": len(opened),
            "images_beyond_the_first": sum(len(group.rows) - 1 for group in groups),
            "groups": duplicates_as_records(opened, groups),
        }
        put_json(json_file, content)
    if STDOUT not in (json_file, csv_file):
        _print(opened, groups, threshold)
        say_written("JSON", json_file)
    say_written("CSV", csv_file)
    say_written("page", html_file)


def _print(index: FeatureIndex, groups: Sequence[DuplicateGroup], threshold: float) -> None:
    """Print the largest groups, and what they are by their bytes."""
    from sop_faiss.verbs.finding.index_duplicates import KINDS

    alike = sum(len(group.rows) for group in groups)
    if not groups:
        click.echo(f"no two of {len(index):,} images were found at {threshold:g} or more; try a lower --threshold")
        return
    counted_groups = f"{len(groups):,} {'group' if len(groups) == 1 else 'groups'}"
    click.echo(f"{alike:,} of {len(index):,} images are in {counted_groups}, by similarities of {threshold:g} or more")
    kinds = Counter(group.kind for group in groups)
    counts = ", ".join(f"{name} in {kinds[kind]:,}" for kind, name in KINDS.items() if kinds[kind])
    click.echo(f"groups by the bytes of their files: {counts}")
    for group in groups[:_SHOWN_GROUPS]:
        keys = [one_line(index.ids.keys[row]) for row in group.rows[:_SHOWN_KEYS].tolist()]
        more = f"  and {len(group.rows) - len(keys):,} more" if len(group.rows) > len(keys) else ""
        click.echo(f"{len(group.rows):5d}  {group.kind:7}  {'  '.join(keys)}{more}")
    if len(groups) > _SHOWN_GROUPS:
        click.echo(f"and {len(groups) - _SHOWN_GROUPS:,} more groups: see --csv, --json or --html")
