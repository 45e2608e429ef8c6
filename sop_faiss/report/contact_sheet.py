"""One self-contained HTML page of queries and their hits: no script, no request, safe for any file name."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from sop_faiss.errors import DataError
from sop_faiss.progress import ProgressCallback
from sop_faiss.report.page import write_page
from sop_faiss.report.thumbnails import Thumbnail, make_thumbnail, missing_thumbnail

__all__ = ["Chart", "SheetHit", "SheetImage", "SheetTable", "Strip", "Verdict", "show_strips", "write_contact_sheet"]

TEMPLATE = "contact_sheet.html"


class Verdict(StrEnum):
    """Whether a found image is right."""

    RIGHT = "right"
    WRONG = "wrong"
    JUNK = "junk"
    """Left out of the score: neither right nor wrong."""


@dataclass(frozen=True)
class SheetImage:
    """One image of a page."""

    name: str
    """Shown below the image; any text."""
    read: Callable[[], bytes]
    """Returns its encoded bytes, or raises DataError; called from several threads."""
    label: str = ""
    """The class of the image, if known."""
    box: tuple[float, float, float, float] | None = None
    """x1, y1, x2, y2 in pixels: the part that was searched for, which is outlined."""


@dataclass(frozen=True)
class SheetHit:
    """One found image."""

    image: SheetImage
    similarity: float
    """Cosine."""
    verdict: Verdict | None = None
    """None if it is not known what is right."""
    note: str = ""
    """A few words below the similarity."""


@dataclass(frozen=True)
class Strip:
    """One query and what was found, nearest first."""

    query: SheetImage
    hits: Sequence[SheetHit]
    note: str = ""
    """A few words next to the query, as in `AP 43.2 %`."""
    empty: str = "Nothing found."
    """Shown if there are no hits."""


@dataclass(frozen=True)
class SheetTable:
    """A small table above the strips; the first column has the names of the rows."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class Chart:
    """A figure above the strips, as `plot_training` makes them."""

    title: str
    png: bytes
    caption: str = ""


def write_contact_sheet(
    path: Path,
    title: str,
    strips: Sequence[Strip],
    *,
    subtitle: str = "",
    legend: str = "Query on the left, nearest first; the number is the cosine similarity.",
    summary: Sequence[SheetTable] = (),
    charts: Sequence[Chart] = (),
    pairs: bool = False,
    footer: str = "",
    progress: ProgressCallback | None = None,
) -> None:
    """Write the page, atomically: each strip a row with the query on the left and its ranked hits on the right.

    Right hits have a green frame and a check mark, wrong ones a red frame and a cross, junk a gray frame and a dash,
    unknown ones a plain frame. Images that cannot be read are shown as placeholders that say why.

    Args:
        path: the HTML file; its folder is created.
        title: of the page.
        strips: rows of the page, in order.
        subtitle: one or two sentences below the title.
        legend: how to read a row.
        summary: tables above the strips.
        charts: PNG images above the strips.
        pairs: put the first and the second strip side by side, the third and the fourth and so on, with the tables and
            charts below them.
        footer: how the page was made, such as the command and the date.
        progress: called with the number of images read and their total.

    Raises:
        OSError: the place cannot be written.
    """
    judged = [hit.verdict for strip in strips for hit in strip.hits]
    values = {
        "title": title,
        "subtitle": subtitle,
        "legend": legend,
        "summary": summary,
        "charts": [_show_chart(chart) for chart in charts],
        "pairs": pairs,
        "strips": show_strips(strips, progress),
        "judged": any(verdict is not None for verdict in judged),
        "any_junk": Verdict.JUNK in judged,
        "footer": footer,
    }
    write_page(path, TEMPLATE, values)


def show_strips(strips: Sequence[Strip], progress: ProgressCallback | None = None) -> list[dict[str, Any]]:
    """Convert strips for the templates, with every image read and shrunk.

    Args:
        strips: rows of a page.
        progress: called with the number of images read and their total.
    """
    thumbnails = _read_thumbnails([image for strip in strips for image in _images(strip)], progress)
    return [_show_strip(strip, thumbnails) for strip in strips]


def _images(strip: Strip) -> list[SheetImage]:
    return [strip.query, *(hit.image for hit in strip.hits)]


def _read_thumbnails(images: Sequence[SheetImage], progress: ProgressCallback | None) -> dict[int, Thumbnail]:
    """Make the thumbnail of each image, by its `id`; equal bytes are decoded once."""
    distinct = {id(image): image for image in images}
    made: dict[tuple[bytes, object], Thumbnail] = {}

    def read(image: SheetImage) -> Thumbnail:
        try:
            encoded = image.read()
        except DataError as error:
            return missing_thumbnail(error)
        key = hashlib.blake2b(encoded).digest(), image.box
        if key not in made:
            made[key] = make_thumbnail(encoded, image.box)
        return made[key]

    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        thumbnails = pool.map(read, distinct.values())
        return dict(zip(distinct, _counted(thumbnails, len(distinct), progress), strict=True))


def _counted(thumbnails: Iterable[Thumbnail], total: int, progress: ProgressCallback | None) -> Iterable[Thumbnail]:
    for done, thumbnail in enumerate(thumbnails, start=1):
        if progress is not None:
            progress(done, total)
        yield thumbnail


def _show_strip(strip: Strip, thumbnails: dict[int, Thumbnail]) -> dict[str, Any]:
    judged = [hit for hit in strip.hits if hit.verdict in (Verdict.RIGHT, Verdict.WRONG)]
    right = sum(hit.verdict is Verdict.RIGHT for hit in judged)
    return {
        "query": _show_image(strip.query, thumbnails),
        "note": strip.note,
        "empty": strip.empty,
        "score": f"{right} of {len(judged)} right" if judged else "",
        "hits": [
            _show_image(hit.image, thumbnails)
            | {"similarity": similarity, "verdict": hit.verdict.value if hit.verdict else "", "note": hit.note}
            for hit, similarity in zip(strip.hits, _show_similarities(strip.hits), strict=True)
        ],
    }


def _show_similarities(hits: Sequence[SheetHit]) -> list[str]:
    """Format with three decimals, or with four if different similarities of one query would look equal."""
    short = [f"{hit.similarity:.3f}" for hit in hits]
    all_distinct = len(set(short)) == len({hit.similarity for hit in hits})
    return short if all_distinct else [f"{hit.similarity:.4f}" for hit in hits]


def _show_image(image: SheetImage, thumbnails: dict[int, Thumbnail]) -> dict[str, Any]:
    return {"name": image.name, "label": image.label, "thumbnail": thumbnails[id(image)]}


def _show_chart(chart: Chart) -> dict[str, Any]:
    uri = "data:image/png;base64," + base64.b64encode(chart.png).decode("ascii")
    return {"title": chart.title, "caption": chart.caption, "uri": uri}
