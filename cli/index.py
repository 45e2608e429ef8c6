"""sop-index: a k-NN index of features or images: build it, search it, look at it."""

from __future__ import annotations

import logging
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sop_faiss.cli.common import CONTEXT_SETTINGS, log_to_stderr, one_line, run_command
from sop_faiss.cli.encoder_options import EncoderCommand, batch_size_option
from sop_faiss.cli.index_change import add_command, merge_command, remove_command
from sop_faiss.cli.index_duplicates import duplicates_command
from sop_faiss.cli.index_export import export_command
from sop_faiss.cli.index_info import info_command
from sop_faiss.cli.index_output import counted, max_bad_option, say_left_out
from sop_faiss.cli.index_parts import make_parts_of, part_grid_option, part_grids, parts_command
from sop_faiss.cli.index_search import search_command
from sop_faiss.cli.index_serve import serve_command
from sop_faiss.cli.index_sync import sync_command
from sop_faiss.cli.index_tokens import make_tokens_of, tokens_command
from sop_faiss.cli.index_tune import tune_command
from sop_faiss.cli.optional_encoder import optional_encoder_options, source_argument
from sop_faiss.cli.path_options import NamedPath
from sop_faiss.cli.progress_reporter import progress_reporter
from sop_faiss.cli.ranks import ranks_of_torchrun
from sop_faiss.cli.rerank_options import token_options, token_settings
from sop_faiss.errors import ConfigError
from sop_faiss.model.encoders.spec import EncoderSpec

if TYPE_CHECKING:
    from sop_faiss.index.store import IndexManifest

_FOLDER = NamedPath()


@click.group(context_settings=CONTEXT_SETTINGS)
@click.version_option(package_name="sop-faiss")
def main() -> None:
    """Build, search and inspect k-NN indices of images.

    \b
    Example:
      sop-index build photos/ --out photos.index
      sop-index serve photos.index
      sop-index search photos.index query.jpg --html found.html
    """


@main.command("build", cls=EncoderCommand, short_help="Build an index of images or of features.")
@source_argument
@click.option("--features", type=_FOLDER, metavar="STORE", help="Instead of SRC: a feature store of sop-embed.")
@optional_encoder_options
@click.option("--out", required=True, type=_FOLDER, metavar="DIR", help="A new or empty directory.")
@click.option(
    "--factory",
    default="auto",
    metavar="F",
    help="Kind of index: auto (by number and memory), or a FAISS factory, as Flat (exact), IVF1024,SQ8 or HNSW32.",
)
@click.option(
    "--max-memory", metavar="SIZE", help="For auto: most that the index may take, as 500MB or 1GB.  [default: no limit]"
)
@click.option(
    "--recall",
    default=0.95,
    help="Share of the 10 nearest that a search must find; tuned and measured on images held out.",
)
@click.option("--tokens", "with_tokens", is_flag=True, help="Make tokens, too, for search --rerank local.")
@token_options
@click.option("--parts", "with_parts", is_flag=True, help="Make parts of the images, too, for search --parts.")
@part_grid_option
@click.option(
    "--max-query-ms",
    type=float,
    metavar="MS",
    help="Of one query on one core; auto takes coarser codes until it is met.  [default: not measured]",
)
@click.option(
    "--cluster",
    metavar="ADDRESS",
    help="Build --features by tasks on a Ray cluster; ray: that of RAY_ADDRESS, or this machine. See docs/scale.md.",
)
@batch_size_option
@max_bad_option
@run_command
def build_command(
    features: Path | None,
    encoder: EncoderSpec | None,
    data: str | None,
    out: Path,
    factory: str,
    max_memory: str | None,
    recall: float,
    max_query_ms: float | None,
    with_tokens: bool,
    token_size: int | None,
    token_count: int | None,
    token_codes: str | None,
    with_parts: bool,
    part_grid: str | None,
    cluster: str | None,
    batch_size: int,
    max_bad_fraction: float,
) -> None:
    """Build an index of images, or of a feature store.

    SRC is a folder of images, .tar shards, or a .txt or .csv list. Without --model the encoder is lite0. The index
    remembers its encoder: no later command needs --model. Images that cannot be used are left out and named. After a
    kill, the same command continues where it was.

    \b
    Examples:
      sop-index build photos/ --out photos.index
      sop-index build photos/ --model runs/photos --out photos.index
      sop-index build photos/ --model photos.encoder.json --out photos.index
      sop-index build --features features/ --out photos.index
      sop-index build --cluster ray --features features/ --factory IVF4096,SQ8 --out photos.index
    """
    from sop_faiss.features.extract import ExtractionOptions
    from sop_faiss.index.build import IndexOptions, parse_bytes
    from sop_faiss.index.part_source import DEFAULT_GRIDS, boxes_of_grids
    from sop_faiss.index.store import read_left_out
    from sop_faiss.verbs.finding.index_build import build

    log_to_stderr(logging.INFO)
    if part_grid is not None and not with_parts:
        raise ConfigError("--part-grid says how parts are made: give --parts too")
    tokens = token_settings(token_size, token_count, token_codes, used=with_tokens, needed="--tokens")
    grids = part_grids(part_grid)
    boxes_of_grids(grids or DEFAULT_GRIDS)
    if with_tokens:
        choices = {"--token-size": token_size, "--token-count": token_count, "--token-codes": token_codes}
        _require_new("tokens", out, features, choices)
    if with_parts:
        _require_new("parts", out, features, {"--part-grid": part_grid})
    options = IndexOptions(factory, None if max_memory is None else parse_bytes(max_memory), recall, max_query_ms)
    verb, things = ("indexing", "parts" if cluster else "vectors") if features else ("embedding", "images")
    with ranks_of_torchrun() as is_main, progress_reporter(verb, things) as progress:
        manifest = build(
            out,
            features=features,
            encoder=encoder,
            data=data,
            options=options,
            cluster=cluster,
            extraction=ExtractionOptions(batch_size, max_bad_fraction=max_bad_fraction),
            progress=progress,
        )
    if not is_main:
        return
    if with_tokens:
        make_tokens_of(out, encoder, None, tokens)
    if with_parts:
        make_parts_of(out, encoder, None, grids, options, batch_size)
    say_left_out(read_left_out(out, manifest), out)
    click.echo(one_line(f"{_describe(manifest)} in {out}; encoder {manifest.encoder['name']}"))


main.add_command(tune_command)
main.add_command(tokens_command)
main.add_command(parts_command)
main.add_command(search_command)
main.add_command(info_command)
main.add_command(duplicates_command)
main.add_command(sync_command)
main.add_command(add_command)
main.add_command(remove_command)
main.add_command(merge_command)
main.add_command(export_command)
main.add_command(serve_command)


def _require_new(what: str, out: Path, features: Path | None, choices: dict[str, Any]) -> None:
    """Refuse tokens or parts of a feature store, or of an index without them that is there already.

    Args:
        what: `tokens` or `parts`: the option, the command and the folder.
        out: the index.
        features: the feature store that it is built of, if any.
        choices: the options that say how they are made; None: not given.
    """
    if features is not None:
        raise ConfigError(f"--{what} are made of images, and --features has none: build of images")
    if (out / "manifest.json").is_file() and not (out / what).is_dir():  # a kill came in between
        words = [str(out), *(str(word) for option in choices.items() if option[1] is not None for word in option)]
        raise ConfigError(
            f"{out} has an index already, without {what}: `sop-index {what} {shlex.join(words)}` makes them"
        )


def _describe(manifest: IndexManifest) -> str:
    left_out = f" ({counted(manifest.dropped)} left out)" if manifest.dropped else ""
    return f"{manifest.count:,} vectors of dimension {manifest.dimension}{left_out}, {_kind(manifest)} index"


def _kind(manifest: IndexManifest) -> str:
    """Name the factory, and how much of an exact search it finds."""
    recall = manifest.search["recall"]
    return manifest.factory if recall is None else f"{manifest.factory} (recall@{manifest.search['k']} {recall:.3f})"


if __name__ == "__main__":
    main()
