"""Tokens as they are stored: in float16 nothing is lost, product-quantized what the centroids say."""

from __future__ import annotations

import numpy as np
import pytest

from sop_faiss.errors import ConfigError
from sop_faiss.index.rerank.local import local_scores
from sop_faiss.index.rerank.token_codes import TokenCodes
from sop_faiss.neighbors.product_codes import ProductCodes


def unit(rows: np.ndarray) -> np.ndarray:
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True))


@pytest.fixture(scope="module")
def directions() -> np.ndarray:
    return unit(np.random.default_rng(0).standard_normal((300, 8))).astype(np.float32)


def test_float16_is_as_it_was(directions: np.ndarray) -> None:
    tokens = (directions * 0.3).astype(np.float16)
    codes = TokenCodes(8)
    packed = codes.packed(tokens)
    assert packed.tobytes() == tokens.tobytes()
    assert packed.shape == (300, codes.token_bytes)
    np.testing.assert_array_equal(codes.tokens(packed), tokens)


def test_codes_are_decoded_to_unit_vectors_times_the_root_of_the_weight(directions: np.ndarray) -> None:
    quantizer = ProductCodes.learn(directions, 4)
    codes = TokenCodes(8, quantizer)
    roots = np.linspace(1e-3, 1, 300, dtype=np.float32)[:, None]
    tokens = (directions * roots).astype(np.float16)
    tokens[7] = 0
    packed = codes.packed(tokens)
    assert packed.dtype == np.uint8
    assert packed.shape == (300, codes.token_bytes) == (300, 6)
    found = codes.tokens(packed)
    exact = tokens.astype(np.float64)
    norms = np.linalg.norm(exact, axis=1, keepdims=True)
    decoded = quantizer.decode(quantizer.encode((exact / np.maximum(norms, 1e-12)).astype(np.float32)))
    np.testing.assert_allclose(found, unit(decoded.astype(np.float64)) * norms, atol=1e-3)
    assert not found[7].any()
    light = found[0] / np.linalg.norm(found[0])  # float16 keeps 11 bits of the root: its direction is not lost with it
    assert light @ directions[0] > 0.5


def test_scores_of_codes_are_those_of_decoded_tokens(directions: np.ndarray) -> None:
    codes = TokenCodes(8, ProductCodes.learn(directions, 8))
    tokens = (directions[:40] / np.sqrt(10)).astype(np.float16)
    images = np.split(codes.tokens(codes.packed(tokens)), 4)
    exact = local_scores(tokens[:10].astype(np.float32), np.split(tokens, 4))
    coded = local_scores(tokens[:10].astype(np.float32), images)
    assert coded.argmax() == 0
    assert np.abs(exact - coded).max() < 0.1


def test_a_quantizer_of_other_dimensions(directions: np.ndarray) -> None:
    with pytest.raises(ConfigError, match="8 dimensions, and tokens have 9"):
        TokenCodes(9, ProductCodes.learn(directions, 4))


def test_what_is_not_finite_is_seen(directions: np.ndarray) -> None:
    tokens = (directions * 0.3).astype(np.float16)
    tokens[3, 1] = np.finfo(np.float16).max
    for codes in (TokenCodes(8), TokenCodes(8, ProductCodes.learn(directions, 8))):
        assert codes.are_finite(codes.packed(tokens))
        for wrong in (np.nan, np.inf, -np.inf):
            packed = codes.packed(tokens).copy()
            packed[7, -2:] = np.array([wrong], np.float16).view(np.uint8)
            assert not codes.are_finite(packed)
