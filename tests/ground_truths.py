"""Small ground truths, and where the real ones are, for tests of retrieval."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

REAL_GND = Path(__file__).parents[2] / "shared" / "data" / "revisited_gnd"
needs_real_gnd = pytest.mark.skipif(not REAL_GND.is_dir(), reason="the revisited ground-truth files are not here")

GRADED_GND: dict[str, Any] = {
    "imlist": ["a", "b", "c", "d", "e"],
    "qimlist": ["q0", "q1"],
    "gnd": [
        {"bbx": [1, 2, 11.5, 12], "easy": [0], "hard": [1, 2], "junk": [3]},
        {"bbx": [0, 0, 16, 16], "easy": [], "hard": [4], "junk": []},
    ],
}
PLAIN_GND: dict[str, Any] = {
    "imlist": ["a.jpg", "b.jpg", "c.jpg"],
    "qimlist": ["a.jpg", "q.jpg"],
    "gnd": [{"ok": [0, 2], "junk": [1]}, {"ok": [1]}],
}


def write_json(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


def write_pickle(path: Path, content: Any, protocol: int = 2) -> Path:
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    return path


def changed(content: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**json.loads(json.dumps(content)), **changes}
