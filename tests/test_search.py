"""Index directories: what is found, what is written, and what is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import sop_faiss.index.build as build_module
from sop_faiss import load_encoder
from sop_faiss.data.images.decode import decode_image
from sop_faiss.data.images.source import open_source
from sop_faiss.errors import ConfigError, DataError, FeatureError, IndexMismatchError, SopError
from sop_faiss.features.store import FeatureStore
from sop_faiss.index.build import IndexOptions, build_index, build_index_of_images, parse_bytes
from sop_faiss.index.closest_key import closest_key
from sop_faiss.index.images import index_images
from sop_faiss.index.search import FeatureIndex
from sop_faiss.index.store import IdTable, IndexManifest
from sop_faiss.model.encoders.preprocess import Preprocess
from sop_faiss.output_checks import refuse_occupied
from tests.encoders import write_run
from tests.images import write_folder, write_shards
from tests.oracle_neighbors import brute_force, unit_rows

COUNT, DIMENSION = 60, 12


def make_store(seed: int = 0, count: int = COUNT, labels: bool = True) -> FeatureStore:
    """Random features in which every third row is a copy of an earlier one; keys need escaping here and there."""
    rng = np.random.default_rng(seed)
    features = unit_rows(rng, count, DIMENSION)
    copies = np.arange(2, count, 3)
    features[copies] = features[rng.integers(0, 2, len(copies))]
    return FeatureStore(
        keys=[f"bild-{row:04d}" if row % 5 else f'ä"<{row}>,\n' for row in range(count)],
        labels=rng.integers(-1, 3, count) if labels else None,
        sources=["a.tar" if row % 2 else "" for row in range(count)],
        members=[f"{row}.jpg" for row in range(count)],
        features=features,
        manifest={
            "encoder": {"name": "tiny", "fingerprint": "ab" * 32},
            "preprocess": Preprocess.square(32).to_dict(),
            "pooling": "cls",
            "class_names": ["apple", "pear", "plum"],
            "root": "/photos",
            "dropped": {"count": 2, "reasons": {"truncated": 2}, "images": []},
        },
    )


@dataclass(frozen=True)
class StubEncoder:
    """What identifies an encoder."""

    name: str = "tiny"
    fingerprint: str = "ab" * 32
    pooling: str = "cls"
    feature_dim: int = DIMENSION
    preprocess: Preprocess = field(default_factory=lambda: Preprocess.square(32))


@pytest.fixture(scope="module")
def store() -> FeatureStore:
    return make_store()


@pytest.fixture(scope="module")
def built(store: FeatureStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("indices") / "photos.index"
    build_index(store, out)
    return out


@pytest.fixture(scope="module")
def index(built: Path) -> FeatureIndex:
    return FeatureIndex.open(built)


# what is found


@pytest.mark.parametrize("k", [1, 7, COUNT])
def test_search_is_brute_force(index: FeatureIndex, store: FeatureStore, k: int) -> None:
    queries = unit_rows(np.random.default_rng(9), 11, DIMENSION)
    found = index.search(queries, k)
    similarities, rows = brute_force(queries, store.features, k)
    np.testing.assert_array_equal(found.rows, rows)
    np.testing.assert_array_equal(found.similarities, similarities)
    assert found.keys == [[store.keys[row] for row in line] for line in rows]
    np.testing.assert_array_equal(found.labels, store.labels[rows])


def test_copies_are_all_found_lowest_row_first(index: FeatureIndex, store: FeatureStore) -> None:
    equal = np.flatnonzero((store.features == store.features[0]).all(axis=1))
    assert len(equal) > 3
    found = index.search(store.features[0], len(equal))
    np.testing.assert_array_equal(found.rows[0], equal)
    np.testing.assert_allclose(found.similarities, 1, atol=1e-6)


def test_other_images_of_a_row(index: FeatureIndex, store: FeatureStore) -> None:
    k = 9
    found = index.search_rows(range(COUNT), k)
    for row in range(COUNT):
        _, ranked = brute_force(store.features[row : row + 1], store.features, COUNT)
        np.testing.assert_array_equal(found.rows[row], [other for other in ranked[0] if other != row][:k])
    assert index.search_rows([], 3).keys == []


@pytest.mark.parametrize(
    "change",
    [
        lambda x: torch.from_numpy(x),
        lambda x: torch.from_numpy(x).double().requires_grad_(),
        lambda x: np.asfortranarray(x),
        lambda x: np.repeat(x, 2, axis=1)[:, ::2],
        lambda x: x.astype(np.float64),
        lambda x: torch.from_numpy(x).T.contiguous().T,
    ],
)
def test_any_float_type_and_stride(
    index: FeatureIndex, change: Callable[[np.ndarray], np.ndarray | torch.Tensor]
) -> None:
    queries = unit_rows(np.random.default_rng(3), 5, DIMENSION)
    np.testing.assert_array_equal(index.search(change(queries), 6).rows, index.search(queries, 6).rows)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_finds_the_row_it_was_made_from(
    index: FeatureIndex, store: FeatureStore, dtype: torch.dtype
) -> None:
    half = torch.from_numpy(store.features[4])
    half = torch.nn.functional.normalize(half.to(dtype), dim=0)
    if abs(float(half.float().norm()) - 1) > 1e-3:
        pytest.skip("bfloat16 cannot hold this vector at unit norm")
    assert index.search(half, 1).rows.tolist() == [[4]]


def test_no_query(index: FeatureIndex) -> None:
    found = index.search(np.empty((0, DIMENSION), np.float32), 3)
    assert found.rows.shape == (0, 3) and found.keys == []


def test_names(index: FeatureIndex, store: FeatureStore) -> None:
    assert len(index) == COUNT and index.dimension == DIMENSION
    assert [index.row_of(key) for key in store.keys] == list(range(COUNT))
    assert [index.class_name(label) for label in (-1, 0, 2, 7)] == [None, "apple", "plum", "7"]
    np.testing.assert_array_equal(index.features([3, 1]), store.features[[3, 1]])
    with pytest.raises(ConfigError, match="did you mean 'bild-0001'"):
        index.row_of("bild-0001x")


def test_images_find_what_their_features_find(tmp_path: Path) -> None:
    encoder = load_encoder(str(write_run(tmp_path / "run")))
    folder = write_folder(tmp_path / "photos", classes=0, per_class=6)
    build_index_of_images(encoder, open_source(folder), tmp_path / "index")
    index = FeatureIndex.open(tmp_path / "index")
    paths = sorted(folder.iterdir())[2:4]
    arrays = [decode_image(path.read_bytes()) for path in paths]
    expected = index.search(encoder.encode(paths), 3)
    for images in (paths, [str(path) for path in paths], arrays, np.stack(arrays)):
        found = index.search(images, 3, encoder=encoder)
        assert found.keys == expected.keys and [keys[0] for keys in found.keys] == ["0002", "0003"]
        np.testing.assert_allclose(found.similarities, expected.similarities, atol=1e-6)
    assert index.search(paths[0], 1, encoder=encoder).keys == [["0002"]]
    (above,) = index.search_above(paths[0], 0.9999, encoder=encoder)
    assert "0002" in above.keys[0]
    assert index.search(encoder.encode(paths), 3, encoder=encoder).keys == expected.keys  # features, as without
    assert index.search(paths, 3).keys == expected.keys, "with the encoder that the index remembers"
    index.manifest = replace(index.manifest, encoder_spec=None)
    with pytest.raises(ConfigError) as missing:
        index.search(paths, 3)
    assert missing.value.arguments == ("encoder",)
    with pytest.raises(IndexMismatchError, match="pooling"):
        index.search(paths, 3, encoder=load_encoder(str(tmp_path / "run"), pooling="mean"))
    with pytest.raises(DataError, match=r"none\.jpg"):
        index.search([*paths, tmp_path / "none.jpg"], 3, encoder=encoder)
    with pytest.raises(ConfigError, match="wanted 1 <= k <= 6"):
        index.search([tmp_path / "none.jpg"], 7, encoder=encoder)  # before any image is read


# what is asked wrongly


@pytest.mark.parametrize("k", [0, -3, COUNT + 1])
def test_k_out_of_range(index: FeatureIndex, k: int) -> None:
    with pytest.raises(ConfigError, match=f"k = {k} .* wanted 1 <= k <= {COUNT}"):
        index.search(index.features([0]), k)
    with pytest.raises(ConfigError, match=f"wanted 1 <= k <= {COUNT - 1}"):
        index.search_rows([0], COUNT if k > 0 else k)


@pytest.mark.parametrize("rows", [[-1], [0, COUNT]])
def test_rows_out_of_range(index: FeatureIndex, rows: list[int]) -> None:
    with pytest.raises(ConfigError, match=f"wanted 0 to {COUNT - 1}"):
        index.search_rows(rows, 2)


def test_unusable_queries(index: FeatureIndex) -> None:
    good = unit_rows(np.random.default_rng(0), 4, DIMENSION)
    for value in (np.nan, np.inf):
        bad = good.copy()
        bad[2, 5] = value
        with pytest.raises(FeatureError, match=r"queries: 1 of 4 rows .*row 2 is NaN or infinite"):
            index.search(bad, 1)
    with pytest.raises(FeatureError, match="row 0 is of norm 2"):
        index.search(2 * good, 1)
    with pytest.raises(FeatureError, match=r"4 of 4 rows .*row 0 is zero"):
        index.search(0 * good, 1)
    for wrong in (good[:, :-1], good[0, :-1], good[None], torch.from_numpy(good)[:, 1:]):
        with pytest.raises(FeatureError, match="use the encoder the index was built with"):
            index.search(wrong, 1)
    for wrong_type in (good.astype(np.int64), torch.ones(1, DIMENSION, dtype=torch.int32), good.astype(complex)):
        with pytest.raises(FeatureError, match="wanted floating-point"):
            index.search(wrong_type, 1)


@pytest.mark.parametrize(
    ("encoder", "message"),
    [
        (StubEncoder(name="other", fingerprint="cd" * 32), "fingerprint cdcdcdcdcdcd instead of abababababab"),
        (StubEncoder(preprocess=Preprocess.square(48)), "crop 48 instead of 32, resize 48 instead of 32"),
        (
            StubEncoder(preprocess=replace(Preprocess.square(32), mean=(0.5, 0.5, 0.5))),
            r"mean \[0.5, 0.5, 0.5\] instead",
        ),
        (StubEncoder(pooling="mean"), r"another pooling .*'mean' instead of 'cls'"),
        (StubEncoder(feature_dim=13), r"another dimension .*13 instead of 12"),
    ],
)
def test_another_encoder_is_refused_in_one_line(index: FeatureIndex, encoder: StubEncoder, message: str) -> None:
    index.check_encoder(StubEncoder())
    index.check_encoder(StubEncoder(name="renamed"))
    with pytest.raises(IndexMismatchError, match=message) as error:
        index.check_encoder(encoder)
    assert "\n" not in str(error.value)


# what is written


def test_directory_of_contract(built: Path, store: FeatureStore) -> None:
    assert sorted(file.name for file in built.iterdir()) == ["ids.parquet", "index.faiss", "manifest.json"]
    manifest = json.loads((built / "manifest.json").read_text())
    assert manifest["format"] == "sop_faiss.index" and manifest["format_version"] == 2
    assert (manifest["factory"], manifest["metric"]) == ("Flat", "inner_product")
    assert (manifest["dimension"], manifest["count"]) == (DIMENSION, COUNT)
    for name in ("encoder", "preprocess", "pooling", "class_names", "root"):
        assert manifest[name] == store.manifest[name]
    assert manifest["dropped"] == {"truncated": 2}
    table = pq.read_table(built / "ids.parquet")
    assert table.column_names == ["row", "key", "source", "member", "label"]
    assert table["row"].to_pylist() == list(range(COUNT))
    assert table["key"].to_pylist() == store.keys
    assert table["label"].to_pylist() == [None if label < 0 else label for label in store.labels.tolist()]


def test_without_labels(tmp_path: Path) -> None:
    build_index(make_store(labels=False), tmp_path / "out")
    opened = FeatureIndex.open(tmp_path / "out")
    assert opened.ids.labels is None and opened.search_rows([0], 2).labels is None


def test_it_can_be_moved(built: Path, index: FeatureIndex, tmp_path: Path) -> None:
    shutil.copytree(built, tmp_path / "elsewhere" / "renamed")
    moved = FeatureIndex.open(str(tmp_path / "elsewhere" / "renamed"))
    np.testing.assert_array_equal(moved.search_rows([5], 4).rows, index.search_rows([5], 4).rows)


def test_what_stands_at_the_output_stays(store: FeatureStore, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("all of it")
    (tmp_path / "file").write_text("a file")
    for out in (tmp_path / "full", tmp_path / "file"):
        for attempt in (lambda out=out: build_index(store, out), lambda out=out: refuse_occupied(out)):
            with pytest.raises(SopError, match="already exists and is not empty"):
                attempt()
    assert (tmp_path / "full" / "thesis.txt").read_text() == "all of it"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full"]
    (tmp_path / "empty").mkdir()
    build_index(store, tmp_path / "empty")
    assert len(FeatureIndex.open(tmp_path / "empty")) == COUNT


def test_nothing_is_left_of_a_build_that_fails(
    store: FeatureStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(self: IdTable, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build_module.IdTable, "write", full_disk)
    with pytest.raises(OSError, match="No space left"):
        build_index(store, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def changed(change: Callable[[FeatureStore], None]) -> FeatureStore:
    store = make_store()
    change(store)
    return store


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda store: store.features.__setitem__((7, 3), np.nan), "NaN"),
        (lambda store: store.features.__setitem__(7, 0.5), "norm"),
        (lambda store: store.keys.__setitem__(7, store.keys[8]), "unique"),
        (lambda store: store.members.pop(), "59"),
        (lambda store: store.manifest.pop("encoder"), "'encoder'"),
        (lambda store: store.manifest["encoder"].pop("fingerprint"), "'fingerprint'"),
        (lambda store: store.keys.__setitem__(7, "bad\udcff"), "not valid Unicode"),
    ],
)
def test_unusable_stores_are_refused(change: Callable[[FeatureStore], None], message: str, tmp_path: Path) -> None:
    with pytest.raises(FeatureError, match=message) as error:
        build_index(changed(change), tmp_path / "out")
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_impossible_options_are_refused(tmp_path: Path) -> None:
    for options, message in (
        (IndexOptions("nonsense"), "'nonsense' is unknown to FAISS"),
        (IndexOptions("CAGRA32"), "'CAGRA32': CAGRA needs a GPU and faiss-gpu-cuvs.* use HNSW32"),
        (IndexOptions("hnsw32,cagra"), "CAGRA needs"),
        (IndexOptions("IVF64,Flat"), "cannot be trained on 60 vectors"),
        (IndexOptions("Flat", max_bytes=1000), "leave one of them out"),
        (IndexOptions(max_bytes=10), "allow more memory"),
        (IndexOptions(recall=1.5), "`recall` 1.5"),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            build_index(make_store(), tmp_path / "out", options)
        assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


# what is damaged

FILES = ("index.faiss", "ids.parquet", "manifest.json")


def flip(content: bytes, rng: np.random.Generator) -> bytes:
    damaged = bytearray(content)
    for position in rng.integers(0, len(damaged), rng.integers(1, 4)):
        damaged[position] ^= int(rng.integers(1, 256))
    return bytes(damaged) if bytes(damaged) != content else content[:-1]


def cut(content: bytes, rng: np.random.Generator) -> bytes:
    return content[: int(rng.integers(0, len(content)))]


def grow(content: bytes, rng: np.random.Generator) -> bytes:
    return content + rng.bytes(int(rng.integers(1, 50)))


def blank(content: bytes, rng: np.random.Generator) -> bytes:
    start = int(rng.integers(0, len(content)))
    damaged = content[:start] + bytes(min(512, len(content) - start)) + content[start + 512 :]
    return damaged if damaged != content else content[:start] + b"\x01" + content[start + 1 :]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [flip, cut, grow, blank])
def test_damaged_files_are_all_refused(
    built: Path, tmp_path: Path, name: str, damage: Callable[[bytes, np.random.Generator], bytes]
) -> None:
    shutil.copytree(built, tmp_path / "copy")
    whole = (built / name).read_bytes()
    for seed in range(40):
        (tmp_path / "copy" / name).write_bytes(damage(whole, np.random.default_rng(seed)))
        with pytest.raises(IndexMismatchError) as error:
            FeatureIndex.open(tmp_path / "copy")
        assert "\n" not in str(error.value), seed
    (tmp_path / "copy" / name).write_bytes(whole)
    FeatureIndex.open(tmp_path / "copy")


@pytest.mark.parametrize("names", [("index.faiss",), ("ids.parquet",), ("manifest.json",), FILES[:2], FILES[1:]])
def test_files_of_another_index_are_refused(built: Path, tmp_path: Path, names: tuple[str, ...]) -> None:
    build_index(make_store(seed=1), tmp_path / "other")  # same encoder, dimension and count
    shutil.copytree(built, tmp_path / "copy")
    for name in names:
        shutil.copy(tmp_path / "other" / name, tmp_path / "copy" / name)
    with pytest.raises(IndexMismatchError, match=r"belongs to another index|was cut"):
        FeatureIndex.open(tmp_path / "copy")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file(built: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(built, tmp_path / "copy")
    (tmp_path / "copy" / name).unlink()
    with pytest.raises(IndexMismatchError, match=name):
        FeatureIndex.open(tmp_path / "copy")
    (tmp_path / "copy" / name).mkdir()
    with pytest.raises(IndexMismatchError, match=name):
        FeatureIndex.open(tmp_path / "copy")


def test_a_manifest_nested_so_deeply_that_it_is_read_but_not_written(built: Path, tmp_path: Path) -> None:
    shutil.copytree(built, tmp_path / "copy")
    path = tmp_path / "copy" / "manifest.json"
    manifest = json.loads(path.read_text())
    nested: object = 1
    for _ in range(600):
        nested = {"a": nested}
    path.write_text(json.dumps(manifest | {"preprocess": nested}))
    with pytest.raises(IndexMismatchError, match=r"was changed|is damaged"):
        FeatureIndex.open(tmp_path / "copy")


def test_what_is_no_index(tmp_path: Path) -> None:
    with pytest.raises(IndexMismatchError, match="does not exist"):
        FeatureIndex.open(tmp_path / "absent")
    with pytest.raises(IndexMismatchError, match="not an index directory"):
        FeatureIndex.open(tmp_path)
    for content in ("[]", '{"format": "sop_faiss feature store 1"}', "3"):
        (tmp_path / "manifest.json").write_text(content)
        with pytest.raises(IndexMismatchError, match="not the manifest of an index"):
            FeatureIndex.open(tmp_path)
    (tmp_path / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(IndexMismatchError, match="damaged"):
        FeatureIndex.open(tmp_path)


def test_a_foreign_version(built: Path, tmp_path: Path) -> None:
    shutil.copytree(built, tmp_path / "copy")
    manifest = json.loads((built / "manifest.json").read_text())
    for version in (1, 4, "2", None):
        (tmp_path / "copy" / "manifest.json").write_text(json.dumps(manifest | {"format_version": version}))
        with pytest.raises(IndexMismatchError, match=f"format version {version!r}, this program reads 2 and 3"):
            FeatureIndex.open(tmp_path / "copy")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": COUNT - 1}, "names 60 images, the manifest 59"),
        ({"dimension": DIMENSION + 1}, "wanted 60 of 13"),
        ({"metric": "l2"}, "metric 'l2'"),
        ({"factory": "IVF16,Flat"}, "not the index IVF16,Flat"),
    ],
)
def test_a_manifest_sealed_over_a_lie(built: Path, tmp_path: Path, change: dict[str, object], message: str) -> None:
    shutil.copytree(built, tmp_path / "copy")
    replace(IndexManifest.read(built), **change).write(tmp_path / "copy")
    with pytest.raises(SopError, match=message) as error:
        FeatureIndex.open(tmp_path / "copy")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("encoder", None),
        ("encoder", {"name": "x"}),
        ("root", ["a"]),
        ("search", 7),
        ("files", {}),
        ("files", {"index.faiss": 5, "ids.parquet": []}),
        ("preprocess", []),
        ("dropped", 5),
        ("pooling", ["x"]),
        ("class_names", "abc"),
    ],
)
def test_a_manifest_sealed_with_entries_of_other_types(built: Path, tmp_path: Path, name: str, value: Any) -> None:
    shutil.copytree(built, tmp_path / "copy")
    content = json.loads((built / "manifest.json").read_text()) | {name: value}
    del content["seal"]
    seal = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    (tmp_path / "copy" / "manifest.json").write_text(json.dumps(content | {"seal": seal}, indent=1) + "\n")
    with pytest.raises(IndexMismatchError, match="was changed after it was written"):
        FeatureIndex.open(tmp_path / "copy")


def test_ids_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "ids.parquet"
    pq.write_table(pa.table({"row": [0, 1], "key": ["a", "b"]}), path)
    with pytest.raises(IndexMismatchError):
        IdTable.read(path)
    IdTable(["a", "b"], ["", ""], ["a.jpg", "b.jpg"], None).write(path)
    pq.write_table(pq.read_table(path).take([1, 0]), path)
    with pytest.raises(IndexMismatchError, match="out of order"):
        IdTable.read(path)


def test_unverified_vectors_may_be_wrong_but_never_crash(built: Path, tmp_path: Path) -> None:
    shutil.copytree(built, tmp_path / "copy")
    whole = (built / "index.faiss").read_bytes()
    opened = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        (tmp_path / "copy" / "index.faiss").write_bytes((flip, cut, blank)[seed % 3](whole, rng))
        try:
            found = FeatureIndex.open(tmp_path / "copy", verify="sizes").search(unit_rows(rng, 2, DIMENSION), COUNT)
        except IndexMismatchError:
            continue
        opened += 1
        assert found.rows.min() >= 0
    assert 20 < opened < 180


# the images


@pytest.mark.parametrize("kind", ["folder", "shards"])
def test_images_are_read_where_they_are_now(tmp_path: Path, kind: str) -> None:
    from sop_faiss.data.images.source import open_source

    place = (write_folder if kind == "folder" else write_shards)(tmp_path / "photos")
    source = open_source(place)
    rows = range(len(source))
    store = replace(
        make_store(count=len(source)),
        keys=source.keys,
        sources=[source.source_of(row) for row in rows],
        members=[source.member_of(row) for row in rows],
    )
    store.manifest["root"] = str(source.root)
    build_index(store, tmp_path / "out")
    opened = FeatureIndex.open(tmp_path / "out")
    wanted = [source.read(row) for row in rows]
    assert [index_images(opened).read(row) for row in rows] == wanted
    place.rename(tmp_path / "moved")
    with pytest.raises(DataError, match=r"does not exist|cannot be opened"):
        index_images(opened).read(0)
    moved = index_images(opened, tmp_path / "moved")
    assert [moved.read(row) for row in rows] == wanted


@pytest.mark.parametrize(
    ("source", "member"), [("", "../x.jpg"), ("", "/etc/passwd"), ("../a.tar", "x.jpg"), ("/a.tar", "x")]
)
def test_images_outside_the_root_are_refused(tmp_path: Path, source: str, member: str) -> None:
    store = make_store(count=3)
    store.sources[0], store.members[0] = source, member
    build_index(store, tmp_path / "out")
    with pytest.raises(DataError, match=r"^outside: "):
        index_images(FeatureIndex.open(tmp_path / "out"), tmp_path).read(0)


@pytest.mark.parametrize("size", ["", "x", "-5MB", "1e3", "9" * 400, "9" * 5000, "5 XB"])
def test_sizes_that_are_none(size: str) -> None:
    with pytest.raises(ConfigError, match="wanted a number with B, KB"):
        parse_bytes(size)


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("IMG_0088", ""),  # another number is another photo
        ("IMG_88", ""),
        ("IMG_O087", ""),
        ("IMG0087", "; did you mean 'IMG_0087'?"),
        ("img_0099", "; did you mean 'trip/img_0099'?"),
        ("", ""),
    ],
)
def test_only_near_keys_are_suggested(key: str, hint: str) -> None:
    assert closest_key(key, ["IMG_0087", "IMG_0089", "trip/img_0099", "home"]) == hint
