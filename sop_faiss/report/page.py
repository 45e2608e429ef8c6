"""Self-contained pages from the templates in this folder: everything is escaped, and written atomically."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

from sop_faiss.files import GENERATOR, atomic_file

__all__ = ["write_page"]


def write_page(path: Path, template: str, values: dict[str, Any]) -> None:
    """Fill a template and write it, atomically.

    Args:
        path: the HTML file; its folder is created.
        template: its name.
        values: the variables of the template; texts may be anything.

    Raises:
        OSError: the place cannot be written.
    """
    page = _environment().get_template(template).render(values, generator=GENERATOR)
    with atomic_file(path) as temporary:
        # file names that are not Unicode have lone surrogates, which UTF-8 cannot encode; HTML has no NUL
        temporary.write_bytes(page.replace("\0", "\ufffd").encode("utf-8", "replace"))


def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
