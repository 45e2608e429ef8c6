"""Self-contained pages from the templates in this folder: everything is escaped, and written atomically."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from sop_faiss.files import GENERATOR, atomic_file

_FOLDER = Path(__file__).parent


def write_page(path: Path, template: str, values: dict[str, Any]) -> None:
    """Fill a template and write it, atomically.

    The page may run the one script that it holds, which the browser knows by its hash, and may load nothing.

    Args:
        path: the HTML file; its folder is created.
        template: its name.
        values: the variables of the template; texts may be anything.

    Raises:
        OSError: the place cannot be written.
    """
    script = page_part("viewer.js") + page_part("page.js")
    page = (
        _environment()
        .get_template(template)
        .render(
            values,
            generator=GENERATOR,
            style=Markup(page_part("viewer.css")),
            script=Markup(script),
            script_hash="sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii"),
        )
    )
    with atomic_file(path) as temporary:
        # file names that are not Unicode have lone surrogates, which UTF-8 cannot encode; HTML has no NUL
        temporary.write_bytes(page.replace("\0", "\ufffd").encode("utf-8", "replace"))


def page_part(name: str) -> str:
    """Read a script or style that pages share; `sop_faiss.serve` serves the same files."""
    return (_FOLDER / name).read_text(encoding="utf-8")


def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
