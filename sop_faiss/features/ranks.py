"""Ranks share an extraction: each of n ranks encodes every n-th image, then all get all features."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32

from sop_faiss import distributed

Rows = dict[int, Float32[np.ndarray, " d"]]


def share_of_rank(count: int) -> range:
    """Return which of `count` positions this rank encodes."""
    return range(distributed.rank(), count, distributed.world_size())


def gather_extracted(extract: Callable[[], Rows], dropped: list[dict[str, Any]], reasons: Counter[str]) -> Rows:
    """Run each rank's part and gather all.

    Args:
        extract: features by position, of this rank's images.
        dropped: this rank's unusable images, once `extract` has run; all ranks' afterwards.
        reasons: how many, by reason; this rank's before, all ranks' afterwards.

    Raises:
        SopError: what a rank's part raised, on every rank.
    """
    if distributed.world_size() == 1:
        return extract()
    rows = distributed.on_all_ranks(extract)
    everything = _gathered(rows)
    all_dropped, all_reasons = distributed.gather_objects(list(dropped)), distributed.gather_objects(Counter(reasons))
    dropped[:] = [image for of_rank in all_dropped for image in of_rank]
    reasons.clear()
    for of_rank in all_reasons:
        reasons.update(of_rank)
    return everything


def _gathered(rows: Rows) -> Rows:
    """Gather all ranks' rows. A rank without any gets the width from the others."""
    width = max(distributed.gather_objects(next((len(row) for row in rows.values()), 0)))
    device = torch.device("cuda") if torch.distributed.get_backend() == "nccl" else torch.device("cpu")
    features = np.stack(list(rows.values())) if rows else np.empty((0, width), np.float32)
    positions = distributed.gather_rows(torch.tensor(list(rows), dtype=torch.int64, device=device))
    gathered = distributed.gather_rows(torch.from_numpy(features).to(device)).cpu().numpy()
    return dict(zip(positions.tolist(), gathered, strict=True))
