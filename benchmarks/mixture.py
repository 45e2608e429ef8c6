"""Unit vectors with known structure: a mixture with heavy tails, in sizes of clusters and in distances to centers."""

from __future__ import annotations

from pathlib import Path

import numpy as np

__all__ = ["write_mixture"]

CLUSTERS, DEGREES, DECAY, SPREAD = 20_000, 3.0, 0.5, 0.9
"""Zipf-like sizes; Student's t for the distance to the center; variance of direction j as j^-2 DECAY."""
_BLOCK = 50_000


def write_mixture(count: int, queries: int, dimension: int, folder: Path, seed: int = 0) -> None:
    """Write `gallery.npy`, `queries.npy` (float32, unit rows) and `clusters.npy` (of the gallery's rows)."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    scale = (np.arange(1, dimension + 1) ** -DECAY).astype(np.float32)
    scale /= np.linalg.norm(scale)
    turn = np.linalg.qr(rng.standard_normal((dimension, dimension)))[0].astype(np.float32)
    centers = rng.standard_normal((CLUSTERS, dimension), np.float32) * scale
    weights = 1 / np.arange(10, CLUSTERS + 10)
    weights /= weights.sum()
    total = count + queries
    clusters = rng.choice(CLUSTERS, total, p=weights)
    rng.shuffle(clusters)
    gallery = np.lib.format.open_memmap(folder / "gallery.npy", "w+", np.float32, (count, dimension))
    asked = np.empty((queries, dimension), np.float32)
    for start in range(0, total, _BLOCK):
        part = clusters[start : start + _BLOCK]
        length = np.sqrt(DEGREES / rng.chisquare(DEGREES, (len(part), 1))).astype(np.float32)
        noise = rng.standard_normal((len(part), dimension), np.float32) * scale
        rows = (centers[part] + SPREAD * length * noise) @ turn
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        into = max(0, min(len(part), count - start))
        gallery[start : start + into] = rows[:into]
        asked[start + into - count : start + len(part) - count] = rows[into:] if into < len(part) else rows[:0]
    gallery.flush()
    np.save(folder / "queries.npy", asked)
    np.save(folder / "clusters.npy", clusters[:count])
