"""PCA whitening of features: learned on one set of images, kept in a file, applied to those of any other.

As revisited Oxford/Paris are reported with (Radenovic et al. 2018, arXiv 1711.02512, section 3.3; there called PCA_w):
subtract the mean, project on the principal directions, divide each by its standard deviation, and scale to unit norm.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from sop_faiss.errors import CheckpointError, ConfigError, FeatureError
from sop_faiss.files import atomic_file, require_readable
from sop_faiss.model.tensor_files import writing_tensors
from sop_faiss.paths import path_state

WHITENING_FILE = "whitening.safetensors"
"""Its name in the directory of a feature store."""
FORMAT = "sop_faiss whitening 1"
_LEAST_VARIANCE = 1e-9
"""Directions with less than this fraction of the first one's variance are noise of float32: they are left out."""


@dataclass(frozen=True)
class WhiteningOrigin:
    """What a whitening was learned from."""

    set_name: str
    """The images as the user named them."""
    set_fingerprint: str
    """sha256 of their features, in order."""
    images: int
    encoder_fingerprint: str
    pooling: str


@dataclass(frozen=True, eq=False)
class Whitening:
    """An affine map of unit-norm features, and what it was learned from."""

    mean: Float32[np.ndarray, " d"]
    components: Float32[np.ndarray, "D d"]
    """Principal directions, most variance first, each divided by its standard deviation."""
    origin: WhiteningOrigin

    @property
    def dimension(self) -> int:
        """D: width of whitened features."""
        return len(self.components)

    @functools.cached_property
    def fingerprint(self) -> str:
        """sha256 of the map."""
        digest = hashlib.sha256()
        for values in (self.mean, self.components):
            digest.update(f"{values.shape}".encode())
            digest.update(np.ascontiguousarray(values).tobytes())
        return digest.hexdigest()

    def apply(self, features: Float32[np.ndarray, "n d"]) -> Float32[np.ndarray, "n D"]:
        """Return whitened features of unit norm; one that equals the mean stays zero, which the caller refuses."""
        projected = (features.astype(np.float64) - self.mean) @ self.components.T.astype(np.float64)
        norms = np.linalg.norm(projected, axis=1, keepdims=True)
        whitened: Float32[np.ndarray, "n D"] = (projected / np.where(norms == 0, 1, norms)).astype(np.float32)
        return whitened

    def facts(self) -> dict[str, Any]:
        """Return JSON values, for manifests and results."""
        return {"dimension": self.dimension, "fingerprint": self.fingerprint, **asdict(self.origin)}

    def write(self, path: Path) -> None:
        """Write the file, atomically."""
        facts = {"format": FORMAT, "origin": json.dumps(asdict(self.origin))}
        with atomic_file(path) as temporary, writing_tensors(temporary):
            save_file({"mean": self.mean, "components": self.components}, temporary, metadata=facts)


def learn_whitening(features: Float32[np.ndarray, "n d"], dimension: int | None, origin: WhiteningOrigin) -> Whitening:
    """Learn the PCA whitening of a set of features, by a singular value decomposition in float64.

    Args:
        features: unit-norm rows.
        dimension: D; None: all directions that the set spans.
        origin: what they are of.

    Raises:
        ConfigError: the set spans fewer directions than that.
    """
    mean = features.mean(axis=0, dtype=np.float64)
    width = features.shape[1]
    scatter = np.zeros((width, width))
    for start in range(0, len(features), 65_536):  # no float64 copy of a large set
        block = features[start : start + 65_536] - mean
        scatter += block.T @ block
    directions, variances, _ = np.linalg.svd(scatter / len(features), hermitian=True)
    spanned = int((variances > max(_LEAST_VARIANCE * variances[0], 1e-18)).sum())
    wanted = spanned if dimension is None else dimension
    if not 1 <= wanted <= spanned:
        raise ConfigError(
            f"whitening to {wanted} dimensions: {len(features)} images of {origin.set_name} span {spanned} of the "
            f"{width}; wanted 1 to {spanned}, or more images"
        )
    components = directions[:, :wanted].T / np.sqrt(variances[:wanted, None])
    return Whitening(mean.astype(np.float32), np.ascontiguousarray(components, np.float32), origin)


def read_whitening(path: Path) -> Whitening:
    """Read a whitening: its file, or the feature store that it is in.

    Raises:
        CheckpointError: it is missing or not a whitening.
        FeatureError: its numbers are not finite.
    """
    file = path / WHITENING_FILE if path.is_dir() else path
    if not file.is_file():
        raise CheckpointError(f"whitening {file} {path_state(file)}; sop-embed --whiten SRC makes one")
    require_readable(file)
    try:
        with safe_open(file, framework="numpy") as opened:
            facts = opened.metadata() or {}
            if facts.get("format") != FORMAT:
                raise CheckpointError(f"{file} is not a whitening ({FORMAT})")
            origin = WhiteningOrigin(**json.loads(facts["origin"]))
            mean, components = opened.get_tensor("mean"), opened.get_tensor("components")
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file} is damaged or not a whitening ({str(error).splitlines()[0]})") from None
    shaped = mean.ndim == 1 and components.ndim == 2 and components.shape[1] == len(mean) and len(components)
    if not shaped or mean.dtype != np.float32 or components.dtype != np.float32:
        raise CheckpointError(f"{file} is damaged: its mean and components do not fit each other")
    if not (np.isfinite(mean).all() and np.isfinite(components).all()):
        raise FeatureError(f"{file} holds NaN or infinity: learn the whitening again")
    return Whitening(mean, components, origin)
