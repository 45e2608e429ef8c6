"""Unit rows pass, everything else is named in one line."""

from __future__ import annotations

import numpy as np
import pytest

from sop_faiss.errors import FeatureError
from sop_faiss.unit_rows import require_unit_rows
from tests.messages import assert_one_line

ROWS = np.eye(4, dtype=np.float32)


def test_unit_rows_pass() -> None:
    require_unit_rows(ROWS, "rows")
    require_unit_rows(ROWS[:0], "rows")
    require_unit_rows(ROWS * np.float32(1.0009), "rows")
    require_unit_rows(ROWS * np.float32(1.004), "rows", tolerance=5e-3)


@pytest.mark.parametrize(
    ("value", "kind"), [(np.nan, "NaN or infinite"), (-np.inf, "NaN or infinite"), (0.0, "zero"), (2.0, "of norm 2")]
)
def test_the_first_wrong_row_is_named(value: float, kind: str) -> None:
    rows = ROWS.copy()
    rows[2, 2] = rows[3, 3] = value
    with pytest.raises(FeatureError) as caught:
        require_unit_rows(rows, "queries")
    assert_one_line(caught, f"queries: 2 of 4 rows are not unit vectors (row 2 is {kind}): extract them again")
    with pytest.raises(FeatureError) as caught:
        require_unit_rows(rows, "features", names=["a", "b", "c", "d"], remedy="mend it")
    assert_one_line(caught, f"features: 2 of 4 rows are not unit vectors ('c' is {kind}): mend it")


def test_the_tolerance_counts() -> None:
    with pytest.raises(FeatureError, match=r"of norm 1\.0009"):
        require_unit_rows(ROWS * np.float32(1.0009), "rows", tolerance=1e-4)
