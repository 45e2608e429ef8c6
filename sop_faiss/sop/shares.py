"""What the members of a task give to the prototypes, split into an own and a shared part, in log space (design 2.3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["LOG_OF_ZERO", "MemberShares"]

LOG_OF_ZERO = -1e30  # finite, so that differences of two of them stay finite


def _safe_log(values: Float[Tensor, "K S"]) -> Float[Tensor, "K S"]:
    positive = values > 0
    return torch.where(positive, values.clamp_min(torch.finfo(values.dtype).tiny).log(), LOG_OF_ZERO)


@dataclass(frozen=True)
class MemberShares:
    """D of one task, and what its members give: log(w - c) to their own prototype, log c to every other."""

    members: Float[Tensor, "K S d"]
    log_own: Float[Tensor, "K S"]
    log_other: Float[Tensor, "K S"]

    @classmethod
    def of(cls, members: Float[Tensor, "K S d"], contributions: Float[Tensor, "K S"]) -> MemberShares:
        """Split the contributions w into own and shared parts."""
        others = (1.0 - contributions) / (len(contributions) - 1)
        return cls(members, _safe_log((contributions - others).clamp_min(0)), _safe_log(others.clamp_min(0)))

    def to(self, dtype: torch.dtype) -> MemberShares:
        """The same in another precision."""
        return MemberShares(self.members.to(dtype), self.log_own.to(dtype), self.log_other.to(dtype))
