"""Settings of re-ranking: defaults by method, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from sop_faiss.errors import ConfigError
from sop_faiss.index.rerank.settings import Rerank


def test_settings_of_other_methods_are_not_in_a_result() -> None:
    assert Rerank("local").to_dict() == {"method": "local", "depth": 400, "mutual": False, "one_way": False}
    assert Rerank("diffusion").to_dict() == {"method": "diffusion", "depth": 400, "neighbors": 10}
    assert Rerank("global", beta=0.0).to_dict() == {"method": "global", "depth": 400, "neighbors": 4, "beta": 0.0}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"method": "best"}, "rerank=best"),
        ({"method": ""}, "rerank="),
        ({"method": "local", "depth": 1}, "rerank_depth=1"),
        ({"method": "local", "depth": 10**9}, "rerank_depth"),
        ({"method": "local", "neighbors": 3}, "rerank_neighbors"),
        ({"method": "global", "neighbors": 0}, "rerank_neighbors=0"),
        ({"method": "global", "depth": 5, "neighbors": 5}, "rerank_neighbors=5"),
        ({"method": "diffusion", "beta": 0.5}, "rerank_beta"),
        ({"method": "global", "beta": float("nan")}, "rerank_beta=nan"),
        ({"method": "global", "beta": -1.0}, "rerank_beta"),
        ({"method": "global", "mutual": True}, "rerank_mutual"),
        ({"method": "diffusion", "one_way": True}, "rerank_one_way"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Rerank(**settings)
