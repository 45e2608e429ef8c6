"""Tables as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sop_faiss.files import write_file
from sop_faiss.report.contact_sheet import SheetTable


def write_markdown(path: Path, title: str, tables: Sequence[SheetTable]) -> None:
    """Write tables as Markdown, atomically."""
    lines = [f"# {title}"]
    for table in tables:
        lines += ["", table.caption, "", "| " + " | ".join(table.columns) + " |", "|---" * len(table.columns) + "|"]
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table.rows]
    write_file(path, "\n".join(lines) + "\n")
