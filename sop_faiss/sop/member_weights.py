"""Member weights: what each member of a task gives to the prototypes, in log space (section 3.2; docs/method.md, 3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from sop_faiss.errors import ConfigError

LOG_OF_ZERO = -1e30  # not -infinity, so that the difference of two of them is a number

_ROUNDING = 1e-6  # relative; contributions that were clamped to [1/K, 1] in float32 may be this far outside


def _safe_log(values: Float[Tensor, "S K"]) -> Float[Tensor, "S K"]:
    positive = values > 0
    return torch.where(positive, values.clamp_min(torch.finfo(values.dtype).tiny).log(), LOG_OF_ZERO)


def check_contributions(contributions: Float[Tensor, "*tasks K S"]) -> None:
    """Raise unless each contribution w is in [1/K, 1]; it waits once for the device, whatever the number of tasks.

    Raises:
        ConfigError: a w is outside, so that its member would give more to another prototype than to its own, or less
            than nothing.
    """
    least = 1.0 / contributions.shape[-2]
    if not bool(((contributions >= least * (1 - _ROUNDING)) & (contributions <= 1 + _ROUNDING)).all()):
        raise ConfigError(
            f"contributions = {float(contributions.min()):.6g} to {float(contributions.max()):.6g}: wanted each "
            f"between 1/K = {least:.6g} and 1; clamp them, as sop_faiss.sop.prototypes.contributions does"
        )


@dataclass(frozen=True)
class MemberWeights:
    """D of one task, and the weights of its members: log(w - c) for their own prototype, log c for every other.

    c = (1 - w)/(K - 1). All tensors are contiguous, with all first members (the anchors) before all second ones: a sum
    over the members of each prototype then runs along whole rows of K.
    """

    members: Float[Tensor, "S K d"]
    log_own: Float[Tensor, "S K"]
    log_other: Float[Tensor, "S K"]

    @classmethod
    def of(cls, members: Float[Tensor, "K S d"], contributions: Float[Tensor, "K S"]) -> MemberWeights:
        """Compute the weights of members with contributions w, in the precision of w.

        Raises:
            ConfigError: see `check_contributions`.
        """
        check_contributions(contributions)
        return cls.of_checked(members, contributions)

    @classmethod
    def of_checked(cls, members: Float[Tensor, "K S d"], contributions: Float[Tensor, "K S"]) -> MemberWeights:
        """Compute the same of contributions that `check_contributions` did not refuse.

        Members that are in this class's order in memory (`Prototypes.members`) are not copied.
        """
        weights = contributions.T.contiguous()
        others = (1.0 - weights) / (len(contributions) - 1)
        log_own, log_other = _safe_log((weights - others).clamp_min(0)), _safe_log(others.clamp_min(0))
        return cls(members.transpose(0, 1).contiguous(), log_own, log_other)

    @property
    def count(self) -> int:
        """Return K, the prototypes of the task."""
        return self.members.shape[1]

    def to(self, dtype: torch.dtype) -> MemberWeights:
        """Return the same weights in another precision; they gain no digits by it."""
        return MemberWeights(self.members.to(dtype), self.log_own.to(dtype), self.log_other.to(dtype))
