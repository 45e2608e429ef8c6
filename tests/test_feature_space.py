"""Which features may be compared, and that stores and indices on disk say so under the keys that they always had."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sop_faiss.errors import FeatureError
from sop_faiss.features.feature_space import FeatureSpace
from sop_faiss.features.store import FeatureStore
from sop_faiss.files import sha256_file
from sop_faiss.index.build import IndexOptions, build_index
from sop_faiss.index.search import FeatureIndex
from sop_faiss.model.encoders.preprocess import Preprocess
from tests.oracle_neighbors import unit_rows

PREPROCESS = {
    "resize": 32,
    "crop": 32,
    "mean": [0.485, 0.456, 0.406],
    "std": [0.229, 0.224, 0.225],
    "interpolation": "bicubic",
    "keep_aspect": False,
    "multiple": 1,
}
SPACE = FeatureSpace("ab" * 32, PREPROCESS, "cls", 12)


@dataclass(frozen=True)
class StubEncoder:
    """What identifies an encoder."""

    name: str = "tiny"
    fingerprint: str = SPACE.fingerprint
    pooling: str = SPACE.pooling
    feature_dim: int = SPACE.dimension
    preprocess: Preprocess = field(default_factory=lambda: Preprocess.square(32))


def make_store(count: int = 60) -> FeatureStore:
    names = [f"{row}.jpg" for row in range(count)]
    manifest = {
        "encoder": {"name": "tiny", "fingerprint": SPACE.fingerprint},
        "preprocess": dict(PREPROCESS),
        "pooling": SPACE.pooling,
        "root": "/photos",
    }
    return FeatureStore(names, None, [""] * count, names, unit_rows(np.random.default_rng(0), count, 12), manifest)


@pytest.mark.parametrize(
    ("other", "what", "values"),
    [
        (replace(SPACE, fingerprint="cd" * 32, pooling="mean"), "encoder", ["cdcdcdcdcdcd", "abababababab"]),
        (replace(SPACE, preprocess=PREPROCESS | {"crop": 48}), "preprocessing", ["crop 48", "32"]),
        (
            replace(SPACE, preprocess=PREPROCESS | {"scales": [1.0, 0.5]}),
            "preprocessing",
            ["scales [1.0, 0.5]", "None"],
        ),
        (replace(SPACE, pooling="gem"), "pooling", ["'gem'", "'cls'"]),
        (replace(SPACE, dimension=13), "dimension", ["13", "12"]),
    ],
)
def test_what_differs(other: FeatureSpace, what: str, values: list[str]) -> None:
    assert SPACE.difference(replace(SPACE)) is None
    difference = SPACE.difference(other)
    assert difference is not None and difference.what == what
    assert all(value in difference.values for value in values)
    back = other.difference(SPACE)
    assert back is not None and back.what == what


def test_an_encoder_its_store_and_its_index_have_one_space(tmp_path: Path) -> None:
    store = make_store()
    manifest = build_index(store, tmp_path / "index")
    spaces = [FeatureSpace.of_encoder(StubEncoder()), store.space(), manifest.space]
    spaces.append(FeatureIndex.open(tmp_path / "index").manifest.space)
    assert all(one.difference(other) is None for one in spaces for other in spaces)
    wider = FeatureSpace.of_encoder(StubEncoder(), StubEncoder().preprocess.keeping_aspect())
    difference = store.space().difference(wider)
    assert difference is not None and difference.what == "preprocessing"


@pytest.mark.parametrize("missing", ["encoder", "preprocess", "pooling"])
def test_a_manifest_that_does_not_say_how_features_were_made(missing: str) -> None:
    store = make_store()
    del store.manifest[missing]
    with pytest.raises(FeatureError, match=rf"photos.*{missing}"):
        store.space("photos")


def test_a_store_as_it_was_written_before_opens(tmp_path: Path) -> None:
    features = np.eye(3, 4, dtype=np.float32)
    columns = {
        "key": pa.array(["a", "b", "c"]),
        "label": pa.array([0, None, 1], pa.int64()),
        "source": pa.array(["", "", ""]),
        "member": pa.array(["a.jpg", "b.jpg", "c.jpg"]),
        "feature": pa.FixedSizeListArray.from_arrays(pa.array(features.reshape(-1)), 4),
    }
    file = tmp_path / "features-00000.parquet"
    pq.write_table(pa.table(columns), file)
    manifest = {
        "encoder": {"name": "tiny", "fingerprint": "ab" * 32},
        "scores": None,
        "preprocess": PREPROCESS,
        "pooling": "cls",
        "whitening": None,
        "dimension": 4,
        "count": 3,
        "normalized": True,
        "root": "/photos",
        "sources": ["/photos"],
        "class_names": ["cat", "dog"],
        "dropped": {"count": 0, "reasons": {}, "images": []},
        "format": "sop_faiss feature store 1",
        "feature_dtype": "float32",
        "files": [{"name": file.name, "rows": 3, "sha256": sha256_file(file)}],
    }
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    store = FeatureStore.read(tmp_path)
    np.testing.assert_array_equal(store.features, features)
    assert store.space() == replace(SPACE, dimension=4)


def test_an_index_as_it_was_written_before_opens(tmp_path: Path) -> None:
    """Its manifest has the search setting under `effort`, and neither `mean_cosine` nor `scores`."""
    store, directory = make_store(), tmp_path / "index"
    build_index(store, directory, IndexOptions("IVF4,Flat", recall=0.5))
    written = json.loads((directory / "manifest.json").read_text())
    content = {
        "format": "sop_faiss.index",
        "format_version": 2,
        "factory": "IVF4,Flat",
        "metric": "inner_product",
        "dimension": 12,
        "count": 60,
        "encoder": {"name": "tiny", "fingerprint": "ab" * 32},
        "preprocess": PREPROCESS,
        "pooling": "cls",
        "class_names": None,
        "root": "/photos",
        "dropped": {"truncated": 2},
        "search": {"effort": 3, "recall": 0.9, "k": 10, "queries": 6, "target": 0.5, "why": "asked for"},
        "files": written["files"],
    }
    assert list(written) == [*content, "seal"] and list(written["search"])[:6] == list(content["search"])
    seal = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    (directory / "manifest.json").write_text(json.dumps(content | {"seal": seal}, indent=1) + "\n")
    index = FeatureIndex.open(directory)
    assert index._vectors.search_setting == 3
    assert index.manifest.space == SPACE
    assert index.search(store.features, 1).rows.shape == (60, 1)
