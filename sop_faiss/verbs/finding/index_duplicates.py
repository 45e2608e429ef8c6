"""Groups of near duplicates, as records, CSV, or a page of images."""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sop_faiss.index.duplicates import DuplicateGroup
from sop_faiss.index.images import IndexImages, data_name, index_images
from sop_faiss.index.search import FeatureIndex
from sop_faiss.progress import ProgressCallback
from sop_faiss.report.contact_sheet import SheetHit, Strip, write_contact_sheet
from sop_faiss.verbs.finding.search_output import index_commands, index_image

_MOST_GROUPS, _MOST_IMAGES = 200, 60
"""On the page; JSON and CSV have all."""
KINDS = {"exact": "exact copies", "partly": "some exact copies", "similar": "only similar"}
"""What the kinds of groups are called."""
SAME_IMAGE = 0.99
"""Images of this similarity are marked for removal as exact copies are. Measured with lite0: 120 photos saved again as
JPEG of quality 85 have 0.993 or more, consecutive frames of videos at most 0.983, other photos of 500 groceries at most
0.967."""


def duplicates_as_records(index: FeatureIndex, groups: Sequence[DuplicateGroup]) -> list[dict[str, Any]]:
    """Return the groups as JSON values."""
    return [{"size": len(group.rows), "kind": group.kind, "images": _images(index, group)} for group in groups]


def duplicates_as_csv(index: FeatureIndex, groups: Sequence[DuplicateGroup]) -> str:
    """Write one CSV line per image below a heading; groups are numbered from 1."""
    stream = io.StringIO(newline="")
    writer = csv.writer(stream)
    writer.writerow(["group", "size", "row", "key", "similarity_to_first", "label", "copy_of", "link"])
    for number, group in enumerate(groups, start=1):
        for each in _images(index, group):
            similarity = f"{each['similarity_to_first']:.6f}"
            line = [each["row"], each["key"], similarity, each["label"], each["copy_of"], int(each["link"])]
            writer.writerow([number, len(group.rows), *line])
    return stream.getvalue()


def _images(index: FeatureIndex, group: DuplicateGroup) -> list[dict[str, Any]]:
    keys = [index.ids.keys[row] for row in group.rows.tolist()]
    return [
        {
            "row": row,
            "key": keys[place],
            "similarity_to_first": round(float(group.similarities[place]), 6),
            "label": index.label_name(row),
            "copy_of": keys[group.copy_of[place]] if group.copy_of[place] != place else None,
            "link": group.links[place],
        }
        for place, row in enumerate(group.rows.tolist())
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

    Of images with the same bytes, or of similarity `SAME_IMAGE` or more, all but the largest are marked for removal;
    links never are. The page makes lists of what is marked.

    Args:
        index: what was looked through.
        groups: what was found, largest first.
        threshold: that pairs reach.
        images_root: where the index's images are now; where they were when it was built, if None.
        footer: how it was made.
    """
    images = index_images(index, images_root)
    strips = [_strip(index, images, group) for group in groups[:_MOST_GROUPS]]
    alike = sum(len(group.rows) for group in groups)
    shown = f" The {_MOST_GROUPS} largest groups are shown." if len(groups) > _MOST_GROUPS else ""
    subtitle = (
        f"{alike:,} of the {len(index):,} images are in {len(groups):,} {'group' if len(groups) == 1 else 'groups'}, "
        f"joined by pairs of similarity {threshold:g} or more.{shown}"
    )
    if not groups:
        subtitle = f"No two of the {len(index):,} images reach a similarity of {threshold:g}."
    legend = (
        "On the left the first image of a group; next to it the others, nearest first, with their similarity to it."
    )
    legend += (
        f" Marked to be removed are exact copies (the same bytes) and images of similarity {SAME_IMAGE:g} or more, all "
        "but the largest (pixels, then bytes); decide about the others yourself. "
        "Nothing is removed until you do it, and then from the index only: the files stay."
    )
    place = shlex.quote(str(index.directory.absolute()))
    commands = replace(index_commands(index), marks="remove", with_keys=f"sop-index remove {place} --keys-from")
    title = f"Near duplicates in {data_name(index)}"
    write_contact_sheet(
        path, title, strips, subtitle=subtitle, legend=legend, commands=commands, footer=footer, progress=progress
    )


def _strip(index: FeatureIndex, images: IndexImages, group: DuplicateGroup) -> Strip:
    """Make the row of a group: its first image, then the others, nearest first."""
    others = sorted(range(1, len(group.rows)), key=lambda place: -group.similarities[place])
    places = [0, *others[: _MOST_IMAGES - 1]]
    rows = group.rows[places].tolist()
    features = index.features(rows)
    features = features / np.linalg.norm(features, axis=1, keepdims=True)  # codes do not keep norms

    def same(one: int, two: int) -> bool:
        ours, theirs = places[one], places[two]
        if group.links[ours] or group.links[theirs]:
            return False
        return group.copy_of[ours] == group.copy_of[theirs] or bool(features[one] @ features[two] >= SAME_IMAGE)

    def note(place: int) -> str:
        copies = "exact copy" if group.copy_of.count(group.copy_of[place]) > 1 else ""
        return "link" if group.links[place] else copies

    hits = [
        SheetHit(index_image(index, images, row), float(group.similarities[place]), note=note(place))
        for place, row in zip(places[1:], rows[1:], strict=True)
    ]
    cut = f", {_MOST_IMAGES} shown" if len(group.rows) > _MOST_IMAGES else ""
    first = f"; this one: {note(0)}" if note(0) and group.kind != "exact" else ""
    text = f"{len(group.rows):,} alike: {KINDS[group.kind]}{first}{cut}"
    return Strip(index_image(index, images, rows[0]), hits, text, same=same)
