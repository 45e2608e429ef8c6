"""The settings of training few parameters instead of all."""

from __future__ import annotations

from dataclasses import dataclass

from sop_faiss.config.checks import require, require_between, require_finite, require_one_of

_MOST = 1024
"""The largest rank: the sides of usual networks' matrices are hardly larger."""


@dataclass(frozen=True)
class LoraConfig:
    """Few parameters instead of all (LoRA, arXiv 2106.09685): `model.init` stays as it is, and what is added to some of
    its matrices learns, a product of two thin ones. `sop-export --adapter` writes these alone.

    All else in the backbone stays as it is: other weights, norms, biases, and the running statistics of batch norms,
    which would otherwise belong to the adapter, and to one process with its batch in one part. The mask token and the
    projector learn as ever. Weight decay acts on the thin matrices, and so pulls towards `model.init`;
    `optim.layer_decay` holds for them by their layers.
    """

    rank: int = 0
    """r: of the thin matrices, r x inputs and outputs x r; 8 to 32 are usual. A layer that is smaller on one side has
    that as its rank. 0: all parameters learn."""
    alpha: float = 16.0
    """The product is added times alpha / rank, so that one learning rate suits several ranks."""
    layers: str = "all"
    """Which matrices: `attention` (queries, keys, values and the projection behind them, of ViTs and Swin),
    `pointwise` (1 x 1 convolutions, also where a network like ConvNeXt writes them as linear layers), or `all` of
    these that the backbone has."""

    def __post_init__(self) -> None:
        require_finite("model.lora", self)
        require_between("model.lora.rank", self.rank, 0, _MOST)
        require(0 < self.alpha <= 1e4, f"model.lora.alpha = {self.alpha}: wanted more than 0, at most 10,000")
        require_one_of("model.lora.layers", self.layers, ("all", "attention", "pointwise"))
        for name in ("alpha", "layers") if not self.rank else ():
            value = getattr(self, name)
            require(
                value == type(self).__dataclass_fields__[name].default,
                f"model.lora.{name} = {value} with model.lora.rank = 0, where all parameters learn: leave it out, or "
                "set a rank such as 8",
            )

    @property
    def scale(self) -> float:
        """Return the factor of the product of the thin matrices."""
        return self.alpha / self.rank
