"""Lists learned and filled by GPUs: the same index with FAISS's CPU in their place; on a GPU nearly the same."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from sop_faiss.neighbors.disk import gpu_lists
from sop_faiss.neighbors.disk.approximate_index import ApproximateIndex
from sop_faiss.neighbors.disk.from_factory import make_approximate_index
from sop_faiss.neighbors.selftest import count_faiss_gpus
from tests.oracle_neighbors import unit_rows

DIMENSION = 16


def built(factory: str, rows: np.ndarray, file: Path) -> bytes:
    index = make_approximate_index(factory, rows.shape[1])
    index.train(rows)
    for block in np.array_split(rows, 3):
        index.add(block)
    index.write(file)
    return file.read_bytes()


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The indices that are put on GPUs, which stay on the CPU here."""
    put: list[Any] = []

    def put_there(index: Any) -> Any:
        put.append(index)
        return index

    monkeypatch.setattr(gpu_lists, "_WORTH_IT", 1)
    monkeypatch.setattr(gpu_lists, "_gpus", lambda: 1)
    monkeypatch.setattr(faiss, "index_cpu_to_all_gpus", put_there, raising=False)
    return put


@pytest.mark.parametrize("factory", ["IVF8,Flat", "IVF8,SQ8", "IVF8,PQ4x4", "OPQ4_8,IVF8,PQ4x4", "IVF8,RaBitQ"])
def test_the_index_is_the_same(
    factory: str, tmp_path: Path, stand_in: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = unit_rows(np.random.default_rng(0), 600, DIMENSION)
    helped = built(factory, rows, tmp_path / "helped")
    assert len(stand_in) == 2, "once to learn, once to fill"
    monkeypatch.setattr(gpu_lists, "_gpus", lambda: 0)
    assert helped == built(factory, rows, tmp_path / "alone")
    assert len(stand_in) == 2


@pytest.mark.parametrize("factory", ["HNSW8", "SQ8", "IVF8,PQ4x4fs", "IVF8_HNSW8,Flat", "IVF8,Flat,RFlat"])
def test_other_kinds_are_filled_by_the_cpu(factory: str, tmp_path: Path, stand_in: list[Any]) -> None:
    rows = unit_rows(np.random.default_rng(0), 600, DIMENSION)
    built(factory, rows, tmp_path / "index")
    assert len(stand_in) == ("IVF" in factory), "at most to learn"


def test_a_gpu_that_faiss_cannot_use_is_told_and_left(
    tmp_path: Path, stand_in: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(index: Any) -> Any:
        raise RuntimeError("Faiss assertion failed\nno kernel image")

    monkeypatch.setattr(faiss, "index_cpu_to_all_gpus", fail, raising=False)
    caplog.set_level(logging.WARNING)
    rows = unit_rows(np.random.default_rng(0), 600, DIMENSION)
    built("IVF8,Flat", rows, tmp_path / "index")
    assert [record.getMessage() for record in caplog.records] == [
        "FAISS cannot use the GPU, the CPU builds: no kernel image"
    ] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("factory", ["IVF256,Flat", "OPQ16_64,IVF256,PQ16"])
def test_a_gpu_builds_an_index_that_finds_as_much(factory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if count_faiss_gpus() == 0:
        pytest.skip("FAISS has no GPU code here")
    rng = np.random.default_rng(0)
    centers = unit_rows(rng, 500, 64)
    rows = centers[rng.integers(0, 500, 60_000)] + 0.3 * unit_rows(rng, 60_000, 64)
    rows = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    queries = rows[:200]
    exact = np.argsort(-(queries @ rows.T), axis=1)[:, :10]

    def recall(worth_it: int) -> float:
        monkeypatch.setattr(gpu_lists, "_WORTH_IT", worth_it)
        index: ApproximateIndex = make_approximate_index(factory, 64)
        index.train(rows)
        index.add(rows)
        assert index.count == len(rows) and (index._gpus._centers is not None) == (worth_it == 1)
        index.search_setting = 16
        found = index.search(queries, 10).rows
        return float(np.mean([len(set(a) & set(b)) for a, b in zip(found, exact, strict=True)])) / 10

    assert recall(1) == pytest.approx(recall(2**62), abs=0.03)
