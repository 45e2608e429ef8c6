"""Exact search in torch against the whole product and topk, ties allowed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sop_faiss.neighbors.blocks import NearestRows, search_by_blocks
from tests.memory_use import LargestTensor
from tests.oracle import product_and_topk


def whole_numbers(count: int, dim: int, seed: int) -> Tensor:
    """Small whole numbers: products are exact in any order, and there are many ties."""
    return torch.randint(-2, 3, (count, dim), generator=torch.Generator().manual_seed(seed)).float()


def assert_nearest(found: NearestRows, queries: Tensor, rows: Tensor, k: int) -> None:
    """For data whose products are exact."""
    expected, _ = product_and_topk(queries, rows, k)
    assert torch.equal(found.similarities, expected)
    assert torch.equal((queries @ rows.T).gather(1, found.rows), found.similarities)
    assert all(len(set(line)) == k for line in found.rows.tolist())
    ties = found.similarities.diff(dim=1) == 0
    assert (found.rows.diff(dim=1)[ties] > 0).all()


@given(
    count=st.integers(1, 1500),
    k=st.integers(1, 30),
    queries=st.integers(0, 7),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 5),
)
def test_any_sizes_with_ties(count, k, queries, dtype, seed):
    k = min(k, count)
    rows, asked = whole_numbers(count, 5, seed), whole_numbers(queries, 5, seed + 1)
    assert_nearest(search_by_blocks(asked.to(dtype), rows.to(dtype), k), asked, rows, k)


@pytest.mark.parametrize("places", ["one group", "one place of each group", "last rows", "first row", "all equal"])
def test_wherever_the_nearest_are(places):
    count, k = 1003, 5  # 125 groups of 8, and 3 rows more
    rows = torch.rand(count, 1, generator=torch.Generator().manual_seed(0))
    nearest = {
        "one group": 240 + torch.arange(8),
        "one place of each group": 2 + 8 * torch.arange(125),
        "last rows": torch.arange(count - 3, count),
        "first row": torch.arange(1),
        "all equal": torch.arange(count),
    }[places]
    rows[nearest] = 2 + (0.0 if places == "all equal" else torch.rand(len(nearest), 1))
    assert_nearest(search_by_blocks(torch.ones(3, 1), rows, k), torch.ones(3, 1), rows, k)


@pytest.mark.parametrize(("count", "k", "by_groups"), [(640, 10, 1), (639, 10, 0), (64, 1, 1), (63, 1, 0), (10, 10, 0)])
def test_groups_are_used_where_they_pay_and_only_there(count, k, by_groups):
    rows, queries = whole_numbers(count, 5, 0), whole_numbers(4, 5, 1)
    with LargestTensor() as seen:
        assert_nearest(search_by_blocks(queries, rows, k), queries, rows, k)
    assert seen.calls["amax"] == by_groups


@pytest.mark.parametrize(("queries", "count", "k"), [(9, 2**22 + 5, 3), (9, 2**22 + 5, 70_000), (2, 2**24 + 1, 3)])
def test_no_more_similarities_than_a_block_are_held(queries, count, k):
    """Of 64 MiB; one query at a time where its own are more."""
    asked, rows = whole_numbers(queries, 1, 1), whole_numbers(count, 1, 0)
    with LargestTensor() as seen:
        found = search_by_blocks(asked, rows, k)
    assert seen.elements == count * max(1, 2**24 // count)
    assert torch.equal(found.similarities, product_and_topk(asked, rows, k)[0])
    assert torch.equal(asked * rows[found.rows].squeeze(2), found.similarities)


def test_no_gradient_is_recorded():
    queries = torch.rand(3, 4, requires_grad=True)
    assert not search_by_blocks(queries, torch.rand(100, 4), 1).similarities.requires_grad
