"""Features of the same images under many settings of one encoder, from one pass of decoding."""

from __future__ import annotations

import itertools
import math
import time
from contextlib import closing
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Float32, UInt8
from torch import Tensor
from torch.nn import functional

from sop_faiss.data.images.decode import decode_image
from sop_faiss.data.images.source import ImageSource
from sop_faiss.data.ordered_map import default_workers, map_ordered
from sop_faiss.data.views.crops import draw_crop
from sop_faiss.errors import DataError, UnreachableError
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.encoders.forward import exact_inference
from sop_faiss.model.encoders.pooling import pool_tokens, pooling_name, split_pooling
from sop_faiss.model.encoders.preprocess import Preprocess
from sop_faiss.progress import ProgressCallback

_SIZES = (0.75, 1.0, 4 / 3)
"""Relative to the encoder's own."""
_SCALES = (1.0, 0.7071, 0.5)
"""Of the revisited Oxford/Paris benchmark."""
_LAST_BLOCKS = 4
"""As in DINO's linear evaluation of ViT-S."""
_IMAGES = 8
"""Per forward pass."""
_CROP_AREA, _CROP_ASPECT = (0.3, 0.8), (0.75, 4 / 3)
"""Of the two crops that have to find each other where there are no labels."""


@dataclass(frozen=True)
class Setting:
    """One way to make features with an encoder, apart from a whitening."""

    size: int
    """Side of the images, in pixels."""
    scales: tuple[float, ...]
    pooling: str
    """With `_lastN` behind it, of the last N blocks."""

    def __str__(self) -> str:
        scales = "" if self.scales == (1.0,) else f", scales {','.join(f'{scale:g}' for scale in self.scales)}"
        return f"{self.size} px, {self.pooling}{scales}"


@dataclass
class SettingFeatures:
    """Features by setting, and what they cost.

    Attributes:
        positions: of the images in the source that could be used.
        rows: unit rows of each setting; with two views, those of the second follow those of the first.
        milliseconds: of the encoder per image, by size and scales.
        bad: images that could not be used, by name.
    """

    positions: list[int] = field(default_factory=list)
    rows: dict[Setting, Float32[np.ndarray, "n d"]] = field(default_factory=dict)
    milliseconds: dict[tuple[int, tuple[float, ...]], float] = field(default_factory=dict)
    bad: list[str] = field(default_factory=list)


def possible_settings(encoder: Encoder) -> list[Setting]:
    """Return the settings that are compared; the encoder's own is the first."""
    model, seen = encoder.model, encoder.preprocess
    own = Setting(seen.crop, seen.scales, encoder.token_pooling)
    unit = math.lcm(model.multiple, 8 if seen.crop >= 64 else 1)
    sizes = [seen.crop] if model.fixed else [max(1, round(seen.crop * factor / unit)) * unit for factor in _SIZES]
    all_scales = [seen.scales] if model.fixed else [seen.scales, (1.0,), _SCALES]
    # quadrants would make the index four times as large, and are for things that keep their place
    poolings = [own.pooling, *(name for name in model.poolings if name != "quadrants")]
    poolings += [
        pooling_name(name, _LAST_BLOCKS, model.blocks)
        for name in ("cls", "cls_mean")
        if name in model.poolings and model.blocks >= _LAST_BLOCKS
    ]
    found = [Setting(*each) for each in itertools.product(sizes, all_scales, poolings)]
    return list(dict.fromkeys([own, *found]))


def preprocess_of(encoder: Encoder, size: int) -> Preprocess:
    """Return the encoder's preprocessing at another size, one scale."""
    own = encoder.preprocess
    if size == own.crop:
        return replace(own, scales=(1.0,))
    return Preprocess.square(size, mean=own.mean, std=own.std, multiple=own.multiple, top_value=own.top_value)


def setting_features(
    encoder: Encoder,
    source: ImageSource,
    settings: list[Setting],
    *,
    views: bool,
    seed: int = 0,
    progress: ProgressCallback | None = None,
) -> SettingFeatures:
    """Compute the features of images under every setting; each image is decoded once.

    Args:
        encoder: its own whitening and cache are not used.
        source: the images; those that cannot be decoded are left out.
        settings: as of `possible_settings`.
        views: of two random crops of each image instead of the image.
        seed: of the crops.

    Raises:
        ConfigError: the encoder does not take images of one of these sizes.
        UnreachableError: a shard cannot be fetched.
    """
    sizes = sorted({setting.size for setting in settings})
    preprocesses = {size: preprocess_of(encoder, size) for size in sizes}
    found = SettingFeatures()
    parts: dict[Setting, list[np.ndarray]] = {setting: [] for setting in settings}
    spent: dict[tuple[int, float], float] = {}

    def prepare(position: int) -> dict[int, UInt8[np.ndarray, "v s s 3"]] | DataError:
        try:
            image = decode_image(source.read(position), top_value=encoder.preprocess.top_value)
        except UnreachableError:
            raise
        except DataError as error:
            return error
        crops = _two_crops(image, (seed, position)) if views else [image]
        return {size: np.stack([preprocess.apply(crop) for crop in crops]) for size, preprocess in preprocesses.items()}

    def run(images: list[dict[int, np.ndarray]]) -> None:
        for size in sizes:
            batch = torch.from_numpy(np.concatenate([image[size] for image in images]))
            of_size = [setting for setting in settings if setting.size == size]
            for setting, rows in _features_of_size(encoder, preprocesses[size], batch, of_size, spent).items():
                parts[setting].append(rows)

    waiting: list[dict[int, np.ndarray]] = []
    with exact_inference(encoder), closing(map_ordered(prepare, range(len(source)), default_workers())) as prepared:  # type: ignore[type-var]
        for position, image in enumerate(prepared):
            if isinstance(image, DataError):
                found.bad.append(source.keys[position])
            else:
                found.positions.append(position)
                waiting.append(image)
            if len(waiting) * (1 + views) >= _IMAGES or position + 1 == len(source):
                if waiting:
                    run(waiting)
                waiting = []
                if progress is not None:
                    progress(position + 1, len(source))
    for setting, several in parts.items():
        rows = np.concatenate(several) if several else np.empty((0, encoder.token_dimension), np.float32)
        found.rows[setting] = np.concatenate([rows[0::2], rows[1::2]]) if views else rows
        each = [spent.get((setting.size, scale), 0.0) for scale in setting.scales]
        found.milliseconds[setting.size, setting.scales] = 1000 * sum(each) / max(1, len(rows))
    return found


def _two_crops(image: UInt8[np.ndarray, "h w 3"], seed: tuple[int, int]) -> list[np.ndarray]:
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))
    height, width = image.shape[:2]
    boxes = [draw_crop(height, width, _CROP_AREA, _CROP_ASPECT, rng) for _ in range(2)]
    return [image[box.top : box.top + box.height, box.left : box.left + box.width] for box in boxes]


def _features_of_size(
    encoder: Encoder,
    preprocess: Preprocess,
    batch: UInt8[Tensor, "b s s 3"],
    settings: list[Setting],
    spent: dict[tuple[int, float], float],
) -> dict[Setting, Float32[np.ndarray, "b d"]]:
    """Return the features of images of one size, as `features_of_batch` makes them; `spent` gets the seconds."""
    images = preprocess.normalize(batch.to(next(encoder.parameters()).device))
    poolings = list(dict.fromkeys(setting.pooling for setting in settings))
    of_scale: dict[float, dict[str, Tensor]] = {}
    for scale in dict.fromkeys(scale for setting in settings for scale in setting.scales):
        started = time.perf_counter()
        raw = _pooled(encoder, preprocess.scaled(images, scale), poolings)
        of_scale[scale] = {name: functional.normalize(rows.double(), dim=1) for name, rows in raw.items()}
        key = (preprocess.crop, scale)
        spent[key] = spent.get(key, 0.0) + time.perf_counter() - started
    features = {}
    for setting in settings:
        each = [of_scale[scale][setting.pooling] for scale in setting.scales]
        rows = each[0] if len(each) == 1 else functional.normalize(torch.stack(each).sum(0), dim=1)
        features[setting] = rows.float().cpu().numpy()
    return features


def _pooled(encoder: Encoder, images: Float32[Tensor, "b 3 h w"], poolings: list[str]) -> dict[str, Tensor]:
    """Return raw features by pooling: one forward pass for all of the last block, one for each of several blocks."""
    model = encoder.model
    several = [name for name in poolings if split_pooling(name)[1] > 1]
    found = {name: model.features(images, name) for name in several}
    rest = [name for name in poolings if name not in found]
    if len(rest) == 1:
        return found | {rest[0]: model.features(images, rest[0])}
    if rest:
        first = "pooled" if "pooled" in rest else rest[0]
        own, tokens = model.features_and_tokens(images, first)
        made = {name: pool_tokens(tokens.cls, tokens.patches, tokens.grid, name) for name in rest if name != first}
        found |= {first: own, **made}
    return found
