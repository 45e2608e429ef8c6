"""sop-index add, remove, merge: an index changed on disk."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click

from sop_faiss.cli.common import one_line, run_command
from sop_faiss.cli.encoder_options import EncoderCommand, batch_size_option
from sop_faiss.cli.index_output import counted, max_bad_option, say_left_out
from sop_faiss.cli.optional_encoder import optional_encoder_options, source_argument
from sop_faiss.cli.path_options import NamedPath
from sop_faiss.cli.progress_reporter import progress_reporter
from sop_faiss.model.encoders.spec import EncoderSpec

_FOLDER = NamedPath()


@click.command("add", cls=EncoderCommand, short_help="Add images or features to an index.")
@click.argument("index", type=_FOLDER)
@source_argument
@click.option("--features", type=_FOLDER, metavar="STORE", help="Instead of SRC: a feature store of sop-embed.")
@optional_encoder_options
@click.option("--skip-existing", is_flag=True, help="Leave out images that are in the index already, and count them.")
@batch_size_option
@max_bad_option
@run_command
def add_command(
    index: Path,
    features: Path | None,
    encoder: EncoderSpec | None,
    data: str | None,
    skip_existing: bool,
    batch_size: int,
    max_bad_fraction: float,
) -> None:
    """Add images, or features of the index's own encoder, to an index.

    SRC is a folder of images, .tar shards, or a .txt or .csv list. The index knows its encoder. It is complete at every
    moment: a search meanwhile, or a kill, finds it as it was before. sop-index sync goes on following the folder that
    the index was built of, and leaves alone what was added from elsewhere.

    \b
    Examples:
      sop-index add photos.index new_photos/
      sop-index add photos.index new_photos/ --skip-existing
      sop-index add photos.index --features new_features/
    """
    from sop_faiss.features.extract import ExtractionOptions
    from sop_faiss.index.left_out import count_unusable
    from sop_faiss.verbs.finding.index_build import add

    with progress_reporter("embedding", "images") as progress:
        done = add(
            index,
            features=features,
            encoder=encoder,
            data=data,
            skip_existing=skip_existing,
            extraction=ExtractionOptions(batch_size, max_bad_fraction=max_bad_fraction),
            progress=progress,
        )
    say_left_out(done.left_out, index)
    left_out = f" ({counted(count_unusable(done.left_out))} left out)" if done.left_out else ""
    skipped = f"{done.added:,} added, {done.skipped:,} skipped that were there already: " if skip_existing else ""
    click.echo(one_line(f"{skipped}{done.manifest.count:,} vectors now in {index}{left_out}"))


@click.command("remove", short_help="Remove images from an index by their keys.")
@click.argument("index", type=_FOLDER)
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@click.option("--keys-from", type=click.File(encoding="utf-8"), metavar="FILE", help="One key a line; - is stdin.")
@run_command
def remove_command(index: Path, keys: tuple[str, ...], keys_from: Iterable[str] | None) -> None:
    """Remove images from an index by their keys; the image files stay.

    sop-index sync does not add them again unless a file changes or --again is given.

    \b
    Examples:
      sop-index remove photos.index IMG_0042 IMG_0043
      sop-index remove photos.index --keys-from keys.txt
    """
    from sop_faiss.errors import ConfigError
    from sop_faiss.index.change import remove_from_index

    try:
        listed: list[str] = [] if keys_from is None else [line.rstrip("\r\n") for line in keys_from]
    except UnicodeDecodeError:
        raise ConfigError("--keys-from is not UTF-8: wanted one key a line") from None
    wanted = [*keys, *(key for key in listed if key)]
    if not wanted:
        raise ConfigError("name what to remove: KEY..., or --keys-from FILE")
    manifest = remove_from_index(index, wanted)
    click.echo(one_line(f"{len(set(wanted)):,} removed, {manifest.count:,} vectors left in {index}"))
    click.echo("the image files stay; sop-index sync does not add them again, except with --again", err=True)


@click.command("merge", short_help="Join indices of one encoder into a new one.")
@click.argument("indices", nargs=-1, required=True, type=_FOLDER, metavar="INDEX INDEX...")
@click.option("--out", required=True, type=_FOLDER, metavar="DIR", help="A new or empty directory.")
@run_command
def merge_command(indices: tuple[Path, ...], out: Path) -> None:
    """Join indices of one encoder into a new one, of the first one's kind.

    \b
    Example:
      sop-index merge 2024.index 2025.index --out all.index
    """
    from sop_faiss.index.change import merge_indices

    manifest = merge_indices(indices, out)
    click.echo(one_line(f"{manifest.count:,} vectors, {manifest.factory} index in {out}"))
