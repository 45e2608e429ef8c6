"""How a token is stored: in float16, or product-quantized."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float16, Float32, UInt8

from sop_faiss.errors import ConfigError
from sop_faiss.neighbors.product_codes import ProductCodes

_ROOT_BYTES = 2
_EXPONENT = np.uint16(0x7C00)
"""Of float16: all of these bits are set in what is not finite; NumPy's own test takes ten times as long."""
_LEAST_NORM = np.float32(1e-12)


@dataclass(frozen=True)
class TokenCodes:
    """Bytes of tokens, each of which is a unit vector times the root of its weight.

    Without a quantizer they are the tokens in float16. With one they are the codes of the unit vector, and the root in
    float16: a light token, too, is compared by its direction.

    Raises:
        ConfigError: the quantizer is of vectors of another dimension.
    """

    dimension: int
    quantizer: ProductCodes | None = None

    def __post_init__(self) -> None:
        if self.quantizer is not None and self.quantizer.dimension != self.dimension:
            raise ConfigError(f"codes of {self.quantizer.dimension} dimensions, and tokens have {self.dimension}")

    @property
    def token_bytes(self) -> int:
        """Return the bytes of a token."""
        return 2 * self.dimension if self.quantizer is None else len(self.quantizer.centroids) + _ROOT_BYTES

    def packed(self, tokens: Float16[np.ndarray, "m d"]) -> UInt8[np.ndarray, "m b"]:
        """Return tokens as they are stored."""
        if self.quantizer is None:
            return np.ascontiguousarray(tokens).view(np.uint8)
        exact = tokens.astype(np.float32)
        roots = np.linalg.norm(exact, axis=1, keepdims=True).astype(np.float16)
        return np.concatenate([self.quantizer.encode(_unit(exact)), roots.view(np.uint8)], axis=1)

    def are_finite(self, packed: UInt8[np.ndarray, "m b"]) -> bool:
        """Return whether all stored tokens are finite numbers."""
        halves = packed if self.quantizer is None else packed[:, -_ROOT_BYTES:]
        return not bool((np.ascontiguousarray(halves).view(np.uint16) & _EXPONENT == _EXPONENT).any())

    def tokens(self, packed: UInt8[np.ndarray, "m b"]) -> Float[np.ndarray, "m d"]:
        """Return stored tokens, in float16, or in float32 where they are decoded."""
        if self.quantizer is None:
            return np.ascontiguousarray(packed).view(np.float16)
        roots = np.ascontiguousarray(packed[:, -_ROOT_BYTES:]).view(np.float16).astype(np.float32)
        return _unit(self.quantizer.decode(packed[:, :-_ROOT_BYTES])) * roots


def _unit(rows: Float32[np.ndarray, "m d"]) -> Float32[np.ndarray, "m d"]:
    norms = np.sqrt(np.einsum("md,md->m", rows, rows))
    return rows / np.maximum(norms, _LEAST_NORM)[:, None]
