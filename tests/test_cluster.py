"""Indices built in parts: the same as those built at once, whatever happens to the workers."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from sop_faiss.cli.index import main
from sop_faiss.errors import ConfigError, FeatureError, SopError
from sop_faiss.features.store import FeatureStore, read_names
from sop_faiss.index import cluster
from sop_faiss.index import cluster_tasks as work
from sop_faiss.index.build import IndexOptions, build_index
from sop_faiss.index.cluster import build_by_tasks, build_on_cluster
from sop_faiss.index.search import FeatureIndex
from tests.oracle_neighbors import unit_rows
from tests.test_search import make_store

COUNT, DIMENSION, PARTS = 700, 16, 5
FACTORIES = ["Flat", "IVF8,Flat", "IVF8,SQ8", "IVF8,PQ4x4", "IVF8,RaBitQ"]
FACTORIES.append(pytest.param("OPQ4,IVF8,PQ4x4", marks=pytest.mark.slow))  # its rotation takes seconds to learn


def run_here(function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
    """Tasks one after the other in this process."""
    return itertools.starmap(function, arguments)


def make_parts(directory: Path) -> FeatureStore:
    """A feature store of several files; classes come one after the other."""
    store = make_store(count=COUNT)
    rng = np.random.default_rng(1)
    rows = np.repeat(unit_rows(rng, 7, DIMENSION), 100, axis=0) + 0.6 * unit_rows(rng, COUNT, DIMENSION)
    store.features = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    store.labels = np.repeat(np.arange(7) % 3, 100)
    bytes_per_file = 4 * DIMENSION * (COUNT // PARTS + 1)
    assert len(store.write(directory, bytes_per_file=bytes_per_file)["files"]) == PARTS
    return store


@pytest.fixture
def store(tmp_path: Path) -> FeatureStore:
    return make_parts(tmp_path / "store")


def flip_a_feature(file: Path) -> None:
    """Change a byte of the last column; the names before it and the footer stay."""
    content = bytearray(file.read_bytes())
    content[len(content) * 3 // 5] ^= 1
    file.write_bytes(content)


def assert_same(one: Path, two: Path) -> None:
    """Same bytes of vectors and ids, and the same manifest: search setting, recall, checksums."""
    for name in ("ids.parquet", "index.faiss", "manifest.json"):
        assert (one / name).read_bytes() == (two / name).read_bytes(), name


@pytest.mark.parametrize("factory", FACTORIES)
def test_parts_make_the_same_index(store: FeatureStore, tmp_path: Path, factory: str) -> None:
    options = IndexOptions(factory, recall=0.6)
    build_index(FeatureStore.read(tmp_path / "store"), tmp_path / "whole", options)
    steps: list[tuple[int, int]] = []
    manifest = build_by_tasks(
        tmp_path / "store",
        tmp_path / "parts",
        options,
        run=run_here,
        progress=lambda done, total: steps.append((done, total)),
    )
    assert_same(tmp_path / "whole", tmp_path / "parts")
    assert steps == [(done, PARTS) for done in range(1, PARTS + 1)] and manifest.count == COUNT
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts", "store", "whole"]
    if factory != "Flat":
        index = FeatureIndex.open(tmp_path / "parts")
        assert manifest.search["queries"] == 70 and index.ids.keys[:3] != store.keys[-3:]


def test_files_of_others_in_the_place_of_the_parts_stay(store: FeatureStore, tmp_path: Path) -> None:
    (tmp_path / ".out.parts").mkdir()
    (tmp_path / ".out.parts" / "mine.txt").write_text("mine")
    with pytest.raises(SopError, match=r"parts .*mine\.txt"):
        build_by_tasks(tmp_path / "store", tmp_path / "out", IndexOptions("IVF8,Flat"), run=run_here)
    assert [path.name for path in (tmp_path / ".out.parts").iterdir()] == ["mine.txt"]


def test_rows_held_out_are_a_fair_sample(store: FeatureStore, tmp_path: Path) -> None:
    build_index(store, tmp_path / "index", IndexOptions("IVF8,Flat"))
    labels = FeatureIndex.open(tmp_path / "index").ids.labels
    assert labels is not None and (np.diff(labels[:630]) < 0).sum() < 7  # in order
    assert len(set(labels[630:].tolist())) == 3 and (np.diff(labels[630:]) < 0).sum() > 10  # of all classes


def test_what_was_done_is_not_done_again(store: FeatureStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options, done = IndexOptions("IVF8,SQ8", recall=0.5), []
    real_empty = work._empty

    def lost(function: Any, arguments: Any) -> Any:
        for number, each in enumerate(arguments):
            if function is work.index_part and number == 3:
                raise OSError(28, "No space left on device")
            yield function(*each)

    monkeypatch.setattr(work, "_empty", lambda *words: done.append(1) or real_empty(*words))
    with pytest.raises(OSError, match="No space"):
        build_by_tasks(tmp_path / "store", tmp_path / "out", options, run=lost)
    assert len(done) == 3 and not (tmp_path / "out").exists()
    part = tmp_path / ".out.parts" / "part-00001"
    (part / "part.faiss").write_bytes(b"damaged")
    build_by_tasks(tmp_path / "store", tmp_path / "out", options, run=run_here)
    assert len(done) == 3 + 3 + 2  # the damaged one, two missing ones, and twice what they are joined in
    build_index(store, tmp_path / "whole", options)
    assert_same(tmp_path / "whole", tmp_path / "out")
    assert not (tmp_path / ".out.parts").exists()


def test_parts_of_other_features_are_not_taken(
    store: FeatureStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = IndexOptions("IVF8,Flat", recall=0.5)
    monkeypatch.setattr(cluster.shutil, "rmtree", lambda *_, **__: None)
    build_by_tasks(tmp_path / "store", tmp_path / "first", options, run=run_here)
    (tmp_path / ".first.parts").rename(tmp_path / ".out.parts")
    store.features = store.features[::-1].copy()
    store.write(tmp_path / "other")
    build_by_tasks(tmp_path / "other", tmp_path / "out", options, run=run_here)
    build_index(store, tmp_path / "whole", options)
    assert_same(tmp_path / "whole", tmp_path / "out")


def test_what_cannot_be_made_in_parts(store: FeatureStore, tmp_path: Path) -> None:
    for factory in ("HNSW8", "SQ8", "IVF8,PQ4x4,RFlat"):
        with pytest.raises(ConfigError, match="cannot be made in parts"):
            build_by_tasks(tmp_path / "store", tmp_path / "out", IndexOptions(factory), run=run_here)
    result = CliRunner().invoke(main, ["build", "--cluster", "ray", "--model", "x", "--data", "y", "--out", "z"])
    assert result.exit_code == 1 and "--cluster builds of --features STORE" in result.stderr
    flip_a_feature(tmp_path / "store" / "features-00002.parquet")
    with pytest.raises(FeatureError, match="sha256"):
        build_by_tasks(tmp_path / "store", tmp_path / "out", IndexOptions("Flat"), run=run_here)
    assert not (tmp_path / "out").exists()
    (tmp_path / "store" / "features-00002.parquet").write_bytes(b"cut")
    with pytest.raises(FeatureError, match="is damaged") as error:
        build_by_tasks(tmp_path / "store", tmp_path / "out", IndexOptions("Flat"), run=run_here)
    assert "\n" not in str(error.value)


def test_names_alone(store: FeatureStore, tmp_path: Path) -> None:
    names = read_names(tmp_path / "store")
    assert names.keys == store.keys and names.members == store.members and len(names) == COUNT
    np.testing.assert_array_equal(names.labels, store.labels)


# on Ray


def die_once(part: work.Part) -> int:
    """Index a part; at the first of the second part, the worker is killed when the vectors are half written."""
    mark = Path(part.directory).with_name("killed")
    if part.number == 1 and not mark.exists():
        mark.write_text(str(os.getpid()))
        directory = Path(part.directory)
        with work.atomic_directory(directory) as temporary:
            (temporary / "part.faiss").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
    return work.index_part(part)


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: sop-faiss[cluster]")
@pytest.mark.parametrize("named_by", ["argument", "environment"])
@pytest.mark.parametrize("address", ["127.0.0.1:9", "ray://127.0.0.1:9", "[::1]:9", "nowhere", "x:y", f"x:{10**30}"])
@pytest.mark.filterwarnings("default")  # Ray's own
def test_an_address_where_nothing_answers_is_told_at_once(
    store: FeatureStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, named_by: str
) -> None:
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("Ray would wait for minutes"))
    if named_by == "environment":
        monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=re.escape(repr(address))):
        build_on_cluster(tmp_path / "store", tmp_path / "out", address=address if named_by == "argument" else "ray")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: sop-faiss[cluster]")
@pytest.mark.filterwarnings("default")  # Ray's own
def test_a_worker_killed_midway(store: FeatureStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    try:
        options = IndexOptions("IVF8,SQ8", recall=0.5)
        monkeypatch.setattr(work, "index_part", die_once)
        kept: list[str] = []
        real = cluster.shutil.rmtree
        monkeypatch.setattr(
            cluster.shutil,
            "rmtree",
            lambda path, **words: (
                kept.append((Path(path) / "killed").read_text()) if Path(path).name == ".out.parts" else None,
                real(path, **words),
            ),
        )
        build_on_cluster(tmp_path / "store", tmp_path / "out", options)
        assert len(kept) == 1 and int(kept[0]) != os.getpid()  # a worker was killed indeed
        build_index(store, tmp_path / "whole", options)
        assert_same(tmp_path / "whole", tmp_path / "out")
        with pytest.raises(ConfigError, match="cannot be made in parts"):
            build_on_cluster(tmp_path / "store", tmp_path / "graph", IndexOptions("HNSW8"))
        flip_a_feature(tmp_path / "store" / "features-00003.parquet")
        with pytest.raises(FeatureError, match="sha256") as error:
            build_on_cluster(tmp_path / "store", tmp_path / "damaged", options)
        assert "\n" not in str(error.value)
    finally:
        ray.shutdown()
