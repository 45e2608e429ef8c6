"""Which features may be compared: those of one encoder, of images prepared and tokens pooled in the same way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from sop_faiss.errors import FeatureError

if TYPE_CHECKING:  # torch; `sop-index info` does without
    from sop_faiss.model.encoders.preprocess import Preprocess


@runtime_checkable
class EncoderLike(Protocol):
    """What identifies an encoder; `load_encoder` returns one."""

    @property
    def name(self) -> str:
        """As the user named it."""

    @property
    def fingerprint(self) -> str:
        """sha256 of architecture and weights."""

    @property
    def preprocess(self) -> Preprocess:
        """How images are prepared."""

    @property
    def pooling(self) -> str:
        """How tokens are pooled."""

    @property
    def feature_dim(self) -> int:
        """Width of the features."""


class SpaceDifference(NamedTuple):
    """Why features of two spaces cannot be compared."""

    what: str
    """`encoder`, `preprocessing`, `pooling` or `dimension`."""
    values: str
    """What the other space has instead, such as `crop 48 instead of 32`."""


@dataclass(frozen=True)
class FeatureSpace:
    """What sets of features must share to be compared."""

    fingerprint: str
    """Of the encoder."""
    preprocess: dict[str, Any]
    """As of `Preprocess.to_dict`."""
    pooling: str
    """The whitening included."""
    dimension: int

    @classmethod
    def of_encoder(cls, encoder: EncoderLike, preprocess: Preprocess | None = None) -> FeatureSpace:
        """Return the space of an encoder's features, of images prepared by `preprocess` or as the encoder does."""
        prepared = preprocess or encoder.preprocess
        return cls(encoder.fingerprint, prepared.to_dict(), encoder.pooling, encoder.feature_dim)

    @classmethod
    def of_manifest(cls, manifest: Mapping[str, Any], dimension: int, name: str) -> FeatureSpace:
        """Return the space of a feature store.

        Args:
            manifest: of the store.
            dimension: of its features.
            name: of the store, for the message.

        Raises:
            FeatureError: the manifest does not say how the features were made.
        """
        try:
            fingerprint = str(manifest["encoder"]["fingerprint"])
            return cls(fingerprint, dict(manifest["preprocess"]), manifest["pooling"], dimension)
        except (KeyError, TypeError) as error:
            raise FeatureError(
                f"the manifest of {name} does not say how its features were made ({error}): embed again"
            ) from None

    def difference(self, other: FeatureSpace) -> SpaceDifference | None:
        """Find the first thing in which another space differs; None where features of the two can be compared."""
        if other.fingerprint != self.fingerprint:
            values = f"fingerprint {other.fingerprint[:12]} instead of {self.fingerprint[:12]}"
            return SpaceDifference("encoder", values)
        own, others = self.preprocess, other.preprocess
        unequal = [name for name in sorted({*own, *others}) if own.get(name) != others.get(name)]
        if unequal:
            values = ", ".join(f"{name} {others.get(name)} instead of {own.get(name)}" for name in unequal)
            return SpaceDifference("preprocessing", values)
        if other.pooling != self.pooling:
            return SpaceDifference("pooling", f"{other.pooling!r} instead of {self.pooling!r}")
        if other.dimension != self.dimension:
            return SpaceDifference("dimension", f"{other.dimension} instead of {self.dimension}")
        return None
