"""k-means against plain Lloyd iterations."""

from __future__ import annotations

import numpy as np
import pytest

from sop_faiss.errors import ConfigError
from sop_faiss.neighbors.kmeans import kmeans


def test_centroids_are_the_means_of_their_rows(capfd: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    rows = np.concatenate([rng.normal(center, 0.1, (60, 3)) for center in (-4, 0, 4)]).astype(np.float32)
    centroids = kmeans(rows, 3, iterations=20, seed=1)
    nearest = ((rows[:, None] - centroids) ** 2).sum(2).argmin(1)
    for number in range(3):
        np.testing.assert_allclose(centroids[number], rows[nearest == number].mean(0), atol=1e-4)
    np.testing.assert_array_equal(centroids, kmeans(rows, 3, iterations=20, seed=1))
    assert capfd.readouterr() == ("", "")


def test_as_many_centroids_as_rows_and_no_more() -> None:
    rows = np.eye(4, dtype=np.float32)
    assert len(kmeans(rows, 4, iterations=2, seed=0)) == 4
    for count in (0, 5):
        with pytest.raises(ConfigError, match="1 to 4"):
            kmeans(rows, count, iterations=2, seed=0)
