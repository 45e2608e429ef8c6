"""Commands killed while they write: nothing half-written is picked up, and a rerun works and cleans up."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sop_faiss.data.check import check
from sop_faiss.data.images.source import open_source
from sop_faiss.errors import FeatureError, IndexMismatchError
from sop_faiss.features.store import FeatureStore
from sop_faiss.index.search import FeatureIndex
from tests.encoders import write_run
from tests.images import write_folder
from tests.test_search import make_store
from tests.transfers import write_cifar

pytestmark = pytest.mark.slow

KILLED_AT = """
import importlib, os, sys
module, name, at, number, command, *arguments = sys.argv[1:]
owner = importlib.import_module(module)
*path, last = name.split(".")
for part in path:
    owner = getattr(owner, part)
real, calls = getattr(owner, last), [0]
def killed(*args, **kwargs):
    result = real(*args, **kwargs)
    calls[0] += 1
    if calls[0] == int(at):
        os.kill(os.getpid(), int(number))
    return result
setattr(owner, last, killed)
importlib.import_module(f"sop_faiss.cli.{command}").main(arguments)
"""
SOME = 6


def run(point: tuple[str, str, int], *words: object, number: int = signal.SIGKILL) -> int:
    """Run a command that gets a signal after so many calls of a function (never: 0); its exit status."""
    command = [sys.executable, "-c", KILLED_AT, *map(str, (*point, int(number))), *map(str, words)]
    return subprocess.run(command, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("place")
    write_run(root / "run")
    write_folder(root / "photos", classes=2, per_class=SOME)
    return root


def left(out: Path) -> list[str]:
    return sorted(path.name for path in out.parent.iterdir() if out.name in path.name)


PACK_POINTS = [
    ("sop_faiss.data.shards.shard_writer", "ShardWriter.write", 3),
    ("sop_faiss.data.pack", "write_manifest", 1),
    ("sop_faiss.files", "_sync_file", 2),
]


@pytest.mark.parametrize("point", PACK_POINTS)
def test_pack(place: Path, tmp_path: Path, point: tuple[str, str, int]) -> None:
    out = tmp_path / "shards"
    words = ("data", "pack", place / "photos", out, "--samples-per-shard", 5)
    assert run(point, *words) == -signal.SIGKILL
    (half,) = left(out)
    assert half.startswith(".shards.") and not out.exists()
    assert run((*point[:2], 0), *words) == 0
    assert left(out) == ["shards"]
    assert len(open_source(out)) == 2 * SOME and not check(out).problems


EMBED_POINTS = [
    ("pyarrow.parquet", "write_table", 1),
    ("sop_faiss.features.store", "write_json", 1),
    ("sop_faiss.features.extract", "features_of_batch", 1),
]


@pytest.mark.parametrize("point", EMBED_POINTS)
def test_embed(place: Path, tmp_path: Path, point: tuple[str, str, int]) -> None:
    out = tmp_path / "features"
    words = ("embed", "--model", place / "run", "--data", place / "photos", "--out", out)
    assert run(point, *words) == -signal.SIGKILL
    assert not out.exists()
    with pytest.raises(FeatureError, match="does not exist"):
        FeatureStore.read(out)
    assert run((*point[:2], 0), *words) == 0
    assert left(out) == ["features"] and len(FeatureStore.read(out)) == 2 * SOME


INDEX_POINTS = [
    ("sop_faiss.index.store", "IdTable.write", 1),
    ("sop_faiss.index.store", "IndexManifest.write", 1),
    ("sop_faiss.neighbors.disk.flat_index", "FlatIndex.write", 1),
]


@pytest.mark.parametrize("point", INDEX_POINTS)
def test_index(place: Path, tmp_path: Path, point: tuple[str, str, int]) -> None:
    out = tmp_path / "index"
    words = ("index", "build", "--model", place / "run", "--data", place / "photos", "--out", out)
    assert run(point, *words) == -signal.SIGKILL
    assert not out.exists()
    with pytest.raises(IndexMismatchError, match="does not exist"):
        FeatureIndex.open(out)
    assert "index.partial" in left(out), "the features are kept"
    assert run((*point[:2], 0), *words) == 0
    assert left(out) == ["index"] and len(FeatureIndex.open(out)) == 2 * SOME


BUILD = ("index", "build", "--factory", "IVF4,SQ8")


@pytest.mark.parametrize("point", [("sop_faiss.index.build", "_add", 1), ("sop_faiss.index.build", "measure", 1)])
def test_index_does_not_train_twice(features: Path, tmp_path: Path, point: tuple[str, str, int]) -> None:
    words = (*BUILD, "--features", features / "first", "--out")
    assert run(point, *words, tmp_path / "index") == -signal.SIGKILL
    assert ".index.trained" in left(tmp_path / "index")
    never = ("sop_faiss.neighbors.disk.approximate_index", "ApproximateIndex.train", 1)
    assert run(never, *words, tmp_path / "index") == 0, "trained, and so killed"
    assert left(tmp_path / "index") == ["index"]
    assert run((*point[:2], 0), *words, tmp_path / "whole") == 0
    assert (tmp_path / "index" / "index.faiss").read_bytes() == (tmp_path / "whole" / "index.faiss").read_bytes()


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("features")
    make_store(0).write(root / "first")
    second = make_store(1, count=20)
    second.keys = [f"second-{key}" for key in second.keys]
    second.write(root / "second")
    return root


LIST_POINTS = [
    ("sop_faiss.neighbors.disk.approximate_index", "ApproximateIndex.train", 1),
    ("sop_faiss.neighbors.disk.approximate_index", "ApproximateIndex.add", 1),
    ("sop_faiss.neighbors.disk.approximate_index", "ApproximateIndex.write", 1),
    ("sop_faiss.index.store", "IndexManifest.write", 1),
    ("sop_faiss.files", "_sync_file", 2),
]


@pytest.mark.parametrize("point", LIST_POINTS)
def test_index_with_lists(features: Path, tmp_path: Path, point: tuple[str, str, int]) -> None:
    out = tmp_path / "index"
    words = ("index", "build", "--features", features / "first", "--factory", "IVF4,SQ8", "--out", out)
    assert run(point, *words) == -signal.SIGKILL
    assert not out.exists()
    assert run((*point[:2], 0), *words) == 0
    assert left(out) == ["index"] and len(FeatureIndex.open(out)) == 60


ADD_POINTS = [
    ("sop_faiss.neighbors.disk.approximate_index", "ApproximateIndex.add", 1),
    ("sop_faiss.neighbors.disk.approximate_index", "ApproximateIndex.write", 1),
    ("sop_faiss.index.store", "IdTable.write", 1),
    ("sop_faiss.index.store", "IndexManifest.write", 1),
    ("sop_faiss.files", "_sync_file", 3),
    ("pathlib", "Path.rename", 1),
    ("pathlib", "Path.rename", 2),
]


@pytest.mark.parametrize("point", ADD_POINTS)
def test_add(features: Path, tmp_path: Path, point: tuple[str, str, int]) -> None:
    out = tmp_path / "index"
    assert run(("sop_faiss.files", "_sync_file", 0), *BUILD, "--features", features / "first", "--out", out) == 0
    words = ("index", "add", out, "--features", features / "second")
    assert run(point, *words) == -signal.SIGKILL
    there = len(FeatureIndex.open(out))  # as it was, or with all that was to be added
    assert there == (80 if point == ("pathlib", "Path.rename", 2) else 60)
    if there == 60:
        assert run((*point[:2], 0), *words) == 0
    assert run((*point[:2], 0), "index", "remove", out, "bild-0001") == 0
    assert left(out) == ["index"] and len(FeatureIndex.open(out)) == 79


SYNC_POINTS = [
    ("sop_faiss.features.extract", "features_of_batch", 1),
    ("sop_faiss.neighbors.disk.flat_index", "FlatIndex.keep", 1),
    ("sop_faiss.neighbors.disk.flat_index", "FlatIndex.write", 1),
    ("sop_faiss.features.file_states", "FileStates.write", 1),
    ("sop_faiss.index.store", "IndexManifest.write", 1),
    ("sop_faiss.files", "_put_in_place", 1),
    ("shutil", "rmtree", 1),
]


@pytest.mark.parametrize("point", SYNC_POINTS)
def test_sync(place: Path, tmp_path: Path, point: tuple[str, str, int]) -> None:
    photos, out = shutil.copytree(place / "photos", tmp_path / "photos"), tmp_path / "index"
    build = ("index", "build", photos, "--model", place / "run", "--out", out)
    assert run((*point[:2], 0), *build) == 0
    (photos / "class_0" / "0000.jpg").unlink()
    (photos / "class_1" / "0000.jpg").rename(photos / "class_1" / "new.jpg")
    (photos / "class_1" / "0001.jpg").write_bytes((photos / "class_0" / "0001.jpg").read_bytes())
    assert run(point, "index", "sync", out) == -signal.SIGKILL
    there = FeatureIndex.open(out)  # as it was, or equal to the folder
    assert len(there) == 2 * SOME - there.has("new")
    assert run((*point[:2], 0), "index", "sync", out) == 0
    assert left(out) == ["index"]
    synced = FeatureIndex.open(out)
    again = ("index", "build", photos, "--model", place / "run", "--out", tmp_path / "again")
    assert run((*point[:2], 0), *again) == 0
    built = FeatureIndex.open(tmp_path / "again")
    assert sorted(synced.ids.keys) == built.ids.keys
    for key in built.ids.keys:
        ours, theirs = synced.features([synced.row_of(key)]), built.features([built.row_of(key)])
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize(
    ("point", "before"),
    [(("sop_faiss.index.build", "_add", 1), False), (("sop_faiss.files", "_sync_file", 1), True)],
)
def test_parts(place: Path, tmp_path: Path, point: tuple[str, str, int], before: bool) -> None:
    out = tmp_path / "index"
    words = ("index", "build", "--model", place / "run", "--data", place / "photos", "--out", out)
    assert run((*point[:2], 0), *words, *(["--parts", "--part-grid", 2] if before else [])) == 0
    make = ("index", "parts", out, "--factory", "IVF4,SQ8")
    assert run(point, *make) == -signal.SIGKILL
    assert (out / "parts").is_dir() == before
    assert run((*point[:2], 0), *make) == 0
    assert left(out / "parts") == ["parts"]
    assert FeatureIndex.open(out / "parts").manifest.factory == "IVF4,SQ8"
    FeatureIndex.open(out).with_parts()


def transfer(point: tuple[str, str, int], root: Path, name: str, number: int = signal.SIGKILL) -> int:
    """Fine-tune on a small set in three epochs of five steps, with the state in `root / name`."""
    network = ("--model", "timm:test_resnet", "--random-weights", 0, "--size", 32, "--device", "cpu")
    recipe = ("--quick", "--epochs", 3, "--batch-size", 6, "--mixup", 0.8, "--drop-path", 0.3)
    outputs = ("--out", root / name, "--json", root / f"{name}.json")
    return run(point, "eval", "transfer", *network, *recipe, "--data", root / "cifar", *outputs, number=number)


def transferred(root: Path, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state after the last step, and the scores."""
    state = torch.load(root / name / "transfer.pt", weights_only=True)["training"]
    return state, json.loads((root / f"{name}.json").read_text())["metrics"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("transfer")
    write_cifar(root / "cifar")
    assert transfer(("torch", "save", 0), root, "whole") == 0
    return root


STEP, STATE = ("sop_faiss.evaluate.trained.training", "_step", 8), ("torch", "save", 2)


@pytest.mark.parametrize(
    ("point", "number", "status", "steps"),
    [(STEP, signal.SIGKILL, -9, 5), (STATE, signal.SIGKILL, -9, 5), (STEP, signal.SIGTERM, 75, 8)],
)
def test_transfer(whole: Path, point: tuple[str, str, int], number: int, status: int, steps: int) -> None:
    name = f"{point[1]}{number}"
    assert transfer(point, whole, name, number) == status
    assert torch.load(whole / name / "transfer.pt", weights_only=True)["training"]["steps"] == steps
    assert not (whole / f"{name}.json").exists()
    assert transfer((*point[:2], 0), whole, name) == 0
    assert left(whole / name / "transfer.pt") == ["transfer.pt"]
    (state, scores), (expected, of_whole) = transferred(whole, name), transferred(whole, "whole")
    assert scores == of_whole and state["steps"] == expected["steps"] == 15
    for key, value in expected["parts"]["model"].items():
        assert torch.equal(value, state["parts"]["model"][key]), key
    for key, moments in expected["parts"]["optimizer"]["state"].items():
        assert all(torch.equal(each, state["parts"]["optimizer"]["state"][key][of]) for of, each in moments.items())
