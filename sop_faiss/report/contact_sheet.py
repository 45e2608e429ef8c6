"""One self-contained HTML page of queries and their hits: no request, safe for any file name."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from sop_faiss.data.images.source import ImageSource, Place, place_of
from sop_faiss.data.ordered_map import default_workers
from sop_faiss.errors import DataError
from sop_faiss.progress import ProgressCallback
from sop_faiss.report.page import write_page
from sop_faiss.report.thumbnails import Thumbnail, make_thumbnail, missing_thumbnail, side_for

TEMPLATE = "contact_sheet.html"
_SHORT_STRIP = 2
"""Strips of at most this many hits are placed side by side."""


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
    """x1, y1, x2, y2, as of `make_thumbnail`: the part that was searched for, or found, which is outlined."""
    place: Place | None = None
    """Where it is, if known; only images that are files can be put on a list of paths."""
    key: str = ""
    """Its key in the index that the page shows; empty for an image of no index."""


def source_image(
    source: ImageSource, position: int, label: str = "", box: tuple[float, float, float, float] | None = None
) -> SheetImage:
    """Make the image of a position of a source."""
    read = functools.partial(source.read, position)
    return SheetImage(source.keys[position], read, label, box, place_of(source, position))


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
    same: Callable[[int, int], bool] | None = None
    """Says of two of its images, the query being 0, whether one may go: of those all but the largest are marked for
    removal, as far as they can be read. None: nothing is marked."""


@dataclass(frozen=True)
class SheetTable:
    """A small table above the strips; the first column has the names of the rows."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class Chart:
    """A figure above the strips."""

    title: str
    uri: str
    """An image as a `data:` URI, as `themed_svg` makes it."""
    caption: str = ""
    alt: str = ""
    """What is seen in it, in words; the title, if empty."""


@dataclass(frozen=True)
class Commands:
    """What a reader can do with a page's images; the commands are shown to be copied."""

    marks: str = ""
    """What a mark on an image means, and the name of the downloaded lists; if empty, none can be marked."""
    search: str = ""
    """A command that ends before the key of the image to search by; empty if there is no index."""
    with_keys: str = ""
    """A command that ends before the file of keys."""
    with_paths: str = ""
    """A command that ends before the file of paths."""


def write_contact_sheet(
    path: Path,
    title: str,
    strips: Sequence[Strip],
    *,
    subtitle: str = "",
    legend: str = "Each query first, then the images nearest to it; the number is the cosine similarity.",
    commands: Commands | None = None,
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
        strips: rows of the page, in order.
        subtitle: one or two sentences below the title.
        legend: how to read a row.
        commands: for what images are marked.
        summary: tables above the strips.
        charts: figures above the strips.
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
        "charts": charts,
        "pairs": pairs,
        "commands": commands or Commands(),
        "strips": show_strips(strips, progress),
        "judged": any(verdict is not None for verdict in judged),
        "any_junk": Verdict.JUNK in judged,
        "footer": footer,
    }
    write_page(path, TEMPLATE, values)


def spread_places(total: int, count: int) -> list[int]:
    """Return `count` places of 0 to `total` - 1, evenly spaced, first and last among them; all if there are no more."""
    if total <= count:
        return list(range(total))
    return [round(place * (total - 1) / max(1, count - 1)) for place in range(count)]


def show_strips(strips: Sequence[Strip], progress: ProgressCallback | None = None) -> list[dict[str, Any]]:
    """Convert strips for the templates, with every image read and shrunk.

    Args:
        strips: rows of a page.
        progress: called with the number of images read and their total.
    """
    images = [image for strip in strips for image in _images(strip)]
    thumbnails = _read_thumbnails(images, side_for(len(images)), progress)
    return [_show_strip(strip, thumbnails) for strip in strips]


def _images(strip: Strip) -> list[SheetImage]:
    return [strip.query, *(hit.image for hit in strip.hits)]


def _read_thumbnails(
    images: Sequence[SheetImage], side: int, progress: ProgressCallback | None
) -> dict[int, Thumbnail]:
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
            made[key] = make_thumbnail(encoded, side, image.box)
        return made[key]

    with ThreadPoolExecutor(max_workers=default_workers()) as pool:
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
    marked = _all_but_the_largest(strip, thumbnails)
    return {
        "query": _show_image(strip.query, thumbnails, 0 in marked),
        "may_mark_query": strip.same is not None,
        "short": len(strip.hits) <= _SHORT_STRIP,
        "note": strip.note,
        "empty": strip.empty,
        "score": f"{right} of {len(judged)} shown are right" if judged else "",
        "hits": [
            _show_image(hit.image, thumbnails, number in marked)
            | {"similarity": similarity, "verdict": hit.verdict.value if hit.verdict else "", "note": hit.note}
            for number, (hit, similarity) in enumerate(
                zip(strip.hits, _show_similarities(strip.hits), strict=True), start=1
            )
        ],
    }


def _show_similarities(hits: Sequence[SheetHit]) -> list[str]:
    """Format with three decimals, or with four if different similarities of one query would look equal."""
    short = [f"{hit.similarity:.3f}" for hit in hits]
    all_distinct = len(set(short)) == len({hit.similarity for hit in hits})
    return short if all_distinct else [f"{hit.similarity:.4f}" for hit in hits]


def _all_but_the_largest(strip: Strip, thumbnails: dict[int, Thumbnail]) -> set[int]:
    """Return the numbers of the images that are the same as a larger one, the query being 0; of equals the first stays.

    Each is compared with those that stay, so that no chain of small differences removes an image.
    """
    if strip.same is None:
        return set()
    made = [thumbnails[id(image)] for image in _images(strip)]
    readable = [number for number, each in enumerate(made) if each.file_bytes]
    kept: list[int] = []
    for number in sorted(readable, key=lambda number: (-math.prod(made[number].whole), -made[number].file_bytes)):
        if not any(strip.same(other, number) for other in kept):
            kept.append(number)
    return set(readable) - set(kept)


def _show_image(image: SheetImage, thumbnails: dict[int, Thumbnail], marked: bool) -> dict[str, Any]:
    thumbnail = thumbnails[id(image)]
    return {
        "name": image.name,
        "label": image.label,
        "thumbnail": thumbnail,
        "place": image.place or Place(),
        "key": image.key,
        "size": _show_size(thumbnail) if thumbnail.file_bytes else "",
        "marked": marked,
    }


def _show_size(thumbnail: Thumbnail) -> str:
    width, height = thumbnail.whole
    kilobytes = thumbnail.file_bytes / 1000
    length = f"{kilobytes:,.1f} kB" if kilobytes < 1000 else f"{kilobytes / 1000:,.1f} MB"
    return f"{width:,} × {height:,} px, {length}"
