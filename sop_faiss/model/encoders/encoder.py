"""Any encoder, by the name a user gives it: a run or an export of ours, a timm network with a weights file, an official
checkpoint.

An encoder is a network, a pooling and a preprocessing; perhaps a whitening. Its fingerprint says whether two sets
of features may be compared. The networks' modules (timm, torchvision) are imported when one is made: an index can be
searched by its own images without them.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sop_faiss.errors import CheckpointError, ConfigError
from sop_faiss.model.backbones.positions import rule_of_official
from sop_faiss.model.checkpoint import scores_of_run
from sop_faiss.model.device import choose_device
from sop_faiss.model.encoders.pooling import pooling_name
from sop_faiss.model.encoders.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.model.encoders.weights import read_official, read_weights
from sop_faiss.model.encoders.whitening import Whitening, read_whitening
from sop_faiss.paths import path_state

if TYPE_CHECKING:
    from sop_faiss.config import Config
    from sop_faiss.model.backbones.backbone import Backbone
    from sop_faiss.model.encoders.sop_encoder import SopTrunk
    from sop_faiss.model.encoders.timm_encoder import TimmTrunk

__all__ = ["Encoder", "EncoderSpec", "encoder_of_backbone", "encoder_of_spec", "load_encoder"]

_log = logging.getLogger(__name__)
_MODEL_FORMS = "wanted a run directory, a checkpoint in one, an export, timm:NAME, dino:FILE or config:NAME"


class Encoder(nn.Module):
    """Images to raw features, frozen.

    Attributes:
        name: what it is, for people.
        token_pooling: `cls`, `mean` (of the patch tokens), `cls_mean`, `gem` or `pooled` (the network's own); with
            `_lastN` behind it, of the last N blocks.
        preprocess: what its images must go through.
        token_dimension: width of what the network gives, before any whitening.
        whitening: what the extraction applies to its unit-norm features.
        cache: the directory in which the extraction keeps features; None: nowhere.
        scores: of the run it is from, as `scores_of_run` gives them; None: none, or not of a run.
        left_out: names of tensors in the weights file that are no part of it, such as a classifier's.
    """

    def __init__(
        self,
        trunk: SopTrunk | TimmTrunk,
        name: str,
        preprocess: Preprocess,
        pooling: str,
        feature_dim: int,
        left_out: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self.trunk = trunk
        self.name = name
        self.preprocess = preprocess
        self.token_pooling = pooling
        self.token_dimension = feature_dim
        self.left_out = left_out
        self.whitening: Whitening | None = None
        self.cache: Path | None = None
        self.scores: dict[str, Any] | None = None

    def forward(self, images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b d"]:
        """Raw features of normalized images of one size; unit norm is the extraction's work."""
        return self.trunk.features(images, self.token_pooling)

    @property
    def feature_dim(self) -> int:
        """d: width of the features, whitened if they are."""
        return self.token_dimension if self.whitening is None else self.whitening.dimension

    @property
    def pooling(self) -> str:
        """How tokens become one feature, the whitening included; features of different poolings cannot be compared."""
        if self.whitening is None:
            return self.token_pooling
        return f"{self.token_pooling}, whitened to {self.whitening.dimension} ({self.whitening.fingerprint[:12]})"

    def whiten_with(self, whitening: Whitening) -> None:
        """Have features whitened, of whatever size and scales of the images.

        Raises:
            ConfigError: it was learned from features of another encoder or pooling.
        """
        learned, own = whitening.origin, (self.fingerprint, self.token_pooling)
        if (learned.encoder_fingerprint, learned.pooling) != own:
            raise ConfigError(
                f"the whitening was learned from pooling {learned.pooling!r} of encoder "
                f"{learned.encoder_fingerprint[:12]}, this is pooling {own[1]!r} of encoder {own[0][:12]}: "
                "learn it again"
            )
        self.whitening = whitening

    @functools.cached_property
    def fingerprint(self) -> str:
        """sha256 of the architecture and of the backbone's tensors in the order of their names.

        Preprocessing and pooling are no part of it, nor is the token of masked patches, which no feature depends on: an
        export, which leaves it out, has its run's fingerprint. Computed once, when first asked for.
        """
        digest = hashlib.sha256(json.dumps(self.trunk.architecture, sort_keys=True).encode())
        for name, value in sorted(self.trunk.network.state_dict().items()):
            if name == "mask_token":
                continue
            digest.update(f"\n{name} {value.dtype} {tuple(value.shape)}\n".encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def check_preprocess(self, preprocess: Preprocess) -> None:
        """Check that images preprocessed in this way fit the network.

        Raises:
            ConfigError: the network takes images of one size only and these would have another.
        """
        native = self.trunk.native_size
        if self.trunk.fixed and (preprocess.keep_aspect or preprocess.crop != native):
            raise ConfigError(
                f"{self.name} takes only square images of {native} pixels: use `size={native}` and a crop"
            )
        if self.trunk.fixed and preprocess.scales != (1.0,):
            raise ConfigError(f"{self.name} takes only images of {native} pixels: leave `scales` out")


def encoder_of_spec(spec: EncoderSpec) -> Encoder:
    """The encoder that a user means, in evaluation mode, on its device.

    Raises:
        CheckpointError: weights are missing, damaged, or of another model.
        ConfigError: the model is unknown, or an option does not apply to it.
    """
    from sop_faiss.model.encoders.sop_encoder import exported_trunk, trained_trunk, untrained_trunk
    from sop_faiss.model.encoders.timm_encoder import filled_trunk, random_trunk
    from sop_faiss.model.export import is_export

    device = choose_device(spec.device)
    spec.refuse_idle_options()
    left_out: list[str] = []
    scores = None
    trunk: SopTrunk | TimmTrunk
    name = spec.model
    if spec.kind == "run" and is_export(Path(spec.place)):
        if spec.student:
            raise ConfigError(f"`student` does not apply to {spec.model}: an export holds one network")
        trunk = exported_trunk(Path(spec.place))
        name = f"{spec.model} (export)"
    elif spec.kind == "run":
        trunk, checkpoint = trained_trunk(_existing_run(spec.place), student=spec.student)
        scores = scores_of_run(checkpoint)
        name = f"{spec.model} ({'student' if spec.student else 'teacher'} of {checkpoint.name})"
    elif spec.kind == "config":
        trunk = untrained_trunk(spec.place, _seed(spec.random_weights, spec.model))
    elif spec.kind == "dino":
        trunk, left_out = _official(spec)
    elif spec.weights is None:
        trunk = random_trunk(spec.place, _seed(spec.random_weights, spec.model), spec.position_resize or "timm")
    else:
        trunk, left_out = filled_trunk(
            spec.place,
            read_weights(spec.weights, student=spec.student),
            file=spec.weights,
            by_position=spec.by_position,
            position_resize=spec.position_resize or "timm",
        )
    if spec.kind in ("timm", "dino") and spec.student:
        name = f"{name} (student)"
    if trunk.position_resize == "dino":
        name = f"{name}, positions resized as by DINO"
    if left_out:
        few = ", ".join(left_out[:4]) + (", ..." if len(left_out) > 4 else "")
        _log.warning("%s: %d tensors of the file are no part of the encoder (%s)", name, len(left_out), few)
    if spec.random_weights is not None:
        name = f"{name} (random weights, seed {spec.random_weights})"
    encoder = _assemble(spec, trunk, name, left_out).to(device)
    encoder.scores = scores
    return encoder


def _official(spec: EncoderSpec) -> tuple[TimmTrunk, list[str]]:
    from sop_faiss.model.encoders.timm_encoder import filled_trunk

    if spec.arch is None:
        raise ConfigError(f"{spec.model} needs `arch`, the timm name of its network, such as vit_small_patch16_224")
    file = Path(spec.place)
    tensors = read_official(file, student=spec.student)
    rule = spec.position_resize or rule_of_official(spec.arch)
    trunk, left_out = filled_trunk(spec.arch, tensors, file=file, position_resize=rule)
    trunk.mean, trunk.std = IMAGENET_MEAN, IMAGENET_STD  # as their authors have it, not timm's weights of that name
    return trunk, left_out


def _assemble(spec: EncoderSpec, trunk: SopTrunk | TimmTrunk, name: str, left_out: list[str]) -> Encoder:
    pooling = spec.pooling or trunk.poolings[0]
    if pooling not in trunk.poolings:
        raise ConfigError(f"{spec.model} has no pooling {pooling!r}: wanted one of {', '.join(trunk.poolings)}")
    pooling = pooling_name(pooling, spec.last_blocks, trunk.blocks)
    preprocess = Preprocess.square(
        trunk.native_size if spec.size is None else spec.size,
        mean=spec.mean or _triple(trunk.mean) or IMAGENET_MEAN,
        std=spec.std or _triple(trunk.std) or IMAGENET_STD,
        multiple=trunk.multiple,
        top_value=trunk.top_value if spec.top_value is None else spec.top_value,
    )
    if spec.scales is not None:
        preprocess = replace(preprocess, scales=spec.scales)
    trunk.eval().requires_grad_(False)
    encoder = Encoder(trunk, name, preprocess, pooling, 0, tuple(left_out)).eval()
    encoder.check_preprocess(preprocess)
    encoder.token_dimension = _probe(encoder)
    if spec.whitening is not None:
        encoder.whiten_with(read_whitening(spec.whitening))
    encoder.cache = spec.cache
    return encoder


def _existing_run(text: str) -> Path:
    path = Path(text)
    if path.is_dir():
        return path
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


def _probe(encoder: Encoder) -> int:
    """The width of the features of one black image, which also shows that the network takes images of this size."""
    side = encoder.preprocess.crop
    try:
        with torch.inference_mode():
            features = encoder(torch.zeros(1, 3, side, side))
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = str(error).split("\n", 1)[0]
        raise ConfigError(
            f"{encoder.name} takes no images of {side} pixels ({reason}): choose another `size`"
        ) from None
    return int(features.shape[1])


def encoder_of_backbone(backbone: Backbone, config: Config, name: str) -> Encoder:
    """A live backbone, such as a teacher's in training, as an encoder; it is shared, not copied.

    The fingerprint is computed once: ask for it only of a backbone that no longer changes.
    """
    from sop_faiss.model.encoders.sop_encoder import SopTrunk

    trunk = SopTrunk(backbone, config)
    preprocess = Preprocess.square(
        trunk.native_size, mean=trunk.mean, std=trunk.std, multiple=trunk.multiple, top_value=trunk.top_value
    )
    return Encoder(trunk, name, preprocess, trunk.poolings[0], backbone.feature_dim)


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
    student: bool = False,
    by_position: bool = False,
    position_resize: str | None = None,
    device: str = "cpu",
) -> Encoder:
    """Load an encoder for evaluation; the arguments are the fields of `EncoderSpec`.

    Example:
        `load_encoder("runs/photos")`, `load_encoder("exports/photos")`,
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
        student=student,
        by_position=by_position,
        position_resize=position_resize,
        device=device,
    )
    return encoder_of_spec(spec)
