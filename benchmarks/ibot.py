"""iBOT's own loader and training step, imported from a checkout that the user names (github.com/bytedance/ibot)."""

from __future__ import annotations

import importlib
import math
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.data import DataLoader

__all__ = ["load_ibot", "peer_dataset", "peer_loader", "peer_step"]

# what main_ibot.py imports beside its transforms, networks, loss and helpers; nothing of it is run here
UNUSED = ("tensorboardX", "evaluation", "evaluation.unsupervised", "evaluation.unsupervised.unsup_cls")


def load_ibot(checkout: Path) -> tuple[ModuleType, ModuleType]:
    """Return its modules `main_ibot` and `loader`, unchanged; their logs and evaluation are left out."""
    missing = [name for name in ("main_ibot.py", "loader.py", "utils.py") if not (checkout / name).is_file()]
    if missing:
        raise SystemExit(f"--ibot {checkout} has no {missing[0]}: wanted a checkout of github.com/bytedance/ibot")
    sys.path.insert(0, str(checkout))
    sys.modules.update({name: mock.MagicMock() for name in UNUSED})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it imports from places that timm has moved
            return importlib.import_module("main_ibot"), importlib.import_module("loader")
    finally:
        sys.path.remove(str(checkout))
        for name in UNUSED:
            del sys.modules[name]


def peer_dataset(checkout: Path, photos: Path) -> Any:
    """Make iBOT's data set of images with 2 + 10 views and masks, by the settings of its README for ViT-S/16."""
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
    """Make the loader as main_ibot.py does, without pinned memory, which needs a GPU; processes are forked."""
    return DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=True,
        num_workers=workers,
        drop_last=True,
        multiprocessing_context="fork",
    )


def peer_step(
    checkout: Path, arch: str, images: list[torch.Tensor], masks: list[torch.Tensor], device: torch.device
) -> Callable[[], float]:
    """Return a training step of iBOT on one rank, as in `train_one_epoch` with its README's settings for ViT-S/16.

    It has its own networks, head, loss, parameter groups, clipping and moving average; float32 on a CPU, its fp16
    with a scaler on CUDA. Logs other than the loss are left out, and so is the exchange with other ranks.

    Args:
        checkout: of github.com/bytedance/ibot.
        arch: `vit_small` or `vit_tiny`.
        images: the two global views first, then the local ones; normalized.
        masks: of the two global views, rows x columns of patches.
        device: where images and masks are.
    """
    main, _ = load_ibot(checkout)
    vars(main)["dist"] = SimpleNamespace(all_reduce=lambda _: None, get_world_size=lambda: 1)
    crops, epochs = len(images), 800
    student, teacher = (_peer_network(main, arch, teacher, device) for teacher in (False, True))
    teacher.load_state_dict(student.state_dict(), strict=False)
    teacher.requires_grad_(False)
    loss_of = main.iBOTLoss(8192, 8192, 2, crops - 2, 0.04, 0.07, 0.04, 0.07, 30, epochs).to(device)
    optimizer = torch.optim.AdamW(main.utils.get_params_groups(student))
    for number, group in enumerate(optimizer.param_groups):
        group["lr"], group["weight_decay"] = 1e-6, 0.04 if number == 0 else 0.0
    scaler = torch.amp.GradScaler("cuda") if device.type == "cuda" else None
    theirs = dict(student.named_parameters())
    pairs = [(theirs[name], ours) for name, ours in teacher.named_parameters() if name in theirs]
    epoch, momentum = 1, 0.996

    def step() -> float:
        with torch.autocast(device.type, torch.float16, enabled=scaler is not None):
            teacher_output = teacher(images[:2])
            student_output = student(images[:2], mask=masks)
            student.backbone.masked_im_modeling = False
            local_cls = student(images[2:])[0] if crops > 2 else None
            student.backbone.masked_im_modeling = True
            loss = loss_of(student_output, teacher_output, local_cls, masks, epoch)["loss"]
        if not math.isfinite(loss.item()):
            raise SystemExit("iBOT's loss is not finite")
        optimizer.zero_grad()
        if scaler is None:
            loss.backward()
            main.utils.clip_gradients(student, 3.0)
            main.utils.cancel_gradients_last_layer(epoch, student, 1)
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            main.utils.clip_gradients(student, 3.0)
            main.utils.cancel_gradients_last_layer(epoch, student, 1)
            scaler.step(optimizer)
            scaler.update()
        with torch.no_grad():
            for param_q, param_k in pairs:
                param_k.data.mul_(momentum).add_((1 - momentum) * param_q.detach().data)
        return float(loss)

    return step


def _peer_network(main: ModuleType, arch: str, is_teacher: bool, device: torch.device) -> Any:
    """Backbone and shared head (`--shared_head true --norm_last_layer false --out_dim 8192`)."""
    options = {} if is_teacher else {"drop_path_rate": 0.1, "masked_im_modeling": True}
    backbone = getattr(main.models, arch)(patch_size=16, return_all_tokens=True, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its weight norm is an old one
        head: nn.Module = main.iBOTHead(
            backbone.embed_dim,
            8192,
            patch_out_dim=8192,
            norm=None,
            act="gelu",
            norm_last_layer=is_teacher,
            shared_head=True,
        )
    return main.utils.MultiCropWrapper(backbone, head).to(device)
