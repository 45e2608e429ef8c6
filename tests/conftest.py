"""Settings of the whole test run."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

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


@pytest.fixture(autouse=True, scope="session")
def _no_waiting_for_the_disk() -> Iterator[None]:
    """Flushing takes some ms a file, and guards against a power cut alone, which no test can make."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True)
def _log_level_of_the_package() -> Iterator[None]:
    """Commands set it for their process; here one test's command must not silence another test's log."""
    logger = logging.getLogger("sop_faiss")
    before = logger.level
    yield
    logger.setLevel(before)


@pytest.fixture(scope="session")
def vit_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of timm's `test_vit`; only read."""
    from safetensors.torch import save_file

    from tests.encoders import timm_network

    path = tmp_path_factory.mktemp("weights") / "vit.safetensors"
    save_file(timm_network("test_vit").state_dict(), path)
    return path
