"""sop-index tokens: the tokens of an index's images, for re-ranking by parts."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click

from sop_faiss.cli.common import run_command
from sop_faiss.cli.encoder_options import EncoderCommand
from sop_faiss.cli.optional_encoder import optional_encoder_options
from sop_faiss.cli.path_options import NamedPath
from sop_faiss.cli.progress_reporter import progress_reporter
from sop_faiss.cli.rerank_options import token_options, token_settings
from sop_faiss.errors import ConfigError
from sop_faiss.model.encoders.spec import EncoderSpec


@click.command("tokens", cls=EncoderCommand, short_help="Make tokens, for search --rerank local.")
@click.argument("index", type=NamedPath())
@optional_encoder_options
@token_options
@click.option("--images-root", type=NamedPath(), metavar="DIR", help="Where the index's images are, if they moved.")
@run_command
def tokens_command(
    index: Path,
    encoder: EncoderSpec | None,
    token_size: int | None,
    token_count: int | None,
    token_codes: str | None,
    images_root: Path | None,
) -> None:
    """Make the tokens of all images of INDEX that have none, such as those added since.

    Tokens are in the index's folder: about 13 kB per image, or 1.7 kB with --token-codes pq32. With another
    --token-size, --token-count or --token-codes all are made again; what is not given stays as it was.

    \b
    Examples:
      sop-index tokens photos.index --token-size 320
      sop-index search photos.index query.jpg --rerank local
    """
    if encoder is not None and encoder.cache is not None:
        raise ConfigError("--cache keeps features, and tokens are none: leave it out")
    changes = token_settings(token_size, token_count, token_codes, used=True, needed="")
    make_tokens_of(index, encoder, images_root, changes)


def make_tokens_of(index: Path, encoder: EncoderSpec | None, images_root: Path | None, changes: dict[str, Any]) -> None:
    """Make tokens, and say of how many images."""
    from sop_faiss.verbs.finding.index_tokens import make_tokens

    made = make_tokens(index, encoder, changes, images_root=images_root, stage=progress_reporter)
    ready = f"tokens of {made:,} images made" if made else "all images have their tokens"
    click.echo(f"{ready}; next: sop-index search {shlex.quote(str(index))} IMAGE --rerank local")
