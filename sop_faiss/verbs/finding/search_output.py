"""What a search found, as records, CSV, or a page of images."""

from __future__ import annotations

import csv
import functools
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sop_faiss.files import atomic_file
from sop_faiss.index.images import index_images
from sop_faiss.index.search import FeatureIndex
from sop_faiss.progress import ProgressCallback
from sop_faiss.report.contact_sheet import Chart, SheetHit, SheetImage, SheetTable, Strip, Verdict, write_contact_sheet
from sop_faiss.verbs.finding.search_result import SearchResult

__all__ = ["as_csv", "as_records", "as_strips", "write_search_csv", "write_search_page"]


def as_records(result: SearchResult) -> list[dict[str, Any]]:
    """Return the search as JSON values: one object per query, with its neighbors inside."""
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
                }
                for found in query.found
            ],
        }
        for query in result.queries
    ]


def as_csv(result: SearchResult) -> str:
    """Write one CSV line per query and neighbor below a heading; unknown values are empty."""
    stream = io.StringIO(newline="")
    writer = csv.writer(stream)
    writer.writerow(["query", "query_label", "rank", "row", "key", "similarity", "label", "right"])
    for query in result.queries:
        for found in query.found:
            right = "" if found.right is None else int(found.right)
            values = [found.rank, found.row, found.key, f"{found.similarity:.6f}", found.label, right]
            writer.writerow([query.key, query.label, *values])
    return stream.getvalue()


def write_search_csv(path: Path, result: SearchResult) -> None:
    """Write `as_csv` to a file, atomically."""
    with atomic_file(path) as temporary:
        temporary.write_bytes(as_csv(result).encode())


def as_strips(index: FeatureIndex, result: SearchResult, images_root: Path | None = None) -> list[Strip]:
    """Return the search as rows of a page; arguments as of `write_search_page`."""
    images = index_images(index, images_root)
    return [
        Strip(
            SheetImage(query.key, query.read, query.label or ""),
            [
                SheetHit(
                    SheetImage(found.key, functools.partial(images.read, found.row), found.label or ""),
                    found.similarity,
                    None if found.right is None else Verdict.RIGHT if found.right else Verdict.WRONG,
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
    title: str = "Search results",
    footer: str = "",
    summary: Sequence[SheetTable] = (),
    charts: Sequence[Chart] = (),
    progress: ProgressCallback | None = None,
) -> None:
    """Write the search as a page of images.

    Args:
        path: the HTML file.
        index: what was searched.
        result: what was found.
        images_root: where the index's images are now; where they were when it was built, if None.
        title: of the page.
        footer: how it was made.
        summary: tables above the images.
        charts: plots above the images.
        progress: called with images read and their total.
    """
    strips = as_strips(index, result, images_root)
    manifest = index.manifest
    subtitle = (
        f"{len(strips):,} {'query' if len(strips) == 1 else 'queries'} in {len(index):,} images. "
        f"Encoder {manifest.encoder['name']}; {manifest.factory} index, dimension {manifest.dimension}."
    )
    write_contact_sheet(
        path, title, strips, subtitle=subtitle, summary=summary, charts=charts, footer=footer, progress=progress
    )
