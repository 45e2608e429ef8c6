"""The metrics that every loss term reports (docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from sop_faiss import distributed
from sop_faiss.objectives.objective import Learned


def no_sums(device: torch.device) -> Float[Tensor, " sums"]:
    """Return zeros, to which the `TermLoss.sums` of a part of a batch are added."""
    return torch.zeros(5, device=device)


def averaged_sums(learned: Sequence[Learned], names: Collection[str]) -> dict[str, Float[Tensor, " sums"]]:
    """Return the terms' `TermLoss.sums`, added up over parts of a batch and averaged over ranks, in one all-reduce."""
    totals = torch.stack([torch.stack([part.sums[name] for part in learned]).sum(0) for name in names])
    return dict(zip(names, distributed.average(totals), strict=True))


def term_metrics(name: str, sums: Float[Tensor, " sums"], parts: int, log_count: float) -> dict[str, Tensor]:
    """Return a term's metrics from its `TermLoss.sums`; NaN if no patch was masked.

    Args:
        name: of the term.
        sums: added up over parts, averaged over ranks.
        parts: of the batch.
        log_count: ln K.
    """
    loss, weight, entropies, rows, target_entropy = sums
    return {
        f"loss_{name}": loss / parts,
        f"loss_{name}_over_lnK": loss / weight / log_count,
        f"kl_{name}": (loss - target_entropy) / weight,
        f"teacher_entropy_{name}_over_lnK": entropies / rows / log_count,
    }
