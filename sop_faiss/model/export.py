"""Exports: a directory with a backbone that timm, Hugging Face's timm loader and this package read.

model.safetensors  the backbone's tensors under timm's names
config.json        timm's description of it, and under `sop_faiss` what makes it the same encoder in this package

The mask token and the projector are left out: no feature depends on them. So an export has the fingerprint of its run,
which is computed from its tensors, not read from its config.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.models.eva import Eva
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from sop_faiss.config import Config, config_of
from sop_faiss.errors import CheckpointError, SopError
from sop_faiss.files import read_json, sha256_file
from sop_faiss.model.backbones.build import shape_of, timm_overrides
from sop_faiss.model.backbones.positions import resize_in_architecture
from sop_faiss.model.encoders.preprocess import Preprocess

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
FORMAT = "sop_faiss export 1"
_VIEW_FIELDS = ("global_size", "mean", "std")


def is_export(path: Path) -> bool:
    """Return whether a path is a directory that looks like an export."""
    return (path / CONFIG_FILE).is_file() and not (path / "state.json").is_file()


def model_arguments(model: nn.Module, config: Config) -> dict[str, Any]:
    """Return the arguments with which `timm.create_model` makes this model again, with the run's pooling at its end."""
    settings = config.model
    arguments = timm_overrides(settings)
    if isinstance(model, VisionTransformer | Eva):
        arguments |= {"img_size": config.views.global_size, "dynamic_img_size": True}
        if settings.global_token == "cls":
            return {**arguments, "global_pool": "token"}
        norm_after_mean = "use_fc_norm" if isinstance(model, Eva) else "fc_norm"
        return {**arguments, "global_pool": "avg", norm_after_mean: False}  # the norm stays before it, as in training
    if isinstance(model, SwinTransformer):
        arguments["strict_img_size"] = False
    return arguments


def timm_config(model: nn.Module, config: Config, preprocess: Preprocess, weights_sha256: str) -> dict[str, Any]:
    """Return the content of config.json.

    Args:
        model: of timm.
        preprocess: of its encoder.
        weights_sha256: of model.safetensors.
    """
    known: Any = getattr(model, "pretrained_cfg", {})
    pooling: Any = getattr(model, "global_pool", "avg")  # a name, or in timm's ResNets the module itself
    arguments = model_arguments(model, config)
    side = preprocess.crop
    return {
        "architecture": config.model.backbone,
        "num_classes": 0,
        "num_features": int(getattr(model, "num_features", 0)),
        "global_pool": arguments.get("global_pool", getattr(pooling, "pool_type", pooling)),
        "model_args": arguments,
        "pretrained_cfg": {
            "tag": "sop",
            "custom_load": False,
            "input_size": [3, side, side],
            "fixed_input_size": False,
            "interpolation": preprocess.interpolation,
            "crop_pct": _crop_share(side, preprocess.resize),
            "crop_mode": "center",
            "mean": list(preprocess.mean),
            "std": list(preprocess.std),
            "num_classes": 0,
            "pool_size": None,
            "first_conv": known.get("first_conv"),
            "classifier": known.get("classifier"),
        },
        "sop_faiss": {
            "format": FORMAT,
            "weights_sha256": weights_sha256,
            **settings_of_encoder(config),
        },
    }


def settings_of_encoder(config: Config) -> dict[str, dict[str, Any]]:
    """Return the settings of a run that make its encoder what it is, by section."""
    return {
        "model": shape_of(config.model)
        | {"global_token": config.model.global_token}
        | resize_in_architecture(config.model.position_resize),
        "views": {name: getattr(config.views, name) for name in _VIEW_FIELDS},
        "data": {"top_value": config.data.top_value},
    }


def _crop_share(crop: int, resize: int) -> float:
    """Return `crop_pct`, so that timm, which takes floor(crop / crop_pct), resizes to the same number of pixels."""
    share = crop / resize
    while math.floor(crop / share) < resize:
        share = math.nextafter(share, 0)
    return share


def read_export(directory: Path) -> tuple[Config, dict[str, Tensor]]:
    """Return the configuration of an exported backbone, and its tensors under timm's names.

    Raises:
        CheckpointError: it is not an export of sop-export, or a file is missing, damaged or was changed.
    """
    config_file, weights = directory / CONFIG_FILE, directory / WEIGHTS_FILE
    try:
        content = read_json(config_file)
    except SopError as error:
        raise CheckpointError(f"export {directory}: {error}") from None
    ours = content.get("sop_faiss") if isinstance(content, dict) else None
    if not isinstance(ours, dict) or ours.get("format") != FORMAT:
        raise CheckpointError(
            f"{directory} has a {CONFIG_FILE}, but not of sop-export ({FORMAT}): give the weights of another model by "
            "timm:NAME and `weights=FILE`"
        )
    config = _config_in(ours, config_file)
    if not weights.is_file():
        raise CheckpointError(f"export {directory} lacks {WEIGHTS_FILE}: it is incomplete")
    if sha256_file(weights) != ours.get("weights_sha256"):
        raise CheckpointError(f"{weights} is damaged or was changed (its checksum differs): export again")
    try:
        return config, load_file(weights)
    except SafetensorError as error:
        raise CheckpointError(f"{weights} cannot be read: {str(error).splitlines()[0]}") from None


def _config_in(ours: dict[str, Any], file: Path) -> Config:
    """Return the configuration of an encoder alone, without losses and data."""
    model, views, data = ours.get("model"), ours.get("views"), ours.get("data", {})
    if not isinstance(model, dict) or not isinstance(views, dict):
        raise CheckpointError(f"{file} was changed: its section sop_faiss has no model or no views")
    try:
        sections = {"model": model, "views": views, "data": data, "sop": {"patch": {"weight": 0.0}}}
        return config_of(sections, str(file))
    except SopError as error:
        raise CheckpointError(f"{error}: export again") from None
