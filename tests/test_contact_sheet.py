"""The page as a browser would read it: only its own script runs, nothing is fetched, images are in their places."""

from __future__ import annotations

import base64
import hashlib
import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sop_faiss.data.images.source import Place
from sop_faiss.errors import DataError
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
from sop_faiss.report.thumbnails import LEAST_SIDE, make_thumbnail, side_for
from tests.images import encode, make_image
from tests.pages import HOSTILE, Page


def image(name: str, size: int | tuple[int, int] = 40, label: str = "", seed: int = 0) -> SheetImage:
    encoded = encode(make_image(np.random.default_rng(seed), size))
    return SheetImage(name, lambda: encoded, label)


def unreadable(message: str) -> SheetImage:
    def read() -> bytes:
        raise DataError(message)

    return SheetImage("gone", read)


def write(path: Path, strips: list[Strip], **options: object) -> Page:
    write_contact_sheet(path, "Title", strips, **options)
    return Page(path.read_text(encoding="utf-8"))


def test_strips_hits_and_marks(tmp_path: Path) -> None:
    verdicts = [Verdict.RIGHT, Verdict.WRONG, Verdict.JUNK, None]
    hits = [
        SheetHit(image(f"hit {i}", label=f"class {i}", seed=i), 0.9 - i / 10, verdict)
        for i, verdict in enumerate(verdicts)
    ]
    strips = [Strip(image("first", seed=9), hits, "AP 43.2 %"), Strip(image("second", seed=8), hits[3:])]
    page = write(tmp_path / "page.html", strips, subtitle="about", footer="made by hand")
    assert len(page.of("article", "strip")) == 2 and len(page.of("li", "hit")) == 5 and len(page.of("img")) == 7
    for verdict in ("right", "wrong", "junk"):
        assert len(page.of("li", verdict)) == 1
        marks = [mark for mark in page.of("span", verdict) if mark["aria-label"] == verdict]
        assert len(marks) == 2  # on the hit and in the legend
    assert {"✓", "✕", "–"} <= set(page.texts)
    for text in (
        "Title",
        "about",
        "made by hand",
        "AP 43.2 %",
        "1 of 2 shown are right",
        "first",
        "hit 2",
        "class 2",
        "0.700",
        "4",
    ):
        assert text in page.texts
    assert [img["alt"] for img in page.of("img")][:3] == ["first", "hit 0", "hit 1"]


@pytest.mark.parametrize(
    ("similarities", "wanted"),
    [
        ([0.9123, 0.8, 0.8, -0.1], ["0.912", "0.800", "0.800", "-0.100"]),  # two are equal: no digit tells them apart
        ([0.99996, 0.9994, 0.9991], ["1.0000", "0.9994", "0.9991"]),
        ([0.5], ["0.500"]),
        ([], []),
    ],
)
def test_similarities_that_differ_read_differently(
    tmp_path: Path, similarities: list[float], wanted: list[str]
) -> None:
    near = Strip(image("q"), [SheetHit(image("a"), similarity) for similarity in similarities])
    other = Strip(image("p"), [SheetHit(image("a"), 0.3001), SheetHit(image("a"), 0.2)])
    page = write(tmp_path / "page.html", [near, other])
    shown = [text for text in page.texts if re.fullmatch(r"-?\d\.\d+", text)]
    assert shown == [*wanted, "0.300", "0.200"]  # each query by itself


def test_without_labels_there_is_no_judgment(tmp_path: Path) -> None:
    page = write(tmp_path / "page.html", [Strip(image("q"), [SheetHit(image("a"), 0.5)]), Strip(image("p"), [])])
    assert page.of("span", "mark") == [] and not any("right" in text for text in page.texts)
    assert "Nothing found." in page.texts


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_stays_text(tmp_path: Path, name: str) -> None:
    def failing() -> bytes:
        raise DataError(f"missing: {name}")

    hit = SheetImage(name, failing, name, place=Place(name, name), key=name)
    strip = Strip(image(name, label=name), [SheetHit(hit, 0.5)], name)
    table = SheetTable([name, name], [[name, name]], name)
    chart = Chart(name, "data:image/png;base64,", name, name)
    commands = Commands(name, name, name, name)
    path = tmp_path / "page.html"
    write_contact_sheet(
        path, name, [strip], subtitle=name, commands=commands, summary=[table], charts=[chart], footer=name
    )
    page, plain = Page(path.read_text(encoding="utf-8")), write(tmp_path / "plain.html", [strip])
    harmless = Page((tmp_path / "plain.html").read_text())
    assert {tag for tag, _ in page.tags} <= {tag for tag, _ in harmless.tags} | {
        *(
            "p",
            "section",
            "table",
            "caption",
            "thead",
            "tbody",
            "tr",
            "th",
            "td",
            "figure",
            "figcaption",
            "h3",
            "footer",
        )
    }
    assert len(plain.of("script")) == len(page.of("script")) == 1 and not page.of("svg")
    for tag, attrs in page.tags:
        assert not [attr for attr in attrs if attr.startswith("on")], tag
        assert attrs.get("src", "data:image/").startswith("data:image/")
    shown = name.replace("\0", "\ufffd").encode("utf-8", "replace").decode()
    assert not shown or sum(shown in text for text in page.texts) >= 8


def test_the_page_stands_alone(tmp_path: Path) -> None:
    page = write(tmp_path / "page.html", [Strip(image("q"), [SheetHit(image("a"), 0.5)])])
    text = (tmp_path / "page.html").read_text()
    assert page.of("link") == [{"rel": "icon", "href": "data:,"}] and "http://" not in text and "https://" not in text
    script = text.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(meta for meta in page.of("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert policy["content"] == (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )
    assert "prefers-color-scheme: dark" in text


def thumbnail_of(page: Page, position: int) -> Image.Image:
    uri = page.of("img")[position]["src"]
    assert uri.startswith("data:image/jpeg;base64,")
    return Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2], validate=True)))


@pytest.mark.parametrize(
    ("size", "wanted", "tiny"),
    [
        ((960, 1280), (640, 480), False),
        ((1280, 960), (480, 640), False),
        ((100, 200), (200, 100), False),
        (32, (32, 32), True),
        ((3, 600), (600, 3), False),
        ((1, 1), (1, 1), True),
    ],
)
def test_thumbnails_are_bounded(
    tmp_path: Path, size: int | tuple[int, int], wanted: tuple[int, int], tiny: bool
) -> None:
    page = write(tmp_path / "page.html", [Strip(image("q", size), [])])
    thumbnail = thumbnail_of(page, 0)
    assert thumbnail.format == "JPEG" and thumbnail.size == wanted
    attrs = page.of("img")[0]
    assert (attrs["width"], attrs["height"]) == (str(wanted[0]), str(wanted[1]))
    assert ("tiny" in attrs.get("class", "")) is tiny


def test_a_thumbnail_looks_like_its_image() -> None:
    image = np.zeros((300, 300, 3), np.uint8)
    image[:, 150:] = (250, 120, 10)
    thumbnail = make_thumbnail(encode(image, "PNG"))
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(thumbnail.uri.partition(",")[2]))), np.float64)
    np.testing.assert_allclose(shown[60, 20], (0, 0, 0), atol=6)
    np.testing.assert_allclose(shown[60, 100], (250, 120, 10), atol=6)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (unreadable("missing: photos/gone.jpg does not exist"), "missing: photos/gone.jpg does not exist"),
        (SheetImage("text", lambda: b"not an image at all"), "not-an-image"),
        (SheetImage("empty", lambda: b""), "empty"),
        (SheetImage("cut", lambda: encode(make_image(np.random.default_rng(0), 90))[:700]), "truncated"),
    ],
)
def test_unreadable_images_say_why(tmp_path: Path, bad: SheetImage, reason: str) -> None:
    page = write(tmp_path / "page.html", [Strip(bad, [SheetHit(bad, 0.5, Verdict.WRONG), SheetHit(image("ok"), 0.4)])])
    problems = page.of("div", "problem")
    assert len(problems) == 2 and all(problem["title"].startswith(reason) for problem in problems)
    assert len(page.of("img")) == 1 and len(page.of("li", "wrong")) == 1


def test_tables_and_charts(tmp_path: Path) -> None:
    uri = "data:image/svg+xml;base64,PHN2Zy8+"
    tables = [SheetTable(["", "mAP"], [["before", "14.6"], ["after", "19.3"]], "Percent"), SheetTable(["a"], [])]
    page = write(tmp_path / "page.html", [], summary=tables, charts=[Chart("Training", uri, "loss", "falls")])
    assert len(page.of("table")) == 2 and len(page.of("td")) == 2
    assert {"Percent", "before", "19.3", "Training", "loss"} <= set(page.texts)
    (chart,) = page.of("img")
    assert chart["src"] == uri and chart["alt"] == "falls"
    assert all(place["tabindex"] == "0" and place["aria-label"] for place in page.of("div", "scrolls"))


def test_each_image_is_read_once_and_progress_is_told(tmp_path: Path) -> None:
    reads: list[str] = []

    def read() -> bytes:
        reads.append("x")
        return encode(make_image(np.random.default_rng(0), 20))

    shared = SheetImage("shared", read)
    told: list[tuple[int, int]] = []
    strips = [Strip(shared, [SheetHit(shared, 1.0), SheetHit(image("other"), 0.3)]) for _ in range(5)]
    write(tmp_path / "page.html", strips, progress=lambda done, total: told.append((done, total)))
    assert len(reads) == 1
    assert told == [(done, 6) for done in range(1, 7)]


def test_the_old_page_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "page.html"
    write(path, [])
    before = path.read_bytes()

    def interrupted() -> bytes:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(path, [Strip(SheetImage("q", interrupted), [])])
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def test_a_large_page_stays_small(tmp_path: Path) -> None:
    photos = [image(f"{i}", 224, seed=i) for i in range(40)]
    strips = [
        Strip(photos[i % 40], [SheetHit(photos[(i + j) % 40], 0.5, Verdict.RIGHT) for j in range(20)])
        for i in range(70)
    ]
    page = write(tmp_path / "page.html", strips)
    assert len(page.of("img")) == 70 * 21
    assert all(img["loading"] == "lazy" and img["decoding"] == "async" for img in page.of("img"))
    assert (tmp_path / "page.html").stat().st_size < 12 << 20


def test_few_images_are_large_and_many_small() -> None:
    assert side_for(1) == 640 and side_for(1_000_000) == LEAST_SIDE and side_for(0) == 640
    assert 640 > side_for(200) > side_for(400) > LEAST_SIDE


def test_what_opens_large_has_its_place_key_and_size(tmp_path: Path) -> None:
    encoded = encode(make_image(np.random.default_rng(0), (30, 1200)))
    file = SheetImage("a", lambda: encoded, place=Place("/photos/a b.jpg"), key="a")
    packed = SheetImage("b", lambda: encoded, place=Place("/shards/0.tar", "b.jpg"))
    strip = Strip(image("q"), [SheetHit(file, 0.5), SheetHit(packed, 0.4)])
    page = write(tmp_path / "page.html", [strip], commands=Commands("selected", "search --key="))
    first, second = page.of("li", "hit")
    assert first["data-place"] == "/photos/a b.jpg" and first["data-file"] == "1" and first["data-key"] == "a"
    assert first["data-size"] == f"1,200 × 30 px, {len(encoded) / 1000:,.1f} kB"
    assert second["data-place"] == "/shards/0.tar: b.jpg" and second["data-file"] == second["data-key"] == ""
    assert "data-mark" not in page.of("div", "query")[0] and first["data-mark"] == ""
    assert page.of("main")[0]["data-marks"] == "selected" and page.of("main")[0]["data-search"] == "search --key="


@pytest.mark.parametrize(
    ("sizes", "kept"),
    [
        ([(20, 20), (40, 40), (30, 30)], 1),
        ([(40, 40), (40, 40)], 0),  # equal ones: the first
        ([None, (20, 20), (30, 30)], 2),
    ],
)
def test_all_but_the_largest_are_marked(tmp_path: Path, sizes: list[tuple[int, int] | None], kept: int) -> None:
    made = [unreadable("missing: x") if size is None else image(str(size), size) for size in sizes]
    strip = Strip(made[0], [SheetHit(each, 0.9) for each in made[1:]], same=lambda *_: True)
    page = write(tmp_path / "page.html", [strip], commands=Commands("remove"))
    marks = [each["data-mark"] for each in (*page.of("div", "query"), *page.of("li", "hit"))]
    wanted = ["" if number == kept or sizes[number] is None else "on" for number in range(len(sizes))]
    assert marks == wanted  # what cannot be seen is never marked


def test_a_chain_of_small_differences_removes_only_what_is_the_same_as_one_that_stays(tmp_path: Path) -> None:
    made = [image(str(side), (side, side)) for side in (40, 30, 20)]
    strip = Strip(made[0], [SheetHit(each, 0.9) for each in made[1:]], same=lambda one, two: abs(one - two) == 1)
    page = write(tmp_path / "page.html", [strip], commands=Commands("remove"))
    assert [each["data-mark"] for each in (*page.of("div", "query"), *page.of("li", "hit"))] == ["", "on", ""]


def test_places_are_spread_from_first_to_last() -> None:
    assert spread_places(5, 9) == [0, 1, 2, 3, 4]
    assert spread_places(101, 5) == [0, 25, 50, 75, 100]
    assert spread_places(7, 1) == [0]
    for total in range(1, 60):
        places = spread_places(total, 8)
        assert places == sorted(set(places)) and places[-1] == (total - 1) and len(places) == min(total, 8)
