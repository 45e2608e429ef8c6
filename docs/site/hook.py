"""What mkdocs does not do by itself: pages of files outside docs/, links to these, order of pages, unbroken options.

In the repository docs/ is read as it is: docs/index.md is about indices, and `../sop_faiss/sop/loss.py` is a file.
On the site what_this_is.md is the first page; files of the repository that a page links to become pages of their own.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/RESULTS.md", "examples/README.md")
RECORDS = ("CHANGELOG.md", "benchmarks/RESULTS.md")
"""Long pages that name everything: a search would find them before the page that explains."""
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n"
DESTINATIONS = {"what_this_is.md": "index.html", "index.md": "the_index.html"}
_LINK = re.compile(r"(!?\[[^\]\[]*(?:\[[^\]]*\][^\]\[]*)*\]\()([^)\s#]+)(#[^)\s]*)?\)")
_CODE = re.compile(r"<code>.*?</code>", re.DOTALL)
_HYPHENS = re.compile(r"(?<![\w&#/-])[\w-]*-[\w-]*(?![^<]*>)")  # a word with hyphens, not in a tag
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".cff": "yaml", ".html": "html", ".css": "css"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each of PAGES and for each file that a page links to, and set DESTINATIONS."""
    for source, place in DESTINATIONS.items():
        page = files.get_file_from_path(source)
        assert page is not None, source
        page.dest_uri = place
        page.name = posixpath.splitext(place)[0]
    for name in PAGES:
        head = UNSEARCHED if name in RECORDS else ""
        files.append(File.generated(config, f"repository/{name}", content=head + (ROOT / name).read_text()))
    for page in [file for file in files if file.is_documentation_page()]:
        for _, target, _ in _LINK.findall(page.content_string):
            place = _repository_path(page.src_uri, target)
            if place and files.get_file_from_path(_page_of(place)) is None:
                files.append(_source_page(place, config))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to where their files are on the site; put the empty line before a list that Markdown wants here."""
    own = page.file.src_uri

    def moved(match: re.Match[str]) -> str:
        place = _repository_path(own, match[2])
        if place is None:
            return match[0]
        return f"{match[1]}{posixpath.relpath(_page_of(place), posixpath.dirname(own) or '.')}{match[3] or ''})"

    lines = _LINK.sub(moved, markdown).split("\n")
    spaced: list[str] = []
    for line in lines:
        before = spaced[-1] if spaced else ""
        if re.match(r"(- |\d+\. )", line) and before.strip() and not re.match(r"(- |\d+\. |\s)", before):
            spaced.append("")
        spaced.append(line)
    return "\n".join(spaced)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Keep `--option` and `sop-command` in one line, which browsers break at hyphens."""
    if page.file.src_uri.startswith("source/"):
        return html
    return _CODE.sub(lambda code: _HYPHENS.sub(r'<span class="whole">\g<0></span>', code[0]), html)


def _repository_path(page: str, target: str) -> str | None:
    """Return what a link leads to, from the root of the repository; None where mkdocs finds it without help."""
    if "://" in target or target.startswith("mailto:"):
        return None
    here = posixpath.dirname(page.removeprefix("repository/") if page.startswith("repository/") else f"docs/{page}")
    place = posixpath.normpath(posixpath.join(here, target))
    inside = place.startswith("docs/") and not page.startswith("repository/")
    return None if inside or not (ROOT / place).exists() else place


def _page_of(place: str) -> str:
    """Return the page, from the folder of pages, of a file of the repository."""
    if place.startswith("docs/"):
        return place.removeprefix("docs/")
    return f"repository/{place}" if place in PAGES else f"source/{place}.md"


def _source_page(place: str, config: MkDocsConfig) -> File:
    """Make a page that shows a file, or the names in a folder."""
    path = ROOT / place
    if path.is_dir():
        text = "\n".join(f"- `{file.name}`" for file in sorted(path.iterdir()) if file.name[0] not in "._")
    elif path.suffix == ".ipynb":
        text = "\n\n".join(map(_cell_text, json.loads(path.read_text())["cells"]))
    else:
        text = f'````{_LANGUAGES.get(path.suffix, "text")} linenums="1"\n{path.read_text()}````\n'
    content = f"{UNSEARCHED}# `{place}`\n\n{text}"
    return File.generated(config, f"source/{place}.md", content=content, inclusion=InclusionLevel.NOT_IN_NAV)


def _cell_text(cell: dict[str, Any]) -> str:
    """Return a cell of a notebook as Markdown, its headings below the page's own."""
    source = "".join(cell["source"])
    return f"```python\n{source}\n```" if cell["cell_type"] == "code" else re.sub("^#", "##", source)
