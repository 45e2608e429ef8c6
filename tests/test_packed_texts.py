"""Texts in little memory read as the list that they were made of."""

from __future__ import annotations

import pickle
import sys

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings

from sop_faiss.index.packed_texts import PackedTexts, RowsOfTexts


def packed(texts: list[str]) -> PackedTexts:
    return PackedTexts(pa.chunked_array([texts[:2], texts[2:]], pa.string()))


@settings(max_examples=40)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), max_size=20), st.integers(1, 60))
def test_reads_as_the_list(texts: list[str], times: int) -> None:
    texts = texts * times
    ours = packed(texts)
    assert len(ours) == len(texts) and list(ours) == texts and ours == texts
    assert ours[1::3] == texts[1::3] and ours[-2:] == texts[-2:]
    for place in {0, len(texts) // 2, len(texts) - 1, -1} if texts else ():
        assert ours[place] == texts[place]
    with pytest.raises(IndexError):
        ours[len(texts)]
    assert (ours == [*texts, "x"]) is False and (ours != "x")


def test_rows_of_texts() -> None:
    texts = [f"bild-{row}" for row in np.random.default_rng(0).permutation(3000)]
    for column in (texts, packed(texts)):
        rows = RowsOfTexts(column)
        assert [rows.get(text) for text in texts[::7]] == list(range(0, 3000, 7))
        assert rows.get("bild-3000") is None and rows.get("") is None
    assert RowsOfTexts([]).get("x") is None


def test_equal_hashes_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sop_faiss.index.packed_texts.hash", lambda text: 5, raising=False)
    rows = RowsOfTexts(["a", "b", "c"])
    assert [rows.get(text) for text in "abcd"] == [0, 1, 2, None]


def test_memory() -> None:
    texts = [f"products/season_{row % 40:02d}/image_{row:08d}" for row in range(100_000)]
    ours = packed(texts)
    size = sum(sys.getsizeof(block) + sys.getsizeof(pair) + 36 for pair in ours._blocks for block in pair[1:])
    assert size < 10 * len(texts) < len(pickle.dumps(texts)) / 2
