"""Features of very many augmented views of photos, to try indices at full size.

A million different photos are rarely available, and random vectors are not a useful test: they have no neighbors.
Therefore each photo is encoded in many random crops and colors, at the small size of a small encoder. [CLS] and the
mean of the patches are concatenated, and each vector has unit norm.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.lib.format import open_memmap

from sop_faiss.config import DataConfig, load_config
from sop_faiss.data.images.source import open_source
from sop_faiss.data.stream import Batches, batch_loader, split_holdout
from sop_faiss.data.views.device_color import normalize
from sop_faiss.model.checkpoint import find_checkpoint
from sop_faiss.model.encoders.sop_encoder import trained_model

__all__ = ["write_photo_features"]

_BATCH, _HELD_OUT = 256, 0.1


@torch.inference_mode()
def write_photo_features(run: Path, photos: str, count: int, queries: int, folder: Path) -> None:
    """Write `gallery.npy` (count, 2 d) and `queries.npy` (queries, 2 d), of views of other photos, in float32.

    Args:
        run: a run directory; its teacher and its views are used.
        photos: SRC.
        count: rows of the gallery.
        queries: rows of views of a tenth of the photos, of which the gallery has no view.
        folder: a folder to create.
    """
    model, _ = trained_model(run)
    model.eval()
    config = load_config(find_checkpoint(run).parent.parent / "config.yaml")
    config = replace(
        config,
        data=DataConfig(workers=2, decoded_cache_bytes=800_000_000),
        train=replace(config.train, batch_size=_BATCH),
    )
    source = open_source(photos)
    folder.mkdir(parents=True, exist_ok=True)
    for name, positions, rows in zip(
        ("gallery", "queries"), split_holdout(len(source), _HELD_OUT, 0), (count, queries), strict=True
    ):
        out = open_memmap(folder / f".{name}.npy", "w+", np.float32, (rows, 2 * model.backbone.feature_dim))
        batches = Batches(source, positions, config, model.multiple)
        per_step = _BATCH * config.views.global_count
        for step, batch in enumerate(batch_loader(batches, range(-(-rows // per_step)), pin_memory=False)):
            views = normalize(batch.global_views, batch.global_colors, config.views, torch.device("cpu"))
            tokens = model.backbone(views.flatten(0, 1))
            features = torch.cat([tokens.cls, tokens.patches.mean(1)], 1)
            part = torch.nn.functional.normalize(features, dim=1).numpy()[: rows - step * per_step]
            out[step * per_step : step * per_step + len(part)] = part
            if step % 100 == 0:
                print(f"{name}: {step * per_step:,} of {rows:,}", file=sys.stderr, flush=True)
        out.flush()
        (folder / f".{name}.npy").rename(folder / f"{name}.npy")
