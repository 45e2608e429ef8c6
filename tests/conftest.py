"""Settings of the whole test run."""

from __future__ import annotations

import os

os.environ.setdefault("MPLBACKEND", "Agg")

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("default", derandomize=True, deadline=None)
hypothesis.settings.load_profile("default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
