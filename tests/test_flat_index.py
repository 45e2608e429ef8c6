"""The FAISS index on disk against brute force in float64, with ties, and against files that lie about themselves."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sop_faiss.errors import ConfigError, FeatureError, IndexMismatchError
from sop_faiss.neighbors.disk import faiss_files, flat_index
from sop_faiss.neighbors.disk.factories import read_index
from sop_faiss.neighbors.disk.flat_index import FlatIndex, make_flat_index
from tests.oracle_neighbors import brute_force, unit_rows


def make_index(rows: np.ndarray) -> FlatIndex:
    index = make_flat_index(rows.shape[1])
    index.add(rows)
    return index


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 60),
    dimension=st.integers(1, 40),
    queries=st.integers(0, 5),
    copies=st.integers(1, 30),
    part=st.floats(0, 1),
    seed=st.integers(0, 2**32 - 1),
)
def test_search_is_brute_force_also_among_copies(
    count: int, dimension: int, queries: int, copies: int, part: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    distinct = unit_rows(rng, max(1, count // copies), dimension)
    gallery = distinct[rng.integers(0, len(distinct), count)]
    k = max(1, round(part * count))
    wanted = unit_rows(rng, queries, dimension)
    found = make_index(gallery).search(wanted, k)
    similarities, rows = brute_force(wanted, gallery, k)
    np.testing.assert_array_equal(found.rows, rows)
    np.testing.assert_array_equal(found.similarities, similarities)


def test_the_lowest_of_many_equal_rows_come_first() -> None:
    rng = np.random.default_rng(0)
    gallery = np.repeat(unit_rows(rng, 1, 96), 3000, axis=0)
    gallery[::7] = unit_rows(rng, 1, 96)
    found = make_index(gallery).search(gallery[1:2], 50)
    np.testing.assert_array_equal(found.rows[0], [row for row in range(3000) if row % 7][:50])
    assert (found.similarities == found.similarities[0, 0]).all()


def test_rows_closer_than_float32_can_tell_are_ranked_by_float64() -> None:
    rng = np.random.default_rng(1)
    gallery = unit_rows(rng, 1, 512) + 2e-7 * rng.standard_normal((400, 512)).astype(np.float32)
    gallery = (gallery / np.linalg.norm(gallery, axis=1, keepdims=True)).astype(np.float32)
    queries = unit_rows(rng, 3, 512)
    found = make_index(gallery).search(queries, 20)
    similarities, rows = brute_force(queries, gallery, 20)
    np.testing.assert_array_equal(found.rows, rows)
    np.testing.assert_array_equal(found.similarities, similarities)


def test_a_similarity_does_not_depend_on_the_other_queries() -> None:
    rng = np.random.default_rng(2)
    index = make_index(unit_rows(rng, 700, 65))
    queries = unit_rows(rng, 33, 65)
    together = index.search(queries, 12)
    for position, query in enumerate(queries):
        alone = index.search(query[None], 12)
        np.testing.assert_array_equal(alone.rows[0], together.rows[position])
        np.testing.assert_array_equal(alone.similarities[0], together.similarities[position])


def test_scoring_by_small_blocks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    index, queries = make_index(unit_rows(rng, 50, 16)), unit_rows(rng, 4, 16)
    whole = index.search(queries, 9)
    monkeypatch.setattr(flat_index, "_BLOCK_BYTES", 1)
    blocks = index.search(queries, 9)
    np.testing.assert_array_equal(blocks.rows, whole.rows)
    np.testing.assert_array_equal(blocks.similarities, whole.similarities)


def test_strided_queries_and_galleries() -> None:
    rng = np.random.default_rng(4)
    gallery, queries = unit_rows(rng, 40, 12), unit_rows(rng, 6, 12)
    strided_gallery, strided_queries = np.asfortranarray(gallery), np.repeat(queries, 2, axis=0)[::2]
    found = make_index(strided_gallery).search(strided_queries, 5)
    np.testing.assert_array_equal(found.rows, brute_force(queries, gallery, 5)[1])


@pytest.mark.parametrize("k", [0, -1, 11])
def test_k_out_of_range(k: int) -> None:
    index = make_index(unit_rows(np.random.default_rng(0), 10, 4))
    with pytest.raises(ConfigError, match="wanted 1 <= k <= 10"):
        index.search(index.vectors[:1], k)


def test_other_dimension() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(FeatureError, match="dimension 5, the index 4"):
        make_index(unit_rows(rng, 10, 4)).search(unit_rows(rng, 1, 5), 2)


def test_vectors_cannot_be_written_to() -> None:
    index = make_index(unit_rows(np.random.default_rng(0), 10, 4))
    with pytest.raises(ValueError, match="read-only"):
        index.vectors[0, 0] = 1.0


def test_a_stored_vector_that_is_not_finite_never_becomes_row_minus_one() -> None:
    gallery = unit_rows(np.random.default_rng(0), 10, 4)
    gallery[3] = np.nan
    with pytest.raises(IndexMismatchError, match="not finite"):
        make_index(gallery).search(gallery[:1], 10)


def test_write_and_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    index, queries = make_index(unit_rows(rng, 30, 7)), unit_rows(rng, 3, 7)
    index.write(tmp_path / "index.faiss")
    again = read_index(tmp_path / "index.faiss", "Flat", 7, 30)
    assert (again.factory, again.dimension, again.count) == ("Flat", 7, 30)
    np.testing.assert_array_equal(again.vectors, index.vectors)
    np.testing.assert_array_equal(again.search(queries, 30).rows, index.search(queries, 30).rows)


def test_write_where_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="cannot write") as error:
        make_index(unit_rows(np.random.default_rng(0), 3, 2)).write(tmp_path / "absent" / "index.faiss")
    assert "\n" not in str(error.value)


HEADER = "<4siqqqBiQ"


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (0, b"IxF2"),
        (0, b"IwFl"),
        (1, -5),
        (1, 2**31 - 1),
        (2, 2**62),
        (2, -1),
        (5, 0),
        (6, 1),
        (7, 2**61),
        (7, 0),
    ],
)
def test_a_header_that_lies_never_reaches_faiss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, position: int, value: bytes | int
) -> None:
    path = tmp_path / "index.faiss"
    make_index(unit_rows(np.random.default_rng(0), 12, 3)).write(path)
    content = path.read_bytes()
    fields = list(struct.unpack_from(HEADER, content))
    assert fields[:3] == [b"IxFI", 3, 12]
    fields[position] = value
    path.write_bytes(struct.pack(HEADER, *fields) + content[struct.calcsize(HEADER) :])
    monkeypatch.setattr(faiss_files.faiss, "read_index", lambda *arguments: pytest.fail("FAISS was asked to read it"))
    with pytest.raises(IndexMismatchError, match=str(path)):
        read_index(path, "Flat", 3, 12)


@pytest.mark.parametrize("length", [0, 3, 44, 45, 60, 188])
def test_a_cut_file_never_reaches_faiss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    path = tmp_path / "index.faiss"
    make_index(unit_rows(np.random.default_rng(0), 12, 3)).write(path)
    path.write_bytes(path.read_bytes()[:length])
    monkeypatch.setattr(faiss_files.faiss, "read_index", lambda *arguments: pytest.fail("FAISS was asked to read it"))
    with pytest.raises(IndexMismatchError, match="bytes"):
        read_index(path, "Flat", 3, 12)
