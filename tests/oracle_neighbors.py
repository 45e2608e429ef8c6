"""Nearest neighbors by looking at every one, in float64."""

from __future__ import annotations

import numpy as np


def unit_rows(rng: np.random.Generator, count: int, dimension: int) -> np.ndarray:
    rows = rng.standard_normal((count, dimension)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def brute_force(queries: np.ndarray, gallery: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Every inner product in float64, rounded to float32; a stable sort gives ties by rising row."""
    similarities, rows = [], []
    for query in queries.astype(np.float64):
        scores = np.array([np.einsum("d,d->", query, row) for row in gallery.astype(np.float64)]).astype(np.float32)
        order = np.argsort(-scores, kind="stable")[:k]
        similarities.append(scores[order])
        rows.append(order)
    return np.array(similarities).reshape(-1, k), np.array(rows, np.int64).reshape(-1, k)
