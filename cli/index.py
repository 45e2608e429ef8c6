"""sop-index: a k-NN index of features or pictures: build it, search it, look at it."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sop_faiss.cli.common import (
    CONTEXT_SETTINGS,
    log_to_stderr,
    one_line,
    page_footer,
    progress_reporter,
    run_command,
    say_written,
)
from sop_faiss.cli.index_change import add_command, merge_command, remove_command
from sop_faiss.cli.index_serve import serve_command
from sop_faiss.cli.optional_encoder import optional_encoder_options
from sop_faiss.files import write_json
from sop_faiss.model.spec import EncoderSpec
from sop_faiss.pipeline.outputs import STDOUT, check_outputs, encoder_files, source_files

if TYPE_CHECKING:
    from sop_faiss.index.store import IndexManifest
    from sop_faiss.pipeline.search import SearchResult

_FILE = click.Path(path_type=Path, allow_dash=True)
_FOLDER = click.Path(path_type=Path)


@click.group(context_settings=CONTEXT_SETTINGS)
@click.version_option(package_name="sop-faiss")
def main() -> None:
    """Build, search and inspect k-NN indices of pictures.

    \b
    Example:
      sop-index build --model runs/photos --data photos/ --out photos.index
      sop-index search photos.index query.jpg --model runs/photos --html found.html
    """


@main.command("build", short_help="Build an index of pictures or of features.")
@click.option("--features", type=_FOLDER, metavar="STORE", help="A feature store, as sop-embed writes it.")
@optional_encoder_options
@click.option("--data", metavar="SRC", help="Pictures: .tar shards, a folder, or a .txt or .csv list; with --model.")
@click.option("--out", required=True, type=_FOLDER, metavar="DIR", help="A new or empty directory.")
@click.option(
    "--factory",
    default="auto",
    show_default=True,
    metavar="F",
    help="Kind of index: auto (by number and memory), or a FAISS factory, as Flat (exact), IVF1024,SQ8 or HNSW32.",
)
@click.option("--max-memory", metavar="SIZE", help="For auto: most that the index may take, as 500MB or 1GB.")
@click.option(
    "--recall",
    type=float,
    default=0.95,
    show_default=True,
    help="Share of the 10 nearest that a search shall find; tuned and measured on pictures held out.",
)
@click.option("--batch-size", type=int, default=64, show_default=True, help="Pictures per forward pass.")
@click.option(
    "--max-bad-fraction",
    type=float,
    default=0.01,
    show_default=True,
    help="Unusable pictures up to this share are left out and counted; more is an error.",
)
@run_command
def build_command(
    features: Path | None,
    encoder: EncoderSpec | None,
    data: str | None,
    out: Path,
    factory: str,
    max_memory: str | None,
    recall: float,
    batch_size: int,
    max_bad_fraction: float,
) -> None:
    """Build an index of a feature store, or of pictures.

    \b
    Examples:
      sop-index build --features features/ --out photos.index
      sop-index build --model runs/photos --data photos/ --out photos.index
    """
    from sop_faiss.index.build import IndexOptions, parse_bytes
    from sop_faiss.pipeline.index import build

    log_to_stderr(logging.INFO)
    options = IndexOptions(factory, None if max_memory is None else parse_bytes(max_memory), recall)
    verb, things = ("indexing", "vectors") if features is not None else ("embedding", "pictures")
    with progress_reporter(verb, things) as progress:
        manifest = build(
            out,
            features=features,
            encoder=encoder,
            data=data,
            options=options,
            batch_size=batch_size,
            max_bad_fraction=max_bad_fraction,
            progress=progress,
        )
    click.echo(one_line(f"{_describe(manifest)} in {out}; encoder {manifest.encoder['name']}"))


@main.command("search", short_help="Find the pictures nearest to yours.")
@click.argument("index", type=_FOLDER)
@click.argument("images", metavar="[IMAGE]...", type=_FOLDER, nargs=-1)
@click.option("--key", "keys", multiple=True, metavar="KEY", help="An image of the index itself; needs no --model.")
@click.option("--data", metavar="SRC", help="Many queries: .tar shards, a folder, or a .txt or .csv list.")
@optional_encoder_options
@click.option("-k", type=int, default=10, show_default=True, help="Neighbours of each query.")
@click.option("--threshold", type=float, metavar="COSINE", help="Leave out neighbours of a smaller similarity.")
@click.option("--json", "json_file", type=_FILE, metavar="FILE", help="Write what was found as JSON; - is stdout.")
@click.option(
    "--csv", "csv_file", type=_FILE, metavar="FILE", help="Write one line per query and neighbour; - is stdout."
)
@click.option("--html", "html_file", type=_FOLDER, metavar="FILE", help="Write a page of pictures that stands alone.")
@click.option("--images-root", type=_FOLDER, metavar="DIR", help="Where the index's pictures are, if they moved.")
@click.option("--batch-size", type=int, default=64, show_default=True, help="Pictures per forward pass.")
@click.option(
    "--max-bad-fraction", type=float, default=0.01, show_default=True, help="Of --data: share that may be unusable."
)
@run_command
def search_command(
    index: Path,
    images: tuple[Path, ...],
    keys: tuple[str, ...],
    data: str | None,
    encoder: EncoderSpec | None,
    k: int,
    threshold: float | None,
    json_file: Path | None,
    csv_file: Path | None,
    html_file: Path | None,
    images_root: Path | None,
    batch_size: int,
    max_bad_fraction: float,
) -> None:
    """Find the pictures of an index that are nearest to yours, nearest first.

    INDEX is the directory that sop-index build wrote, IMAGE a picture file. The similarity is the cosine of the
    features. Where classes are known, right and wrong ones are marked.

    \b
    Examples:
      sop-index search photos.index query.jpg --model runs/photos --html found.html
      sop-index search photos.index --key IMG_0042 -k 20
      sop-index search photos.index --data queries/ --model runs/photos --csv found.csv
    """
    from sop_faiss.index.search import FeatureIndex
    from sop_faiss.pipeline.search import SearchOptions, search_index
    from sop_faiss.pipeline.search_output import as_csv, as_records, write_search_csv, write_search_page

    check_outputs(
        {"--json": json_file, "--csv": csv_file, "--html": html_file},
        [index, *images, *source_files(data), *encoder_files(encoder)],
        to_stdout=("--json", "--csv"),
    )
    options = SearchOptions(k, threshold, images_root, batch_size, max_bad_fraction)
    opened = FeatureIndex.open(index)
    with progress_reporter("embedding", "pictures") as progress:
        result = search_index(
            opened, pictures=images, data=data, keys=keys, encoder=encoder, options=options, progress=progress
        )
    if csv_file == STDOUT:
        click.echo(_for_stdout(as_csv(result)), nl=False)
    elif csv_file is not None:
        write_search_csv(csv_file, result)
    if html_file is not None:
        with progress_reporter("drawing", "pictures") as progress:
            footer = page_footer("sop-index search")
            write_search_page(html_file, opened, result, images_root=images_root, footer=footer, progress=progress)
    if json_file is not None:
        content = {
            "command": "sop-index search",
            "index": str(index),
            "encoder": opened.manifest.encoder,
            "k": k,
            "threshold": threshold,
            "dropped": result.dropped,
            "queries": as_records(result),
        }
        _write_json(json_file, content)
    if STDOUT not in (json_file, csv_file):
        click.echo(_found_text(result))
        say_written("JSON", json_file)
    say_written("CSV", csv_file)
    say_written("page", html_file)
    if result.dropped:
        click.echo(f"left out: {_counted(result.dropped)}", err=True)


@main.command("info", short_help="Verify an index and say what it is.")
@click.argument("index", type=_FOLDER)
@click.option(
    "--json",
    "json_file",
    type=_FILE,
    is_flag=False,
    flag_value="-",
    metavar="[FILE]",
    help="As JSON, on stdout if no FILE.",
)
@run_command
def info_command(index: Path, json_file: Path | None) -> None:
    """Verify every byte of an index and say what it is.

    INDEX is the directory that sop-index build wrote.

    \b
    Example:
      sop-index info photos.index
    """
    from sop_faiss.index.store import read_verified

    check_outputs({"--json": json_file}, [index], to_stdout=("--json",))
    manifest, ids = read_verified(index)
    labelled = 0 if ids.labels is None else int((ids.labels >= 0).sum())
    size = sum(int(file["bytes"]) for file in manifest.files.values())
    facts = {
        "factory": manifest.factory,
        "search": manifest.search,
        "metric": manifest.metric,
        "count": manifest.count,
        "dimension": manifest.dimension,
        "bytes": size,
        "encoder": manifest.encoder,
        "preprocess": manifest.preprocess,
        "pooling": manifest.pooling,
        "labelled": labelled,
        "class_names": manifest.class_names,
        "dropped": manifest.dropped,
        "root": manifest.root,
        "root_exists": Path(manifest.root).is_dir(),
        "verified": True,
    }
    if json_file is not None:
        _write_json(json_file, facts)
    if json_file != STDOUT:
        click.echo(_info_text(index, facts))
        say_written("JSON", json_file)


main.add_command(add_command)
main.add_command(remove_command)
main.add_command(merge_command)
main.add_command(serve_command)


def _info_text(index: Path, facts: dict[str, Any]) -> str:
    encoder, names = facts["encoder"], facts["class_names"]
    moved = "" if facts["root_exists"] else " (not there: give --images-root when you search)"
    lines = {
        "index": f"{index}, {facts['bytes'] / 1e6:,.1f} MB, every byte verified",
        "vectors": f"{facts['count']:,} of dimension {facts['dimension']}, {facts['factory']}, {facts['metric']}",
        "encoder": f"{encoder['name']}, fingerprint {encoder['fingerprint'][:12]}, pooling {facts['pooling']}",
        "preprocess": ", ".join(f"{name} {value}" for name, value in facts["preprocess"].items()),
        "labels": f"{facts['labelled']:,} of {facts['count']:,}" + (f", {len(names):,} class names" if names else ""),
        "pictures": f"{facts['root']}{moved}",
        "left out": _counted(facts["dropped"]) or "none",
    }
    return "\n".join(f"{name:<11}{one_line(value)}" for name, value in lines.items())


def _describe(manifest: IndexManifest) -> str:
    left_out = f" ({_counted(manifest.dropped)} left out)" if manifest.dropped else ""
    return f"{manifest.count:,} vectors of dimension {manifest.dimension}{left_out}, {_kind(manifest)} index"


def _kind(manifest: IndexManifest) -> str:
    """The factory, and how much of an exact search it finds."""
    recall = manifest.search["recall"]
    return manifest.factory if recall is None else f"{manifest.factory} (recall@{manifest.search['k']} {recall:.3f})"


def _counted(dropped: dict[str, int]) -> str:
    return one_line(", ".join(f"{reason} {count}" for reason, count in dropped.items()))


def _found_text(result: SearchResult) -> str:
    """One block a query: its key and class, then rank, similarity, mark, key and class of each neighbour."""
    marks = {True: "+", False: "-", None: " "}
    blocks = []
    for query in result.queries:
        lines = [_named(query.key, query.label)]
        for found in query.found:
            named = _named(found.key, found.label)
            lines.append(f"{found.rank:4d}  {found.similarity:7.4f} {marks[found.right]} {named}")
        if not query.found:
            lines.append("      nothing above the threshold")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _named(key: str, label: str | None) -> str:
    return one_line(key) + (f"  [{one_line(label)}]" if label is not None else "")


def _for_stdout(text: str) -> bytes:
    """The text as it is for a pipe or a file; without control characters for a terminal, which would obey them."""
    if sys.stdout.isatty():
        text = "".join(letter if letter.isprintable() or letter in "\r\n" else "?" for letter in text)
    return text.encode()


def _write_json(file: Path, content: Any) -> None:
    if file == STDOUT:
        click.echo(json.dumps(content, indent=1, allow_nan=False))
    else:
        write_json(file, content)


if __name__ == "__main__":
    main()
