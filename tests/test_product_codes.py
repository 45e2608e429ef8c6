"""Product-quantized codes against the definition: the nearest centroid of each part, by all distances."""

from __future__ import annotations

import numpy as np
import pytest

from sop_faiss.errors import ConfigError
from sop_faiss.neighbors.product_codes import CENTROIDS, ProductCodes

PARTS, WIDTH = 3, 4


@pytest.fixture(scope="module")
def rows() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((600, PARTS * WIDTH)).astype(np.float32)


def test_codes_name_the_nearest_centroids(rows: np.ndarray, capfd: pytest.CaptureFixture[str]) -> None:
    codes = ProductCodes.learn(rows, PARTS)
    assert codes.centroids.shape == (PARTS, CENTROIDS, WIDTH)
    parted = rows.reshape(-1, PARTS, 1, WIDTH).astype(np.float64)
    distances = ((parted - codes.centroids) ** 2).sum(3)
    found = codes.encode(rows)
    chosen = np.take_along_axis(distances, found[:, :, None].astype(np.int64), 2)[:, :, 0]
    assert (chosen <= distances.min(2) + 1e-5).all()
    wanted = np.stack([codes.centroids[part, found[:, part]] for part in range(PARTS)], axis=1).reshape(rows.shape)
    np.testing.assert_array_equal(codes.decode(found), wanted)
    np.testing.assert_array_equal(ProductCodes(codes.centroids).encode(rows), found)
    assert capfd.readouterr() == ("", "")


def test_learning_is_repeated_exactly_and_better_than_no_learning(rows: np.ndarray) -> None:
    codes = ProductCodes.learn(rows, PARTS)
    np.testing.assert_array_equal(codes.centroids, ProductCodes.learn(rows, PARTS).centroids)
    unlearned = ProductCodes(rows[:CENTROIDS].reshape(CENTROIDS, PARTS, WIDTH).transpose(1, 0, 2))
    errors = [((each.decode(each.encode(rows)) - rows) ** 2).sum() for each in (codes, unlearned)]
    assert errors[0] < errors[1]


def test_what_cannot_be(rows: np.ndarray) -> None:
    for parts in (0, 5):
        with pytest.raises(ConfigError, match=f"{parts} bytes do not divide 12"):
            ProductCodes.learn(rows, parts)
    with pytest.raises(ConfigError, match=r"255 vectors are too few .* wanted 256"):
        ProductCodes.learn(rows[: CENTROIDS - 1], PARTS)
    for wrong in (np.zeros((PARTS, 255, WIDTH), np.float32), np.full((PARTS, CENTROIDS, WIDTH), np.nan, np.float32)):
        with pytest.raises(ConfigError, match="finite"):
            ProductCodes(wrong)
