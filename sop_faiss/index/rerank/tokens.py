"""Images to the tokens that local re-ranking compares: whitened, the heaviest, in float16."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float16, Float32, Float64, UInt8

from sop_faiss.data.images.decode import decode_image
from sop_faiss.data.ordered_map import default_workers, map_ordered
from sop_faiss.errors import ConfigError, DataError, FeatureError
from sop_faiss.index.rerank.settings import TokenSettings
from sop_faiss.index.rerank.token_codes import TokenCodes
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.encoders.forward import batches_of_equal_shape, exact_inference
from sop_faiss.model.encoders.preprocess import Preprocess
from sop_faiss.neighbors.product_codes import ProductCodes
from sop_faiss.progress import ProgressCallback

_BATCH = 8
_LEARNED_IMAGES = 500
_LEARNED_TOKENS = 100
"""Of each of these images: the covariance of 50,000 tokens is known well enough for a thousand dimensions."""
_LEAST_VARIANCE = 1e-6
"""Directions of a smaller share of the largest variance are rounding."""
_TINY = 1e-12


@dataclass(frozen=True)
class TokenWhitening:
    """PCA whitening of unit tokens."""

    mean: Float32[np.ndarray, " D"]
    matrix: Float32[np.ndarray, "D d"]

    def apply(self, tokens: Float32[np.ndarray, "n D"], most: int) -> Float16[np.ndarray, "m d"]:
        """Return the heaviest tokens, in row-major order: unit vectors times the root of their weight.

        A weight is the squared norm of a token as a share of those kept. Tokens that are zero have none.
        """
        squares = np.einsum("nd,nd->n", tokens, tokens).astype(np.float64)
        kept = np.sort(np.argsort(-squares, kind="stable")[:most])
        weights = squares[kept] / max(squares[kept].sum(), _TINY)
        unit = tokens[kept] / np.maximum(np.sqrt(squares[kept]), _TINY)[:, None]
        return (self.directions(unit) * np.sqrt(weights)[:, None]).astype(np.float16)

    def directions(self, unit: Float[np.ndarray, "n D"]) -> Float[np.ndarray, "n d"]:
        """Return unit tokens whitened, of unit norm again."""
        white = (unit - self.mean) @ self.matrix
        white /= np.maximum(np.linalg.norm(white, axis=1, keepdims=True), _TINY)
        return white


@dataclass(frozen=True)
class Tokenizer:
    """How tokens are made of an image: two images can be compared only by the same."""

    encoder: Encoder
    preprocess: Preprocess
    whitening: TokenWhitening
    most: int
    codes: TokenCodes
    """How tokens of a gallery are stored; those of a query are compared as they are made."""

    def tokens(
        self, count: int, read: Callable[[int], bytes], names: Sequence[str], progress: ProgressCallback | None = None
    ) -> Iterator[tuple[int, Float16[np.ndarray, "m d"]]]:
        """Yield the position and the tokens of each image, those of equal shape together.

        Args:
            count: of the images.
            read: their encoded bytes by position.
            names: of the images, for errors.
            progress: called with images done and their total.

        Raises:
            DataError: an image cannot be read.
            FeatureError: its tokens are not finite.
        """
        found = tokens_of_images(self.encoder, self.preprocess, count, read, names)
        for done, (position, tokens) in enumerate(found, start=1):
            yield position, self.whitening.apply(tokens, self.most)
            if progress is not None:
                progress(done, count)

    def seen(self, encoded: bytes, name: str) -> SeenTokens:
        """Return an image with all its tokens in row-major order, to show where it matches another.

        Raises:
            DataError: the image cannot be read.
        """
        pixels = self.preprocess.apply(decode_image(encoded, top_value=self.preprocess.top_value))
        device = next(self.encoder.parameters()).device
        with exact_inference(self.encoder):
            found = self.encoder.tokens(self.preprocess.normalize(torch.from_numpy(pixels)[None].to(device)))[1]
        tokens = found.patches[0].float().cpu().numpy()
        _require_finite(tokens, name)
        return SeenTokens(pixels, self.whitening.apply(tokens, len(tokens)).astype(np.float32), found.grid)


class SeenTokens(NamedTuple):
    """An image as the encoder sees it, with all its tokens."""

    pixels: UInt8[np.ndarray, "h w 3"]
    tokens: Float32[np.ndarray, "n d"]
    grid: tuple[int, int]


def token_preprocess(encoder: Encoder, settings: TokenSettings) -> Preprocess:
    """Return how images are prepared for tokens: whole, unless the encoder takes only its own square.

    Raises:
        ConfigError: the encoder does not take this size.
    """
    plain = replace(encoder.preprocess, scales=(1.0,), mirrored=False)
    if encoder.model.fixed and settings.size in (None, encoder.model.native_size):
        return plain
    chosen = plain.keeping_aspect(settings.size)
    encoder.check_preprocess(chosen)
    return chosen


def learn_tokenizer(
    encoder: Encoder,
    settings: TokenSettings,
    count: int,
    read: Callable[[int], bytes],
    names: Sequence[str],
    progress: ProgressCallback | None = None,
) -> Tokenizer:
    """Learn the whitening of tokens, and their codes, from up to 500 images of a gallery, a seeded draw.

    Args:
        encoder: whose tokens.
        settings: size and the like.
        count: of the images.
        read: their encoded bytes by position.
        names: of the images, for errors.
        progress: called with images read and their total.

    Raises:
        ConfigError: the encoder has no tokens, or does not take this size, or there are too few tokens, or dimensions
            of one, for these codes.
        DataError: an image cannot be read.
    """
    generator = np.random.default_rng(0)
    drawn = np.sort(generator.permutation(count)[:_LEARNED_IMAGES]).tolist()
    preprocess = token_preprocess(encoder, settings)
    sample = []
    images = tokens_of_images(
        encoder, preprocess, len(drawn), lambda at: read(drawn[at]), [names[each] for each in drawn]
    )
    for position, tokens in images:
        own = np.random.default_rng((0, position)).permutation(len(tokens))[:_LEARNED_TOKENS]
        sample.append(tokens[own])
        if progress is not None:
            progress(len(sample), len(drawn))
    together = np.concatenate(sample).astype(np.float64)
    together /= np.maximum(np.linalg.norm(together, axis=1, keepdims=True), _TINY)
    whitening = _whitening(together, settings, encoder.name)
    quantizer = None
    if settings.code_bytes:
        quantizer = ProductCodes.learn(whitening.directions(together).astype(np.float32), settings.code_bytes)
    codes = TokenCodes(whitening.matrix.shape[1], quantizer)
    return Tokenizer(encoder, preprocess, whitening, settings.most, codes)


def _whitening(unit: Float64[np.ndarray, "n D"], settings: TokenSettings, encoder: str) -> TokenWhitening:
    mean = unit.mean(0)
    variances, directions = np.linalg.eigh((unit - mean).T @ (unit - mean) / len(unit))
    order = np.argsort(-variances)[: settings.dimension]
    order = order[variances[order] > _LEAST_VARIANCE * max(float(variances.max()), _TINY)]
    if not len(order):
        raise FeatureError(f"all tokens of {encoder} are alike: its weights or its preprocessing are wrong")
    parts = settings.code_bytes or 1
    if len(order) < parts:
        raise ConfigError(
            f"`token_codes={settings.codes}`: the tokens of {encoder} have {len(order)} dimensions: wanted as many "
            "bytes or fewer"
        )
    order = order[: len(order) // parts * parts]
    matrix = directions[:, order] / np.sqrt(variances[order])
    return TokenWhitening(mean.astype(np.float32), matrix.astype(np.float32))


def tokens_of_images(
    encoder: Encoder, preprocess: Preprocess, count: int, read: Callable[[int], bytes], names: Sequence[str]
) -> Iterator[tuple[int, Float32[np.ndarray, "n D"]]]:
    """Yield the position and all raw tokens of each image; arguments and errors as of `Tokenizer.tokens`."""

    def prepare(position: int) -> tuple[int, np.ndarray]:
        try:
            pixels = decode_image(read(position), top_value=preprocess.top_value)
        except DataError as error:
            raise DataError(f"{names[position]}: {error}") from None
        return position, preprocess.apply(pixels)

    device = next(encoder.parameters()).device
    with (
        exact_inference(encoder),
        contextlib.closing(map_ordered(prepare, range(count), default_workers())) as prepared,  # type: ignore[type-var]
    ):
        for positions, batch in batches_of_equal_shape(prepared, _BATCH):
            made = encoder.tokens(preprocess.normalize(batch.to(device)))[1].patches.float().cpu().numpy()
            for position, tokens in zip(positions, made, strict=True):
                _require_finite(tokens, names[position])
                yield position, tokens


def _require_finite(tokens: Float32[np.ndarray, "n D"], name: str) -> None:
    if not np.isfinite(tokens).all():
        raise FeatureError(f"the tokens of {name} are not finite: the encoder's weights are wrong")
