"""The k nearest rows of a gallery against looking at every one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sop_faiss.errors import ConfigError, FeatureError
from sop_faiss.neighbors.exact import nearest_rows
from tests.oracle_neighbors import brute_force, unit_rows


@given(
    seed=st.integers(0, 2**16), queries=st.integers(1, 8), count=st.integers(1, 40), repeats=st.integers(1, 6),
    share=st.floats(0, 1),
)  # fmt: skip
def test_equals_brute_force_and_of_equal_rows_takes_the_first(seed, queries, count, repeats, share):
    """Repeated rows tie exactly, and the list may end among them."""
    rng = np.random.default_rng(seed)
    gallery = np.repeat(unit_rows(rng, count, 5), repeats, axis=0)
    asked = np.concatenate([unit_rows(rng, queries, 5), gallery[:1]])
    k = 1 + round(share * (len(gallery) - 1))
    similarities, rows = brute_force(asked, gallery, k)
    found = nearest_rows(asked, gallery, k)
    np.testing.assert_allclose(found.similarities, similarities, atol=1e-6)
    same = found.rows == rows
    # Rows of different vectors may change places only where their similarities differ by rounding.
    np.testing.assert_allclose(
        np.einsum("qd,qkd->qk", asked, gallery[found.rows])[~same], similarities[~same], atol=1e-6
    )
    assert [len(set(line)) for line in found.rows.tolist()] == [k] * len(asked)


def test_when_all_rows_are_alike_the_first_k_are_found():
    gallery = np.tile(unit_rows(np.random.default_rng(0), 1, 16), (500, 1))
    assert nearest_rows(gallery[:3], gallery, 7).rows.tolist() == [list(range(7))] * 3


@pytest.mark.parametrize("k", [0, 6, -1])
def test_impossible_k_is_one_line(k):
    rows = unit_rows(np.random.default_rng(0), 5, 4)
    with pytest.raises(ConfigError, match="wanted 1 <= k <= 5"):
        nearest_rows(rows, rows, k)


def test_values_that_are_not_finite_are_refused():
    rows = unit_rows(np.random.default_rng(0), 5, 4)
    broken = rows.copy()
    broken[2, 1] = np.nan
    for queries, gallery, name in ((broken, rows, "queries"), (rows, broken, "gallery")):
        with pytest.raises(FeatureError, match=f"{name} contain NaN"):
            nearest_rows(queries, gallery, 1)
