"""Local re-ranking: images compared token by token, a chamfer similarity of the parts that match.

Each token of one image is compared with all of the other, and its best similarity counts by the token's weight; both
directions are added. With `mutual` only pairs that are each other's best count. Tokens are whitened unit vectors; a
token's weight is its squared norm before that, as a share of the image's: background has small norms in convolutional
maps. A token is stored as its unit vector times the root of its weight, so that one array says both.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32, Int64

_LEAST_NORM = np.float32(1e-12)
_BLOCK_TOKENS = 2048
"""Tokens of candidates that are compared at a time: what is computed of these stays in a processor's cache."""


def local_scores(
    query: Float32[np.ndarray, "t d"], candidates: Sequence[np.ndarray], *, mutual: bool = False, one_way: bool = False
) -> Float32[np.ndarray, " m"]:
    """Score images by how well their tokens match those of a query, from 0 to 1; larger is better.

    Args:
        query: its tokens, each a unit vector times the root of its weight.
        candidates: the same of each image; float16 or float32.
        mutual: count only pairs of tokens that are each other's nearest.
        one_way: count the query's tokens only, and not what else is in an image: for queries that are parts.
    """
    unit, weights = _parted(query)
    scores = np.zeros(len(candidates), np.float32)
    counts = np.array([len(each) for each in candidates], np.int64)
    ends = np.cumsum(counts)
    start = 0
    while start < len(candidates):
        before = ends[start] - counts[start]
        stop = max(start + 1, int(np.searchsorted(ends, before + _BLOCK_TOKENS, side="right")))
        scores[start:stop] = _block_scores(unit, weights, candidates[start:stop], mutual, one_way)
        start = stop
    return scores


def token_shares(
    query: Float32[np.ndarray, "t d"], other: Float32[np.ndarray, "u d"]
) -> tuple[Float32[np.ndarray, " t"], Float32[np.ndarray, " u"]]:
    """Return what each token of either image adds to their score: half the sum of both is that of `local_scores`."""
    unit, weights = _parted(query)
    others, other_weights = _parted(other)
    products = np.maximum(others @ unit.T, 0)
    return weights * products.max(axis=0) ** 2, other_weights * products.max(axis=1) ** 2


def _block_scores(
    unit: Float32[np.ndarray, "t d"],
    weights: Float32[np.ndarray, " t"],
    candidates: Sequence[np.ndarray],
    mutual: bool,
    one_way: bool,
) -> Float32[np.ndarray, " m"]:
    counts: Int64[np.ndarray, " m"] = np.array([len(each) for each in candidates])
    starts = np.cumsum(counts) - counts
    others, other_weights = _parted(np.concatenate(candidates).astype(np.float32, copy=False))
    products = np.maximum(unit @ others.T, 0)  # (tokens of the query, of all); of opposite tokens, nothing matches
    best = np.maximum.reduceat(products, starts, axis=1)  # (tokens of the query, candidates)
    back = products.max(axis=0)
    if mutual:
        both = (products >= back) & (products >= np.repeat(best, counts, axis=1))
        best = best * np.logical_or.reduceat(both, starts, axis=1)
        back = back * both.any(axis=0)
    found = weights @ best**2
    return np.asarray(found if one_way else (found + np.add.reduceat(other_weights * back**2, starts)) / 2)


def _parted(tokens: Float32[np.ndarray, "t d"]) -> tuple[Float32[np.ndarray, "t d"], Float32[np.ndarray, " t"]]:
    """Return the unit vectors, and the weights."""
    norms = np.sqrt(np.einsum("td,td->t", tokens, tokens))
    return tokens / np.maximum(norms, _LEAST_NORM)[:, None], norms**2
