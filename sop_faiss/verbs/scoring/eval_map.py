"""A picture of what an encoder takes for similar: its features in a plane, several encoders side by side."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64
from PIL import Image

from sop_faiss.errors import ConfigError, DataError
from sop_faiss.evaluate.plane import METHODS, points_of
from sop_faiss.evaluate.sets.feature_sets import FeatureSet, fill_stores, open_feature_set
from sop_faiss.features.extract import ExtractionOptions
from sop_faiss.model.encoders.load import encoder_of_spec
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.progress import ProgressCallback
from sop_faiss.report.map_figure import MapPanel, draw_maps
from sop_faiss.report.thumbnails import shrink_image

_THUMBNAIL_PIXELS = 40
_METHOD_NAMES = {"tsne": "t-SNE", "pca": "PCA", "umap": "UMAP"}
_MOST_PANELS = 6
_LEAVING_OUT = ExtractionOptions(max_bad_fraction=1.0)


@dataclass(frozen=True)
class MapOptions:
    """How to place and draw images, and how to extract features where there is no store."""

    method: str = "tsne"
    """`tsne`, `pca` or `umap`."""
    perplexity: float = 30.0
    """See `points_of`; a third of the images where there are fewer than 90."""
    limit: int = 2000
    """The most images, a seeded draw: the same ones for all encoders."""
    show_images: bool = False
    """Draw the images themselves, of a source of images alone."""
    seed: int = 0
    extraction: ExtractionOptions = _LEAVING_OUT
    """How features are extracted; images that cannot be read are left out."""

    def check(self) -> None:
        """Check the choices.

        Raises:
            ConfigError: one is impossible.
        """
        if self.method not in METHODS:
            raise ConfigError(f"`method={self.method}`: wanted {', '.join(METHODS)}")
        if not 3 <= self.limit <= 100_000:
            raise ConfigError(f"`limit={self.limit}`: wanted 3 to 100,000")
        if not 1 <= self.perplexity <= 10_000:
            raise ConfigError(f"`perplexity={self.perplexity:g}`: wanted 1 to 10,000")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"`seed={self.seed}`: wanted 0 or more and below 2^32")


def draw_map(
    sources: Sequence[str],
    encoder: EncoderSpec | None = None,
    options: MapOptions | None = None,
    *,
    progress: ProgressCallback | None = None,
) -> bytes:
    """Place images in a plane by their features, and draw them as a PNG.

    Args:
        sources: SRC of images, or feature stores of the same images, one for each encoder.
        encoder: of images; None where all are stores.

    Raises:
        ConfigError: an option is impossible, or the encoder is missing or idle.
        DataError: the stores are of different images, or images cannot be shown.
        SopError: as of `open_feature_set` and `extract_features`.
    """
    options = options or MapOptions()
    options.check()
    if not 1 <= len(sources) <= _MOST_PANELS:
        raise ConfigError(f"{len(sources)} sources: wanted 1 to {_MOST_PANELS}, images or feature stores")
    sets = [open_feature_set(source) for source in sources]
    images = [each for each in sets if each.store is None]
    if bool(images) != (encoder is not None) or len(images) > 1:
        raise ConfigError(
            f"{len(images)} of {len(sets)} sources are images: wanted one, with `model`, or feature stores alone "
            "(sop-embed), one for each encoder"
        )
    if options.show_images and (len(sets) > 1 or not images):
        raise ConfigError("show_images needs one source of images: feature stores do not hold them")
    if encoder is not None:
        loaded = encoder_of_spec(encoder)
        filled = fill_stores(images, loaded, extraction=options.extraction, progress=progress)
        sets = [filled[0] if each.store is None else each for each in sets]
    shown, rows = _common_rows(sets, options)
    perplexity = min(options.perplexity, max(1.0, len(shown) / 3))
    panels = []
    for each, own in zip(sets, rows, strict=True):
        assert each.store is not None
        points = points_of(each.store.features[own], options.method, perplexity=perplexity, seed=options.seed)
        labels = None if each.labels is None else _labels(each, own)
        thumbnails = _thumbnails(each, shown) if options.show_images else None
        name = str(each.store.manifest["encoder"].get("name"))
        panels.append(MapPanel(name if len(sets) == 1 else f"{each.name}: {name}", points, labels, thumbnails))
    settings = "" if options.method == "pca" else f", perplexity {perplexity:g}, seed {options.seed}"
    bad = _unusable(sets[0])
    left_out = f" ({bad:,} unusable left out)" if bad else ""
    note = f"{len(shown):,} images{left_out}, {_METHOD_NAMES[options.method]}{settings}"
    return draw_maps(panels, sets[0].class_names, note)


def _unusable(each: FeatureSet) -> int:
    assert each.store is not None
    return int(each.store.manifest.get("dropped", {}).get("count", 0))


def _labels(each: FeatureSet, rows: Int64[np.ndarray, " m"]) -> Int64[np.ndarray, " m"]:
    assert each.store is not None and each.store.labels is not None
    return each.store.labels[rows]


def _common_rows(sets: Sequence[FeatureSet], options: MapOptions) -> tuple[list[str], list[Int64[np.ndarray, " m"]]]:
    """Draw images that all sets have, known by shard and member, and find their keys and rows."""
    places = []
    for each in sets:
        assert each.store is not None
        files = zip(each.store.sources, each.store.members, strict=True)
        places.append({file: row for row, file in enumerate(files)})
    common = sorted(set(places[0]).intersection(*places[1:]))
    if len(common) < 3:
        raise DataError(
            f"{', '.join(each.name for each in sets)} have {len(common)} images in common: wanted 3 or more"
        )
    drawn = np.random.default_rng(options.seed).permutation(len(common))[: options.limit]
    shown = [common[place] for place in sorted(drawn)]
    rows = [np.array([each[file] for file in shown], dtype=np.int64) for each in places]
    assert sets[0].store is not None
    return [sets[0].store.keys[row] for row in rows[0]], rows


def _thumbnails(each: FeatureSet, keys: Sequence[str]) -> list[Image.Image | None]:
    assert each.source is not None
    places = {key: place for place, key in enumerate(each.source.keys)}
    found: list[Image.Image | None] = []
    for key in keys:
        try:
            small = shrink_image(each.source.read(places[key]), _THUMBNAIL_PIXELS)
            found.append(Image.open(io.BytesIO(small)).convert("RGB"))
        except DataError:
            found.append(None)
    return found
