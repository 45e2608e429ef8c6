"""The static pages in a browser: images open large, are marked, and the downloaded lists are read by commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from PIL import Image

from sop_faiss.cli.index import main as index_command
from sop_faiss.data.images.source import open_source
from sop_faiss.features.extract import extract_features
from sop_faiss.index.build import build_index
from sop_faiss.index.search import FeatureIndex
from sop_faiss.model.encoders.load import load_encoder
from sop_faiss.report.page import page_part, write_page
from sop_faiss.report.run_report import RunPage, write_run_report
from tests.browser import open_browser
from tests.encoders import write_run
from tests.images import write_folder

DESK, PHONE = {"width": 1400, "height": 900}, {"width": 390, "height": 844}
HOSTILE = 'it\'s, "b" <img src=x onerror=alert(1)>; $(x)'


def test_the_script_cannot_end_early(tmp_path: Path) -> None:
    for name in ("viewer.js", "page.js", "viewer.css"):
        assert "</" not in page_part(name) and "innerHTML" not in page_part(name), name
    values = {"summary": [], "charts": [], "strips": [], "judged": False, "any_junk": False, "subtitle": ""}
    with pytest.raises(Exception, match="commands"):  # a template that lacks a value is not written
        write_page(tmp_path / "x.html", "contact_sheet.html", values | {"title": "", "legend": "", "footer": ""})
    assert not (tmp_path / "x.html").exists()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos, two of them again in other sizes, an index of them, and pages of it."""
    root = tmp_path_factory.mktemp("pages")
    write_run(root / "run")
    photos = write_folder(root / "photos", classes=2, per_class=6, size=48)
    first = Image.open(photos / "class_0" / "0000.jpg")
    first.resize((200, 200)).save(photos / "class_0" / f"{HOSTILE}.jpg", quality=95)
    Image.open(photos / "class_1" / "0003.jpg").save(photos / "class_1" / "copy.jpg", quality=20)
    store = extract_features(load_encoder(str(root / "run")), open_source(photos))
    build_index(store, root / "index")
    run(root, "duplicates", root / "index", "--threshold", 0.9999, "--html", root / "duplicates.html")
    keys = [word for key in store.keys[:3] for word in ("--key", key)]
    run(root, "search", root / "index", *keys, "-k", 10, "--html", root / "search.html")
    return root


def run(place: Path, *words: object) -> str:
    result = CliRunner().invoke(index_command, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.output


CLOSE_AND_MOVE_DOWN = """async () => {
  document.querySelector("dialog").close();
  document.activeElement.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowDown", bubbles: true}));
  await new Promise(done => setTimeout(done, 200));
  const strips = [...document.querySelectorAll(".strip")];
  return strips.indexOf(document.activeElement.closest(".strip")) + 1;
}"""


def heard(page: Any) -> list[str]:
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    return problems


def facts_of(page: Any) -> dict[str, str]:
    names, values = page.locator("dialog dt").all_inner_texts(), page.locator("dialog dd > span").all_inner_texts()
    return dict(zip(names, values, strict=True))


@pytest.mark.slow
def test_a_result_opens_large_by_mouse_and_keyboard(place: Path) -> None:
    with open_browser(viewport=DESK) as page:
        problems = heard(page)
        page.goto((place / "search.html").as_uri())
        rows = (
            page.locator(".strip")
            .first.locator(".hit")
            .evaluate_all("all => all.map(each => each.getBoundingClientRect().top)")
        )
        assert len(rows) == 10 and len(set(rows)) == 1  # ten in a row
        hit = page.locator(".hit").nth(2)
        hit.locator(".frame").click()
        facts = facts_of(page)
        name = page.locator(".large-name").inner_text()
        assert name == hit.locator(".name").get_attribute("title") == facts["Key"]
        assert Path(facts["Path"]).is_file() and facts["Similarity"].endswith("rank 3") and facts["Size"].endswith("kB")
        assert facts["Search by it"].startswith("sop-index search ") and facts["Label"] in ("class_0", "class_1")
        box = page.locator(".large-image img").bounding_box()
        assert box["width"] > 300 or box["height"] > 300
        link = page.get_by_role("link", name="Open file")
        assert link.evaluate("each => each.href") == Path(facts["Path"]).as_uri()
        page.keyboard.press("ArrowRight")
        assert facts_of(page)["Similarity"].endswith("rank 4")
        page.keyboard.press("x")
        assert page.locator(".hit").nth(3).evaluate("each => each.classList.contains('marked')")
        page.keyboard.press("Escape")
        assert page.locator("dialog").is_hidden()
        for key, number in (("ArrowDown", "16 of 33"), ("ArrowUp", "5 of 33")):
            page.keyboard.press(key)
            page.keyboard.press("Enter")
            assert page.locator(".large-place").inner_text() == number
            page.keyboard.press("Escape")
        page.keyboard.press("Enter")
        row = page.evaluate(CLOSE_AND_MOVE_DOWN)
        assert row == 2  # the closed dialog does not take the focus back
        assert problems == []


@pytest.mark.slow
def test_paths_are_copied_as_they_are(place: Path) -> None:
    with open_browser(viewport=DESK) as page:
        page.goto((place / "duplicates.html").as_uri())
        page.evaluate("navigator.clipboard.writeText = text => { window.copied = text; return Promise.resolve(); }")
        frame = page.locator(".tile:has(img[alt^='it'])").first.locator(".frame")
        frame.click()
        page.keyboard.press("c")
        page.wait_for_selector("text=Copied")
        path = place / "photos" / "class_0" / f"{HOSTILE}.jpg"
        assert page.evaluate("window.copied") == str(path)
        command = facts_of(page)["Search by it"]
        assert command.endswith("--key='it'\\''s, \"b\" <img src=x onerror=alert(1)>; $(x)'")
        link = page.get_by_role("link", name="Open file")
        assert link.evaluate("each => decodeURIComponent(each.pathname)") == str(path)


@pytest.mark.slow
def test_the_downloaded_lists_remove_the_smaller_copies(place: Path, tmp_path: Path) -> None:
    with open_browser(viewport=DESK, accept_downloads=True) as page:
        problems = heard(page)
        page.goto((place / "duplicates.html").as_uri())
        assert page.locator(".marked").count() == 2  # of two pairs the smaller ones
        names = {}
        for what in ("keys", "paths"):
            with page.expect_download() as waiting:
                page.get_by_role("button", name=f"Download {what}").click()
            names[what] = waiting.value.suggested_filename
            waiting.value.save_as(tmp_path / names[what])
        assert names == {"keys": "remove-keys.txt", "paths": "remove.txt"} and problems == []
        page.locator(".marked .pick").first.click()
        assert page.locator(".picked p").inner_text().startswith("1 of 4")
        page.get_by_role("button", name="Unmark all").click()
        assert page.locator(".picked").is_hidden()
    small = {str(place / "photos" / "class_0" / "0000.jpg"), str(place / "photos" / "class_1" / "copy.jpg")}
    listed = (tmp_path / "remove.txt").read_text().splitlines()
    assert set(listed) == small and len(open_source(tmp_path / "remove.txt")) == 2
    before = FeatureIndex.open(place / "index")
    keys = (tmp_path / "remove-keys.txt").read_text().splitlines()
    assert {str(place / "photos" / before.ids.members[before.row_of(key)]) for key in keys} == small
    said = run(place, "remove", place / "index", "--keys-from", tmp_path / "remove-keys.txt")
    assert said.startswith("2 removed, 12 vectors left")


@pytest.mark.slow
def test_a_list_of_the_kept_ones_is_read_by_commands(place: Path, tmp_path: Path) -> None:
    """Names with commas, quotes and markup survive the way through the page into a list."""
    with open_browser(viewport=DESK, accept_downloads=True) as page:
        page.goto((place / "duplicates.html").as_uri())
        page.get_by_role("button", name="Unmark all").click()
        page.locator(".tile:has(img[alt^='it'])").first.locator(".pick").click()
        with page.expect_download() as waiting:
            page.get_by_role("button", name="Download paths").click()
        waiting.value.save_as(tmp_path / "remove.txt")
    source = open_source(tmp_path / "remove.txt")
    assert [source.member_of(0)] == [f"{HOSTILE}.jpg"] and len(source) == 1


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["search", "duplicates"])
def test_pages_fit_a_telephone(place: Path, name: str, scheme: str) -> None:
    with open_browser(viewport=PHONE, is_mobile=True, has_touch=True, color_scheme=scheme) as page:
        page.goto((place / f"{name}.html").as_uri())
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        if name == "duplicates":  # what is to be done with the list stays reachable
            bar = page.locator(".picked-list").first
            assert "sop-index remove" in bar.locator("code").inner_text()
            assert bar.get_by_role("button", name="Copy").is_visible()
            assert page.locator(".picked").bounding_box()["height"] < 250
        page.locator(".frame").nth(1).tap()
        box = page.locator("dialog").bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 390


@pytest.mark.slow
def test_without_a_script_there_is_nothing_that_does_not_work(place: Path) -> None:
    with open_browser(viewport=DESK, java_script_enabled=False) as page:
        page.goto((place / "duplicates.html").as_uri())
        assert page.locator(".frame img").first.is_visible() and page.locator("article").count() == 2
        assert page.locator("button, input, [role=button], dialog").count() == 0


@pytest.mark.slow
def test_the_report_opens_the_section_that_a_link_names(tmp_path: Path) -> None:
    write_run_report(tmp_path / "r.html", RunPage("run", "about", "It got better."))
    with open_browser(viewport=DESK) as page:
        problems = heard(page)
        page.goto((tmp_path / "r.html").as_uri())
        assert page.locator(".verdict").inner_text() == "It got better." and page.locator("#settings").is_hidden()
        page.locator("nav a", has_text="Settings").click()
        page.locator("#settings").wait_for(state="visible")
        assert problems == []
