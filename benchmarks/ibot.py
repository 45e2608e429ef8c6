"""iBOT's own loader, imported from a checkout that the user points to (github.com/bytedance/ibot)."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from torch.utils.data import DataLoader

__all__ = ["load_ibot", "peer_dataset", "peer_loader"]

# what main_ibot.py imports beside its transforms; nothing of it is run here
UNUSED = (
    "models",
    "models.head",
    "tensorboardX",
    "evaluation",
    "evaluation.unsupervised",
    "evaluation.unsupervised.unsup_cls",
)


def load_ibot(checkout: Path) -> tuple[ModuleType, ModuleType]:
    """Its modules `main_ibot` and `loader`, unchanged; their networks and logs are left out."""
    missing = [name for name in ("main_ibot.py", "loader.py", "utils.py") if not (checkout / name).is_file()]
    if missing:
        raise SystemExit(f"--ibot {checkout} has no {missing[0]}: wanted a checkout of github.com/bytedance/ibot")
    sys.path.insert(0, str(checkout))
    sys.modules.update({name: mock.MagicMock() for name in UNUSED})
    try:
        return importlib.import_module("main_ibot"), importlib.import_module("loader")
    finally:
        sys.path.remove(str(checkout))
        for name in UNUSED:
            del sys.modules[name]


def peer_dataset(checkout: Path, photos: Path) -> Any:
    """Images with 2 + 10 views and masks, by the settings of iBOT's README for ViT-S/16."""
    main, loader = load_ibot(checkout)
    return loader.ImageFolderMask(
        str(photos),
        transform=main.DataAugmentationiBOT((0.25, 1.0), (0.05, 0.25), 2, 10),
        patch_size=16,
        pred_ratio=[0.0, 0.3],
        pred_ratio_var=[0.0, 0.2],
        pred_aspect_ratio=(0.3, 1 / 0.3),
        pred_shape="block",
        pred_start_epoch=0,
    )


def peer_loader(dataset: Any, batch_size: int, workers: int) -> DataLoader[Any]:
    """As main_ibot.py makes it, but for pinned memory, which needs a GPU; in forked processes, as on Linux then."""
    return DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=True,
        num_workers=workers,
        drop_last=True,
        multiprocessing_context="fork",
    )
