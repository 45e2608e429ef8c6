"""Our own backbones as encoders: from a run's checkpoint, from an export, or with the weights training starts from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from sop_faiss.config import Config, load_config
from sop_faiss.model.backbones.backbone import Backbone, VitBackbone
from sop_faiss.model.backbones.build import seeded_backbone
from sop_faiss.model.backbones.conv import ConvBackbone
from sop_faiss.model.backbones.positions import resize_in_architecture
from sop_faiss.model.checkpoint import config_of_run, find_checkpoint, read_backbone, run_directory
from sop_faiss.model.encoders.pooling import TOKEN_POOLINGS, features_of_last_blocks, pool_tokens, split_pooling
from sop_faiss.model.encoders.weights import fit_tensors
from sop_faiss.model.export import read_export
from sop_faiss.model.initial_weights import SHAPE_FIELDS, resolve_init

__all__ = ["SHAPE_FIELDS", "SopTrunk", "exported_trunk", "trained_trunk", "untrained_trunk"]


class SopTrunk(nn.Module):
    """A backbone whose features are asked for by the name of a pooling. Attributes as of `TimmTrunk`."""

    def __init__(self, backbone: Backbone, config: Config) -> None:
        super().__init__()
        self.network = backbone
        self.config = config
        self.mean, self.std = config.views.mean, config.views.std
        self.native_size = config.views.global_size
        self.top_value = config.data.top_value
        self.multiple = 1 if isinstance(backbone, ConvBackbone) else backbone.patch_size
        self.fixed = False
        self.poolings: tuple[str, ...] = ("mean", "gem")
        self.blocks = 0
        if isinstance(backbone, ConvBackbone):
            self.poolings = ("pooled", "mean", "gem")
        elif isinstance(backbone, VitBackbone):
            own = config.model.global_token
            self.poolings = (own, *(name for name in TOKEN_POOLINGS if name != own))
            self.blocks = len(backbone.trunk.blocks)
        self.position_resize = config.model.position_resize
        shape = {name: getattr(config.model, name) for name in SHAPE_FIELDS}
        self.architecture: dict[str, Any] = {"sop_faiss": shape | resize_in_architecture(self.position_resize)}

    def features(self, images: Float[Tensor, "b 3 h w"], pooling: str) -> Float[Tensor, "b d"]:
        """Raw features; `pooling` is one of `poolings`, or of the last blocks (see `pooling_name`)."""
        name, blocks = split_pooling(pooling)
        if blocks > 1:
            return features_of_last_blocks(self.network.trunk, images, blocks, name)
        tokens = self.network(images)
        return tokens.cls if name == "pooled" else pool_tokens(tokens.cls, tokens.patches, name)


def trained_trunk(run: Path, *, student: bool = False) -> tuple[SopTrunk, Path]:
    """The backbone of a run directory's latest checkpoint, or of the given checkpoint in one; and the checkpoint.

    Raises:
        CheckpointError: nothing usable is there, a file is damaged, or the tensors are not those of the run's config.
        ConfigError: the run's config is damaged.
    """
    checkpoint = find_checkpoint(run)
    config = config_of_run(checkpoint)
    backbone = seeded_backbone(config.model, config.views.global_size, seed=0)
    ours = read_backbone(checkpoint, student=student)
    target = f"the model of {run_directory(checkpoint) / 'config.yaml'}"
    fit_tensors(backbone, ours, origin=f"checkpoint {checkpoint}", target=target)
    return SopTrunk(backbone, config), checkpoint


def exported_trunk(directory: Path) -> SopTrunk:
    """The backbone of a directory that `sop-export` wrote; its mask token, which no feature depends on, is anew.

    Raises:
        CheckpointError: a file is missing, damaged or was changed, or the tensors are not those of its config.
    """
    config, tensors = read_export(directory)
    backbone = seeded_backbone(config.model, config.views.global_size, seed=0)
    own = {name: value for name, value in backbone.state_dict().items() if not name.startswith("trunk.")}
    ours = {**own, **{f"trunk.{name}": value for name, value in tensors.items()}}
    fit_tensors(backbone, ours, origin=f"export {directory}", target="the model of its config.json")
    return SopTrunk(backbone, config)


def untrained_trunk(config: str, seed: int) -> SopTrunk:
    """The backbone of a configuration with the weights that training with this seed starts from.

    Raises:
        ConfigError: there is no such configuration, or it is wrong.
    """
    loaded = resolve_init(load_config(config))
    backbone = seeded_backbone(loaded.model, loaded.views.global_size, seed)
    backbone.check_size("views.global_size", loaded.views.global_size)
    return SopTrunk(backbone, loaded)
