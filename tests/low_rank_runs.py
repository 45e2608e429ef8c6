"""A run with low-rank additions on disk, and the run that it started from, for tests."""

from __future__ import annotations

from pathlib import Path

import torch

from sop_faiss.config import Config, to_yaml
from sop_faiss.model.initial_weights import load_initial_weights, resolve_init
from sop_faiss.model.networks import Network
from sop_faiss.train.checkpoints.checkpoint import write_checkpoint
from tests.encoders import write_run
from tests.runs import networks_of, tiny_config


def low_rank_config(folder: Path, *overrides: str) -> Config:
    """A tiny ViT with additions of rank 3 to the teacher of the run `base` in the folder, which is made if missing."""
    if not (folder / "base").exists():
        write_run(folder / "base", tiny_config(folder))
    settings = ("model.drop_path=0", f"model.init={folder / 'base'}", "model.lora.rank=3")
    return resolve_init(tiny_config(folder, *settings, *overrides))


def started(config: Config) -> tuple[Network, Network]:
    """Student and teacher as a run begins with them; then what is added is random, and no longer 0."""
    student, teacher = networks_of(config)
    load_initial_weights(teacher.backbone, config.model, config.views)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, value in teacher.named_parameters():
            if name.endswith(".up"):
                value.normal_(std=0.05)
    student.load_state_dict(teacher.state_dict())
    return student, teacher


def write_low_rank_run(run: Path, config: Config) -> Path:
    """A run directory as training leaves it, with random additions."""
    student, teacher = started(config)
    run.mkdir()
    (run / "config.yaml").write_text(to_yaml(config))
    other = {name: {"unread": torch.zeros(1)} for name in ("optimizer", "objective")}
    tensors = {"student": student.state_dict(), "teacher": teacher.state_dict(), **other}
    write_checkpoint(run, 10, tensors, {"images_seen": 0, "bad_samples": 0, "best_score": None})
    return run
