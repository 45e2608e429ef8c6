"""Vectors as product-quantized codes, by FAISS on the CPU."""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np
from jaxtyping import Float32, UInt8

from sop_faiss.errors import ConfigError

CENTROIDS = 256
"""Of each part of a vector, so that its code is one byte."""


class ProductCodes:
    """Codes of one byte for each of several equal parts of a vector: the number of the nearest centroid.

    Source: Jégou, Douze, Schmid, "Product Quantization for Nearest Neighbor Search", PAMI 2011. Thread-safe.

    Args:
        centroids: of each part, in the order of the parts.

    Raises:
        ConfigError: they are not finite numbers of this shape.
    """

    def __init__(self, centroids: Float32[np.ndarray, "parts numbers width"]) -> None:
        if centroids.ndim != 3 or centroids.shape[1] != CENTROIDS or not np.isfinite(centroids).all():
            raise ConfigError(f"centroids have shape {centroids.shape}: wanted (parts, {CENTROIDS}, width), finite")
        self.centroids = np.ascontiguousarray(centroids, np.float32)
        parts, _, width = centroids.shape
        self.dimension = parts * width
        self._quantizer: Any = faiss.ProductQuantizer(parts * width, parts, 8)
        faiss.copy_array_to_vector(self.centroids.reshape(-1), self._quantizer.centroids)

    @classmethod
    def learn(cls, rows: Float32[np.ndarray, "n d"], parts: int) -> ProductCodes:
        """Learn the centroids by k-means of rows, of which FAISS draws up to 65,536 by a fixed seed.

        Raises:
            ConfigError: there are fewer rows than centroids, or the parts do not divide the dimension.
        """
        count, dimension = rows.shape
        if parts < 1 or dimension % parts:
            raise ConfigError(f"{parts} bytes do not divide {dimension} dimensions: wanted a divisor of these")
        if count < CENTROIDS:
            raise ConfigError(
                f"{count} vectors are too few to learn product quantization: wanted {CENTROIDS}, or other codes"
            )
        quantizer = faiss.ProductQuantizer(dimension, parts, 8)
        quantizer.cp.min_points_per_centroid = 1  # else FAISS prints a warning
        quantizer.train(np.ascontiguousarray(rows))
        return cls(faiss.vector_to_array(quantizer.centroids).reshape(parts, CENTROIDS, dimension // parts))

    def encode(self, rows: Float32[np.ndarray, "n d"]) -> UInt8[np.ndarray, "n parts"]:
        """Return the codes of rows."""
        codes: UInt8[np.ndarray, "n parts"] = self._quantizer.compute_codes(np.ascontiguousarray(rows))
        return codes

    def decode(self, codes: UInt8[np.ndarray, "n parts"]) -> Float32[np.ndarray, "n d"]:
        """Return the centroids that codes name, side by side."""
        rows: Float32[np.ndarray, "n d"] = self._quantizer.decode(np.ascontiguousarray(codes))
        return rows
