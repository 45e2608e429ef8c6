"""Features without a network: a dictionary of whitened image patches, learned by k-means.

Source: Coates, Lee, Ng, "An Analysis of Single-Layer Networks in Unsupervised Feature Learning", AISTATS 2011, sections
3 and 4: random patches, contrast normalization, ZCA whitening, k-means, the "triangle" assignment, sums over four
quadrants, and standardized features. `Departs:` these are then scaled to unit norm, since cosines compare them here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float32, UInt8
from torch import Tensor
from torch.nn import functional

from sop_faiss.neighbors.kmeans import kmeans

PATCH = 6
"""Side of a patch in pixels, the best one of the paper's for 32 px."""
CENTROIDS = 1600
_TRAINING_PATCHES = 160_000
_ITERATIONS = 20
_CONTRAST_FLOOR = 10.0
"""Added to a patch's variance (of values from 0 to 255) before it is divided by, as in the authors' code."""
_WHITENING_FLOOR = 0.1
"""Added to the variances before whitening, as in the authors' code."""
_FEATURE_FLOOR = 0.01
"""Added to the variance of a feature before it is divided by, as in the authors' code."""
_BLOCK = 4
"""Images at a time: 19 MB of distances at 32 px. One CPU takes 18 ms per image in blocks of 1 to 4, and 26 of 8."""


@dataclass(frozen=True, eq=False)
class PatchDictionary:
    """A whitening of patches, and centroids of whitened patches.

    Attributes:
        mean: of the contrast-normalized patches.
        whitening: symmetric (ZCA).
        centroids: one per row.
    """

    mean: Float32[Tensor, " d"]
    whitening: Float32[Tensor, "d d"]
    centroids: Float32[Tensor, "k d"]

    @property
    def dimension(self) -> int:
        """Return the width of the features: one number for each centroid and quadrant."""
        return 4 * len(self.centroids)

    def features(
        self, images: UInt8[np.ndarray, "n s s 3"], progress: Callable[[int], None] = lambda done: None
    ) -> Float32[np.ndarray, "n D"]:
        """Return how much of each centroid is in each quadrant of the images; see `standardize`.

        Args:
            images: RGB, all of one size, wider than a patch.
        """
        found = np.empty((len(images), self.dimension), np.float32)
        for start in range(0, len(images), _BLOCK):
            block = torch.from_numpy(images[start : start + _BLOCK]).to(self.mean.device)
            found[start : start + len(block)] = self._features(block).cpu().numpy()
            progress(start + len(block))
        return found

    def _features(self, images: UInt8[Tensor, "b s s 3"]) -> Float32[Tensor, "b D"]:
        patches, side = _all_patches(images)
        whitened = (_normalized(patches) - self.mean) @ self.whitening
        # |x - c|^2 = |x|^2 - 2 <x, c> + |c|^2, in place: this is the largest tensor
        squared = whitened @ self.centroids.T
        squared.mul_(-2).add_(whitened.square().sum(1, keepdim=True)).add_(self.centroids.square().sum(1))
        distances = squared.clamp_(min=0).sqrt_()
        assigned = distances.neg_().sub_(distances.mean(1, keepdim=True)).relu_()  # max(0, mean distance - distance)
        grid = assigned.view(len(images), side, side, -1)
        half = (side + 1) // 2
        halves = (slice(None, half), slice(half, None))
        return torch.cat([grid[:, rows, columns].sum((1, 2)) for rows in halves for columns in halves], dim=1)


def _all_patches(images: UInt8[Tensor, "b s s 3"]) -> tuple[Float32[Tensor, "p d"], int]:
    """Return the patches of all images, row by row, and how many there are in a row."""
    columns = functional.unfold(images.permute(0, 3, 1, 2).float(), PATCH)
    return columns.transpose(1, 2).flatten(0, 1), images.shape[1] - PATCH + 1


def _normalized(patches: Float32[Tensor, "p d"]) -> Float32[Tensor, "p d"]:
    centered = patches - patches.mean(1, keepdim=True)
    return centered / (centered.square().mean(1, keepdim=True) + _CONTRAST_FLOOR).sqrt()


def learn_dictionary(
    images: UInt8[np.ndarray, "n s s 3"],
    seed: int,
    centroids: int,
    device: str | torch.device = "cpu",
    *,
    patches: int = _TRAINING_PATCHES,
    iterations: int = _ITERATIONS,
) -> PatchDictionary:
    """Learn a dictionary of the patches of images; the same for the same images and seed.

    Args:
        images: RGB, all of one size, wider than a patch.
        seed: of the patches, and of k-means.
        centroids: how many.
        device: where features are computed later.
        patches: how many it is learned from.
        iterations: of k-means.
    """
    drawn = _normalized(_drawn_patches(images, patches, seed))
    mean = drawn.mean(0)
    centered = drawn - mean
    variances, directions = torch.linalg.eigh(centered.T.double() @ centered.double() / len(drawn))
    whitening = ((directions / (variances + _WHITENING_FLOOR).sqrt()) @ directions.T).float()
    learned = kmeans((centered @ whitening).numpy(), centroids, iterations, seed)
    return PatchDictionary(mean.to(device), whitening.to(device), torch.from_numpy(learned).to(device))


def _drawn_patches(images: UInt8[np.ndarray, "n s s 3"], count: int, seed: int) -> Float32[Tensor, "p d"]:
    """Return random patches, channel by channel as `_all_patches` has them."""
    rng = np.random.default_rng(seed)
    which = rng.integers(0, len(images), count)
    top, left = rng.integers(0, images.shape[1] - PATCH + 1, (2, count))
    offsets = np.arange(PATCH)
    rows, columns = top[:, None] + offsets, left[:, None] + offsets
    drawn = images[which[:, None, None], rows[:, :, None], columns[:, None, :]]
    return torch.from_numpy(drawn.transpose(0, 3, 1, 2).reshape(count, -1)).float()


def standardize(learned_on: Float32[np.ndarray, "n D"], others: Float32[np.ndarray, "m D"]) -> None:
    """Give each feature the mean 0 and variance 1 of the first set in both, and each row unit norm, in place."""
    mean = learned_on.mean(axis=0, dtype=np.float64).astype(np.float32)
    learned_on -= mean
    others -= mean
    variance = np.einsum("nd,nd->d", learned_on, learned_on) / np.float32(len(learned_on))
    for rows in (learned_on, others):
        rows /= np.sqrt(variance + np.float32(_FEATURE_FLOOR))
        rows += np.float32(1e-12)  # a lone image is its set's mean: any direction serves
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
