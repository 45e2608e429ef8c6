"""What a run starts from: the backbone of any encoder (`model.init`), or random weights."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from sop_faiss import distributed
from sop_faiss.config import Config, ModelConfig, ViewsConfig
from sop_faiss.errors import CheckpointError, ConfigError
from sop_faiss.files import sha256_file
from sop_faiss.model.backbones.backbone import Backbone, VitBackbone
from sop_faiss.model.backbones.build import SHAPE_FIELDS, seeded_backbone
from sop_faiss.model.backbones.positions import resample_positions, rule_of_official
from sop_faiss.model.checkpoint import config_of_run, find_checkpoint, read_backbone, refuse_missing_best
from sop_faiss.model.encoders.methods import Method, names_of_model, other_normalization
from sop_faiss.model.encoders.packaged import packaged_architecture, packaged_weights
from sop_faiss.model.encoders.preprocess import IMAGENET_MEAN, IMAGENET_STD
from sop_faiss.model.encoders.spec import PACKAGED_ENCODERS, EncoderSpec
from sop_faiss.model.encoders.timm_encoder import require_timm_name, timm_settings, wanted_heads
from sop_faiss.model.encoders.weights import fit_tensors, fit_tensors_by_position, read_recognized, read_weights
from sop_faiss.model.low_rank import fill_base
from sop_faiss.paths import path_state

_log = logging.getLogger(__name__)
_INIT_FORMS = f"{', '.join(PACKAGED_ENCODERS)}, timm:NAME, dino:FILE, a run directory or a checkpoint in one"


class _Source(NamedTuple):
    """What `model.init` determines besides the weights: fields of the model section, and how images were normalized."""

    shape: dict[str, Any]
    position_resize: str
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


def resolve_init(config: Config, stored: Config | None = None, *, weights_needed: bool = True) -> Config:
    """Fill in what `model.init` determines: the backbone's shape, and mean and std of views.

    A field at its default follows the encoder, with a line in the log; any other must agree (the backbone's) or stays
    as it is (mean and std). Resolving twice changes nothing.

    Args:
        config: of a run.
        stored: the same as a run was started with; it is used instead of another run, which may be gone.
        weights_needed: False where the shape alone is wanted: `model.init=timm:NAME` may then be without its file.

    Raises:
        CheckpointError: the run that `model.init` names cannot be used.
        ConfigError: `model.init` is of an unknown form, lacks its weights, or contradicts the backbone.
    """
    was_auto = stored is not None and stored.model.position_resize == "auto"
    if was_auto and config.model.position_resize != "auto":
        _log_once("model.position_resize stays auto, as this run was started, and not %s", config.model.position_resize)
        config = replace(config, model=replace(config.model, position_resize="auto"))
    if not config.model.init:
        return config
    spec = _spec(config.model, weights_needed)
    if spec.kind == "run" and stored is not None and stored.model.init == config.model.init:
        source = _source_of_config(stored)
    else:
        source = _source(spec, config.model.backbone)
    defaults = ModelConfig()
    changes = {name: value for name, value in source.shape.items() if getattr(config.model, name) != value}
    for name, value in changes.items():
        given = getattr(config.model, name)
        if given != getattr(defaults, name):
            raise ConfigError(
                f"model.{name} = {given}, but model.init = {config.model.init} has {value}: leave model.{name} out"
            )
    if not was_auto:
        changes["position_resize"] = _position_resize(config.model, source.position_resize)
    views, untouched = config.views, ViewsConfig()
    wanted = (source.mean, source.std)
    if (views.mean, views.std) == (untouched.mean, untouched.std) != wanted:
        views = replace(views, mean=source.mean, std=source.std)
        _log_once("views.mean and views.std follow %s: %s and %s", config.model.init, *wanted)
    elif (views.mean, views.std) != wanted:
        mine = (views.mean, views.std)
        _log_once("views.mean and views.std stay %s and %s; %s was trained with %s and %s", *mine, spec.model, *wanted)
    return replace(config, model=replace(config.model, **changes), views=views)


def _position_resize(model: ModelConfig, wanted: str) -> str:
    if model.position_resize == "auto":
        return wanted
    if model.position_resize != wanted:
        _log_once("model.position_resize stays %s; %s has %s", model.position_resize, model.init, wanted)
    return model.position_resize


def _log_once(*line: object) -> None:
    if distributed.is_main():
        _log.info(*line)  # type: ignore[arg-type]


def _spec(model: ModelConfig, weights_needed: bool = True) -> EncoderSpec:
    spec = EncoderSpec(model.init, Path(model.weights) if model.weights else None, by_position=model.by_position)
    if spec.kind == "config":
        raise ConfigError(
            f"model.init = {model.init} would be random weights, which a run has without it: wanted {_INIT_FORMS}"
        )
    if spec.kind == "packaged" and spec.weights is not None:
        raise ConfigError(
            f"model.init = {model.init} has its own weights, and `weights={spec.weights}` (model.weights) are others: "
            "name their network, as model.init=timm:resnet50, or leave them out"
        )
    if spec.kind == "adapter":
        raise ConfigError(
            f"model.init = {model.init} is an adapter, and training starts from complete weights: name the run that it "
            "was exported from"
        )
    spec.refuse_idle_options()
    if spec.kind == "timm" and spec.weights is None and weights_needed:
        raise ConfigError(f"model.init = {model.init} comes without weights: give `weights=FILE` (model.weights)")
    return spec


def _source(spec: EncoderSpec, backbone: str) -> _Source:
    if spec.kind == "run":
        return _source_of_config(config_of_run(_run_checkpoint(spec.place)))
    if spec.kind == "dino":  # all of these methods' authors normalize so, whatever timm's weights of that name want
        return _Source({}, rule_of_official(backbone), IMAGENET_MEAN, IMAGENET_STD)
    name = packaged_architecture(spec.place) if spec.kind == "packaged" else spec.place
    require_timm_name(name)
    settings = timm_settings(name)
    mean, std = settings.get("mean", IMAGENET_MEAN), settings.get("std", IMAGENET_STD)
    return _Source({"backbone": name.partition(".")[0]}, "timm", tuple(mean), tuple(std))


def _source_of_config(config: Config) -> _Source:
    shape = {name: getattr(config.model, name) for name in SHAPE_FIELDS}
    resize = "dino" if config.model.position_resize == "dino" else "timm"
    return _Source(shape, resize, config.views.mean, config.views.std)


def _run_checkpoint(text: str) -> Path:
    refuse_missing_best(Path(text))
    if not Path(text).is_dir():
        raise CheckpointError(f"model.init = {text} {path_state(text)}: wanted {_INIT_FORMS}")
    return find_checkpoint(Path(text))


def load_initial_weights(backbone: Backbone, model: ModelConfig, views: ViewsConfig | None = None) -> str:
    """Fill a backbone from `model.init`; with low-rank additions, what these are added to.

    Args:
        backbone: as built from the configuration that `resolve_init` gives.
        model: says where the weights are.
        views: of the run, needed with additions; a line says so if the weights' authors normalize images in another
            way.

    Returns:
        sha256 of the file with the weights.

    Raises:
        CheckpointError: it is missing or damaged, or its tensors do not fit the backbone.
        ConfigError: as `resolve_init`.
    """
    plain = backbone
    if model.lora.rank:
        assert views is not None
        plain = seeded_backbone(model, views.global_size, seed=0)
    file, left_out, method = fill_backbone(plain, model, note=_log_once)
    if plain is not backbone:
        fill_base(backbone, plain)
    few = ", ".join(left_out[:4]) + (", ..." if len(left_out) > 4 else "")
    _log_once("the backbone starts from %s%s", file, f", without {len(left_out)} tensors ({few})" if left_out else "")
    if method is not None and views is not None and other_normalization(method, views.mean, views.std):
        imagenet = (list(IMAGENET_MEAN), list(IMAGENET_STD))
        _log_once("the authors of %s normalize images by views.mean=%s views.std=%s", method.name, *imagenet)
    return sha256_file(file)


def fill_backbone(
    backbone: Backbone, model: ModelConfig, note: Callable[..., None] = lambda *line: None
) -> tuple[Path, list[str], Method | None]:
    """Fill a backbone without additions from `model.init`; return the file, what was left out of it, and its method.

    Args:
        backbone: as of `load_initial_weights`.
        model: as of `load_initial_weights`.
        note: is given a line for the log if position embeddings are resampled.

    Raises:
        CheckpointError: as `load_initial_weights`.
        ConfigError: as `load_initial_weights`.
    """
    spec = _spec(model)
    target: nn.Module = backbone.trunk
    method = None
    if spec.kind == "run":
        checkpoint = _run_checkpoint(spec.place)
        file, tensors, target = checkpoint / "teacher.safetensors", read_backbone(checkpoint), backbone
    elif spec.kind == "dino":
        file = Path(spec.place)
        tensors, method = read_recognized(file, student=False, official=True)
    elif spec.kind == "packaged":
        file = packaged_weights(spec.place)
        tensors = read_weights(file)
    else:
        assert spec.weights is not None  # checked by `_spec`
        file = spec.weights
        tensors, method = read_recognized(file, student=False, official=False)
    named = {"origin": f"weights {file}", "target": f"model.backbone = {model.backbone}"}
    if model.by_position or spec.kind == "packaged":
        if file.suffix == ".safetensors":
            raise CheckpointError(
                f"{file} cannot be matched by position: safetensors keeps no order; use the .pth file"
            )
        left_out = fit_tensors_by_position(target, tensors, **named)
    else:
        tensors = names_of_model(target.state_dict(), tensors)
        if isinstance(backbone, VitBackbone):
            if "norm.weight" not in tensors:  # timm's Eva family norms the mean of its tokens, a backbone each token
                tensors = {re.sub(r"^fc_norm\.", "norm.", name): value for name, value in tensors.items()}
            tensors = _with_resampled_positions(backbone, tensors, model.position_resize, note)
        left_out = fit_tensors(target, tensors, **named, heads=_classifiers(model.backbone))
    heads = None if method is None else wanted_heads(backbone.trunk, method.heads)
    if method is not None and heads is not None:
        raise ConfigError(
            f"model.init = {model.init}: the ViT of {method.name} has {heads} attention heads, {model.backbone} has "
            f"another number: set model.num_heads={heads}"
        )
    return file, left_out, method


def _classifiers(name: str) -> tuple[str, ...]:
    """Return what the names of a model's classifier start with."""
    named = timm_settings(name).get("classifier") or ()
    return tuple(f"{head}." for head in ((named,) if isinstance(named, str) else named))


def _with_resampled_positions(
    backbone: VitBackbone, tensors: Mapping[str, Tensor], position_resize: str, note: Callable[..., None]
) -> dict[str, Tensor]:
    """Bring position embeddings of another grid to the backbone's, as it does itself for views of other sizes."""
    result, model = dict(tensors), backbone.trunk
    name = next((name for name in ("pos_embed", "trunk.pos_embed") if name in tensors), None)
    if name is None or model.pos_embed is None:
        return result
    positions, own, grid = tensors[name], model.pos_embed, list(model.patch_embed.grid_size)
    prefix = own.shape[1] - grid[0] * grid[1]  # [CLS] and registers
    if positions.ndim != 3 or positions.shape[2] != own.shape[2] or positions.shape == own.shape:
        return result
    side = math.isqrt(max(0, positions.shape[1] - prefix))
    if side and side**2 == positions.shape[1] - prefix:
        rule = "dino" if position_resize == "dino" else "timm"
        result[name] = resample_positions(positions, grid, [side, side], prefix=prefix, rule=rule)
        note("position embeddings are resampled from %d x %d to %d x %d", side, side, *grid)
    return result
