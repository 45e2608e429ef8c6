"""Tiny training runs for tests."""

from __future__ import annotations

from pathlib import Path

from sop_faiss.config import Config, load_config
from sop_faiss.model.networks import Network, build_student_and_teacher
from sop_faiss.objectives.choose import choose_objective

TINY = """
data: {workers: 0}
views: {global_size: 16, global_scale: [0.4, 1.0], local_count: 1, local_size: 8, local_scale: [0.1, 0.4]}
masks: {probability: 0.5}
model:
  backbone: vit_tiny_patch16_224
  patch_size: 4
  embed_dim: 24
  depth: 2
  num_heads: 2
  drop_path: 0.1
  projector_hidden: 16
  embedding_dim: 8
sop:
  cls: {capacity: 40, num_anchors: 8, num_supports: 3, tasks: 2}
  patch: {capacity: 24, num_anchors: 6, num_supports: 0, tasks: 1}
optim: {base_lr: 0.01, warmup_epochs: 1.0}
train: {epochs: 6.0, batch_size: 6, checkpoint_every_steps: 3, log_every_steps: 1, device: cpu}
"""


def tiny_config_file(folder: Path) -> Path:
    """The configuration above as a file."""
    path = folder / "tiny.yaml"
    path.write_text(TINY)
    return path


def tiny_config(folder: Path, *overrides: str) -> Config:
    """The configuration above, with overrides."""
    return load_config(tiny_config_file(folder), overrides)


def networks_of(config: Config) -> tuple[Network, Network]:
    """Student and teacher as a run starts with them."""
    return build_student_and_teacher(config, choose_objective(config).heads)


def conv_config(folder: Path, *overrides: str) -> Config:
    """The configuration above for a small ResNet on views of 64 and 32 pixels, without masks."""
    plain = [f"model.{name}=null" for name in ("patch_size", "embed_dim", "depth", "num_heads")]
    views = ["views.global_size=64", "views.local_size=32", "masks.kind=none"]
    if not any(override.startswith("objective.kind=") for override in overrides):
        views.append("sop.patch.weight=0")
    return tiny_config(folder, "model.backbone=test_resnet", "model.drop_path=0", *plain, *views, *overrides)
