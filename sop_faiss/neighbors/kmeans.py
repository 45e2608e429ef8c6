"""k-means by FAISS on the CPU."""

from __future__ import annotations

import faiss
import numpy as np
from jaxtyping import Float32, Int64

from sop_faiss.errors import ConfigError


def kmeans(
    rows: Float32[np.ndarray, "n d"], count: int, iterations: int, seed: int, restarts: int = 1
) -> Float32[np.ndarray, "k d"]:
    """Return the centroids of k-means, started from rows drawn by the seed.

    Args:
        rows: all of them are used in every iteration.
        count: k.
        iterations: of Lloyd's algorithm.
        seed: below 2^31.
        restarts: starts from other rows; the centroids with the smallest sum of squared distances are returned.

    Raises:
        ConfigError: there are fewer rows than centroids.
    """
    if not 1 <= count <= len(rows):
        raise ConfigError(f"k-means with {count} centroids of {len(rows)} rows: wanted 1 to {len(rows)} centroids")
    engine = faiss.Kmeans(
        rows.shape[1],
        count,
        niter=iterations,
        nredo=restarts,
        seed=seed,
        min_points_per_centroid=1,  # else FAISS prints a warning
        max_points_per_centroid=-(-len(rows) // count),  # else it takes a sample
    )
    engine.train(np.ascontiguousarray(rows))
    return np.asarray(engine.centroids, dtype=np.float32)


def nearest_centroids(
    rows: Float32[np.ndarray, "n d"], centroids: Float32[np.ndarray, "k d"]
) -> Int64[np.ndarray, " n"]:
    """Return the number of the centroid with the smallest Euclidean distance to each row."""
    index = faiss.IndexFlatL2(centroids.shape[1])
    index.add(centroids)
    numbers: Int64[np.ndarray, " n"] = index.search(np.ascontiguousarray(rows), 1)[1][:, 0]
    return numbers
