"""Which objective is learned, and the settings of SOP's rivals (docs/method.md, 8)."""

from __future__ import annotations

from dataclasses import dataclass, field

from sop_faiss.config.checks import require, require_between, require_finite, require_one_of, require_share

OBJECTIVES = {
    "sop": ("sop", "neighbors", "regularizer"),
    "massl": ("massl",),
    "dino": ("dino",),
    "ibot": ("ibot",),
    "distill": ("distill", "sop", "neighbors"),
}
"""The sections that each objective reads; those of the others stay at their defaults."""
_MOST_PROTOTYPES = 16_777_216  # 16 GiB of weights with d = 256, beyond any in use


@dataclass(frozen=True)
class ObjectiveConfig:
    """What is learned."""

    kind: str = "sop"
    """`sop` (this paper), `massl`, `dino` or `ibot` (its rivals), or `distill` (SOP's prototypes of a frozen encoder's
    features, for a student of any network). Each has its own section, `distill` also those of `sop`; only those of the
    chosen one may be set. An override of `objective.kind` drops the sections of the others that the file has."""

    def __post_init__(self) -> None:
        require_one_of("objective.kind", self.kind, tuple(OBJECTIVES))


@dataclass(frozen=True)
class MasslConfig:
    """MaSSL, which compares views by their softmax over blocks of a memory (docs/method.md, 8)."""

    capacity: int = 131_072
    """N, rows of the memory; at most as many as there are training images."""
    block_size: int = 16_384
    """P, rows of a block; the memory is cut into N // P blocks, drawn again in each step. Rows that
    remain are left out."""
    fill: str = "random"
    """First contents of the memory: `random` unit vectors (the released code), or `teacher` embeddings."""
    koleo_weight: float = 0.0
    """Weight of the KoLeo term, which pushes each image of a batch away from its nearest neighbor. As in the released
    code, neighbors are those of one rank and, with `train.accumulate`, of one part: other parts are another loss."""

    def __post_init__(self) -> None:
        require_finite("massl", self)
        require_one_of("massl.fill", self.fill, ("random", "teacher"))
        require(self.capacity >= 2, f"massl.capacity = {self.capacity}: wanted 2 or more")
        require(
            2 <= self.block_size <= self.capacity,
            f"massl.block_size = {self.block_size}: wanted 2 to massl.capacity = {self.capacity}",
        )
        require(self.koleo_weight >= 0, f"massl.koleo_weight = {self.koleo_weight}: wanted 0 or more")


def _check_last_layer(section: str, settings: DinoConfig | IbotConfig) -> None:
    epochs = settings.freeze_last_layer_epochs
    require(epochs >= 0, f"{section}.freeze_last_layer_epochs = {epochs}: wanted 0 or more")
    require_share(f"{section}.center_momentum", settings.center_momentum)


@dataclass(frozen=True)
class DinoConfig:
    """DINO, which compares views by their softmax over learned prototypes (docs/method.md, 8)."""

    prototypes: int = 65_536
    """K, outputs of the head's last layer."""
    norm_last_layer: bool = True
    """Keep the norm of the last layer's weights at 1. DINO's and iBOT's recipes of small networks learn it."""
    freeze_last_layer_epochs: float = 1.0
    """The last layer does not learn in these first epochs."""
    center_momentum: float = 0.9
    """The center keeps this fraction of itself per step."""

    def __post_init__(self) -> None:
        require_finite("dino", self)
        require_between("dino.prototypes", self.prototypes, 2, _MOST_PROTOTYPES)
        _check_last_layer("dino", self)


@dataclass(frozen=True)
class PrototypesConfig:
    """One loss term of iBOT: its weight and its learned prototypes."""

    weight: float = 1.0
    """lambda: factor of the term in the loss; 0 switches it off."""
    prototypes: int = 8192
    """K, outputs of the head's last layer."""


@dataclass(frozen=True)
class IbotConfig:
    """iBOT: DINO's loss of views, and the same of masked patches (docs/method.md, 8)."""

    cls: PrototypesConfig = field(default_factory=PrototypesConfig)
    """The [CLS] term: lambda1 and out_dim."""
    patch: PrototypesConfig = field(default_factory=PrototypesConfig)
    """The patch term: lambda2 and patch_out_dim."""
    shared_head: bool = True
    """Whether [CLS] and patches share the last layer; they share the layers before it in any case."""
    norm_last_layer: bool = True
    """See `dino.norm_last_layer`."""
    freeze_last_layer_epochs: float = 1.0
    """See `dino.freeze_last_layer_epochs`."""
    center_momentum: float = 0.9
    """Both centers keep this fraction of themselves per step."""

    def __post_init__(self) -> None:
        require_finite("ibot", self)
        for name, term in (("cls", self.cls), ("patch", self.patch)):
            require_finite(f"ibot.{name}", term)
            require(term.weight >= 0, f"ibot.{name}.weight = {term.weight}: wanted 0 or more")
            require_between(f"ibot.{name}.prototypes", term.prototypes, 2, _MOST_PROTOTYPES)
        require(bool(self.terms()), "ibot.cls.weight and ibot.patch.weight are both 0: nothing would be learned")
        require(
            not self.shared_head or len({term.prototypes for term in self.terms().values()}) == 1,
            f"ibot.cls.prototypes = {self.cls.prototypes} and ibot.patch.prototypes = {self.patch.prototypes} with one "
            "head: set both to the same number, or ibot.shared_head=false",
        )
        _check_last_layer("ibot", self)

    def terms(self) -> dict[str, PrototypesConfig]:
        """Return the loss terms that have a weight, by name."""
        return {name: term for name, term in (("cls", self.cls), ("patch", self.patch)) if term.weight}
