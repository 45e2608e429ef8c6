"""sop-index parts: crops of an index's images, to find things in parts of images."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from sop_faiss.cli.common import run_command
from sop_faiss.cli.encoder_options import EncoderCommand, batch_size_option
from sop_faiss.cli.optional_encoder import optional_encoder_options
from sop_faiss.cli.path_options import NamedPath
from sop_faiss.cli.progress_reporter import progress_reporter
from sop_faiss.errors import ConfigError
from sop_faiss.model.encoders.spec import EncoderSpec

if TYPE_CHECKING:
    from sop_faiss.index.build import IndexOptions

R = TypeVar("R")


def part_grid_option(command: Callable[..., R]) -> Callable[..., R]:
    """Give a click command `--part-grid`: it receives `part_grid: str | None`."""
    help_text = "Parts of an image: N x N crops, which overlap by half; of several N, all of them.  [default: 3]"
    return click.option("--part-grid", metavar="N[,N]", help=help_text)(command)


@click.command("parts", cls=EncoderCommand, short_help="Make parts of the images, for search --parts.")
@click.argument("index", type=NamedPath())
@optional_encoder_options
@part_grid_option
@click.option("--factory", metavar="F", help="Kind of index of the parts: auto, or a FAISS factory, as IVF1024,SQ8.")
@click.option("--images-root", type=NamedPath(), metavar="DIR", help="Where the index's images are, if they moved.")
@batch_size_option
@run_command
def parts_command(
    index: Path,
    encoder: EncoderSpec | None,
    part_grid: str | None,
    factory: str | None,
    images_root: Path | None,
    batch_size: int,
) -> None:
    """Make the parts of all images of INDEX that have none, such as those added since.

    Parts are in the index's folder, each with as many bytes as an image of this kind of index. With --factory, or
    another --part-grid, all are made again.

    \b
    Examples:
      sop-index parts photos.index
      sop-index search photos.index query.jpg --parts
    """
    from sop_faiss.index.build import IndexOptions

    options = None if factory is None else IndexOptions(factory)
    make_parts_of(index, encoder, images_root, part_grids(part_grid), options, batch_size)


def part_grids(text: str | None) -> list[int] | None:
    """Parse `--part-grid`.

    Raises:
        ConfigError: it is not numbers with commas between them.
    """
    if text is None:
        return None
    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise ConfigError(f"--part-grid {text[:80]!r}: wanted a number, or several as 2,4") from None


def make_parts_of(
    index: Path,
    encoder: EncoderSpec | None,
    images_root: Path | None,
    grids: Sequence[int] | None,
    options: IndexOptions | None,
    batch_size: int,
) -> None:
    """Make parts, and say of how many images."""
    from sop_faiss.features.extract import ExtractionOptions
    from sop_faiss.verbs.finding.index_parts import make_parts

    extraction = ExtractionOptions(batch_size)
    made = make_parts(
        index, encoder, grids, options, images_root=images_root, extraction=extraction, stage=progress_reporter
    )
    ready = f"parts of {made:,} images made" if made else "all images have their parts"
    click.echo(f"{ready}; next: sop-index search {shlex.quote(str(index))} IMAGE --parts")
