"""The backbone that a configuration names, with fresh random weights."""

from __future__ import annotations

import difflib
import re
import warnings
from typing import Any

import timm
import torch
from timm.models.eva import Eva
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from sop_faiss.config import ModelConfig
from sop_faiss.errors import ConfigError
from sop_faiss.model.backbones.backbone import Backbone, SwinBackbone, VitBackbone
from sop_faiss.model.backbones.conv import ConvBackbone
from sop_faiss.model.backbones.positions import resize_as_dino
from sop_faiss.model.backbones.small import SMALL_SIZES

_FIRST_FIELDS = ("backbone", "patch_size", "embed_dim", "depth", "num_heads", "window_size")
SHAPE_FIELDS = (*_FIRST_FIELDS, "layer_scale", "registers")
"""The fields of the model section that make the backbone what it is."""

_TIMM_CLS_TOKEN_STD = 1e-6
"""Of the default: the token that timm has drawn stays (0.02 in its Eva family); another one is drawn after all else."""


def build_backbone(config: ModelConfig, image_size: int, drop_path: float = 0.0) -> Backbone:
    """Make a backbone with fresh random weights from torch's global generator.

    Args:
        config: which timm model, and what to override in it.
        image_size: side of a global view in pixels; position embeddings are made for it.
        drop_path: stochastic depth; 0 for a teacher.

    Raises:
        ConfigError: timm has no such model, it is of another kind, or an override does not fit it.
    """
    _check_shape(config, image_size)
    swin, is_vit = config.backbone.startswith("swin_"), _is_vit(config.backbone)
    options: dict[str, Any] = {"drop_path_rate": drop_path} if swin or is_vit or drop_path else {}
    if swin:
        options["strict_img_size"] = False
    elif is_vit:
        options |= {"img_size": image_size, "dynamic_img_size": True}
    if _is_eva(config.backbone):
        options["global_pool"] = "token"  # so that timm's final norm comes before pooling, on every token
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # timm warns of features that are not used here
            model = timm.create_model(
                config.backbone, pretrained=False, num_classes=0, **options, **timm_overrides(config)
            )
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        reason = _reason(error)
        if drop_path and not (swin or is_vit) and isinstance(error, TypeError):
            reason += "; set model.drop_path=0"
        overrides = _overrides(config) or "no overrides"
        raise ConfigError(f"model.backbone = {config.backbone} with {overrides}: {reason}") from None
    freezes = config.batchnorm == "frozen" or (config.batchnorm == "auto" and bool(config.init))
    if not (swin or is_vit):
        return ConvBackbone(model, freezes_batchnorm=freezes)
    if config.position_resize == "dino":
        resize_as_dino(model, config.backbone)
    if isinstance(model, VisionTransformer | Eva):
        backbone = VitBackbone(model, freezes_batchnorm=freezes)
        if config.cls_token_std != _TIMM_CLS_TOKEN_STD:
            nn.init.trunc_normal_(model.cls_token, std=config.cls_token_std)
        return backbone
    if isinstance(model, SwinTransformer):
        return SwinBackbone(model)
    raise ConfigError(f"model.backbone = {config.backbone} is a {type(model).__name__}: wanted a timm ViT or Swin")


def _check_shape(config: ModelConfig, image_size: int) -> None:
    """Check that timm has the model, and that what is set of its shape applies to it."""
    if not timm.is_model(config.backbone):
        near = difflib.get_close_matches(config.backbone, timm.list_models(), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"model.backbone = {config.backbone!r}: timm has no model of this name{hint}")
    overrides, is_vit = _overrides(config), _is_vit(config.backbone)
    for name in overrides:
        applies = config.backbone.startswith("swin_") if name == "window_size" else is_vit
        if name not in SMALL_SIZES.get(config.backbone, ()) and not applies:
            raise ConfigError(f"model.{name} does not apply to {config.backbone}: remove it")
    if config.position_resize == "dino" and not is_vit:
        raise ConfigError(
            f"model.position_resize = dino does not apply to {config.backbone}, which has no position embeddings to "
            "resize: set model.position_resize=auto"
        )
    if "patch_size" in overrides and image_size < overrides["patch_size"]:
        raise ConfigError(f"model.patch_size = {overrides['patch_size']} exceeds views.global_size = {image_size}")


def _reason(error: Exception) -> str:
    """Say why timm cannot make a model."""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    if isinstance(error, RuntimeError) and re.search(r"alloc|memory|overflow", reason, re.IGNORECASE):
        reason = "there is not enough memory for it; lower model.embed_dim or model.depth"
    if "class token" in reason:
        reason = "it has no [CLS] token of its own; choose another, as vit_small_patch16_224"
    return reason


def _overrides(config: ModelConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in SHAPE_FIELDS[1:] if getattr(config, name) is not None}


def timm_overrides(config: ModelConfig) -> dict[str, Any]:
    """Return what the configuration overrides in a timm model, under the names of timm's arguments."""
    registers = "num_reg_tokens" if _is_eva(config.backbone) else "reg_tokens"
    names = {"layer_scale": "init_values", "registers": registers}
    return {names.get(name, name): value for name, value in _overrides(config).items()}


def shape_of(config: ModelConfig) -> dict[str, Any]:
    """Return `SHAPE_FIELDS` for fingerprints and exports; the later ones only where set, so that earlier ones hold."""
    shape = {name: getattr(config, name) for name in SHAPE_FIELDS}
    return {name: value for name, value in shape.items() if name in _FIRST_FIELDS or value is not None}


def _is_eva(name: str) -> bool:
    return bool(timm.models.model_entrypoint(name).__module__ == Eva.__module__)


def _is_vit(name: str) -> bool:
    return _is_eva(name) or name.startswith(("vit_", "deit"))


def seeded_backbone(config: ModelConfig, image_size: int, seed: int, drop_path: float = 0.0) -> Backbone:
    """Call `build_backbone` for the weights that `seed` determines; torch's global generator stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_backbone(config, image_size, drop_path)
