"""The page of sop-retrieve in a real browser: 70 queries of 20 images, frames, similarities, the crop box."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sop_faiss.report.ap_histogram import draw_ap_histogram
from sop_faiss.report.contact_sheet import Chart, SheetHit, SheetImage, SheetTable, Strip, Verdict, write_contact_sheet
from sop_faiss.report.thumbnails import make_thumbnail
from tests.browser import open_browser
from tests.images import encode, make_image
from tests.test_cli_retrieve import RESNET, graded_gnd, run, write_set

VERDICTS = (Verdict.RIGHT, Verdict.WRONG, Verdict.JUNK)


def decoded(uri: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).convert("RGB"), np.int64)


def test_the_box_is_drawn_where_it_is() -> None:
    gray = encode(np.full((200, 400, 3), 128, np.uint8), "PNG")
    plain, boxed = (decoded(make_thumbnail(gray, box=box).uri) for box in (None, (100.0, 40.0, 300.0, 160.0)))
    changed = np.argwhere(np.abs(plain - boxed).max(axis=2) > 60)
    assert boxed.shape == (60, 120, 3)
    for extreme, wanted in ((changed.min(axis=0), (12, 30)), (changed.max(axis=0), (48, 90))):
        assert np.abs(extreme - wanted).max() <= 3, extreme  # 0.3 thumbnail pixels to one of the image's
    inside = boxed[20:40, 40:80]
    assert np.abs(inside - 128).max() < 12
    over = decoded(make_thumbnail(gray, box=(-50.0, -50.0, 9000.0, 9000.0)).uri)  # never beyond the image
    assert over.shape == (60, 120, 3)


def test_the_histogram_has_one_row_per_difficulty_and_follows_dark_pages() -> None:
    values = np.random.default_rng(0).uniform(0, 100, 70).tolist()
    one, three = (
        base64.b64decode(draw_ap_histogram(each).removeprefix("data:image/svg+xml;base64,")).decode()
        for each in ({"all": values}, {"easy": values, "medium": values, "hard": values[:1]})
    )
    (one_size, three_size) = (re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups() for svg in (one, three))
    assert float(three_size[1]) > 1.8 * float(one_size[1]) and one_size[0] == three_size[0]
    assert "prefers-color-scheme:dark" in one and "fill: var(--first)" in one and "hard: mAP" in three
    draw_ap_histogram({"easy": [], "medium": values})


def test_the_page_shows_whole_queries_with_their_boxes(tmp_path: Path) -> None:
    """The encoder sees the crop, the page the whole image; under a protocol without crops there is no box."""
    root = write_set(tmp_path / "graded", graded_gnd(), size=(60, 80))
    sizes = {}
    for protocol in ("revisitop", "dino"):
        page = tmp_path / f"{protocol}.html"
        result = run(*RESNET, "--dataset", root, "--protocol", protocol, "--html", page)
        assert result.exit_code == 0, result.output
        text = page.read_text()
        first = re.search(r'src="(data:image/jpeg;base64,[^"]+)"[^>]* alt="q0"', text)
        assert first is not None
        sizes[protocol] = decoded(first.group(1))
        assert text.count("<figure") == 1 and "Queries by average precision" in text
    assert sizes["revisitop"].shape == sizes["dino"].shape == (60, 80, 3)
    difference = np.abs(sizes["revisitop"] - sizes["dino"]).max(axis=2)
    assert difference[:, 40:].max() < 40 and difference[:22, :22].max() > 60  # the box is [0, 0, 20, 20]


def many_strips(strips: int = 70, hits: int = 20) -> list[Strip]:
    rng = np.random.default_rng(0)
    photos = [encode(make_image(rng, (240, 320))) for _ in range(60)]

    def image(number: int, box: Any = None) -> SheetImage:
        return SheetImage(f"photo {number}.jpg", lambda: photos[number % len(photos)], box=box)

    return [
        Strip(
            image(row, (40.0, 40.0, 200.0, 200.0)),
            [SheetHit(image(row + place), 1 - place / 40, VERDICTS[(row + place) % 3]) for place in range(hits)],
            note=f"AP {row}.0 %",
        )
        for row in range(strips)
    ]


@pytest.mark.slow
def test_seventy_queries_of_twenty_images_in_a_browser(tmp_path: Path, record_property: Any) -> None:
    page_file = tmp_path / "page.html"
    histogram = draw_ap_histogram({"medium": np.linspace(0, 100, 70).tolist()})
    table = SheetTable(["", "queries", "mAP"], [["medium", "70", "50.00"]], "Percent")
    strips = many_strips()
    write_contact_sheet(
        page_file, "Retrieval", strips, summary=[table], charts=[Chart("Queries by average precision", histogram)]
    )
    assert page_file.stat().st_size < 16 * 2**20
    problems: list[str] = []
    requests: list[str] = []
    with open_browser(viewport={"width": 1500, "height": 900}) as page:
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: requests.append(request.url[:40]))
        page.goto(page_file.as_uri())
        timing = page.evaluate("JSON.stringify(performance.getEntriesByType('navigation')[0])")
        record_property("load_milliseconds", json.loads(timing)["loadEventEnd"])
        assert problems == []
        assert [url for url in requests if not url.startswith("data:")] == [page_file.as_uri()[:40]]
        assert page.locator("article.strip").count() == 70
        assert page.locator("li.hit").count() == 1400
        assert page.locator("figure.chart img").evaluate("image => image.naturalWidth") > 300
        # Strips below the window cost nothing until they are scrolled to.
        assert page.locator("article.strip").last.evaluate("each => getComputedStyle(each).contentVisibility") == "auto"

        colors = {
            kind: page.locator(f"li.hit.{kind} .frame").first.evaluate("each => getComputedStyle(each).borderTopColor")
            for kind in ("right", "wrong", "junk")
        }
        assert len(set(colors.values())) == 3
        first = page.locator("li.hit").first
        frame, similarity = first.locator(".frame").bounding_box(), first.locator(".similarity").bounding_box()
        assert similarity["y"] >= frame["y"] + frame["height"]
        assert first.locator(".similarity").inner_text().startswith("1.000")
        query = page.locator(".query .frame").first.bounding_box()
        assert query["x"] + query["width"] < frame["x"]

        last = page.locator("article.strip").last
        last.scroll_into_view_if_needed()
        image = last.locator("li.hit img").last
        image.scroll_into_view_if_needed()
        page.wait_for_function("image => image.complete && image.naturalWidth > 0", arg=image.element_handle())
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        page.set_viewport_size({"width": 420, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
