"""Lists joined on disk: byte for byte what FAISS writes of the same rows joined in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sop_faiss.neighbors.disk.approximate_index import ApproximateIndex
from sop_faiss.neighbors.disk.from_factory import make_approximate_index, read_approximate_index
from sop_faiss.neighbors.disk.joined_lists import joins_on_disk, write_joined
from tests.oracle_neighbors import unit_rows

DIMENSION = 16
KINDS = ("IVF8,Flat", "IVF8,SQ8", "IVF8,SQfp16", "IVF8,PQ4x4", "OPQ4_8,IVF8,PQ4x4", "IVF8,RaBitQ")


def trained(factory: str, path: Path) -> Path:
    """A file of an index without a row."""
    index = make_approximate_index(factory, DIMENSION)
    index.train(unit_rows(np.random.default_rng(0), 400, DIMENSION))
    index.write(path)
    return path


def empty(path: Path, factory: str) -> ApproximateIndex:
    return read_approximate_index(path, factory, DIMENSION, 0, mapped=False)


@pytest.mark.parametrize("sizes", [(300, 0, 41), (2,), (3, 1), (0, 0), ()])
@pytest.mark.parametrize("factory", KINDS)
def test_the_file_is_what_faiss_writes(tmp_path: Path, factory: str, sizes: tuple[int, ...]) -> None:
    """Many rows fill most of the lists, few of them a part: FAISS tells their sizes in two ways."""
    start = trained(factory, tmp_path / "trained")
    assert joins_on_disk(empty(start, factory))
    rows = unit_rows(np.random.default_rng(1), sum(sizes), DIMENSION)
    whole, parts = empty(start, factory), []
    for number, block in enumerate(np.split(rows, np.cumsum(sizes)[:-1]) if sizes else []):
        part = empty(start, factory)
        part.add(block)
        part.write(tmp_path / f"part{number}")
        parts.append(read_approximate_index(tmp_path / f"part{number}", factory, DIMENSION, len(block)))
        whole.add(block)
    joined = empty(start, factory)
    whole.search_setting = joined.search_setting = 5
    write_joined(joined, parts, tmp_path / "joined")
    whole.write(tmp_path / "whole")
    assert (tmp_path / "joined").read_bytes() == (tmp_path / "whole").read_bytes()
    assert joined.count == 0, "it is as it was"
    opened = read_approximate_index(tmp_path / "joined", factory, DIMENSION, sum(sizes))
    if sum(sizes) > 100:
        opened.search_setting = 5
        found, wanted = (index.search(rows[:20], 5) for index in (opened, whole))
        np.testing.assert_array_equal(found.rows, wanted.rows)


@pytest.mark.parametrize("factory", ["IVF8,PQ4x4fs", "HNSW8", "SQ8"])
def test_other_layouts_are_known_as_such(tmp_path: Path, factory: str) -> None:
    assert not joins_on_disk(empty(trained(factory, tmp_path / "trained"), factory))
