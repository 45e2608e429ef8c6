"""Recall@1 between two views of images: a score that needs no labels."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float32

from sop_faiss.errors import DataError
from sop_faiss.neighbors.exact import nearest_rows
from sop_faiss.unit_rows import require_unit_rows


def views_found(first: Float32[np.ndarray, "n d"], second: Float32[np.ndarray, "n d"]) -> Bool[np.ndarray, "2 n"]:
    """Return of each image whether its second view is the nearest to its first one, and the other way round.

    Args:
        first: unit features of one view of each image.
        second: of another view of the same images, in the same order.

    Raises:
        DataError: there are fewer than two images.
        FeatureError: rows are not finite unit vectors.
    """
    if len(first) < 2:
        raise DataError(f"recall@1 between the views of {len(first)} images: wanted 2 or more images")
    for name, features in (("first", first), ("second", second)):
        require_unit_rows(features, f"features of the {name} views")
    own = np.arange(len(first))
    return np.stack([nearest_rows(*views, 1).rows[:, 0] == own for views in ((first, second), (second, first))])
