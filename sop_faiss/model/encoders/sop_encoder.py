"""Backbones of this package as encoders: of a run, an export or an adapter, or as training starts from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from sop_faiss.config import Config, ModelConfig, load_config
from sop_faiss.errors import CheckpointError, ConfigError
from sop_faiss.model.adapter import POSITIONS, base_fingerprint, read_adapter
from sop_faiss.model.backbones.backbone import Backbone, Tokens, VitBackbone
from sop_faiss.model.backbones.build import seeded_backbone, shape_of
from sop_faiss.model.backbones.conv import ConvBackbone
from sop_faiss.model.backbones.positions import resize_in_architecture
from sop_faiss.model.checkpoint import config_of_run, find_checkpoint, read_backbone, refuse_missing_best, run_directory
from sop_faiss.model.encoders.pooling import TOKEN_POOLINGS, features_of_last_blocks, pool_tokens, split_pooling
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.model.encoders.weights import fit_tensors
from sop_faiss.model.export import read_export
from sop_faiss.model.initial_weights import fill_backbone, resolve_init
from sop_faiss.model.low_rank import check_low_rank, low_rank_layers, merged
from sop_faiss.paths import path_state


class SopModel(nn.Module):
    """A backbone of this package whose features are chosen by the name of a pooling.

    Attributes as of `TimmModel`.
    """

    def __init__(self, backbone: Backbone, config: Config) -> None:
        super().__init__()
        self.backbone = backbone
        self.config = config
        self.mean, self.std = config.views.mean, config.views.std
        self.native_size = config.views.global_size
        self.top_value = config.data.top_value
        self.multiple = 1 if isinstance(backbone, ConvBackbone) else backbone.patch_size
        self.fixed = False
        self.poolings: tuple[str, ...] = ("mean", "gem", "quadrants")
        self.blocks = 0
        if isinstance(backbone, ConvBackbone):
            self.poolings = ("pooled", "mean", "gem", "quadrants")
        elif isinstance(backbone, VitBackbone):
            own = config.model.global_token
            self.poolings = (own, *(name for name in TOKEN_POOLINGS if name != own))
            self.blocks = len(backbone.trunk.blocks)
        self.position_resize = config.model.position_resize
        self.architecture: dict[str, Any] = {
            "sop_faiss": shape_of(config.model) | resize_in_architecture(self.position_resize)
        }

    def features(self, images: Float[Tensor, "b 3 h w"], pooling: str) -> Float[Tensor, "b d"]:
        """Compute raw features; `pooling` is one of `poolings`, or of the last blocks (see `pooling_name`)."""
        name, blocks = split_pooling(pooling)
        if blocks > 1:
            return features_of_last_blocks(self.backbone.trunk, images, blocks, name)
        return self.features_and_tokens(images, pooling)[0]

    def features_and_tokens(
        self, images: Float[Tensor, "b 3 h w"], pooling: str
    ) -> tuple[Float[Tensor, "b d"], Tokens]:
        """Compute raw features as `features` does, and the tokens."""
        tokens: Tokens = self.backbone(images)
        name, blocks = split_pooling(pooling)
        if blocks > 1:
            return self.features(images, pooling), tokens
        if name == "pooled":
            return tokens.cls, tokens
        return pool_tokens(tokens.cls, tokens.patches, tokens.grid, name), tokens


def trained_model(run: Path, *, student: bool = False) -> tuple[SopModel, Path]:
    """Read the backbone of a run directory's latest checkpoint, or of the given one; return it and the checkpoint.

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
    return SopModel(backbone, config), checkpoint


def exported_model(directory: Path) -> SopModel:
    """Read the backbone of a directory that `sop-export` wrote; its mask token, which no feature depends on, is new.

    Raises:
        CheckpointError: a file is missing, damaged or was changed, or the tensors are not those of its config.
    """
    config, tensors = read_export(directory)
    backbone = seeded_backbone(config.model, config.views.global_size, seed=0)
    own = {name: value for name, value in backbone.state_dict().items() if not name.startswith("trunk.")}
    ours = {**own, **{f"trunk.{name}": value for name, value in tensors.items()}}
    fit_tensors(backbone, ours, origin=f"export {directory}", target="the model of its config.json")
    return SopModel(backbone, config)


def adapted_model(directory: Path, weights: Path | None) -> SopModel:
    """Add an adapter to the weights that it belongs to.

    Args:
        directory: as `sop-export --adapter` wrote it.
        weights: those that its training started from; None for a packaged encoder's.

    Raises:
        CheckpointError: a file is missing, damaged or was changed, or the weights are others.
        ConfigError: weights are named where a packaged encoder's are meant, or the reverse.
    """
    adapter = read_adapter(directory)
    config, target = adapter.config, "the model of its adapter.json"
    origin = f"adapter {directory}"
    backbone = seeded_backbone(config.model, config.views.global_size, seed=0)
    fill_backbone(backbone, _placed(config.model, weights, directory))
    model = SopModel(backbone, config)
    base = backbone.state_dict()
    found = base_fingerprint(model.architecture, base)
    if found != adapter.base_fingerprint:
        raise CheckpointError(
            f"{origin} belongs to {config.model.init} ({adapter.base_fingerprint[:12]}), and "
            f"{weights or config.model.init} is another network ({found[:12]}): give the weights that its training "
            "started from by `weights`"
        )
    check_low_rank(base, adapter.tensors, config.model.lora, origin)
    wanted = {f"{name}.{part}" for name in low_rank_layers(backbone, config.model.lora) for part in ("down", "up")}
    if adapter.tensors.keys() != wanted or adapter.positions.keys() != base.keys() & {POSITIONS}:
        raise CheckpointError(f"{origin} has other layers than its adapter.json says: it was changed; export it again")
    tensors = merged(base, adapter.tensors, config.model.lora.scale) | adapter.positions
    fit_tensors(backbone, tensors, origin=origin, target=target)
    return model


def _placed(model: ModelConfig, weights: Path | None, directory: Path) -> ModelConfig:
    """Return the model section with the place of the weights that an adapter belongs to in `init` and `weights`."""
    kind = EncoderSpec(model.init).kind
    if kind == "packaged":
        if weights is not None:
            raise ConfigError(
                f"`weights={weights}`: {directory} belongs to {model.init}, which is installed: leave it out"
            )
        return model
    wanted = {"timm": "the weights file", "dino": "the file"}.get(kind, "the run directory")
    if weights is None:
        raise ConfigError(
            f"{directory} belongs to {model.init}: give {wanted} that its training started from by `weights`"
        )
    if kind == "timm":
        return replace(model, weights=str(weights))
    if kind == "dino":
        return replace(model, init=f"dino:{weights}")
    refuse_missing_best(weights)
    if not weights.is_dir():
        raise CheckpointError(
            f"`weights={weights}` {path_state(weights)}: {directory} belongs to a run; wanted {wanted}"
        )
    return replace(model, init=str(weights.absolute()))


def untrained_model(config: str, seed: int) -> SopModel:
    """Make the backbone of a configuration with the weights that training with this seed starts from.

    Raises:
        ConfigError: there is no such configuration, or it is wrong.
    """
    loaded = resolve_init(load_config(config))
    backbone = seeded_backbone(loaded.model, loaded.views.global_size, seed)
    backbone.check_size("views.global_size", loaded.views.global_size)
    return SopModel(backbone, loaded)
