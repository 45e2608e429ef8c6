"""DINO's, DAVIS's and revisitop's own evaluation, imported from checkouts that the user names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "dino_knn",
    "dino_ranks",
    "load_davis",
    "load_dino",
    "load_dino_video",
    "load_revisitop",
    "setups_of",
    "with_in1d",
]

MapFunction = Callable[..., tuple[float, Any, Any, Any]]
DIFFICULTIES = {
    "easy": (("easy",), ("junk", "hard")),
    "medium": (("easy", "hard"), ("junk",)),
    "hard": (("hard",), ("junk", "easy")),
}


@contextmanager
def with_in1d() -> Iterator[None]:
    """Provide `in1d`, which both evaluations call and numpy 2 lacks: `isin` does the same on flat arrays."""
    with mock.patch.object(np, "in1d", np.isin, create=True):
        yield


def _load(checkout: Path, option: str, repository: str, module: str) -> ModuleType:
    file = checkout / f"{module.replace('.', '/')}.py"
    if not file.is_file():
        raise SystemExit(f"{option}: {file} does not exist: wanted a checkout of github.com/{repository}")
    sys.path.insert(0, str(checkout))
    try:
        return importlib.import_module(module)
    finally:
        sys.path.remove(str(checkout))


def load_revisitop(checkout: Path) -> MapFunction:
    """Return its `compute_map`, unchanged; call it inside `with_in1d`."""
    folder = checkout / "python" if (checkout / "python").is_dir() else checkout
    function: MapFunction = _load(folder, "--revisitop", "filipradenovic/revisitop", "evaluate").compute_map
    return function


def load_dino(checkout: Path) -> ModuleType:
    """Return its module `eval_knn`, unchanged, with its k-NN loop and, as `utils`, its `compute_map`."""
    return _load(checkout, "--dino", "facebookresearch/dino", "eval_knn")


def load_dino_video(checkout: Path) -> ModuleType:
    """Return its module `eval_video_segmentation`, unchanged; it calls `cuda`, and reads `args` from itself."""
    return _load(checkout, "--dino", "facebookresearch/dino", "eval_video_segmentation")


def load_davis(checkout: Path) -> type[Any]:
    """Return its class `DAVISEvaluation`, unchanged."""
    repository = "davisvideochallenge/davis2017-evaluation"
    found: type[Any] = _load(checkout, "--davis", repository, "davis2017.evaluation").DAVISEvaluation
    return found


def dino_ranks(queries: Tensor, gallery: Tensor) -> np.ndarray:
    """Rank as eval_image_retrieval.py does in step 2: one product and a full sort; (gallery, queries)."""
    similarities = torch.mm(gallery, queries.T)
    ranks: np.ndarray = torch.argsort(-similarities, dim=0).cpu().numpy()
    return ranks


def dino_knn(
    module: ModuleType, train: Tensor, labels: Tensor, test: Tensor, truth: Tensor, ks: Sequence[int], classes: int
) -> dict[int, tuple[float, float]]:
    """Compute top-1 and top-5 of each k as eval_knn.py does, one k after the other."""
    return {k: module.knn_classifier(train, labels, test, truth, k, 0.07, num_classes=classes) for k in ks}


def setups_of(queries: Sequence[Any], names: Sequence[str]) -> dict[str, list[dict[str, np.ndarray]]]:
    """Return the ground truth of each difficulty in the form that both evaluations take."""
    setups = {}
    for name in names:
        relevant, ignored = DIFFICULTIES[name]
        setups[name] = [
            {
                "ok": np.concatenate([query.lists[each] for each in relevant]),
                "junk": np.concatenate([query.lists[each] for each in ignored]),
            }
            for query in queries
        ]
    return setups
