"""Pages that stand alone, from the templates beside this file: everything escaped, written whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

from sop_faiss.files import GENERATOR, atomic_file

__all__ = ["write_page"]


def write_page(path: Path, template: str, values: dict[str, Any]) -> None:
    """Fill a template and write it, atomically.

    Args:
        path: the HTML file; its folder is made.
        template: its name.
        values: what it asks for; texts may be anything.

    Raises:
        OSError: the place cannot be written.
    """
    page = _environment().get_template(template).render(values, generator=GENERATOR)
    with atomic_file(path) as temporary:
        # file names that are not Unicode come as lone surrogates, which UTF-8 cannot hold; HTML has no NUL
        temporary.write_bytes(page.replace("\0", "\ufffd").encode("utf-8", "replace"))


def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
