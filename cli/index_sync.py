"""sop-index sync: an index made equal to a folder."""

from __future__ import annotations

from pathlib import Path

import click

from sop_faiss.cli.common import one_line, run_command
from sop_faiss.cli.encoder_options import EncoderCommand, batch_size_option
from sop_faiss.cli.index_output import counted, max_bad_option, say_left_out
from sop_faiss.cli.optional_encoder import optional_encoder_options
from sop_faiss.cli.path_options import NamedPath
from sop_faiss.cli.progress_reporter import progress_reporter
from sop_faiss.model.encoders.spec import EncoderSpec

_FOLDER = NamedPath()


@click.command("sync", cls=EncoderCommand, short_help="Make an index equal to a folder of images.")
@click.argument("index", type=_FOLDER)
@click.argument("folder", required=False, type=_FOLDER, metavar="[DIR]")
@optional_encoder_options
@click.option("--dry-run", is_flag=True, help="List what would be done: + added, ~ changed, - removed.")
@click.option("--force", is_flag=True, help="Remove also more than half of the index's images.")
@click.option("--again", is_flag=True, help="Try images again that are left out: unusable ones, and those you removed.")
@batch_size_option
@max_bad_option
@run_command
def sync_command(
    index: Path,
    folder: Path | None,
    encoder: EncoderSpec | None,
    dry_run: bool,
    force: bool,
    again: bool,
    batch_size: int,
    max_bad_fraction: float,
) -> None:
    """Make an index equal to a folder: new images are added, changed ones replaced, and those that are gone removed.

    DIR is by default the folder that the index was built of; another one, as after a move, is recorded. What was added
    from elsewhere stays. Files of equal size and time are not read; images that cannot be used, or that you removed
    from the index, are left out and not tried again until they change. The index is complete at every moment: a search
    meanwhile, or a kill, finds it as it was before; after a kill the same command continues.

    \b
    Examples:
      sop-index sync photos.index
      sop-index sync photos.index /new/place/photos --dry-run
    """
    from sop_faiss.features.extract import ExtractionOptions
    from sop_faiss.index.left_out import REMOVED
    from sop_faiss.verbs.finding.index_sync import sync

    extraction = ExtractionOptions(batch_size, max_bad_fraction=max_bad_fraction)
    with progress_reporter("comparing and embedding", "images") as progress:
        done = sync(
            index,
            folder,
            encoder=encoder,
            dry_run=dry_run,
            force=force,
            again=again,
            extraction=extraction,
            progress=progress,
        )
    if dry_run:
        for mark, members in (("+", done.added), ("~", done.changed), ("-", done.removed)):
            for member in members:
                click.echo(one_line(f"{mark} {member}"))
    bad = [each for each in done.left_out if each.reason != REMOVED]
    say_left_out(bad, index)
    left_out = [f"{len(bad):,} left out" + (f" ({counted(done.dropped)})" if bad else "")]
    if len(done.left_out) > len(bad):
        left_out.append(f"{len(done.left_out) - len(bad):,} kept out by sop-index remove")
    if done.elsewhere:
        left_out.append(f"{done.elsewhere:,} from elsewhere")
    did = ["to add", "to replace", "to remove"] if dry_run else ["added", "changed", "removed"]
    numbers = [
        f"{len(each):,} {what}" for each, what in zip([done.added, done.changed, done.removed], did, strict=True)
    ]
    rest = [f"{done.unchanged:,} unchanged", *left_out]
    click.echo(
        one_line(f"{', '.join(numbers + rest)}: {index} {'and' if dry_run else 'is up to date with'} {done.folder}")
    )
