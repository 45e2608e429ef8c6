"""The JSON of a measurement: its keys, and an environment without names or paths."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import pytest

from sop_faiss.evaluate.results import environment, result_content
from sop_faiss.files import write_json


def test_environment_says_versions_but_neither_host_nor_paths() -> None:
    found = environment()
    assert {"sop_faiss", "python", "numpy", "torch", "timm", "faiss", "platform", "cpus", "gpu", "date"} == set(found)
    assert found["python"] == platform.python_version()
    assert found["torch"] and found["faiss"]
    text = json.dumps(found)
    assert platform.node() not in text or len(platform.node()) < 4
    assert str(Path.home()) not in text and str(Path.cwd()) not in text


def test_result_has_the_contracts_keys(tmp_path: Path) -> None:
    file = tmp_path / "new" / "result.json"
    encoder = {"name": "made", "fingerprint": "f" * 64, "more": "is left out"}
    write_json(file, result_content("sop-knn", "photos", {"k": 20}, {"top1_k20": 70.0}, encoder, 1.23456))
    content = json.loads(file.read_text())
    assert list(content) == ["command", "dataset", "protocol", "metrics", "encoder", "environment", "seconds"]
    assert content["encoder"] == {"name": "made", "fingerprint": "f" * 64}
    assert (content["metrics"], content["seconds"]) == ({"top1_k20": 70.0}, 1.235)


def test_nan_is_not_written_and_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    choices: dict[str, Any] = {"command": "sop-knn", "dataset": "photos", "protocol": {}, "seconds": 1.0}
    choices["encoder"] = {"name": "", "fingerprint": ""}
    write_json(file, result_content(metrics={"top1_k20": 1.0}, **choices))
    before = file.read_bytes()
    with pytest.raises(ValueError, match="JSON"):
        write_json(file, result_content(metrics={"top1_k20": float("nan")}, **choices))
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
