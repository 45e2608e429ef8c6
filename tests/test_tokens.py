"""Tokens of images for local re-ranking: what is kept, and that they are whitened."""

from __future__ import annotations

import numpy as np
import pytest

from sop_faiss.errors import ConfigError, DataError
from sop_faiss.index.rerank.settings import TokenSettings
from sop_faiss.index.rerank.tokens import TokenWhitening, learn_tokenizer, token_preprocess, tokens_of_images
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.encoders.load import load_encoder
from tests.images import encode, make_image

SIZES = ((40, 64), (64, 64), (64, 40), (40, 64), (50, 50))
NAMES = [f"image {number}" for number in range(len(SIZES))]


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return load_encoder("timm:test_resnet", random_weights=0, size=64)


@pytest.fixture(scope="module")
def photos() -> list[bytes]:
    rng = np.random.default_rng(0)
    return [encode(make_image(rng, size, label=number % 3)) for number, size in enumerate(SIZES)]


def test_the_heaviest_tokens_are_kept_in_their_order() -> None:
    whitening = TokenWhitening(np.zeros(2, np.float32), np.eye(2, dtype=np.float32))
    raw = np.array([[0, 1], [3, 0], [0, 0], [0, 4]], np.float32)
    kept = whitening.apply(raw, 2)
    assert np.allclose(kept, [[0.6, 0], [0, 0.8]], atol=1e-3)
    assert np.allclose(whitening.apply(raw, 9)[2], 0)


def test_tokens_are_of_each_image_whitened_and_weigh_one(encoder: Encoder, photos: list[bytes]) -> None:
    settings = TokenSettings(dimension=3)
    tokenizer = learn_tokenizer(encoder, settings, len(photos), photos.__getitem__, NAMES)
    found = dict(tokenizer.tokens(len(photos), photos.__getitem__, NAMES))
    assert sorted(found) == list(range(len(photos)))
    for tokens in found.values():
        assert np.isclose((tokens.astype(np.float64) ** 2).sum(), 1, atol=5e-3)
    raw = dict(tokens_of_images(encoder, tokenizer.preprocess, len(photos), photos.__getitem__, NAMES))
    together = np.concatenate([raw[position] for position in range(len(photos))])
    unit = together / np.linalg.norm(together, axis=1, keepdims=True)
    white = (unit - tokenizer.whitening.mean) @ tokenizer.whitening.matrix
    assert np.abs(np.cov(white.T, bias=True) - np.eye(white.shape[1])).max() < 1e-2


def test_whole_images_of_the_size_asked(encoder: Encoder) -> None:
    chosen = token_preprocess(encoder, TokenSettings(size=96))
    assert chosen.keep_aspect
    assert chosen.target_size(100, 200) == (48, 96)


def test_what_cannot_be(encoder: Encoder, photos: list[bytes]) -> None:
    for settings in ({"dimension": 0}, {"most": 0}):
        with pytest.raises(ConfigError):
            TokenSettings(**settings)
    with pytest.raises(ConfigError, match="size"):
        token_preprocess(encoder, TokenSettings(size=-5))
    with pytest.raises(DataError, match="image 1"):
        learn_tokenizer(encoder, TokenSettings(), 2, [photos[0], b"no image"].__getitem__, NAMES)
