"""Patches that match between two images, or between two views of each of several images, as a figure and a share."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sop_faiss.bootstrap import bootstrap_interval
from sop_faiss.data.images.source import ImageSource, open_source
from sop_faiss.errors import ConfigError, DataError
from sop_faiss.evaluate.correspondence import (
    Scored,
    crop_views,
    match_tokens,
    places_in_other,
    score_matches,
    tokens_of,
)
from sop_faiss.model.encoders.dense import DenseEncoder
from sop_faiss.model.encoders.forward import exact_inference
from sop_faiss.model.encoders.image_input import pixels_of
from sop_faiss.model.encoders.load import encoder_of_spec
from sop_faiss.model.encoders.spec import OF_ONE_FEATURE, EncoderSpec
from sop_faiss.progress import ProgressCallback
from sop_faiss.report.matches_figure import MatchedPair, draw_matches
from sop_faiss.verbs.scoring.task_result import TaskResult

_COMMAND = "sop-eval correspondence"
_SHOWN = 4
"""Rows of the figure."""


@dataclass(frozen=True)
class CorrespondenceOptions:
    """What to match and to draw."""

    top: int = 12
    """Matches drawn, the most similar ones; iBOT draws as many."""
    stride: int | None = None
    """Pixels from token to token: of convolutional networks, which map is taken; None: the last."""
    limit: int = 50
    """The most images of which views are made, spread evenly over the source."""
    seed: int = 0
    """Of the views."""

    def check(self) -> None:
        """Check the choices.

        Raises:
            ConfigError: one is impossible.
        """
        for name, low, high in (("top", 1, 10_000), ("stride", 1, 256), ("limit", 1, 10**6), ("seed", 0, 2**63 - 1)):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ConfigError(f"`{name}={value}`: wanted {low} to {high:,}")


def match_images(
    first: str, second: str, spec: EncoderSpec, options: CorrespondenceOptions | None = None
) -> tuple[TaskResult, bytes]:
    """Match the patches of two images, each resized to a longer side of the encoder's size.

    Args:
        first: an image.
        second: another.

    Returns:
        The result, without a score since the truth is unknown, and the figure.

    Raises:
        ConfigError: a choice is impossible, or the encoder makes no tokens of such images.
        DataError: an image cannot be read.
    """
    options = options or CorrespondenceOptions()
    started = time.perf_counter()
    dense, side = _dense(spec, options)
    seen = replace(dense.encoder.preprocess, multiple=dense.multiple, resize=side, crop=side, keep_aspect=True)
    pixels = [seen.apply(pixels_of(path, path, seen.top_value)) for path in (first, second)]
    with exact_inference(dense.encoder):
        maps = [tokens_of(dense, image, path) for image, path in zip(pixels, (first, second), strict=True)]
    matches = match_tokens(*maps)
    shown = np.stack([matches.first, matches.second], axis=1)[: options.top]
    grids = maps[0].grid, maps[1].grid
    pair = MatchedPair(f"{Path(first).name} and {Path(second).name}", pixels[0], pixels[1], grids, shown, None)
    metrics = {"matches": float(len(matches.first)), "mean_cosine": float(matches.similarities.mean())}
    protocol = {"first": first, "second": second, **_protocol(dense, side, options), "grids": [list(g) for g in grids]}
    result = TaskResult(_COMMAND, first, protocol, metrics, _named(dense), time.perf_counter() - started)
    return result, draw_matches([pair], _title(dense, side))


def match_views(
    source: str,
    spec: EncoderSpec,
    options: CorrespondenceOptions | None = None,
    *,
    progress: ProgressCallback | None = None,
) -> tuple[TaskResult, bytes]:
    """Match the patches of two views of each image, and count the right ones.

    Args:
        source: SRC of images; one is enough.

    Returns:
        The result, whose shares are means over images, and the figure of the first images.

    Raises:
        ConfigError: a choice is impossible, or the encoder makes no tokens of such images.
        DataError: none of the images can be read, or the two views of none have a patch in common.
    """
    options = options or CorrespondenceOptions()
    started = time.perf_counter()
    dense, side = _dense(spec, options)
    images = open_source(source)
    places = np.unique(np.linspace(0, len(images) - 1, min(options.limit, len(images))).round().astype(int)).tolist()
    pairs: list[MatchedPair] = []
    scored: list[Scored] = []
    bad: list[str] = []
    with exact_inference(dense.encoder):
        for done, place in enumerate(places, start=1):
            try:
                pair, score = _pair_of_views(images, place, dense, side, options)
            except DataError as error:
                bad.append(str(error))
            else:
                scored.append(score)
                pairs += [pair] if len(pairs) < _SHOWN else []
            if progress is not None:
                progress(done, len(places))
    if not scored:
        raise DataError(f"none of the {len(places)} images drawn from {source} can be read: {bad[0]}")
    metrics, details = _summary(scored, source)
    protocol = {"source": source, **_protocol(dense, side, options), "images": len(scored), "images_dropped": len(bad)}
    seconds = time.perf_counter() - started
    result = TaskResult(_COMMAND, source, protocol, metrics, _named(dense), seconds, details)
    return result, draw_matches(pairs, f"{_title(dense, side)}; green: right within one patch")


def _dense(spec: EncoderSpec, options: CorrespondenceOptions) -> tuple[DenseEncoder, int]:
    """Load the encoder, and return the side of the images it sees."""
    options.check()
    for name in OF_ONE_FEATURE:
        if getattr(spec, name) not in (None, False):
            raise ConfigError(
                f"`{name}` does not apply to correspondence, where patch tokens are compared: leave it out"
            )
    encoder = encoder_of_spec(spec)
    dense = DenseEncoder(encoder, options.stride)
    side = encoder.preprocess.crop // dense.multiple * dense.multiple
    if not side:
        raise ConfigError(f"`size={spec.size}`: {encoder.name} has tokens of {dense.multiple} pixels; take more")
    return dense, side


def _pair_of_views(
    images: ImageSource, place: int, dense: DenseEncoder, side: int, options: CorrespondenceOptions
) -> tuple[MatchedPair, Scored]:
    key = images.keys[place]
    pixels = pixels_of(images.read(place), key, dense.encoder.preprocess.top_value)
    (one, other), made = crop_views(pixels, side, options.seed, place)
    first, second = (tokens_of(dense, view, key) for view in made)
    matches = match_tokens(first, second)
    score = score_matches(matches, places_in_other(one, other, first.grid, second.grid), second.grid)
    kept = np.flatnonzero(score.known)[: options.top]
    shown = np.stack([matches.first[kept], matches.second[kept]], axis=1)
    return MatchedPair(key, made[0], made[1], (first.grid, second.grid), shown, score.right[kept]), score


def _summary(scored: list[Scored], source: str) -> tuple[dict[str, float], dict[str, Any]]:
    """Return shares in percent, means over images, and the interval of the first where there are several images."""
    right = np.array([100.0 * each.right[each.known].mean() for each in scored if each.known.any()])
    overlapping = [each for each in scored if len(each.right_nearest)]
    if not len(right):
        raise DataError(f"{source}: no match is of a patch that both views have: give more images, or another seed")
    metrics = {
        "right": float(right.mean()),
        "right_nearest": float(np.mean([100.0 * each.right_nearest.mean() for each in overlapping])),
        "chance": float(np.mean([100.0 * each.chance for each in overlapping])),
        "matches": float(np.mean([each.known.sum() for each in scored])),
    }
    interval = bootstrap_interval(right)
    return metrics, {"right_interval": [interval.low, interval.high] if len(right) > 1 else None}


def _protocol(dense: DenseEncoder, side: int, options: CorrespondenceOptions) -> dict[str, Any]:
    seen = {"mean": list(dense.encoder.preprocess.mean), "std": list(dense.encoder.preprocess.std)}
    return {**asdict(options), "stride": dense.stride, "size": side, "preprocess": seen}


def _named(dense: DenseEncoder) -> dict[str, str]:
    return {"name": dense.encoder.name, "fingerprint": dense.encoder.fingerprint}


def _title(dense: DenseEncoder, side: int) -> str:
    return f"{dense.encoder.name}: tokens every {dense.stride} pixels of {side}"
