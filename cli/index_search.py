"""sop-index search: the images nearest to a query."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from sop_faiss.cli.common import one_line, page_footer, run_command, say_written
from sop_faiss.cli.encoder_options import EncoderCommand, batch_size_option
from sop_faiss.cli.index_output import counted, for_stdout, named
from sop_faiss.cli.json_output import put_json
from sop_faiss.cli.optional_encoder import optional_encoder_options
from sop_faiss.cli.path_options import NamedPath, force_option, refuse_empty
from sop_faiss.cli.progress_reporter import progress_reporter
from sop_faiss.cli.rerank_options import rerank_options
from sop_faiss.files import write_file
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.verbs.output_paths import STDOUT, check_outputs, encoder_files, source_files

if TYPE_CHECKING:
    from sop_faiss.index.images import IndexImages
    from sop_faiss.index.rerank.settings import Rerank
    from sop_faiss.index.rerank.token_store import TokenStore
    from sop_faiss.index.search import FeatureIndex
    from sop_faiss.verbs.finding.index_search import SearchOptions
    from sop_faiss.verbs.finding.search_result import SearchResult

_FILE = NamedPath(allow_dash=True)
_FOLDER = NamedPath()


@click.command("search", cls=EncoderCommand, short_help="Find the images nearest to yours.")
@click.argument("index", type=_FOLDER)
@click.argument("images", metavar="[IMAGE]...", type=_FOLDER, nargs=-1)
@click.option("--key", "keys", multiple=True, metavar="KEY", help="An image of the index itself; needs no encoder.")
@click.option(
    "--data", metavar="SRC", callback=refuse_empty, help="Many queries: .tar shards, a folder, or a .txt or .csv list."
)
@optional_encoder_options
@click.option("--features", type=_FOLDER, metavar="STORE", help="Many queries: a feature store; needs no encoder.")
@click.option("-k", type=int, help="Neighbors of each query.  [default: 10; with --threshold all that reach it]")
@click.option("--threshold", type=float, metavar="COSINE", help="Leave out neighbors of a smaller similarity.")
@rerank_options
@click.option(
    "--box",
    metavar="X0,Y0,X1,Y1",
    help="Search by this part of IMAGE alone: left, top, right, bottom in pixels, or in shares of its sides (0 to 1).",
)
@click.option(
    "--parts", is_flag=True, help="Find images by parts of them, too; needs parts (sop-index parts). The best counts."
)
@click.option(
    "--where",
    metavar="CONDITION",
    help="Only images whose key, source, member or label pass it, as \"label = 'shoe'\".",
)
@click.option("--table", type=_FOLDER, metavar="FILE", help="More columns for --where, by key: .csv or .parquet.")
@click.option("--unique", type=float, metavar="COSINE", help="Fold a neighbor that is this similar to a nearer one.")
@click.option("--together", is_flag=True, help="Search by the mean of all queries.")
@click.option(
    "--minus", multiple=True, metavar="IMAGE", help="Less this image (with --key: a key); implies --together."
)
@click.option(
    "--verify",
    default="all",
    show_default=True,
    metavar="all|sizes",
    help="Compare every byte of the index with its checksum, or (sizes) of the vectors' file only the length; of "
    "tokens always only the length (all by sop-index info).",
)
@click.option("--json", "json_file", type=_FILE, metavar="FILE", help="Write what was found as JSON; - is stdout.")
@click.option(
    "--csv", "csv_file", type=_FILE, metavar="FILE", help="Write one line per query and neighbor; - is stdout."
)
@click.option("--html", "html_file", type=_FOLDER, metavar="FILE", help="Write a page of images, complete in one file.")
@click.option(
    "--explain",
    type=_FOLDER,
    metavar="FILE.png",
    help="Draw where the query matches its first neighbors; needs tokens (sop-index tokens).",
)
@click.option("--by-label", is_flag=True, help="Mark neighbors with the query's label right (+), others wrong (-).")
@click.option("--images-root", type=_FOLDER, metavar="DIR", help="Where the index's images are, if they moved.")
@batch_size_option
@click.option(
    "--max-bad-fraction", type=float, default=0.01, show_default=True, help="Of --data: share that may be unusable."
)
@force_option
@run_command
def search_command(
    index: Path,
    images: tuple[Path, ...],
    keys: tuple[str, ...],
    data: str | None,
    encoder: EncoderSpec | None,
    features: Path | None,
    k: int | None,
    threshold: float | None,
    where: str | None,
    table: Path | None,
    unique: float | None,
    together: bool,
    minus: tuple[str, ...],
    rerank: Rerank | None,
    box: str | None,
    parts: bool,
    verify: str,
    json_file: Path | None,
    csv_file: Path | None,
    html_file: Path | None,
    explain: Path | None,
    by_label: bool,
    images_root: Path | None,
    batch_size: int,
    max_bad_fraction: float,
    force: bool,
) -> None:
    """Find the images of an index that are nearest to yours, nearest first.

    INDEX is the directory that sop-index build wrote, IMAGE an image file. The index knows its encoder; --model opens
    it from another place. The similarity is the cosine of the features; labels, such as the names of folders, are in
    brackets. With --threshold and without -k, all neighbors that reach the threshold are found; with both, of the k
    nearest those that reach it. --rerank puts the first of them (those that pass --where, if it is given) into a
    better order; the similarities printed are still cosines, so that they no longer fall. Near-duplicates are folded
    after that. --rerank local needs tokens (sop-index build --tokens; of an existing index, sop-index tokens).
    --parts compares the query with parts of the images, too (sop-index build --parts, or sop-index parts), and shows
    for each image found which part was the most similar, in shares of its sides; it goes with --rerank local alone.
    --where has the columns key, source (the .tar file; empty for a folder), member (the path in it), label (the
    sub-folder) and those of --table.

    \b
    Examples:
      sop-index search photos.index query.jpg --html found.html
      sop-index search photos.index --key IMG_0042 -k 20
      sop-index search photos.index query.jpg --rerank global
      sop-index search photos.index query.jpg --box 40,60,200,180 --parts
      sop-index search photos.index --data queries/ --csv found.csv
      sop-index search photos.index a.jpg b.jpg --minus c.jpg --unique 0.95
      sop-index search photos.index query.jpg --table shop.csv --where "price < 50 and label <> 'shoe'"
      sop-index search photos.index --features queries.features/ --threshold 0.9 --json found.json
    """
    from sop_faiss.data.images.box import parse_box
    from sop_faiss.features.extract import ExtractionOptions
    from sop_faiss.verbs.finding.index_search import SearchOptions, search_index

    check_outputs(
        {"--json": json_file, "--csv": csv_file, "--html": html_file, "--explain": explain},
        [
            *(index, *images, *source_files(data), *encoder_files(encoder)),
            *(path for path in (features, table) if path),
            *(Path(name) for name in minus if not keys),
        ],
        to_stdout=("--json", "--csv"),
        figures=["--explain"],
        force=force,
    )
    extraction = ExtractionOptions(batch_size, max_bad_fraction=max_bad_fraction)
    part = None if box is None else parse_box(box)
    options = SearchOptions(
        *(k, threshold, images_root, extraction, where, table, unique, together, minus), rerank=rerank, box=part
    )
    opened = _opened(index, verify, parts)
    tokens = None if explain is None else _tokens(opened)  # refused before any image is encoded
    with progress_reporter("embedding", "images") as progress:
        result = search_index(
            opened,
            images=images,
            data=data,
            keys=keys,
            features=features,
            encoder=encoder,
            options=options,
            progress=progress,
        )
    files = _Files(json_file, csv_file, html_file, explain)
    _write(files, opened, tokens, encoder, result, options, _asked(index, opened, options, box), by_label)
    if unique is not None:
        folded = sum(len(found.folded or ()) for query in result.queries for found in query.found)
        click.echo(f"folded: {folded:,} near-duplicates of neighbors", err=True)
    if result.dropped:
        click.echo(f"left out: {counted(result.dropped)}", err=True)


class _Files(NamedTuple):
    """Where what was found is written; None: not."""

    json: Path | None
    csv: Path | None
    html: Path | None
    explain: Path | None


def _write(
    files: _Files,
    opened: FeatureIndex,
    tokens: TokenStore | None,
    encoder: EncoderSpec | None,
    result: SearchResult,
    options: SearchOptions,
    asked: dict[str, Any],
    by_label: bool,
) -> None:
    """Write the wanted files, and print what was found unless one of them is stdout."""
    from sop_faiss.index.images import index_images
    from sop_faiss.verbs.finding.search_output import as_csv, as_records, write_search_csv, write_search_page

    places = index_images(opened, options.images_root)
    if files.explain is not None and tokens is not None:
        from sop_faiss.verbs.finding.index_explain import draw_explanation

        write_file(files.explain, draw_explanation(opened, tokens, encoder, result, places))
    if files.csv == STDOUT:
        click.echo(for_stdout(as_csv(result, places)), nl=False)
    elif files.csv is not None:
        write_search_csv(files.csv, result, places)
    if files.html is not None:
        with progress_reporter("drawing", "images") as progress:
            write_search_page(
                files.html,
                opened,
                result,
                images_root=options.images_root,
                by_label=by_label,
                reranked=options.rerank is not None,
                footer=page_footer("sop-index search"),
                progress=progress,
            )
    if files.json is not None:
        put_json(files.json, asked | {"dropped": result.dropped, "queries": as_records(result, places)})
    if STDOUT not in (files.json, files.csv):
        click.echo(_found_text(result, places, by_label, options.threshold))
    for what, file in (("JSON", files.json), ("CSV", files.csv), ("page", files.html), ("image", files.explain)):
        say_written(what, file)


def _opened(index: Path, verify: str, parts: bool) -> FeatureIndex:
    from sop_faiss.index.search import FeatureIndex

    opened = FeatureIndex.open(index, verify=verify)
    if verify == "sizes":
        click.echo("the vectors' bytes were not verified, only their length", err=True)
    return opened.with_parts(verify=verify) if parts else opened


def _tokens(opened: FeatureIndex) -> TokenStore:
    from sop_faiss.index.rerank.token_store import TokenStore

    return TokenStore.open(opened)


def _asked(index: Path, opened: FeatureIndex, options: SearchOptions, box: str | None) -> dict[str, Any]:
    """Return the question as JSON values; options that were not used are left out."""
    narrowed: dict[str, Any] = {
        "where": options.where,
        "table": str(options.table) if options.table else None,
        "unique": options.unique,
        "together": options.together or bool(options.minus),
        "minus": list(options.minus),
    }
    return {
        "command": "sop-index search",
        "index": str(index),
        "encoder": opened.manifest.encoder,
        "k": 10 if options.k is None and options.threshold is None else options.k,
        "threshold": options.threshold,
        **({} if box is None else {"box": box}),
        **({} if opened.part_boxes is None else {"parts": True}),
        **({} if options.rerank is None else {"rerank": options.rerank.to_dict()}),
        **{name: value for name, value in narrowed.items() if value},
    }


def _found_text(result: SearchResult, images: IndexImages, by_label: bool, threshold: float | None) -> str:
    """Print one block per query: its key and label, then each neighbor; with `by_label` whether it is right."""
    from sop_faiss.data.images.box import box_text, is_part

    marks = {True: "+ ", False: "- ", None: "  "}
    blocks = []
    for query in result.queries:
        lines = [named(query.key, query.label)]
        for found in query.found:
            mark = marks[found.right] if by_label else ""
            place = one_line(": ".join(filter(None, images.place(found.row))))
            name = named(found.key, found.label)
            more = f"  (+{len(found.folded):,} alike)" if found.folded else ""
            part = f"  part {box_text(found.box)}" if found.box is not None and is_part(found.box) else ""
            lines.append(f"{found.rank:4d}  {found.similarity:7.4f}  {mark}{name}  {place}{part}{more}")
        if not query.found:
            lines.append("      nothing found")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)
