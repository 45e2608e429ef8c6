"""The patch dictionary against plain numpy: one patch, one centroid and one quadrant at a time."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from sop_faiss.evaluate import patch_dictionary
from sop_faiss.evaluate.patch_dictionary import PATCH, PatchDictionary, standardize

learn_dictionary = partial(patch_dictionary.learn_dictionary, patches=500, iterations=3)


@pytest.fixture
def images() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (6, 11, 11, 3), dtype=np.uint8)


def slow_features(dictionary: PatchDictionary, image: np.ndarray) -> np.ndarray:
    """As sections 3 and 4 of the paper have it, in float64."""
    side = len(image) - PATCH + 1
    mean, whitening, centroids = (
        each.double().numpy() for each in (dictionary.mean, dictionary.whitening, dictionary.centroids)
    )
    pooled = np.zeros((2, 2, len(centroids)))
    for row in range(side):
        for column in range(side):
            patch = image[row : row + PATCH, column : column + PATCH].astype(float).transpose(2, 0, 1).ravel()
            normalized = (patch - patch.mean()) / np.sqrt(patch.var() + 10)
            whitened = whitening @ (normalized - mean)
            distances = [np.linalg.norm(whitened - centroid) for centroid in centroids]
            quadrant = pooled[int(row >= (side + 1) // 2), int(column >= (side + 1) // 2)]
            quadrant += [max(0.0, np.mean(distances) - distance) for distance in distances]
    return pooled.ravel()


def test_features_are_the_triangle_assignment_summed_over_quadrants(images: np.ndarray) -> None:
    dictionary = learn_dictionary(images, seed=0, centroids=7)
    done: list[int] = []
    found = dictionary.features(images, done.append)
    assert found.shape == (6, dictionary.dimension) == (6, 28)
    assert done == [4, 6]
    for image, features in zip(images, found, strict=True):
        np.testing.assert_allclose(features, slow_features(dictionary, image), rtol=1e-4, atol=1e-3)


def test_patches_are_whitened(images: np.ndarray) -> None:
    dictionary = learn_dictionary(images, seed=0, centroids=7)
    windows = np.lib.stride_tricks.sliding_window_view(images, (PATCH, PATCH), axis=(1, 2))  # n, row, column, channel
    patches = windows.reshape(-1, 3 * PATCH * PATCH).astype(float)
    normalized = (patches - patches.mean(1, keepdims=True)) / np.sqrt(patches.var(1, keepdims=True) + 10)
    whitened = (normalized - dictionary.mean.numpy()) @ dictionary.whitening.numpy()
    variances = np.linalg.eigvalsh(np.cov(whitened.T))
    raw = np.linalg.eigvalsh(np.cov(normalized.T))
    assert np.ptp(variances[20:]) < np.ptp(raw[20:])
    np.testing.assert_allclose(dictionary.whitening, dictionary.whitening.T, atol=1e-4)  # ZCA


def test_the_seed_determines_the_dictionary(images: np.ndarray) -> None:
    one, same, other = (learn_dictionary(images, seed, centroids=5).centroids for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)


def test_standardizing_uses_the_first_set_alone() -> None:
    rng = np.random.default_rng(1)
    first, second = rng.normal(3, 2, (50, 4)).astype(np.float32), rng.normal(0, 1, (5, 4)).astype(np.float32)
    by_hand = []
    for rows in (first, second):
        scaled = (rows - first.mean(0)) / np.sqrt(first.var(0) + 0.01)
        by_hand.append(scaled / np.linalg.norm(scaled, axis=1, keepdims=True))
    standardize(first, second)
    np.testing.assert_allclose(first, by_hand[0], atol=1e-5)
    np.testing.assert_allclose(second, by_hand[1], atol=1e-5)
    lone = np.ones((1, 4), np.float32)
    standardize(lone, second)
    assert np.linalg.norm(lone) == pytest.approx(1)


def test_images_of_one_color_have_features(images: np.ndarray) -> None:
    dictionary = learn_dictionary(np.zeros_like(images), seed=0, centroids=5)
    assert np.isfinite(dictionary.features(np.zeros_like(images))).all()
