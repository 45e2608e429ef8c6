"""The pages of docs/ and the site that mkdocs.yml makes of them."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.browser import open_browser

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_name_only_what_is_public(page: Path) -> None:
    text = page.read_text()
    named = [
        line.split(" import ") for line in re.findall(r"^from (sop_faiss\.[\w.]+ import [\w, ]+)", text, re.MULTILINE)
    ]
    named += [line.rsplit(".", 1) for line in re.findall(r"^::: (sop_faiss\.[\w.]+)$", text, re.MULTILINE)]
    for module, names in named:
        public = getattr(import_module(module), "__all__", None) or [
            n for n in dir(import_module(module)) if n[0] != "_"
        ]
        assert set(names.split(", ")) <= set(public), f"{page.name}: {names} of {module}"


@pytest.mark.slow
def test_the_site_works_from_a_folder_on_a_phone_and_without_a_network(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", tmp_path / "site"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    pages = sorted((tmp_path / "site").glob("*.html"))
    assert len(pages) >= 24 and (tmp_path / "site" / "source" / "sop_faiss" / "sop" / "loss.py.html").exists()
    for scheme in ("light", "dark"):
        with open_browser(viewport={"width": 390, "height": 844}, color_scheme=scheme) as page:
            requests: list[str] = []
            page.on("request", lambda request, kept=requests: kept.append(request.url))
            for file in pages:
                page.goto(file.as_uri())
                assert page.evaluate("document.documentElement.scrollWidth") <= 390, file.name
            dark = page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
            assert dark == (scheme == "dark")
            assert {url.partition(":")[0] for url in requests} <= {"file", "data", "blob"}

            page.goto((tmp_path / "site" / "index.html").as_uri())
            page.keyboard.press("/")
            page.keyboard.type("teacher entropy")
            page.locator(".md-search-result__item").first.wait_for(timeout=20_000)
            assert "teacher_entropy" in page.locator(".md-search-result__list").inner_text()
            found = page.locator(".md-search-result__list a").evaluate_all("links => links.map(link => link.href)")
            assert not [link for link in found if "CHANGELOG" in link or "RESULTS" in link]
