"""The embeddings stored in a [CLS] memory step by step: by a synthetic encoder that drifts, or by a real run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from sop_faiss.config import load_config
from sop_faiss.data.stream import Batches, batch_loader
from sop_faiss.data.views.device_color import normalize
from sop_faiss.model.checkpoint import checkpoint_directories
from sop_faiss.model.networks import build_student_and_teacher
from sop_faiss.objectives.choose import choose_objective
from sop_faiss.train.checkpoints.checkpoint import load_network
from sop_faiss.verbs.training.training_images import open_indexed_images

__all__ = ["drifting_stores", "stores_of_run"]


def drifting_stores(size: int, capacity: int, dim: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield embeddings of views of 50,000 images in 500 clusters, by a linear encoder that changes with each step.

    While the memory is renewed once, the embedding of an image moves to a cosine of about 0.9 with its former value.
    """
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(500, 64, generator=generator)[torch.arange(50_000) % 500]
    images += 0.7 * torch.randn(50_000, 64, generator=generator)
    encoder = torch.randn(64, dim, generator=generator)
    keep = 0.9 ** (size / capacity)
    while True:
        encoder = keep * encoder + (1 - keep**2) ** 0.5 * torch.randn(64, dim, generator=generator)
        ids = torch.randint(len(images), (size,), generator=generator)
        views = images[ids] + 0.3 * torch.randn(size, 64, generator=generator)
        yield F.normalize(views @ encoder, dim=1), ids


@torch.no_grad()
def stores_of_run(run: Path, capacity: int, stores: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield teacher embeddings and image ids of successive batches of a run's stream, computed from its checkpoints.

    The teacher moves in a straight line from the oldest checkpoint kept to the newest while a memory is filled once and
    then receives the remaining stores, so that its rows come from encoders that differ as much as those of the run.

    Args:
        run: a run directory with two checkpoints or more; its training images are where `config.yaml` says.
        capacity: rows of the memory.
        stores: how many batches are stored after it is full.
    """
    config = load_config(run / "config.yaml")
    source, trained = open_indexed_images(config, "this benchmark")
    checkpoints = checkpoint_directories(run)
    if len(checkpoints) < 2:
        raise SystemExit(f"{run} keeps {len(checkpoints)} checkpoints: wanted two or more (train.keep_last)")
    _, teacher = build_student_and_teacher(config, choose_objective(config).heads)
    batches = Batches(source, trained, config, teacher.backbone.patch_size)
    weights = []
    for checkpoint in (checkpoints[-1], checkpoints[0]):
        load_network(teacher, checkpoint, "teacher")
        weights.append([parameter.clone() for parameter in teacher.parameters()])
    teacher.eval()
    steps = -(-capacity // config.train.batch_size) + stores
    for step, batch in enumerate(batch_loader(batches, range(steps), pin_memory=False)):
        for parameter, first, last in zip(teacher.parameters(), *weights, strict=True):
            parameter.copy_(torch.lerp(first, last, step / steps))
        stored = [min(1, len(batch.global_views) - 1)]  # as the run: the second global view, or the only one
        views = normalize(batch.global_views[stored], batch.global_colors[stored], config.views, torch.device("cpu"))
        yield teacher(views.flatten(0, 1))[0], batch.image_ids
