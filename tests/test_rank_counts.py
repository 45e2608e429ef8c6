"""Counting above thresholds: equal to a comparison with the whole matrix in any blocks, order, and on any device."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sop_faiss.errors import FeatureError
from sop_faiss.neighbors.rank_counts import CountAbove
from sop_faiss.neighbors.similarity import fixed_order_products, round_products, similarity_rows
from tests.unit_vectors import unit


def wanted_counts(queries: np.ndarray, rows: np.ndarray, thresholds: list[np.ndarray]) -> list[list[int]]:
    """One comparison for every threshold and row, on similarities summed in one fixed order."""
    counts = []
    for query, own in zip(queries, thresholds, strict=True):
        similarities = (query.astype(np.float64) * rows).sum(axis=1).astype(np.float32)
        counts.append([int((similarities > threshold).sum()) for threshold in own])
    return counts


def counted(queries: np.ndarray, rows: np.ndarray, thresholds: list[np.ndarray], cuts: list[int]) -> list[list[int]]:
    """Counts of a stream cut into parts; the same in float32, in float64, and if the precision changes on the way."""
    found = []
    for precisions in ((torch.float32,), (torch.float64,), (torch.float32, torch.float64)):
        counter = CountAbove(queries, thresholds)
        for number, part in enumerate(np.split(rows, cuts)):
            counter.use(precisions[number % len(precisions)])
            counter.add(part)
        assert counter.row_count == len(rows)
        found.append([each.tolist() for each in counter.counts()])
    assert found[0] == found[1] == found[2]
    return found[0]


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Random or tied rows, and thresholds that are similarities of some of them, or next to one."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count, queries = draw(st.integers(0, 40)), draw(st.integers(1, 4))
    if draw(st.booleans()):
        rows, asked = unit(rng.standard_normal((count, 6))), unit(rng.standard_normal((queries, 6)))
    else:  # axes and corners: many ties, products of exactly 0
        pool = unit(np.concatenate([np.eye(6), np.sign(rng.standard_normal((6, 6)))]))
        rows, asked = pool[rng.integers(0, 12, count)], pool[rng.integers(0, 12, queries)]
    thresholds = []
    for query in asked:
        own = (query.astype(np.float64) * rows).sum(axis=1).astype(np.float32)
        some = rng.choice(own, draw(st.integers(0, 5))) if count else np.empty(0, np.float32)
        near = np.nextafter(some, np.float32(rng.choice([-2, 2])))
        thresholds.append(np.concatenate([some, near, rng.uniform(-1, 1, 2).astype(np.float32)]).astype(np.float32))
    return asked, rows, thresholds


@settings(max_examples=100)
@given(cases(), st.lists(st.integers(0, 40), max_size=3))
def test_equal_to_comparing_with_everything(
    case: tuple[np.ndarray, np.ndarray, list[np.ndarray]], cuts: list[int]
) -> None:
    queries, rows, thresholds = case
    cuts = sorted(min(cut, len(rows)) for cut in cuts)
    assert counted(queries, rows, thresholds, cuts) == wanted_counts(queries, rows, thresholds)


def hard_case(dimension: int = 384) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Rows near thresholds: copies of relevant rows with their entries permuted, whose sums differ in the last bits."""
    rng = np.random.default_rng(0)
    queries = unit(np.ones((3, dimension)))  # so that a permutation changes the order of the sum alone
    rows = unit(rng.standard_normal((40, dimension)))
    copies = np.concatenate([rng.permuted(rows, axis=1) for _ in range(50)])
    thresholds = [fixed_order_products(queries, rows, np.full(20, query), np.arange(20)) for query in range(3)]
    return queries, copies, thresholds


def test_blocks_order_and_padding_change_nothing() -> None:
    queries, rows, thresholds = hard_case()
    whole = counted(queries, rows, thresholds, [])
    assert whole == wanted_counts(queries, rows, thresholds)
    rng = np.random.default_rng(1)
    for cuts in ([1], [7, 8, 1000], list(range(100, 2000, 100))):
        assert counted(queries, rows, thresholds, cuts) == whole
    assert counted(queries, rows[rng.permutation(len(rows))], thresholds, []) == whole
    queries, rows = unit(rng.standard_normal((300, 8))), unit(rng.standard_normal((15_000, 8)))
    thresholds = [np.array([0.5], np.float32)] * 300  # 6990 rows at a time
    assert counted(queries, rows, thresholds, []) == counted(queries, rows, thresholds, list(range(1000, 15_000, 1000)))


def test_products_on_a_boundary_are_resolved() -> None:
    """Exactly halfway between two float32 numbers, products round to the even one, above or below."""
    step = 2.0**-24  # between float32 numbers from 0.5 to 1
    query = np.full((1, 4), 0.5, np.float32)
    rows = np.array([[0.5, 0.5, -0.5, 0.5 + step * odd] for odd in (1, 3)], np.float32)  # products 0.5 + odd step / 2
    thresholds = [np.array([0.5, 0.5 + step, 0.5 + 2 * step], np.float32)]
    assert (query.astype(np.float64) @ rows.T.astype(np.float64)).tolist() == [[0.5 + step / 2, 0.5 + 3 * step / 2]]
    # the first rounds down to 0.5, the second up to 0.5 + 2 step
    assert counted(query, rows, thresholds, []) == [[1, 1, 0]]


def test_the_precision_follows_the_stream() -> None:
    """float32 where few rows come near the thresholds; float64 once many are above them, or in doubt."""
    rng = np.random.default_rng(0)
    queries, rows = unit(rng.standard_normal((2, 64))), unit(rng.standard_normal((600, 64)))
    for near, wanted in ((0.9, torch.float32), (-0.9, torch.float64)):
        counter = CountAbove(queries, [np.array([near], np.float32)] * 2)
        counter.add(rows)
        assert counter.dtype == wanted
    counter = CountAbove(queries, [fixed_order_products(queries, rows, np.full(9, q), np.arange(9)) for q in (0, 1)])
    counter.add(rows[:9].repeat(100, axis=0))
    assert counter.dtype == torch.float64
    many = [np.float32(0.3) + np.arange(5000, dtype=np.float32) * np.float32(1e-5)] * 2  # one wide interval of doubt
    counter = CountAbove(queries, many)
    counter.add(rows)
    assert [each.tolist() for each in counter.counts()] == wanted_counts(queries, rows, many)


def test_streams_add_up() -> None:
    queries, rows, thresholds = hard_case(24)
    parts = [CountAbove(queries, thresholds) for _ in range(3)]
    for number, part in enumerate(parts):
        part.add(rows[number::3])
    total = np.sum([part.histogram for part in parts], axis=0)
    assert [each.tolist() for each in parts[0].counts(total)] == wanted_counts(queries, rows, thresholds)


def test_another_dimension() -> None:
    counter = CountAbove(unit(np.eye(4)), [np.zeros(1, np.float32)] * 4)
    with pytest.raises(FeatureError, match="dimension 5 for queries of 4"):
        counter.add(unit(np.eye(5)))


def test_similarities_are_the_same_in_any_block_also_near_a_boundary() -> None:
    queries, rows, _ = hard_case()
    whole = np.stack(list(similarity_rows(queries, rows)))
    parts = np.stack(list(similarity_rows(queries, rows, gallery_block=3, matrix_elements=4000)))
    assert np.array_equal(whole, parts)
    exact = [
        [math.fsum(a * b for a, b in zip(q, r, strict=True)) for r in rows[:50].tolist()] for q in queries.tolist()
    ]
    assert np.abs(whole[:, :50] - np.array(exact)).max() <= 2**-25  # half a unit in the last place below 1


def test_products_by_a_boundary_are_taken_in_the_fixed_order() -> None:
    """float64 products on either side of a boundary, as two block shapes could give them, round to one float32."""
    queries, rows, _ = hard_case(64)
    fixed = fixed_order_products(queries, rows, np.zeros(len(rows), np.int64), np.arange(len(rows)))
    middle = (fixed.astype(np.float64) + np.nextafter(fixed, np.float32(2))) / 2
    for wobble in (-1e-15, 1e-15):
        assert np.array_equal(round_products((middle + wobble)[None], queries[:1], rows)[0], fixed)


@pytest.mark.gpu
def test_the_device_changes_nothing() -> None:
    queries, rows, thresholds = hard_case()
    counter = CountAbove(queries, thresholds, "cuda")
    counter.add(rows)
    assert [each.tolist() for each in counter.counts()] == wanted_counts(queries, rows, thresholds)
