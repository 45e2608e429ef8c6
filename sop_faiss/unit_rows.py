"""The check before every cosine similarity: rows are finite vectors of norm 1."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32

from sop_faiss.errors import FeatureError

UNIT_NORM_TOLERANCE = 1e-3
"""How far a row's norm may be from 1: twice what rounding to float16 can change."""


def require_unit_rows(
    rows: Float32[np.ndarray, "n d"],
    what: str,
    *,
    tolerance: float = UNIT_NORM_TOLERANCE,
    names: Sequence[str] | None = None,
    remedy: str = "extract them again, and divide each by its norm",
) -> None:
    """Check that every row is a finite vector of norm 1; never repair one, as that would hide a mistake upstream.

    Args:
        rows: one vector per row; zero rows are fine.
        what: what the rows are, in the plural, for the message.
        tolerance: how far a norm may be from 1.
        names: of the rows, for the message; None: their numbers.
        remedy: what the user can do, for the message.

    Raises:
        FeatureError: a row is NaN, infinite, zero or of another norm; names the first.
    """
    # Sums in float32 are several times faster, and near 1 off by at most d 2^-24: precise enough to accept rows.
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.einsum("nd,nd->n", rows, rows)
    if rows.shape[1] * 2.0**-24 <= tolerance and (np.abs(squares - 1) <= tolerance).all():
        return
    norms = np.sqrt(np.einsum("nd,nd->n", rows, rows, dtype=np.float64))
    wrong = np.flatnonzero(~(np.abs(norms - 1) <= tolerance))  # NaN fails every comparison
    if not wrong.size:
        return
    first = int(wrong[0])
    norm = float(norms[first])
    kind = "NaN or infinite" if not np.isfinite(norm) else "zero" if norm == 0 else f"of norm {norm:.6g}"
    name = f"row {first}" if names is None else repr(names[first])
    raise FeatureError(f"{what}: {wrong.size} of {len(rows)} rows are not unit vectors ({name} is {kind}): {remedy}")
