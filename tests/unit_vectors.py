"""Unit vectors, of given rows or random ones."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F


def unit(rows: np.ndarray) -> np.ndarray:
    """The rows, each divided by its norm, in float32."""
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), dtype=np.float32)


def random_unit(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random vectors along the last dimension."""
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype), dim=-1)
