"""Records of a run, one JSON object with its step on each line: read, and cut back when a run is resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sop_faiss.files import write_file


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a .jsonl file up to one that is cut or is not a record; none if there is no file."""
    if not path.is_file():
        return []
    lines: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            break
        lines.append(record)
    return lines


def keep_lines_until(path: Path, step: int, measured_step: int | None = None) -> None:
    """Drop the lines of later steps (all lines for step 0), and the score of a step that is measured again.

    A score has a line of its own, without a loss, which may come after lines of later steps.
    """
    if not path.is_file():
        return
    kept = [
        line
        for line in read_lines(path)
        if 0 < step >= line["step"] and (line["step"] != measured_step or "loss" in line)
    ]
    write_file(path, "".join(json.dumps(line) + "\n" for line in kept))
