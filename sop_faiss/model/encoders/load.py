"""Load the encoder that a user names: a packaged one, a run or an export, a timm model with weights, an official file.

The models' modules (timm, torchvision) are imported when one is made: an index can be searched by its own images
without them.
"""

from __future__ import annotations

import difflib
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sop_faiss.errors import CheckpointError, ConfigError
from sop_faiss.model.checkpoint import refuse_missing_best, scores_of_run
from sop_faiss.model.device import choose_device
from sop_faiss.model.encoders.choice import is_choice, read_choice
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.encoders.methods import Method, other_use
from sop_faiss.model.encoders.packaged import (
    PACKAGED_POOLING,
    PACKAGED_SIZE,
    packaged_architecture,
    packaged_weights,
)
from sop_faiss.model.encoders.pooling import pooling_name
from sop_faiss.model.encoders.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from sop_faiss.model.encoders.remembered import remembered_spec
from sop_faiss.model.encoders.spec import PACKAGED_ENCODERS, EncoderSpec
from sop_faiss.model.encoders.weights import read_recognized, read_weights
from sop_faiss.model.encoders.whitening import read_whitening
from sop_faiss.paths import path_state

if TYPE_CHECKING:
    from sop_faiss.model.encoders.sop_encoder import SopModel
    from sop_faiss.model.encoders.timm_encoder import TimmModel

_log = logging.getLogger(__name__)
_MODEL_FORMS = (
    f"wanted {', '.join(PACKAGED_ENCODERS)}, a run directory, a checkpoint in one, an export, an adapter, timm:NAME, "
    "dino:FILE, config:NAME or a .json of sop-index tune"
)


def encoder_of_spec(spec: EncoderSpec) -> Encoder:
    """Make the encoder that a user means, in evaluation mode, on its device.

    Raises:
        CheckpointError: weights are missing, damaged, or of another model.
        ConfigError: the model is unknown, or an option does not apply to it.
    """
    if is_choice(spec.model):
        return _encoder_of_choice(spec)
    from sop_faiss.model.encoders.sop_encoder import adapted_model, exported_model, trained_model, untrained_model
    from sop_faiss.model.export import is_export

    device = choose_device(spec.device)
    spec.refuse_idle_options()
    left_out: list[str] = []
    scores = checkpoint = method = None
    model: SopModel | TimmModel
    name = spec.model
    if spec.kind == "run" and is_export(Path(spec.place)):
        if spec.student:
            raise ConfigError(f"`student` does not apply to {spec.model}: an export holds one network")
        model = exported_model(Path(spec.place))
        name = f"{spec.model} (export)"
    elif spec.kind == "adapter":
        model = adapted_model(Path(spec.place), spec.weights)
        name = f"{spec.model} (adapter of {model.config.model.init})"
    elif spec.kind == "packaged":
        model = _packaged(spec.place)
    elif spec.kind == "run":
        model, checkpoint = trained_model(_existing_run(spec.place), student=spec.student)
        scores = scores_of_run(checkpoint)
        name = f"{spec.model} ({'student' if spec.student else 'teacher'} of {checkpoint.name})"
    elif spec.kind == "config":
        model = untrained_model(spec.place, _seed(spec.random_weights, spec.model))
    elif spec.kind == "dino":
        model, left_out, method = _official(spec)
    else:
        model, left_out, method = _timm(spec)
    name = _with_options(name, spec, model.position_resize)
    if left_out:
        few = ", ".join(left_out[:4]) + (", ..." if len(left_out) > 4 else "")
        _log.warning("%s: %d tensors of the file are not part of the encoder (%s)", name, len(left_out), few)
    encoder = _assemble(spec, model, name, left_out).to(device)
    seen = encoder.preprocess
    other = "" if method is None else other_use(method, spec, encoder.token_pooling, seen.mean, seen.std)
    if method is not None and other:
        _log.warning("%s: the weights are of %s, whose authors use %s", name, method.name, other)
    encoder.scores = scores
    encoder.spec = remembered_spec(_without_defaults(spec, encoder), checkpoint)
    return encoder


def _with_options(name: str, spec: EncoderSpec, position_resize: str) -> str:
    """Add to an encoder's name what else says which weights it has."""
    if spec.kind in ("timm", "dino") and spec.student:
        name = f"{name} (student)"
    if position_resize == "dino":
        name = f"{name}, positions resized as by DINO"
    return name if spec.random_weights is None else f"{name} (random weights, seed {spec.random_weights})"


def _encoder_of_choice(spec: EncoderSpec) -> Encoder:
    choice = read_choice(Path(spec.model), spec)
    encoder = encoder_of_spec(choice.spec)
    if encoder.fingerprint != choice.fingerprint:
        raise CheckpointError(
            f"{choice.spec.weights or choice.spec.model} has changed since {spec.model} was written: run sop-index "
            "tune again, or name the encoder itself"
        )
    return encoder


def _without_defaults(spec: EncoderSpec, encoder: Encoder) -> EncoderSpec:
    """Return a spec that says all that the encoder does, since a later version may have other defaults."""
    seen = encoder.preprocess
    has_rule = spec.kind in ("timm", "dino")
    return replace(
        spec,
        pooling=spec.pooling or encoder.model.poolings[0],
        size=seen.crop,
        mean=seen.mean,
        std=seen.std,
        scales=seen.scales,
        mirrored=seen.mirrored,
        top_value=seen.top_value,
        position_resize=encoder.model.position_resize if has_rule else spec.position_resize,
    )


def _packaged(name: str) -> TimmModel:
    from sop_faiss.model.encoders.timm_encoder import filled_model

    file = packaged_weights(name)
    # the classifier is left out without a line: nobody who names this encoder could have meant it
    model, _ = filled_model(packaged_architecture(name), read_weights(file), file=file, by_position=True)
    model.native_size = PACKAGED_SIZE
    model.poolings = (PACKAGED_POOLING, *(each for each in model.poolings if each != PACKAGED_POOLING))
    return model


def _official(spec: EncoderSpec) -> tuple[TimmModel, list[str], Method | None]:
    from sop_faiss.model.backbones.positions import rule_of_official
    from sop_faiss.model.encoders.timm_encoder import filled_model

    if spec.arch is None:
        raise ConfigError(f"{spec.model} needs `arch`, the timm name of its model, such as vit_small_patch16_224")
    file = Path(spec.place)
    tensors, method = read_recognized(file, student=spec.student, official=True)
    rule = spec.position_resize or rule_of_official(spec.arch)
    heads = None if method is None else method.heads
    model, left_out = filled_model(spec.arch, tensors, file=file, position_resize=rule, heads=heads)
    model.mean, model.std = IMAGENET_MEAN, IMAGENET_STD  # as their authors have it, not timm's weights of that name
    return model, left_out, method


def _timm(spec: EncoderSpec) -> tuple[TimmModel, list[str], Method | None]:
    from sop_faiss.model.encoders.timm_encoder import filled_model, random_model

    rule = spec.position_resize or "timm"
    if spec.weights is None:
        return random_model(spec.place, _seed(spec.random_weights, spec.model), rule), [], None
    tensors, method = read_recognized(spec.weights, student=spec.student, official=False)
    heads = None if method is None else method.heads
    model, left_out = filled_model(
        spec.place, tensors, file=spec.weights, by_position=spec.by_position, position_resize=rule, heads=heads
    )
    return model, left_out, method


def _assemble(spec: EncoderSpec, model: SopModel | TimmModel, name: str, left_out: list[str]) -> Encoder:
    pooling = spec.pooling or model.poolings[0]
    if pooling not in model.poolings:
        raise ConfigError(f"{spec.model} has no `pooling={pooling}`: wanted one of {', '.join(model.poolings)}")
    pooling = pooling_name(pooling, spec.last_blocks, model.blocks)
    preprocess = Preprocess.square(
        model.native_size if spec.size is None else spec.size,
        mean=spec.mean or _triple(model.mean) or IMAGENET_MEAN,
        std=spec.std or _triple(model.std) or IMAGENET_STD,
        multiple=model.multiple,
        top_value=model.top_value if spec.top_value is None else spec.top_value,
    )
    if spec.scales is not None:
        preprocess = replace(preprocess, scales=spec.scales)
    preprocess = replace(preprocess, mirrored=spec.mirrored)
    model.eval().requires_grad_(False)
    encoder = Encoder(model, name, preprocess, pooling, 0, tuple(left_out)).eval()
    encoder.check_preprocess(preprocess)
    encoder.token_dimension = _probe(encoder, preprocess.crop)
    if spec.whitening is not None:
        encoder.whiten_with(read_whitening(spec.whitening))
    encoder.cache = spec.cache
    return encoder


def _existing_run(text: str) -> Path:
    path = Path(text)
    if path.is_dir():
        return path
    refuse_missing_best(path)
    if path.is_file():
        raise CheckpointError(f"model {text} is a file; {_MODEL_FORMS}, or timm:NAME with `weights={text}`")
    prefix = text.partition(":")[0]
    near = difflib.get_close_matches(prefix, ("timm", "dino", "config"), n=1) if ":" in text else []
    hint = f"; did you mean {near[0]}:?" if near else ""
    raise CheckpointError(f"model {text} {path_state(path)}; {_MODEL_FORMS}{hint}")


def _seed(random_weights: int | None, model: str) -> int:
    if random_weights is None:
        or_weights = "`weights=FILE`, or " if model.startswith("timm:") else ""
        raise CheckpointError(f"{model} comes without weights: give {or_weights}`random_weights=SEED` for a baseline")
    if not 0 <= random_weights < 2**63:
        raise ConfigError(f"`random_weights={random_weights}`: wanted a seed of 0 or more")
    return random_weights


def _triple(values: tuple[float, ...]) -> tuple[float, float, float] | None:
    return (values[0], values[1], values[2]) if len(values) == 3 else None


def check_size(encoder: Encoder, size: int) -> None:
    """Raise ConfigError unless an encoder takes square images of this size, in pixels."""
    encoder.check_preprocess(Preprocess.square(size, multiple=encoder.model.multiple))
    _probe(encoder, size)


def _probe(encoder: Encoder, side: int) -> int:
    """Return the width of the features of a black image, which also shows that the model takes this size."""
    try:
        with torch.inference_mode():
            features = encoder(torch.zeros(1, 3, side, side))
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = str(error).split("\n", 1)[0]
        raise ConfigError(
            f"{encoder.name} does not take images of {side} pixels ({reason}): choose another `size`"
        ) from None
    return int(features.shape[1])


def load_encoder(
    model: str,
    *,
    weights: Path | None = None,
    arch: str | None = None,
    random_weights: int | None = None,
    pooling: str | None = None,
    last_blocks: int | None = None,
    size: int | None = None,
    mean: tuple[float, float, float] | None = None,
    std: tuple[float, float, float] | None = None,
    scales: tuple[float, ...] | None = None,
    whitening: Path | None = None,
    cache: Path | None = None,
    top_value: float | None = None,
    mirrored: bool = False,
    student: bool = False,
    by_position: bool = False,
    position_resize: str | None = None,
    device: str = "cpu",
) -> Encoder:
    """Load an encoder for evaluation; the options are the fields of `EncoderSpec`.

    Example:
        `load_encoder("lite0")`, `load_encoder("runs/photos")`, `load_encoder("exports/photos")`,
        `load_encoder("timm:resnet50", weights=Path("resnet50.safetensors"))`,
        `load_encoder("dino:dino_vits16.pth", arch="vit_small_patch16_224")`,
        `load_encoder("config:digits_demo", random_weights=0)`.

    Raises:
        CheckpointError: weights are missing, damaged, or of another model.
        ConfigError: the model is unknown, or an option does not apply to it.
    """
    spec = EncoderSpec(
        model,
        weights,
        arch,
        random_weights,
        pooling,
        last_blocks,
        size,
        mean,
        std,
        scales,
        whitening,
        cache,
        top_value,
        mirrored=mirrored,
        student=student,
        by_position=by_position,
        position_resize=position_resize,
        device=device,
    )
    return encoder_of_spec(spec)
