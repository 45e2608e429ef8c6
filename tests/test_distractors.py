"""Distractors of sop-retrieve: stores and images give the same numbers, in one process and in two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sop_faiss.data.images.source import open_source
from sop_faiss.errors import FeatureError
from sop_faiss.evaluate.expansion import Expansion, augment_database, expand_queries
from sop_faiss.evaluate.retrieval_task import _expanded
from sop_faiss.evaluate.sets import distractors as stream
from sop_faiss.features.extract import extract_features
from sop_faiss.features.store import FeatureStore
from sop_faiss.features.store_blocks import FeatureBlocks
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.encoders.load import load_encoder
from tests.forked import launch
from tests.images import write_folder
from tests.test_cli_retrieve import RESNET, fails, plain_gnd, run, write_set
from tests.unit_vectors import unit


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return load_encoder("timm:test_resnet", random_weights=0, size=32)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, encoder: Encoder) -> dict[str, Path]:
    """A plain set, images that distract, their features whole, and as squares."""
    root = tmp_path_factory.mktemp("distractors")
    images = write_folder(root / "more", classes=5, per_class=8, size=(30, 40), seed=7)
    for name, preprocess in (("whole", encoder.preprocess.keeping_aspect()), ("square", encoder.preprocess)):
        extract_features(encoder, open_source(images), preprocess=preprocess).write(root / name)
    found = {"set": write_set(root / "set", plain_gnd()), "images": images}
    return found | {name: root / name for name in ("whole", "square")}


def result(*arguments: object, file: Path) -> dict[str, Any]:
    done = run(*RESNET, *arguments, "--json", file)
    assert done.exit_code == 0, done.output
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def test_a_store_and_images_give_the_same_numbers(
    places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ("--dataset", places["set"])
    alone = result(*common, file=tmp_path / "0.json")
    stored = result(*common, "--distractors", places["whole"], file=tmp_path / "1.json")
    monkeypatch.setattr(stream, "CHUNK_IMAGES", 7)
    encoded = result(*common, "--distractors", places["images"], file=tmp_path / "2.json")
    assert stored["metrics"] == encoded["metrics"] != alone["metrics"]
    assert stored["per_query"] == encoded["per_query"]
    assert stored["metrics"]["mAP"] < alone["metrics"]["mAP"]
    assert stored["protocol"]["distractors"] == {"name": str(places["whole"]), "count": 40}
    assert alone["protocol"]["distractors"] is None


def test_it_says_that_there_are_distractors(places: dict[str, Path], tmp_path: Path) -> None:
    done = run(*RESNET, "--dataset", places["set"], "--distractors", places["whole"], "--html", tmp_path / "r.html")
    assert "in 12 images" in done.stdout and "and 40 distractors" in done.stdout
    assert "40 distractors counted but not shown" in (tmp_path / "r.html").read_text()


def test_query_expansion_and_database_augmentation(places: dict[str, Path], tmp_path: Path) -> None:
    common = ("--dataset", places["set"])
    alone = result(*common, file=tmp_path / "0.json")
    expanded = result(*common, "--qe", 12, "--qe-alpha", 0, file=tmp_path / "1.json")  # the mean of everything
    augmented = result(*common, "--dba", 11, file=tmp_path / "2.json")
    among = result(*common, "--qe", 2, "--distractors", places["whole"], file=tmp_path / "3.json")
    assert expanded["protocol"]["query_expansion"] == {"neighbors": 12, "alpha": 0.0}
    assert augmented["protocol"]["database_augmentation"] == {"neighbors": 11, "alpha": 3.0}
    assert alone["protocol"]["query_expansion"] is alone["protocol"]["database_augmentation"] is None
    assert among["metrics"] != alone["metrics"]
    assert "leave one of them out" in fails(*RESNET, *common, "--dba", 2, "--distractors", places["whole"])
    assert "would be encoded twice" in fails(*RESNET, *common, "--qe", 2, "--distractors", places["images"])
    assert "--qe 99 of 12" in fails(*RESNET, *common, "--qe", 99)
    assert "--dba -1" in fails(*RESNET, *common, "--dba", -1)


def test_expansion_is_applied_to_the_right_side() -> None:
    rng = np.random.default_rng(0)
    queries, gallery, more = (unit(rng.standard_normal((count, 8))) for count in (3, 20, 30))
    own_gallery, own_queries = _expanded(queries, gallery, Expansion(4, 2.0, 3, 1.0), None)
    assert np.array_equal(own_gallery, augment_database(gallery, 3, 1.0))
    assert np.array_equal(own_queries, expand_queries(queries, own_gallery, 4, 2.0))
    extra = stream.Distractors("made", 30, True, lambda: iter([]), lambda: iter([more]))
    same, among = _expanded(queries, gallery, Expansion(4, 2.0), extra)
    assert same is gallery
    assert np.array_equal(among, expand_queries(queries, np.concatenate([gallery, more]), 4, 2.0))
    assert not np.array_equal(among, expand_queries(queries, gallery, 4, 2.0))


def test_distractors_of_another_origin(places: dict[str, Path], tmp_path: Path) -> None:
    common = ("--dataset", places["set"], "--distractors")
    assert "another preprocessing" in fails(*RESNET, *common, places["square"])
    other_seed = ("--model", "timm:test_resnet", "--random-weights", 1, "--size", 32)
    assert "another encoder" in fails(*other_seed, *common, places["whole"])
    assert "does not exist" in fails(*RESNET, *common, tmp_path / "nowhere")
    square = run(*RESNET, "--square", *common, places["square"])
    assert square.exit_code == 0, square.output


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_add_up(places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank counts its own blocks; the first one writes what a single process writes."""
    monkeypatch.setattr(stream, "CHUNK_IMAGES", 7)
    alone = result("--dataset", places["set"], "--distractors", places["images"], file=tmp_path / "1.json")
    program = (
        "from sop_faiss.evaluate.sets import distractors\ndistractors.CHUNK_IMAGES = 7\n"
        "from sop_faiss.cli.retrieve import main\nmain()\n"
    )
    words = [*RESNET, "--device", "cpu", "--dataset", places["set"], "--distractors", places["images"]]
    launch(tmp_path / "log", ["-c", program], *words, "--json", tmp_path / "2.json")
    together = json.loads((tmp_path / "2.json").read_text())
    assert together["metrics"] == alone["metrics"] and together["per_query"] == alone["per_query"]


def made_store(directory: Path, rows: int, **options: Any) -> np.ndarray:
    features = np.random.default_rng(0).standard_normal((rows, 8))
    features = (features / np.linalg.norm(features, axis=1, keepdims=True)).astype(np.float32)
    keys = [str(row) for row in range(rows)]
    FeatureStore(keys, None, [""] * rows, keys, features, {}).write(directory, **options)
    return features


def test_a_store_in_blocks_is_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sop_faiss.features import store_blocks

    monkeypatch.setattr(store_blocks, "BLOCK_ROWS", 16)
    features = made_store(tmp_path / "a", 100, bytes_per_file=40 * 32)
    read = FeatureBlocks(tmp_path / "a")
    assert len(read) == 100 and max(len(block) for block in read) <= 16
    assert np.array_equal(np.concatenate(list(read)), features)
    assert np.array_equal(np.concatenate(list(read)), features)  # again
    made_store(tmp_path / "half", 100, feature_dtype="float16", bytes_per_file=40 * 32)
    assert np.array_equal(
        np.concatenate(list(FeatureBlocks(tmp_path / "half"))), FeatureStore.read(tmp_path / "half").features
    )


def test_a_damaged_store_in_blocks(tmp_path: Path) -> None:
    made_store(tmp_path / "a", 10)
    (part,) = (tmp_path / "a").glob("features-*.parquet")
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    with pytest.raises(FeatureError, match="differs from what was written"):
        FeatureBlocks(tmp_path / "a")
    with pytest.raises(FeatureError, match="does not exist"):
        FeatureBlocks(tmp_path / "nowhere")
