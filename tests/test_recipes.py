"""The recipes of docs/python.md run in the order in which they are written, on images made here."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from sop_faiss.errors import CheckpointError
from sop_faiss.model.encoders.packaged import packaged_weights
from tests.images import write_folder

PAGE = Path(__file__).resolve().parent.parent / "docs" / "python.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def encoder_line(block: str) -> str:
    """The block with small images, for speed; with a stand-in where the packaged encoder is not installed."""
    try:
        packaged_weights("lite0")
    except CheckpointError:
        return block.replace('"lite0"', '"config:digits_demo", random_weights=0')
    return block.replace('"lite0"', '"lite0", size=64')


def test_the_recipes_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    folder = write_folder(tmp_path / "photos", classes=3, per_class=4, size=(48, 64))
    shutil.copy(folder / "class_1" / "0002.jpg", tmp_path / "query.jpg")
    monkeypatch.chdir(tmp_path)
    assert len(BLOCKS) == 7  # the encoder, and six recipes
    names: dict[str, Any] = {}
    for number, block in enumerate(BLOCKS):
        exec(compile(encoder_line(block), f"{PAGE.name}, block {number}", "exec", dont_inherit=True), names)

    stored = np.load("features.npz")
    assert stored["features"].shape == (12, names["encoder"].feature_dim)
    np.testing.assert_allclose(np.linalg.norm(stored["features"], axis=1), 1, atol=1e-5)
    assert names["found"].keys[0][0] == "class_1/0002" and len(names["found"].keys[0]) == 3
    assert names["neighbors"].rows.shape == (3, 3) and 0 <= names["scores"].metrics["top1_k5"] <= 100
    printed = capsys.readouterr().out
    assert "12 of 12" in printed and "mAP" in printed
    assert printed.rstrip().endswith(str((1 + (1 / 2 + 2 / 3) / 2) / 3))  # ranks 0 and 2 of three relevant images
    assert np.isfinite(names["loss"].item())

    client = TestClient(names["app"])
    binary = {"Content-Type": "application/octet-stream"}
    answer = client.post("/search?k=2", content=Path("query.jpg").read_bytes(), headers=binary)
    assert answer.status_code == 200, answer.text
    assert [hit["key"] for hit in answer.json()] == names["found"].keys[0][:2]
    for content, query in ((b"no image", "k=2"), (Path("query.jpg").read_bytes(), "k=99")):
        refused = client.post(f"/search?{query}", content=content, headers=binary)
        assert refused.status_code == 400 and "\n" not in refused.json()["detail"]
