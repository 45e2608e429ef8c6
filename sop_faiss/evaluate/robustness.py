"""Images with patches dropped or tiles shuffled, and which of them a k-NN on clean training features gets right.

Source: iBOT's `analysis/occlusion/eval.py`, which follows Naseer et al. 2021, "Intriguing Properties of Vision
Transformers". A dropped patch has the mean color, 0 after normalizing.

Departs: patches are drawn for each image, not for each batch. Salient patches are an exact share of all; iBOT drops
those with a share of the attention of DINO's ViT-S/16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64, UInt8
from torch import Tensor
from torch.nn import functional

from sop_faiss.data.images.decode import decode_image
from sop_faiss.data.images.source import ImageSource
from sop_faiss.data.ordered_map import default_workers, map_ordered
from sop_faiss.errors import DataError
from sop_faiss.evaluate.attention import look
from sop_faiss.features.drops import Drops
from sop_faiss.features.ranks import gather_extracted, share_of_rank
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.encoders.forward import (
    exact_inference,
    features_of_normalized,
    finished_features,
    require_usable,
)
from sop_faiss.progress import ProgressCallback

DROPS = ("random", "salient", "non_salient")
"""Which patches are dropped first."""
_ROWS = 8192
"""Features that are classified together."""


class Point(NamedTuple):
    """A point of a curve."""

    kind: str
    """One of `DROPS`, or `shuffled`."""
    value: float
    """Share of dropped patches, or rows and columns of tiles."""


def dropped_count(share: float, patches: int) -> int:
    """Return how many of the patches are dropped: rounded down, as iBOT does."""
    return math.floor(share * patches + 1e-9)  # 0.29 * 100 is a little less than 29


def drop_patches(image: Float[Tensor, "3 side side"], order: Int64[np.ndarray, " n"], count: int) -> Tensor:
    """Return a normalized image with the first `count` patches of an order in the mean color.

    Args:
        image: its side is a multiple of the patches' rows.
        order: all patches by their row-major number.
        count: how many to drop.
    """
    rows = math.isqrt(len(order))
    kept = torch.ones(len(order), device=image.device)
    kept[torch.from_numpy(order[:count]).to(image.device)] = 0.0
    pixels = image.shape[1] // rows
    return image * kept.view(rows, rows).repeat_interleave(pixels, 0).repeat_interleave(pixels, 1)


def shuffle_tiles(image: Float[Tensor, "3 side side"], places: Int64[np.ndarray, " n"]) -> Tensor:
    """Return an image whose tile number i, row-major, is the given image's tile number `places[i]`."""
    rows = math.isqrt(len(places))
    side = image.shape[1] // rows
    tiles = image.unfold(1, side, side).unfold(2, side, side).flatten(1, 2)
    moved = tiles[:, torch.from_numpy(places).to(image.device)].unflatten(1, (rows, rows))
    return moved.transpose(2, 3).reshape(image.shape)


@torch.no_grad()
def salient_first(
    encoder: Encoder, pixels: UInt8[np.ndarray, "h w 3"], rows: int
) -> tuple[Int64[np.ndarray, " n"], str]:
    """Order an image's patches by falling saliency, and say by what.

    It is the attention of [CLS] in the last block, the mean over heads; of networks without it, the norm of the patch
    tokens. Maps of other rows and columns than the patches' are resized bilinearly, antialiased.

    Args:
        encoder: any that makes tokens or a map.
        pixels: ready for this encoder.
        rows: rows and columns of patches.

    Raises:
        ConfigError: the encoder makes neither tokens nor a map.
    """
    looked = look(encoder, encoder.preprocess.normalize(torch.from_numpy(pixels)[None])[0])
    if looked.heads is not None:
        found, what = looked.heads.mean(0), "attention of [CLS] in the last block, mean over heads"
    else:
        found, what = np.linalg.norm(looked.patches, axis=2), "norm of patch tokens"
    resized = functional.interpolate(
        torch.from_numpy(found)[None, None].double(), (rows, rows), mode="bilinear", antialias=True
    )
    return np.argsort(-resized.numpy().ravel(), kind="stable"), what


@dataclass(frozen=True)
class Distortions:
    """What is done to each image.

    Attributes:
        points: of the curves.
        patches: rows and columns of patches that are dropped.
        seed: of random patches and tiles.
        judge: says which patches are salient.
    """

    points: Sequence[Point]
    patches: int
    seed: int
    judge: Encoder

    def apply(
        self, image: Float32[Tensor, "3 side side"], judged: UInt8[np.ndarray, "h w 3"], number: int
    ) -> Float32[Tensor, "points 3 side side"]:
        """Return the image as each point has it.

        Patches of a smaller share are among those of a larger one.

        Args:
            image: normalized.
            judged: the same, ready for the judge.
            number: of the image, from which with the seed its random patches and tiles follow.
        """
        salient, _ = salient_first(self.judge, judged, self.patches)
        random = np.random.default_rng((self.seed, number)).permutation(self.patches**2)
        orders = {"random": random, "salient": salient, "non_salient": salient[::-1].copy()}
        changed = []
        for kind, value in self.points:
            if kind == "shuffled":
                tiles = int(value)
                places = np.random.default_rng((self.seed, number, tiles)).permutation(tiles**2)
                changed.append(shuffle_tiles(image, places))
            else:
                changed.append(drop_patches(image, orders[kind], dropped_count(value, self.patches**2)))
        return torch.stack(changed).contiguous(memory_format=torch.channels_last)


def right_predictions(
    encoder: Encoder,
    source: ImageSource,
    labels: Int64[np.ndarray, " q"],
    distortions: Distortions,
    predict: Callable[[Float32[np.ndarray, "m d"]], Int64[np.ndarray, " m"]],
    max_bad_fraction: float = 0.0,
    progress: ProgressCallback | None = None,
) -> Float32[np.ndarray, "usable points"]:
    """Return 1 for each usable image and point whose class is predicted, and 0 for the others.

    Each rank takes its share of the images, and all get all.

    Args:
        encoder: of the features.
        labels: class of each.
        distortions: what is done to them.
        predict: classes of unit features.
        max_bad_fraction: share of images that may be unusable.

    Raises:
        DataError: too many images are unusable.
        FeatureError: features are not finite or zero.
    """
    drops = Drops(source, max_bad_fraction)
    own = share_of_rank(len(source))

    def own_rows() -> dict[int, Float32[np.ndarray, " points"]]:
        rows: dict[int, Float32[np.ndarray, " points"]] = {}
        waiting: dict[int, Float32[np.ndarray, "points d"]] = {}

        def classify() -> None:
            if waiting:
                predicted = predict(np.concatenate(list(waiting.values()))).reshape(len(waiting), -1)
                for position, classes in zip(waiting, predicted, strict=True):
                    rows[position] = (classes == labels[position]).astype(np.float32)
                waiting.clear()

        for done, (position, found) in enumerate(_distorted(encoder, source, own, distortions), start=1):
            if isinstance(found, DataError):
                drops.add(position, found)
                continue
            waiting[position] = found
            if len(waiting) * len(found) >= _ROWS:
                classify()
            if progress is not None:
                progress(done * len(source) // len(own), len(source))
        classify()
        return rows

    with exact_inference(encoder), exact_inference(distortions.judge):
        found = gather_extracted(own_rows, drops.listed, drops.reasons)
    drops.check()
    if not found:
        raise DataError(f"{source.description} has no usable image{drops.summary()}")
    return np.stack([found[position] for position in sorted(found)])


def _distorted(
    encoder: Encoder, source: ImageSource, positions: Sequence[int], distortions: Distortions
) -> Iterator[tuple[int, Float32[np.ndarray, "points d"] | DataError]]:
    """Yield the features of each image at all points, or why the image is unusable."""
    seen, judged_by = encoder.preprocess, distortions.judge.preprocess
    device = next(encoder.parameters()).device

    def prepare(position: int) -> tuple[UInt8[np.ndarray, "h w 3"], ...] | DataError:
        try:
            decoded = decode_image(source.read(position), top_value=seen.top_value)
            return seen.apply(decoded), judged_by.apply(decoded)
        except DataError as error:
            return error

    for position, images in zip(positions, map_ordered(prepare, positions, default_workers()), strict=True):
        if isinstance(images, DataError):
            yield position, images
            continue
        pixels, judged = images
        image = seen.normalize(torch.from_numpy(pixels)[None].to(device))[0]
        features = features_of_normalized(encoder, seen, distortions.apply(image, judged, position))
        names = [f"{source.keys[position]} ({kind} {value:g})" for kind, value in distortions.points]
        require_usable(features, names)
        yield position, finished_features(encoder, features, names)
