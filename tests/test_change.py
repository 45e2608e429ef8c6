"""Indices changed on disk: rows, names and classes stay together, and a failed change leaves everything as it was."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sop_faiss.errors import ConfigError, IndexMismatchError, SopError
from sop_faiss.features.store import FeatureStore
from sop_faiss.index import change
from sop_faiss.index.build import IndexOptions, build_index
from sop_faiss.index.change import add_to_index, merge_indices, remove_from_index
from sop_faiss.index.search import FeatureIndex
from tests.test_search import make_store

FACTORIES = ["Flat", "IVF2,Flat", "IVF2,SQ8", "HNSW8"]


def part(store: FeatureStore, rows: slice, root: str = "/photos/a", **manifest: object) -> FeatureStore:
    return FeatureStore(
        store.keys[rows],
        None if store.labels is None else store.labels[rows],
        store.sources[rows],
        store.members[rows],
        store.features[rows],
        store.manifest | {"root": root} | manifest,
    )


@pytest.fixture
def store() -> FeatureStore:
    return make_store()


def digest(directory: Path) -> list[tuple[str, str]]:
    return sorted((path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in directory.iterdir())


def assert_holds(directory: Path, stores: list[FeatureStore], tolerance: float = 1e-6) -> None:
    """Each image of the stores is in the index, with its own vector, place and class, and no other is."""
    index = FeatureIndex.open(directory)
    assert len(index) == sum(map(len, stores))
    for store in stores:
        for row, key in enumerate(store.keys):
            at = index.row_of(key)
            np.testing.assert_allclose(index.features([at])[0], store.features[row], atol=tolerance)
            place = Path(index.manifest.root) / (index.ids.sources[at] or ".") / index.ids.members[at]
            assert place == Path(store.manifest["root"]) / (store.sources[row] or ".") / store.members[row]
            label = -1 if store.labels is None else int(store.labels[row])
            wanted = None if label < 0 else store.manifest["class_names"][label]
            found = None if index.ids.labels is None else index.class_name(int(index.ids.labels[at]))
            assert found == wanted


@pytest.mark.parametrize("factory", FACTORIES)
def test_add(store: FeatureStore, tmp_path: Path, factory: str) -> None:
    first = part(store, slice(0, 40))
    second = part(store, slice(40, 60), "/photos/b/c", class_names=["plum", "fig", "apple"])
    build_index(first, tmp_path / "index", IndexOptions(factory, recall=0.5))
    manifest = add_to_index(tmp_path / "index", second)
    assert manifest.count == 60 and manifest.search["added"] == 20 and manifest.root == "/photos"
    assert manifest.class_names == ["apple", "pear", "plum", "fig"]
    assert_holds(tmp_path / "index", [first, second], 0.5 if "SQ" in factory else 1e-6)  # codes know 40 vectors
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


@pytest.mark.parametrize("factory", FACTORIES[:3])
def test_remove(store: FeatureStore, tmp_path: Path, factory: str) -> None:
    build_index(store, tmp_path / "index", IndexOptions(factory, recall=0.5))
    gone = [store.keys[row] for row in (0, 5, 59)]
    manifest = remove_from_index(tmp_path / "index", [*gone, gone[0]])
    assert manifest.count == 57 and manifest.search["removed"] == 3
    left = [row for row in range(60) if store.keys[row] not in gone]
    rest = FeatureStore(
        [store.keys[row] for row in left],
        store.labels[left],
        [store.sources[row] for row in left],
        [store.members[row] for row in left],
        store.features[left],
        store.manifest,
    )
    assert_holds(tmp_path / "index", [rest], 0.05 if "SQ" in factory else 1e-6)


@pytest.mark.parametrize("factory", FACTORIES)
def test_merge(store: FeatureStore, tmp_path: Path, factory: str) -> None:
    parts = [part(store, slice(0, 30)), part(store, slice(30, 50), "/photos/b"), part(store, slice(50, 60), "/other")]
    parts[1].labels = None
    for number, each in enumerate(parts):
        build_index(each, tmp_path / str(number), IndexOptions(factory if number < 2 else "Flat", recall=0.5))
    before = [digest(tmp_path / str(number)) for number in range(3)]
    manifest = merge_indices([tmp_path / str(number) for number in range(3)], tmp_path / "all")
    assert (manifest.count, manifest.factory, manifest.root) == (60, factory, "/")
    assert_holds(tmp_path / "all", parts, 1.0 if "SQ" in factory else 1e-6)  # codes know 30 vectors
    assert [digest(tmp_path / str(number)) for number in range(3)] == before
    with pytest.raises(SopError, match="already exists"):
        merge_indices([tmp_path / "0", tmp_path / "1"], tmp_path / "all")


def test_a_merged_flat_index_answers_like_one_that_was_built(store: FeatureStore, tmp_path: Path) -> None:
    for name, rows in (("a", slice(0, 25)), ("b", slice(25, 60)), ("whole", slice(0, 60))):
        build_index(part(store, rows), tmp_path / name)
    merge_indices([tmp_path / "a", tmp_path / "b"], tmp_path / "merged")
    for name in ("index.faiss", "ids.parquet"):
        assert (tmp_path / "merged" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def other_pooling(store: FeatureStore) -> None:
    store.manifest["pooling"] = "mean"


def other_encoder(store: FeatureStore) -> None:
    store.manifest["encoder"] = {"name": "x", "fingerprint": "cd" * 32}


def other_size(store: FeatureStore) -> None:
    store.manifest["preprocess"] = store.manifest["preprocess"] | {"crop": 64}


def same_key(store: FeatureStore) -> None:
    store.keys[3] = "bild-0001"


def no_names(store: FeatureStore) -> None:
    store.manifest["class_names"] = None


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (other_pooling, "another pooling"),
        (other_encoder, "another encoder"),
        (other_size, "another preprocessing"),
        (same_key, "first 'bild-0001'"),
        (no_names, "name all"),
    ],
)
def test_what_does_not_belong_together(
    store: FeatureStore, tmp_path: Path, spoil: Callable[[FeatureStore], None], message: str
) -> None:
    build_index(part(store, slice(0, 40)), tmp_path / "index")
    second = part(store, slice(40, 60))
    spoil(second)
    build_index(second, tmp_path / "second")
    before = digest(tmp_path / "index")
    for act in (
        lambda: add_to_index(tmp_path / "index", second),
        lambda: merge_indices([tmp_path / "index", tmp_path / "second"], tmp_path / "out"),
    ):
        with pytest.raises((ConfigError, IndexMismatchError), match=message) as error:
            act()
        assert "\n" not in str(error.value)
    assert digest(tmp_path / "index") == before and not (tmp_path / "out").exists()


def test_what_cannot_be_removed(store: FeatureStore, tmp_path: Path) -> None:
    build_index(store, tmp_path / "index")
    before = digest(tmp_path / "index")
    for keys, message in (
        (["bild-0001", "no\nsuch"], r"key 'no\\nsuch' is not in"),
        (["bild-0001.jpg"], r"nothing was removed; did you mean 'bild-0001'\?"),
        (["bild-0001", "no\nsuch", "other"], r"2 keys are not in .* \(first 'no\\nsuch'\)"),
        (store.keys, "all 60 images"),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            remove_from_index(tmp_path / "index", keys)
        assert "\n" not in str(error.value)
    assert digest(tmp_path / "index") == before
    with pytest.raises(ConfigError, match="two or more"):
        merge_indices([tmp_path / "index"], tmp_path / "out")
    for act in (lambda: remove_from_index(tmp_path / "none", ["x"]), lambda: add_to_index(tmp_path / "none", store)):
        with pytest.raises(IndexMismatchError, match="does not exist"):
            act()


def test_a_change_that_fails_leaves_what_was_there(
    store: FeatureStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_index(part(store, slice(0, 40)), tmp_path / "index")
    before = digest(tmp_path / "index")

    def full(self: object, directory: Path) -> None:
        (directory / "index.faiss").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(change.IndexContents, "write", full)
    with pytest.raises(OSError, match="No space"):
        add_to_index(tmp_path / "index", part(store, slice(40, 60)))
    assert digest(tmp_path / "index") == before and [path.name for path in tmp_path.iterdir()] == ["index"]


def test_one_change_at_a_time(store: FeatureStore, tmp_path: Path) -> None:
    build_index(store, tmp_path / "index")
    descriptor = os.open(tmp_path / "index", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(SopError, match="another process"):
        remove_from_index(tmp_path / "index", ["bild-0001"])
    os.close(descriptor)
    assert remove_from_index(tmp_path / "index", ["bild-0001"]).count == 59


def test_what_a_kill_left_between_two_renames_is_put_back(store: FeatureStore, tmp_path: Path) -> None:
    first, second = part(store, slice(0, 40)), part(store, slice(40, 60))
    index = tmp_path / "index"
    for act, count in (
        (lambda: FeatureIndex.open(index), 40),
        (lambda: add_to_index(index, second), 60),
        (lambda: remove_from_index(index, ["bild-0001"]), 39),
    ):
        build_index(first, index)
        index.rename(tmp_path / ".index.0123abcd.old")
        (tmp_path / ".index.0123abcd.tmp").mkdir()
        act()
        assert [path.name for path in tmp_path.iterdir()] == ["index"] and len(FeatureIndex.open(index)) == count
        shutil.rmtree(index)
