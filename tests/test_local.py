"""Token matching against loops over pairs of tokens."""

from __future__ import annotations

import numpy as np
import pytest

from sop_faiss.index.rerank import local
from sop_faiss.index.rerank.local import local_scores, token_shares


def tokens_of(rng: np.random.Generator, count: int) -> np.ndarray:
    """Unit vectors times the roots of weights that sum to 1."""
    rows = rng.standard_normal((count, 6))
    weights = rng.random(count)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(unit * np.sqrt(weights / weights.sum())[:, None], np.float32)


def loop_score(query: np.ndarray, other: np.ndarray, mutual: bool) -> float:
    def parts(tokens: np.ndarray) -> tuple[list[np.ndarray], list[float]]:
        norms = [float(np.linalg.norm(token.astype(np.float64))) for token in tokens]
        return [token.astype(np.float64) / norm for token, norm in zip(tokens, norms, strict=True)], [
            norm**2 for norm in norms
        ]

    (first, first_weights), (second, second_weights) = parts(query), parts(other)
    table = [[max(0.0, float(a @ b)) for b in second] for a in first]
    nearest = [max(range(len(second)), key=lambda b: table[a][b]) for a in range(len(first))]
    back = [max(range(len(first)), key=lambda a: table[a][b]) for b in range(len(second))]
    total = 0.0
    for a, b in enumerate(nearest):
        if not mutual or (back[b] == a and table[a][b] > 0):
            total += first_weights[a] * table[a][b] ** 2
    for b, a in enumerate(back):
        if not mutual or (nearest[a] == b and table[a][b] > 0):
            total += second_weights[b] * table[a][b] ** 2
    return total / 2


def test_one_way_counts_the_query_alone() -> None:
    rng = np.random.default_rng(4)
    query = tokens_of(rng, 6)
    inside = np.concatenate([query * np.float32(0.3), tokens_of(rng, 30)])
    assert np.isclose(local_scores(query, [inside], one_way=True)[0], 1, atol=1e-5)
    both, other = local_scores(query, [inside])[0], tokens_of(rng, 5)
    assert both < 0.95
    assert np.isclose(local_scores(query, [other], one_way=True)[0], token_shares(query, other)[0].sum(), atol=1e-5)


@pytest.mark.parametrize("mutual", [False, True])
@pytest.mark.parametrize("block", [1, 9, 65_536])
def test_equal_to_loops(mutual: bool, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_BLOCK_TOKENS", block)
    rng = np.random.default_rng(0)
    query, candidates = tokens_of(rng, 7), [tokens_of(rng, count) for count in (5, 1, 8, 3, 7)]
    found = local_scores(query, candidates, mutual=mutual)
    wanted = [loop_score(query, each, mutual) for each in candidates]
    assert np.abs(found - wanted).max() < 1e-5


def test_an_image_matches_itself_completely_and_a_turned_order_too() -> None:
    query = tokens_of(np.random.default_rng(1), 9)
    both = local_scores(query, [query.astype(np.float16), query[::-1]])
    assert np.allclose(both, 1, atol=2e-3)


def test_what_has_no_weight_does_not_count() -> None:
    query = tokens_of(np.random.default_rng(2), 4)
    padded = np.concatenate([query, np.zeros((3, 6), np.float32)])
    assert np.allclose(local_scores(query, [padded]), 1, atol=1e-5)


def test_shares_of_tokens_add_up_to_the_score() -> None:
    rng = np.random.default_rng(3)
    query, other = tokens_of(rng, 7), tokens_of(rng, 4)
    shares = token_shares(query, other)
    assert [len(each) for each in shares] == [7, 4]
    assert np.isclose((shares[0].sum() + shares[1].sum()) / 2, local_scores(query, [other])[0], atol=1e-6)
