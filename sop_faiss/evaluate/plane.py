"""Features as points of a plane, to look at: t-SNE, PCA or UMAP.

Distances in the plane of t-SNE and UMAP show which images are neighbors, not how far apart groups are.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32

from sop_faiss.errors import ConfigError, DataError
from sop_faiss.unit_rows import require_unit_rows

METHODS = ("tsne", "pca", "umap")
_PCA_DIM = 50
"""Dimensions that t-SNE sees, as its authors do (van der Maaten and Hinton 2008, section 4.2: 30)."""
_SAME_POINT = 1e-6
"""Unit rows in float32 that differ by less are copies: t-SNE divides by their spread, and does not end."""


def points_of(
    features: Float32[np.ndarray, "n d"], method: str = "tsne", *, perplexity: float = 30.0, seed: int = 0
) -> Float32[np.ndarray, "n 2"]:
    """Return a point for each feature; the same seed gives the same points on one machine.

    Args:
        features: unit rows, 3 or more.
        method: `tsne`, from the first two principal components (scikit-learn); `pca`; `umap`, where umap-learn is
            installed.
        perplexity: of t-SNE and, as the number of neighbors, of UMAP; at most a third of the number of rows.
        seed: below 2^32.

    Raises:
        ConfigError: a choice is impossible, or UMAP is not installed.
        DataError: there are fewer than 3 rows.
        FeatureError: rows are not finite unit vectors.
    """
    if method not in METHODS:
        raise ConfigError(f"`method={method}`: wanted {', '.join(METHODS)}")
    if not 0 <= seed < 2**32:
        raise ConfigError(f"`seed={seed}`: wanted 0 or more and below 2^32")
    if len(features) < 3:
        raise DataError(f"a map of {len(features)} images: wanted 3 or more")
    if method != "pca" and not 1 <= perplexity <= len(features) / 3:
        raise ConfigError(
            f"`perplexity={perplexity:g}` of {len(features)} images: wanted 1 to a third of them, {len(features) // 3}"
        )
    require_unit_rows(features, "features")
    points = np.zeros((len(features), 2), dtype=np.float32)
    if np.ptp(features, axis=0).max() < _SAME_POINT:
        return points
    from sklearn.decomposition import PCA

    dim = min(*features.shape, 2 if method == "pca" else _PCA_DIM)
    rows = PCA(dim, svd_solver="full").fit_transform(features.astype(np.float64))
    if method == "tsne":
        from sklearn.manifold import TSNE

        rows = TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(rows)
    elif method == "umap":
        try:
            from umap import UMAP
        except ImportError:
            raise ConfigError("method = umap needs umap-learn: pip install umap-learn, or method=tsne") from None
        rows = UMAP(n_neighbors=round(perplexity), random_state=seed, n_jobs=1).fit_transform(rows)
    points[:, : rows.shape[1]] = rows[:, :2]
    return points
