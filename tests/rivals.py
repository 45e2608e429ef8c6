"""Tiny runs of every objective, and what their networks see, written out."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sop_faiss import distributed
from sop_faiss.data.batch import Batch
from sop_faiss.data.images.source import open_source
from sop_faiss.data.stream import Batches
from sop_faiss.data.views.device_color import normalize
from sop_faiss.model.networks import Network
from sop_faiss.train.state import RunState
from tests.runs import tiny_config

KINDS = {
    "sop": ("masks.probability=1",),
    "massl": ("objective.kind=massl", "massl.capacity=24", "massl.block_size=7", "massl.fill=teacher"),
    "dino": ("objective.kind=dino", "dino.prototypes=12", "dino.freeze_last_layer_epochs=0.5"),
    "ibot": ("objective.kind=ibot", "ibot.cls.prototypes=12", "ibot.patch.prototypes=12", "masks.probability=1"),
    "ibot apart": (
        "objective.kind=ibot",
        "ibot.cls.prototypes=12",
        "ibot.patch.prototypes=9",
        "ibot.shared_head=false",
        "ibot.norm_last_layer=false",
        "ibot.freeze_last_layer_epochs=0.5",
    ),
    "distill": (
        "objective.kind=distill",
        "distill.teacher=lite0",
        "distill.direction_weight=0.5",
        "sop.patch.weight=0",
        "sop.fill=teacher",
    ),
}
"""By a name for the test: overrides of `tests/runs.py`."""
for _name in ("massl", "dino", "distill"):
    KINDS[_name] += ("masks.kind=none",)


class Seen(NamedTuple):
    """What student and teacher make of a batch before its step, token by token and view by view."""

    student: Tensor
    """Embeddings before any last layer, (V, b, d)."""
    student_patches: Tensor
    """Of the masked global views, (G, b, n, d)."""
    teacher: Tensor
    teacher_patches: Tensor


def opened(folder: Path, shards: Path, *overrides: str) -> tuple[RunState, Batches]:
    config = tiny_config(folder, "model.drop_path=0", *overrides)
    source = open_source(shards)
    state = RunState(config, torch.device("cpu"), len(source))
    ranks = distributed.rank(), distributed.world_size()
    batches = Batches(source, np.arange(len(source)), config, state.student.backbone.patch_size, *ranks)
    state.objective.fill(state.networks, batches)
    return state, batches


def see(state: RunState, batch: Batch) -> Seen:
    views, local = (
        normalize(views, colors, state.config.views, state.device)
        for views, colors in ((batch.global_views, batch.global_colors), (batch.local_views, batch.local_colors))
    )
    masks = batch.masks if state.config.masks.kind != "none" else [None] * len(views)
    student, teacher = state.student, state.teacher
    with torch.no_grad():
        seen = [student.backbone(view, mask) for view, mask in zip(views, masks, strict=True)]
        seen_locally = [student.backbone(view) for view in local]
        taught = [teacher.backbone(view) for view in views]
        return Seen(
            torch.stack([student.heads["shared"](tokens.cls) for tokens in seen + seen_locally]),
            torch.stack([student.heads["shared"](tokens.patches) for tokens in seen]),
            torch.stack([teacher.heads["shared"](tokens.cls) for tokens in taught]),
            torch.stack([teacher.heads["shared"](tokens.patches) for tokens in taught]),
        )


def logits(network: Network, head: str, embeddings: Tensor) -> Tensor:
    """Similarities to the last layer's directions, times its norms."""
    weights = {name: value.detach() for name, value in network.heads[head].named_parameters()}
    directions = weights["direction"] / weights["direction"].norm(dim=1, keepdim=True)
    return embeddings @ (directions * weights.get("norm", 1)).T
