"""The served page in a real browser: choose an image, see its neighbors, search on, go back."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from sop_faiss.data.images.source import open_source
from sop_faiss.features.extract import extract_features
from sop_faiss.index.build import build_index
from sop_faiss.index.change import remove_from_index
from sop_faiss.index.images import index_images
from sop_faiss.index.rerank.settings import TokenSettings
from sop_faiss.index.rerank.token_store import write_tokens
from sop_faiss.index.search import FeatureIndex
from sop_faiss.index.write_parts import write_parts
from sop_faiss.model.encoders.load import load_encoder
from tests.browser import open_browser
from tests.images import write_folder
from tests.servers_of_indices import serve_index, write_served

pytestmark = pytest.mark.slow

DESK = {"viewport": {"width": 1280, "height": 860}}
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_served(tmp_path_factory.mktemp("place"), per_class=30)
    write_folder(root / "own", classes=0, per_class=2, seed=9)
    (root / "own" / "text.jpg").write_text("not an image")
    index = FeatureIndex.open(root / "index")
    write_tokens(index, load_encoder(str(root / "run")), index_images(index), TokenSettings(most=9))
    write_parts(index, load_encoder(str(root / "run")), index_images(index), [2])
    prices = "".join(f"{key},{row}\n" for row, key in enumerate(index.ids.keys))
    (root / "shop.csv").write_text(f"key,price\n{prices}")
    return root


@pytest.fixture(scope="module")
def address(place: Path) -> Iterator[str]:
    table = ("--table", place / "shop.csv")
    with serve_index(place / "index", "--model", place / "run", "--max-upload", "50KB", *table) as (address, _):
        yield address


def expect(locator: Any) -> Any:
    """Playwright's waiting assertion; unlike `wait_for_function` it needs no eval, which the page forbids."""
    from playwright.sync_api import expect as waiting  # where there is none, `open_browser` has skipped the test

    waiting.set_options(timeout=30_000)  # a busy machine takes its time
    return waiting(locator)


def heard(page: Any) -> list[str]:
    """What the page complains of from now on."""
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    return problems


def shown(page: Any) -> list[str]:
    return [str(key) for key in page.locator("#hits a").evaluate_all("links => links.map(link => link.dataset.key)")]


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_choose_a_file_click_and_go_back(place: Path, address: str, size: dict[str, Any]) -> None:
    with open_browser(**size) as page:
        problems = heard(page)
        foreign: list[str] = []
        page.on("request", lambda sent: None if sent.url.startswith((address, "blob:")) else foreign.append(sent.url))
        page.goto(address)
        page.wait_for_selector("#hits a")
        assert page.locator("#hits a").count() == 48
        page.locator("#more").click()
        expect(page.locator("#hits a")).to_have_count(90)

        page.set_input_files("#file", place / "own" / "0000.jpg")
        page.wait_for_selector(".similarity")
        results = shown(page)
        assert len(results) == 24 and page.locator("#query-name").inner_text() == "0000.jpg"
        values = [float(text.split()[0]) for text in page.locator(".similarity").all_inner_texts()]
        assert values == sorted(values, reverse=True)
        for image in (page.locator("#query-image"), page.locator("#hits img").first):
            expect(image).to_have_js_property("naturalWidth", 32)

        page.locator("#hits a").nth(3).click()
        expect(page.locator("#query-name")).to_have_text(results[3])
        expect(page.locator(".right, .wrong")).to_have_count(24)
        assert "key=" in page.url and shown(page) != results and results[3] not in shown(page)
        page.go_back()
        expect(page.locator("#query-name")).to_have_text("0000.jpg")
        expect(page.locator("#heading")).to_have_text("24 nearest, by cosine similarity")
        assert shown(page) == results
        page.go_back()
        expect(page.locator("#hits a")).to_have_count(48)
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        assert problems == [] and foreign == []


def test_label_number_and_deep_link(address: str) -> None:
    with open_browser(**DESK) as page:
        page.goto(address)
        page.wait_for_selector("#hits a")
        key = shown(page)[5]
        page.locator("#hits a").nth(5).click()
        page.wait_for_selector(".similarity")
        page.select_option("#label", "class_1")
        expect(page.locator("#heading")).to_have_text("24 nearest of class_1, by cosine similarity")
        page.select_option("#k", "12")
        expect(page.locator("#hits a")).to_have_count(12)
        assert set(page.locator("#hits .label").all_inner_texts()) == {"class_1"}
        results, link = shown(page), page.url
        page.goto("about:blank")
        page.goto(link)
        page.wait_for_selector(".similarity")
        assert shown(page) == results and page.locator("#query-name").inner_text() == key
        assert page.locator("#label").input_value() == "class_1" and page.locator("#k").input_value() == "12"
        page.goto(f"{address}?key=%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E")
        page.wait_for_selector("#empty.error")
        assert "no image of the index has this key" in page.locator("#empty").inner_text()
        page.goto(f"{address}?upload=1")
        page.wait_for_selector("#empty.error")
        assert "choose it again" in page.locator("#empty").inner_text()


def test_keyboard(address: str) -> None:
    choosers: list[Any] = []
    with open_browser(**DESK) as page:
        page.on(
            "filechooser", lambda chooser: choosers.append(chooser)
        )  # from the start: it takes the browser a while to listen
        page.goto(address)
        page.wait_for_selector("#hits a")
        keys = shown(page)
        columns = page.evaluate(
            "getComputedStyle(document.querySelector('#hits')).gridTemplateColumns.split(' ').length"
        )
        for pressed in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft"):
            page.keyboard.press(pressed)
        assert page.evaluate("document.activeElement.dataset.key") == keys[columns]
        page.keyboard.press("Enter")
        expect(page.locator("dialog .large-name")).to_have_text(keys[columns])
        page.keyboard.press("ArrowRight")
        expect(page.locator("dialog .large-name")).to_have_text(keys[columns + 1])
        page.keyboard.press("Escape")
        expect(page.locator("dialog")).to_be_hidden()
        focused = "document.activeElement.dataset.key"
        for _ in range(50):  # the browser takes a moment
            if page.evaluate(focused) == keys[columns + 1]:
                break
            page.wait_for_timeout(100)
        assert page.evaluate(focused) == keys[columns + 1]
        assert page.url == address
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("s")
        expect(page.locator("#query-name")).to_have_text(keys[columns])
        expect(page.locator(".similarity")).to_have_count(24)
        page.keyboard.press("l")
        assert page.evaluate("document.activeElement.id") == "label"
        page.locator("#heading").focus()
        page.keyboard.press("o")
        deadline = time.monotonic() + 30
        while not choosers and time.monotonic() < deadline:
            page.wait_for_timeout(20)
        assert len(choosers) == 1
        page.keyboard.press("Escape")
        expect(page.locator("#hits a")).to_have_count(48)
        assert page.url == address


def test_drop_and_what_is_no_image(place: Path, address: str) -> None:
    drop = """([bytes, name]) => {
        const carried = new DataTransfer();
        carried.items.add(new File([new Uint8Array(bytes)], name));
        for (const type of ["dragover", "drop"])
            window.dispatchEvent(new DragEvent(type, {dataTransfer: carried, bubbles: true, cancelable: true}));
    }"""
    with open_browser(**DESK) as page:
        page.goto(address)
        page.wait_for_selector("#hits a")
        page.evaluate(drop, [list((place / "own" / "0001.jpg").read_bytes()), "dropped.jpg"])
        page.wait_for_selector(".similarity")
        assert page.locator("#query-name").inner_text() == "dropped.jpg" and page.locator("#drop").is_hidden()
        page.set_input_files("#file", place / "own" / "text.jpg")
        page.wait_for_selector("#empty.error")
        assert "not-an-image" in page.locator("#empty").inner_text() and shown(page) == []
        page.evaluate(drop, [[0] * 60_000, "large.jpg"])
        expect(page.locator("#empty")).to_contain_text("0.1 MB")


def test_without_an_encoder_the_page_says_so(place: Path) -> None:
    with serve_index(place / "index", "--no-encoder") as (address, _), open_browser(**DESK) as page:
        page.goto(address)
        page.wait_for_selector("#hits a")
        assert page.locator("#choose").is_hidden() and "--model" in page.locator("#no-encoder").inner_text()
        page.locator("#hits a").first.click()
        page.wait_for_selector(".similarity")


def test_an_index_without_labels_that_changes(place: Path, tmp_path: Path) -> None:
    photos = write_folder(tmp_path / "photos", classes=0, per_class=4)
    for number, photo in enumerate(sorted(photos.iterdir())):
        photo.rename(photos / f"{'a-long-name-that-all-have-' * 3}{number}.jpg")
    store = extract_features(load_encoder(str(place / "run")), open_source(photos))
    build_index(store, tmp_path / "index")
    with serve_index(tmp_path / "index", "--no-encoder") as (address, _), open_browser(**DESK) as page:
        page.goto(address)
        page.wait_for_selector("#hits a")
        assert page.locator("#label-key").is_hidden() and page.locator("#label-field").is_hidden()
        names = page.locator("#hits .name")
        assert sorted(names.all_text_contents()) == sorted(store.keys)
        fits = "name.scrollWidth <= name.clientWidth && name.scrollHeight <= name.clientHeight"
        assert names.evaluate_all(f"names => names.every(name => {fits})")  # all of each is seen
        gone = shown(page)[1]
        remove_from_index(tmp_path / "index", [gone])
        page.locator("#hits a").first.click()
        expect(page.locator("#facts")).to_contain_text("3 images")
        assert len(shown(page)) == 2 and gone not in shown(page)


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_an_image_opens_large_and_leads_to_its_folder(place: Path, address: str, size: dict[str, Any]) -> None:
    with open_browser(**size) as page:
        problems = heard(page)
        page.goto(address)
        page.wait_for_selector("#hits a")
        key = shown(page)[4]
        page.locator("#hits .open").nth(4).click()
        dialog = page.locator("dialog")
        expect(dialog.locator("img")).to_have_js_property("naturalWidth", 32)
        expect(dialog.locator("dl")).to_contain_text("Path")
        facts = dict(zip(dialog.locator("dt").all_inner_texts(), dialog.locator("dd").all_inner_texts(), strict=True))
        folder, name = facts["Path"].split()[0].split("/")
        assert facts["Key"].split()[0] == key and key.endswith(name.removesuffix(".jpg")) and facts["Label"] == folder
        assert facts["Size"].startswith("32 × 32 px, ")
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
        page.locator("#hits .open").nth(4).click()
        dialog.get_by_role("button", name="Its folder: 30 images").click()
        expect(page.locator("#hits a")).to_have_count(30)
        assert "folder=" in page.url and set(page.locator("#hits .label").all_inner_texts()) == {folder}
        page.locator("#hits .open").first.click()
        dialog.get_by_role("button", name="Nearest in its folder").click()
        expect(page.locator("#heading")).to_have_text(f"24 nearest in folder {folder}, by cosine similarity")
        assert set(page.locator("#hits .label").all_inner_texts()) == {folder}
        page.locator("#folder").click()
        expect(page.locator("#heading")).to_have_text("24 nearest, by cosine similarity")
        assert problems == []


def test_filters_by_columns_and_near_duplicates(address: str) -> None:
    with open_browser(**DESK) as page:
        page.goto(address)
        page.wait_for_selector("#hits a")
        expect(page.locator("#columns")).to_have_text("Columns: key, source, member, label, price")
        page.keyboard.press("f")
        page.keyboard.type("price < 7")  # whose letters are no keys of the page
        page.keyboard.press("Enter")
        expect(page.locator("#heading")).to_contain_text("7 images of the index that pass the filter")
        page.locator("#hits .again").first.click()
        expect(page.locator("#heading")).to_have_text("6 nearest that pass the filter, by cosine similarity")
        page.locator("#where").fill("prize < 7")
        page.locator("#where").press("Enter")
        expect(page.locator("#empty.error")).to_contain_text("where names column 'prize'")
        expect(page.locator("#heading")).to_have_text("This filter cannot be used")
        expect(page.locator("#where")).to_have_attribute("aria-invalid", "true")
        page.locator("#where").fill("")
        page.locator("#where").press("Enter")
        expect(page.locator("#heading")).to_have_text("24 nearest, by cosine similarity")
        page.goto(f"{page.url}&unique=-1")
        expect(page.locator("#hits .open")).to_have_count(1)
        expect(page.locator("#hits .open")).to_contain_text("+ 88 alike")
        page.select_option("#unique", "")
        page.select_option("#rerank", "local")
        expect(page.locator("#heading")).to_have_text("24 nearest, re-ranked: local; numbers are cosine similarities")


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_several_images_and_less_of_others(place: Path, address: str, size: dict[str, Any]) -> None:
    with open_browser(**size) as page:
        problems = heard(page)
        page.goto(address)
        page.wait_for_selector("#hits a")
        page.set_input_files("#file", place / "own" / "0000.jpg")
        expect(page.locator("#query-name")).to_have_text("0000.jpg")
        expect(page.locator(".similarity")).to_have_count(24)
        first, second = shown(page)[:2]
        for number, name in ((0, "More like it, too"), (0, "Less like it")):
            page.locator("#hits .open").nth(number).click()
            page.get_by_role("button", name=name).click()
            expect(page.locator("dialog.large").first).to_be_hidden()
            expect(page.locator(".chip")).to_have_count(2 if name.startswith("More") else 3)
            expect(page.locator("#hits")).not_to_have_class("hits waiting")
        expect(page.locator(".chip.less")).to_have_count(1)
        expect(page.locator("#query-label")).to_have_text("Searching with 3 images")
        assert first not in shown(page) and "minus-key=" in page.url
        for image in page.locator(".chip img").all():
            expect(image).to_have_js_property("naturalWidth", 32)
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        page.locator(".chip.less").get_by_role("button", name="unwanted").click()
        expect(page.locator(".chip.less")).to_have_count(0)
        page.set_input_files("#add", [place / "own" / "0000.jpg", place / "own" / "0001.jpg"])
        expect(page.locator(".chip")).to_have_count(5)
        page.go_back()
        expect(page.locator(".chip")).to_have_count(3)
        for left in (2, 0):  # one image is shown as one
            page.locator(".chip").last.get_by_role("button", name="Remove").click()
            expect(page.locator(".chip:visible")).to_have_count(left)
        expect(page.locator("#query-name")).to_have_text("0000.jpg")
        page.set_input_files("#file", [place / "own" / "0000.jpg", place / "own" / "0001.jpg"])
        expect(page.locator(".chip:visible")).to_have_count(2)
        page.goto(f"{address}?key={first}&minus-key={second}")
        expect(page.locator(".chip.less")).to_have_count(1)
        expect(page.locator(".right, .wrong")).to_have_count(24)
        assert problems == []


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_a_part_by_pointer_and_by_keys(address: str, size: dict[str, Any]) -> None:
    pointer = """(stage, kind) => {
        const frame = stage.getBoundingClientRect();
        const at = (type, x, y) => stage.dispatchEvent(new PointerEvent(type, {
            pointerId: 1, pointerType: kind, bubbles: true, cancelable: true, isPrimary: true,
            clientX: frame.left + x * frame.width, clientY: frame.top + y * frame.height}));
        stage.setPointerCapture = () => {}; // there is no such pointer
        at("pointerdown", 0.75, 0.5); at("pointermove", 0.5, 0.7); at("pointerup", 0.25, 2);
    }"""
    with open_browser(**size) as page:
        problems = heard(page)
        page.goto(address)
        page.locator("#hits .again").nth(3).click()
        expect(page.locator(".similarity")).to_have_count(24)
        whole = shown(page)
        page.keyboard.press("b")
        stage = page.locator(".part-stage")
        expect(stage.locator("img")).to_have_js_property("complete", True)
        if size is DESK:
            frame = stage.bounding_box()
            page.mouse.move(frame["x"] + 0.75 * frame["width"], frame["y"] + 0.5 * frame["height"])
            page.mouse.down()
            page.mouse.move(frame["x"] + 0.25 * frame["width"], frame["y"] + 1.2 * frame["height"], steps=4)
            page.mouse.up()
        else:
            stage.evaluate(pointer, "touch")
        said = page.locator("dialog p[aria-live]")
        expect(said).to_have_text("25 to 75 % from the left, 50 to 100 % from the top")
        for key in ("ArrowLeft", "ArrowLeft", "ArrowDown", "ArrowUp", "Shift+ArrowRight"):
            page.keyboard.press(key)
        expect(said).to_have_text("21 to 73 % from the left, 48 to 98 % from the top")
        page.keyboard.press("Enter")
        expect(page.locator("#query-part")).to_be_visible()
        expect(page.locator("#hits")).not_to_have_class("hits waiting")
        assert "box=0.2" in page.url and shown(page) != whole
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        page.locator("#whole").click()
        expect(page.locator("#query-part")).to_be_hidden()
        expect(page.locator("#hits")).not_to_have_class("hits waiting")
        assert shown(page) == whole and problems == []


def test_parts_that_are_found_are_outlined(place: Path, address: str) -> None:
    parted = FeatureIndex.open(place / "index").with_parts()
    key = parted.ids.keys[0]
    found = parted.search_rows([0], 24)
    assert found.boxes is not None
    partial = sum(box != [0, 0, 1, 1] for box in found.boxes[0].tolist())
    assert partial > 0
    with open_browser(**DESK) as page:
        problems = heard(page)
        page.goto(f"{address}?key={quote(key)}")
        expect(page.locator(".similarity")).to_have_count(24)
        assert page.locator("#hits .part-mark").count() == 0
        page.locator("#parts").check()
        expect(page.locator("#hits .part-mark")).to_have_count(partial)
        assert "parts=true" in page.url and shown(page) == found.keys[0]
        mark = page.locator("#hits .part-mark").first
        mark.scroll_into_view_if_needed()
        expect(mark).to_be_visible()
        page.locator("#hits .open").first.click()
        expect(page.locator("dialog")).to_contain_text("Part")
        page.keyboard.press("Escape")
        page.locator("#parts").uncheck()
        expect(page.locator("#hits .part-mark")).to_have_count(0)
        assert problems == []


def test_where_it_matches_is_shown_on_click(place: Path, address: str) -> None:
    with open_browser(**DESK) as page:
        problems = heard(page)
        page.goto(address)
        page.wait_for_selector("#hits a")
        page.locator("#hits .again").first.click()
        for _ in range(2):  # for an image of the index, and for one that is sent
            expect(page.locator(".similarity")).to_have_count(24)
            page.locator("#hits .open").first.click()
            page.get_by_role("button", name="Where it matches").click()
            expect(page.locator("dialog .large-image img")).to_have_attribute("alt", re.compile("brighter"))
            page.keyboard.press("Escape")
            page.set_input_files("#file", place / "own" / "0001.jpg")
            expect(page.locator("#query-name")).to_have_text("0001.jpg")
        assert problems == []
