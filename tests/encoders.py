"""Small encoders on disk for tests: a run directory, a timm weights file, an official checkpoint."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import save_file
from torch import nn

from sop_faiss.config import Config, ModelConfig, ViewsConfig, to_yaml
from sop_faiss.files import sha256_file
from sop_faiss.model.backbones.build import seeded_backbone
from sop_faiss.model.checkpoint import FORMAT

TINY_MODEL = ModelConfig(
    backbone="vit_tiny_patch16_224",
    patch_size=8,
    embed_dim=32,
    depth=2,
    num_heads=2,
    drop_path=0.1,
    projector_hidden=16,
    embedding_dim=8,
)


def tiny_config(**model: Any) -> Config:
    """A ViT of 32 dimensions on 32-px images in patches of 8."""
    fields = {**TINY_MODEL.__dict__, **model}
    views = ViewsConfig(global_size=32, local_count=0, mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3))
    return Config(model=ModelConfig(**fields), views=views)


def write_run(run: Path, config: Config | None = None, step: int = 10) -> Path:
    """A run directory as training leaves it; the student's weights are of seed 1, the teacher's of seed 2."""
    config = config or tiny_config()
    checkpoint = run / "checkpoints" / f"step_{step:08d}"
    checkpoint.mkdir(parents=True)
    (run / "config.yaml").write_text(to_yaml(config))
    for seed, role in ((1, "student"), (2, "teacher")):
        backbone = seeded_backbone(config.model, config.views.global_size, seed=seed)
        tensors = {f"backbone.{name}": value.contiguous() for name, value in backbone.state_dict().items()}
        hidden, features = config.model.projector_hidden, backbone.feature_dim
        tensors["heads.shared.mlp.0.weight"] = torch.full((hidden, features), seed / 100)
        tensors["heads.shared.mlp.0.bias"] = torch.arange(hidden).float()
        save_file(tensors, checkpoint / f"{role}.safetensors")
    for name in ("optimizer", "objective"):
        save_file({"unread": torch.zeros(1)}, checkpoint / f"{name}.safetensors")
    sums = {file.name: sha256_file(file) for file in checkpoint.glob("*.safetensors")}
    counters = {"images_seen": 0, "bad_samples": 0, "best_score": None}
    (checkpoint / "state.json").write_text(json.dumps({"format": FORMAT, "step": step, **counters, "sha256": sums}))
    (run / "latest").write_text(checkpoint.name)
    return run


def timm_network(name: str, seed: int = 3, num_classes: int = 5, **options: Any) -> nn.Module:
    """A timm network whose weights, batch statistics included, are random."""
    torch.manual_seed(seed)
    network: nn.Module = timm.create_model(name, num_classes=num_classes, **options)
    for key, buffer in network.named_buffers():
        if key.endswith("running_mean"):
            buffer.normal_(std=0.1)
        elif key.endswith("running_var"):
            buffer.uniform_(0.5, 1.5)
    return network.eval()


def write_official(path: Path, networks: dict[str, nn.Module], **extra: Any) -> Path:
    """A full checkpoint of DINO's kind: teacher and student with their wrappers' prefixes, and the arguments."""
    content: dict[str, Any] = {"epoch": 3, "args": argparse.Namespace(arch="vit_small", lr=1e-3), **extra}
    for role, network in networks.items():
        wrapper = "module.backbone." if role == "student" else "backbone."
        tensors = {wrapper + key: value for key, value in network.state_dict().items() if not key.startswith("head.")}
        content[role] = {**tensors, wrapper.replace("backbone", "head") + "mlp.0.weight": torch.zeros(3, 3)}
    torch.save(content, path)
    return path


def random_images(side: int = 32, count: int = 3, width: int | None = None) -> torch.Tensor:
    """Normalized images, always the same."""
    return torch.randn(count, 3, side, width or side, generator=torch.Generator().manual_seed(0))


def timm_features(network: Any, batch: torch.Tensor) -> torch.Tensor:
    """timm's own features: its forward pass without the classifier."""
    with torch.no_grad():
        features: torch.Tensor = network.forward_head(network.forward_features(batch), pre_logits=True)
    return features.flatten(1)
