"""A run in a few lines, for what `sop-train` takes only by name: a source of images, an objective, a maker of views.

Checkpoints, scores, alarms and several ranks are left out: `sop_faiss/train/loop.py` and `verbs/training/train.py` have
them.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from sop_faiss.config import Config, load_config
from sop_faiss.data.batch_writer import BatchWriter
from sop_faiss.data.images.source import ImageSource
from sop_faiss.data.stream import Batches
from sop_faiss.data.views.multicrop import MultiCrop
from sop_faiss.objectives.objective import Objective
from sop_faiss.train.loop import train_step
from sop_faiss.train.state import RunState

TINY = load_config(Path(__file__).with_name("tiny.yaml"))


def train(
    source: ImageSource,
    config: Config = TINY,
    steps: int = 3,
    objective: Objective | None = None,
    views: Callable[[Config, int], MultiCrop] = MultiCrop,
) -> tuple[RunState, list[float]]:
    """Train a new network for some steps; return the run and the losses. `objective` has the heads of the config's."""
    state = RunState(config, torch.device("cpu"), len(source))
    if objective is not None:
        state.objective = objective
        objective.open(state.device, len(source))
    positions = np.arange(len(source))
    batches = Batches(source, positions, config, state.student.backbone.patch_size)
    batches.writer = BatchWriter(source, positions, views(config, batches.local_count))
    return state, [float(train_step(state, batches[step]).metrics["loss"]) for step in range(steps)]
