"""What a search found, as records, CSV, or a page of images."""

from __future__ import annotations

import csv
import functools
import io
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sop_faiss.data.images.box import box_text, is_part
from sop_faiss.files import write_file
from sop_faiss.index.images import IndexImages, data_name, index_images
from sop_faiss.index.search import FeatureIndex
from sop_faiss.progress import ProgressCallback
from sop_faiss.report.contact_sheet import (
    Chart,
    Commands,
    SheetHit,
    SheetImage,
    SheetTable,
    Strip,
    Verdict,
    spread_places,
    write_contact_sheet,
)
from sop_faiss.verbs.finding.search_result import SearchedQuery, SearchResult

_PAGE_QUERIES = 100
"""Of more queries a page shows this many, spread from the best to the worst; JSON and CSV have all."""


def as_records(result: SearchResult, images: IndexImages) -> list[dict[str, Any]]:
    """Return the search as JSON values: one object per query, with its neighbors and where their `images` are."""
    return [
        {
            "query": query.key,
            "label": query.label,
            "neighbors": [
                {
                    "rank": found.rank,
                    "row": found.row,
                    "key": found.key,
                    "similarity": round(found.similarity, 6),
                    "label": found.label,
                    "right": found.right,
                    "path": place.path,
                    "member": place.member or None,
                }
                | ({} if found.folded is None else {"folded": found.folded})
                | ({} if found.box is None else {"box": [round(each, 4) for each in found.box]})
                for found, place in ((found, images.place(found.row)) for found in query.found)
            ],
        }
        for query in result.queries
    ]


def as_csv(result: SearchResult, images: IndexImages) -> str:
    """Write one CSV line per query and neighbor below a heading; unknown values are empty."""
    stream = io.StringIO(newline="")
    writer = csv.writer(stream)
    columns = ["query", "query_label", "rank", "row", "key", "similarity", "label", "right", "path", "member"]
    is_folded = any(found.folded is not None for query in result.queries for found in query.found)
    is_parted = any(found.box is not None for query in result.queries for found in query.found)
    writer.writerow([*columns, *(["folded"] if is_folded else []), *(["box"] if is_parted else [])])
    for query in result.queries:
        for found in query.found:
            folded: list[Any] = [len(found.folded or [])] if is_folded else []
            folded += [] if found.box is None else [box_text(found.box)]
            right = "" if found.right is None else int(found.right)
            values = [found.rank, found.row, found.key, f"{found.similarity:.6f}", found.label, right]
            writer.writerow([query.key, query.label, *values, *images.place(found.row), *folded])
    return stream.getvalue()


def write_search_csv(path: Path, result: SearchResult, images: IndexImages) -> None:
    """Write `as_csv` to a file, atomically."""
    write_file(path, as_csv(result, images))


def as_strips(
    index: FeatureIndex, result: SearchResult, images_root: Path | None = None, *, by_label: bool = False
) -> list[Strip]:
    """Return the search as rows of a page; arguments as of `write_search_page`."""
    images = index_images(index, images_root)
    return [
        Strip(
            SheetImage(
                query.key, query.read, query.label or "", place=query.place, key=query.key if query.is_key else ""
            ),
            [
                SheetHit(
                    replace(index_image(index, images, found.row), box=found.box if is_part(found.box) else None),
                    found.similarity,
                    None if found.right is None or not by_label else Verdict.RIGHT if found.right else Verdict.WRONG,
                )
                for found in query.found
            ],
        )
        for query in result.queries
    ]


def write_search_page(
    path: Path,
    index: FeatureIndex,
    result: SearchResult,
    *,
    images_root: Path | None = None,
    by_label: bool = False,
    title: str = "",
    queries: int = _PAGE_QUERIES,
    reranked: bool = False,
    footer: str = "",
    summary: Sequence[SheetTable] = (),
    charts: Sequence[Chart] = (),
    progress: ProgressCallback | None = None,
) -> None:
    """Write the search as a page of images; of many queries some, spread from the best to the worst.

    Args:
        index: what was searched.
        images_root: where the index's images are now; where they were when it was built, if None.
        by_label: mark neighbors with the label of their query as right, others as wrong.
        title: of the page; the name of the data set, if empty.
        queries: most that are shown.
        reranked: the order is not that of similarities, and the page says so.
        footer: how it was made.
        summary: tables above the images.
        charts: plots above the images.
    """
    shown, rule = spread_queries(result, queries, by_label=by_label)
    strips = as_strips(index, shown, images_root, by_label=by_label)
    manifest = index.manifest
    count = len(result.queries)
    subtitle = (
        f"{count:,} {'query' if count == 1 else 'queries'} in {len(index):,} images. "
        f"Encoder {manifest.encoder['name']}; {manifest.factory} index, dimension {manifest.dimension}.{rule}"
        f"{' Found by complete images and by parts, which are outlined.' if index.part_boxes is not None else ''}"
        f"{' Re-ranked: the order of a row is not that of the cosine similarities.' if reranked else ''}"
    )
    write_contact_sheet(
        path,
        title or f"Nearest images in {data_name(index)}",
        strips,
        subtitle=subtitle,
        legend="Each query first, then the images nearest to it; the number is the cosine similarity. Mark images to "
        "download their keys or paths.",
        commands=replace(index_commands(index), marks="selected"),
        summary=summary,
        charts=charts,
        footer=footer,
        progress=progress,
    )


def index_image(index: FeatureIndex, images: IndexImages, row: int) -> SheetImage:
    """Make the image of a row of an index."""
    key = index.ids.keys[row]
    read = functools.partial(images.read, row)
    return SheetImage(key, read, index.label_name(row) or "", place=images.place(row), key=key)


def index_commands(index: FeatureIndex) -> Commands:
    """Return what can be done with images of an index."""
    place = shlex.quote(str(index.directory.absolute()))
    return Commands(search=f"sop-index search {place} --html neighbors.html --key=")


def spread_queries(result: SearchResult, count: int, *, by_label: bool = True) -> tuple[SearchResult, str]:
    """Choose some of many queries, evenly spaced by rank from the best to the worst.

    The best is the one with the largest share of right neighbors, where classes are known and count, and then with the
    largest mean similarity.

    Args:
        count: most queries to choose, 1 or more; no more than these are left in their order.
        by_label: whether classes count.

    Returns:
        The result of these queries, and a sentence for the reader after a space, empty if all were chosen.
    """
    total = len(result.queries)
    if total <= count:
        return result, ""
    judged = by_label and any(found.right is not None for query in result.queries for found in query.found)
    ranked = sorted(result.queries, key=_goodness if judged else _mean_similarity, reverse=True)
    shown = [ranked[place] for place in spread_places(total, count)]
    by = "the share of right neighbors" if judged else "mean similarity"
    rule = f" Shown are {count:,} of them, evenly spaced by rank from the best to the worst by {by}."
    return replace(result, queries=shown), rule


def _goodness(query: SearchedQuery) -> tuple[float, float]:
    judged = [found.right for found in query.found if found.right is not None]
    return sum(judged) / max(1, len(judged)), _mean_similarity(query)


def _mean_similarity(query: SearchedQuery) -> float:
    return sum(found.similarity for found in query.found) / max(1, len(query.found))
