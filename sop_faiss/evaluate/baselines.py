"""What an encoder must beat: raw pixels, a dictionary of image patches, and its own network with random weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, UInt8

from sop_faiss import distributed
from sop_faiss.data.images.decode import decode_image
from sop_faiss.data.images.source import ImageSource
from sop_faiss.data.ordered_map import default_workers, map_ordered
from sop_faiss.evaluate.patch_dictionary import CENTROIDS, PATCH, learn_dictionary, standardize
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.encoders.preprocess import Preprocess
from sop_faiss.progress import ProgressCallback, Stage

SIDE = 32
"""Of the images of which pixels and patches are taken, whose shorter sides are resized to it, in pixels."""
_SEED = 0
"""Of patches, k-means and random weights."""
_MOST_BYTES = 2 * 2**30
"""Of the features of one baseline: 83,000 images by 6,400 numbers. Those of more images would take hours, too."""

Features = Float32[np.ndarray, "n d"]
ScoreFeatures = Callable[[Features, Features], Mapping[str, float]]
ScoreEncoder = Callable[[Encoder, ProgressCallback], Mapping[str, float]]


@dataclass(frozen=True)
class Baseline:
    """What one baseline scored."""

    name: str
    """`raw pixels`, `patch dictionary` or `random weights`."""
    metrics: dict[str, float]
    """As the encoder's; empty if it is left out."""
    seconds: float
    choices: dict[str, Any] = field(default_factory=dict)
    """How it was made, as JSON values."""
    left_out: str = ""
    """Why it was not measured, in a sentence."""

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        if self.left_out:
            return {"left_out": self.left_out}
        return {"metrics": self.metrics, "seconds": round(self.seconds, 3), **self.choices}


def small_images(
    source: ImageSource, side: int, top_value: float = 0.0, progress: ProgressCallback | None = None
) -> UInt8[np.ndarray, "n side side 3"]:
    """Return images of this side, in order: shorter sides resized to it, then the central square.

    Args:
        source: all of its images must be readable.
        side: in pixels, at most 64.
        top_value: white in deep grayscale images, see `Preprocess`.

    Raises:
        DataError: an image cannot be read any more.
    """
    preprocess = Preprocess.square(side, top_value=top_value)

    def read(position: int) -> UInt8[np.ndarray, "side side 3"]:
        return preprocess.apply(decode_image(source.read(position), top_value=top_value))

    images = np.empty((len(source), side, side, 3), np.uint8)
    with closing(map_ordered(read, range(len(source)), default_workers())) as found:  # type: ignore[type-var]
        for position, image in enumerate(found):
            images[position] = image
            if progress is not None:
                progress(position + 1, len(source))
    return images


def pixel_features(images: UInt8[np.ndarray, "n s s 3"], center: Float32[np.ndarray, " d"] | None = None) -> Features:
    """Return unit-norm raw pixels, the naive feature.

    Args:
        images: RGB.
        center: subtracted first, such as the mean of the training images; None: nothing is.
    """
    rows = images.reshape(len(images), -1).astype(np.float32)
    if center is not None:
        rows -= center
    rows += 1.0 if center is None else 1e-6  # a black image, and one that is the mean, still have a direction
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows


def measure_baselines(
    sets: tuple[ImageSource, ImageSource],
    encoder: Encoder,
    score_features: ScoreFeatures,
    score_encoder: ScoreEncoder,
    stage: Stage,
) -> list[Baseline]:
    """Measure raw pixels, a patch dictionary and random weights.

    Args:
        sets: training and test images, or gallery and queries. The dictionary is learned of the first, without labels.
        encoder: whose network gets random weights.
        score_features: returns the metrics of features of the two sets.
        score_encoder: returns those of an encoder.

    Raises:
        SopError: as the two raise, or an image cannot be read any more.
    """
    device = next(encoder.parameters()).device
    top_value = encoder.preprocess.top_value
    simple = partial(_simple_baselines, sets, top_value, device, score_features, stage)
    return [*distributed.decide(simple), _random_weights(encoder, score_encoder, stage)]


def _simple_baselines(
    sets: tuple[ImageSource, ImageSource],
    top_value: float,
    device: torch.device,
    score: ScoreFeatures,
    stage: Stage,
) -> list[Baseline]:
    count = sum(map(len, sets))
    started = time.perf_counter()
    with stage("baseline: reading small images", "images") as progress:
        first = small_images(sets[0], SIDE, top_value, lambda done, _: progress(done, count))
        second = small_images(sets[1], SIDE, top_value, lambda done, _: progress(len(first) + done, count))
    measured = []
    for name, width, choices, make in (
        ("raw pixels", SIDE * SIDE * 3, {"side": SIDE}, _of_pixels),
        (
            "patch dictionary",
            4 * CENTROIDS,
            {"side": SIDE, "patch": PATCH, "centroids": CENTROIDS, "seed": _SEED},
            _of_patches,
        ),
    ):
        if count * width * 4 > _MOST_BYTES:
            most = _MOST_BYTES // (4 * width)
            why = f"{count:,} images are more than the {most:,} whose features fit into {_MOST_BYTES / 2**30:g} GiB"
            measured.append(Baseline(name, {}, 0.0, left_out=why))
            continue
        with stage(f"baseline: {name}", "images") as progress:
            metrics = dict(score(*make(first, second, device, progress)))
        measured.append(Baseline(name, metrics, time.perf_counter() - started, choices))
        started = time.perf_counter()
    return measured


def _of_pixels(
    first: np.ndarray, second: np.ndarray, device: torch.device, progress: ProgressCallback
) -> tuple[np.ndarray, np.ndarray]:
    center = first.reshape(len(first), -1).mean(axis=0, dtype=np.float64).astype(np.float32)
    return pixel_features(first, center), pixel_features(second, center)


def _of_patches(
    first: np.ndarray, second: np.ndarray, device: torch.device, progress: ProgressCallback
) -> tuple[np.ndarray, np.ndarray]:
    total = len(first) + len(second)
    dictionary = learn_dictionary(first, _SEED, CENTROIDS, device)
    found = (
        dictionary.features(first, lambda done: progress(done, total)),
        dictionary.features(second, lambda done: progress(len(first) + done, total)),
    )
    standardize(*found)
    return found


def _random_weights(encoder: Encoder, score: ScoreEncoder, stage: Stage) -> Baseline:
    name = "random weights"
    if encoder.spec is not None and "random_weights" in encoder.spec:
        return Baseline(name, {}, 0.0, left_out="the model itself has random weights")
    from sop_faiss.model.encoders.untrained import with_random_weights  # loads timm, which feature stores do without

    started = time.perf_counter()
    with stage(f"baseline: {name}", "images") as progress:
        metrics = dict(score(with_random_weights(encoder, _SEED), progress))
    return Baseline(name, metrics, time.perf_counter() - started, {"seed": _SEED})
