"""The embeddings that a real run stores in its [CLS] memory, step by step, made anew from two of its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from sop_faiss.config import load_config
from sop_faiss.data.source import open_source
from sop_faiss.data.stream import Batches, batch_loader, split_holdout
from sop_faiss.model.checkpoint import checkpoint_directories
from sop_faiss.model.teacher import build_student_and_teacher
from sop_faiss.train.checkpoint import load_network
from sop_faiss.train.loop import normalise

__all__ = ["stores_of_run"]


@torch.no_grad()
def stores_of_run(run: Path, capacity: int, stores: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Teacher embeddings and image ids of successive batches of the run's own stream.

    The teacher moves in a straight line from the oldest checkpoint that is kept to the newest while a memory is filled
    once and then receives the remaining stores, so that its rows are of encoders as different as the run's were.

    Args:
        run: a run directory with two checkpoints or more; its training images are where `config.yaml` says.
        capacity: rows of the memory.
        stores: how many batches are stored after it is full.
    """
    config = load_config(run / "config.yaml")
    source = open_source(config.data.train)
    trained, _ = split_holdout(len(source), config.data.holdout_share, config.train.seed)
    checkpoints = checkpoint_directories(run)
    if len(checkpoints) < 2:
        raise SystemExit(f"{run} keeps {len(checkpoints)} checkpoints: wanted two or more (train.keep_last)")
    _, teacher = build_student_and_teacher(config)
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
        views = normalise(batch.global_views[1:2], config, torch.device("cpu"))
        yield teacher(views.flatten(0, 1))[0], batch.image_ids
