"""Groups of near duplicates, as records, CSV, or a page of images."""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sop_faiss.index.duplicates import DuplicateGroup
from sop_faiss.index.images import data_name, index_images
from sop_faiss.index.search import FeatureIndex
from sop_faiss.progress import ProgressCallback
from sop_faiss.report.contact_sheet import SheetHit, SheetImage, Strip, write_contact_sheet
from sop_faiss.verbs.finding.search_output import index_commands, index_image

__all__ = ["duplicates_as_csv", "duplicates_as_records", "write_duplicates_page"]

_MOST_GROUPS, _MOST_IMAGES = 200, 60
"""On the page; JSON and CSV have all."""


def duplicates_as_records(index: FeatureIndex, groups: Sequence[DuplicateGroup]) -> list[dict[str, Any]]:
    """Return the groups as JSON values."""
    return [{"size": len(group.rows), "images": _images(index, group)} for group in groups]


def duplicates_as_csv(index: FeatureIndex, groups: Sequence[DuplicateGroup]) -> str:
    """Write one CSV line per image below a heading; groups are numbered from 1."""
    stream = io.StringIO(newline="")
    writer = csv.writer(stream)
    writer.writerow(["group", "size", "row", "key", "similarity_to_first", "label"])
    for number, group in enumerate(groups, start=1):
        for each in _images(index, group):
            similarity = f"{each['similarity_to_first']:.6f}"
            writer.writerow([number, len(group.rows), each["row"], each["key"], similarity, each["label"]])
    return stream.getvalue()


def _images(index: FeatureIndex, group: DuplicateGroup) -> list[dict[str, Any]]:
    return [
        {
            "row": row,
            "key": index.ids.keys[row],
            "similarity_to_first": round(similarity, 6),
            "label": index.label_name(row),
        }
        for row, similarity in zip(group.rows.tolist(), group.similarities.tolist(), strict=True)
    ]


def write_duplicates_page(
    path: Path,
    index: FeatureIndex,
    groups: Sequence[DuplicateGroup],
    threshold: float,
    *,
    images_root: Path | None = None,
    footer: str = "",
    progress: ProgressCallback | None = None,
) -> None:
    """Write the largest groups as a page: each group's first image on the left, the others next to it, nearest first.

    All images of a group but the largest are marked for removal; the page makes lists of what is marked.

    Args:
        path: the HTML file.
        index: what was looked through.
        groups: what was found, largest first.
        threshold: that pairs reach.
        images_root: where the index's images are now; where they were when it was built, if None.
        footer: how it was made.
        progress: called with images read and their total.
    """
    images = index_images(index, images_root)

    def image(row: int) -> SheetImage:
        return index_image(index, images, row)

    strips = []
    for group in groups[:_MOST_GROUPS]:
        first, *others = zip(group.rows.tolist(), group.similarities.tolist(), strict=True)
        others.sort(key=lambda other: -other[1])
        hits = [SheetHit(image(row), similarity) for row, similarity in others[: _MOST_IMAGES - 1]]
        cut = f", {_MOST_IMAGES} shown" if len(group.rows) > _MOST_IMAGES else ""
        strips.append(Strip(image(first[0]), hits, f"{len(group.rows):,} alike{cut}", keep_largest=True))
    alike = sum(len(group.rows) for group in groups)
    shown = f" The {_MOST_GROUPS} largest groups are shown." if len(groups) > _MOST_GROUPS else ""
    subtitle = (
        f"{len(groups):,} {'group' if len(groups) == 1 else 'groups'} of {alike:,} of the {len(index):,} images, "
        f"joined by pairs of similarity {threshold:g} or more.{shown}"
    )
    legend = "Each group's first image on the left, nearest to it first; the number is the cosine similarity to it."
    legend += " All but the largest of a group (pixels, then bytes) are marked to be removed; nothing is until you do."
    place = shlex.quote(str(index.directory.absolute()))
    commands = replace(index_commands(index), marks="remove", with_keys=f"sop-index remove {place} --keys-from")
    title = f"Near duplicates in {data_name(index)}"
    write_contact_sheet(
        path, title, strips, subtitle=subtitle, legend=legend, commands=commands, footer=footer, progress=progress
    )
