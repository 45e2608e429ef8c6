"""Any encoder, by the name a user gives it: a run of ours, a timm network with a weights file, an official checkpoint.

An encoder is a network, a pooling and a preprocessing. Its fingerprint says whether two sets of features
may be compared.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
import logging
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sop_faiss.config import Config
from sop_faiss.errors import CheckpointError, ConfigError
from sop_faiss.model.backbone import Backbone
from sop_faiss.model.device import choose_device
from sop_faiss.model.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from sop_faiss.model.sop_trunk import SopTrunk, trained_trunk, untrained_trunk
from sop_faiss.model.spec import EncoderSpec
from sop_faiss.model.timm_trunk import TimmTrunk, filled_trunk, random_trunk
from sop_faiss.model.weights import read_official, read_weights

__all__ = ["Encoder", "EncoderSpec", "encoder_of_backbone", "encoder_of_spec", "load_encoder"]

_log = logging.getLogger(__name__)
_MODEL_FORMS = "wanted a run directory, a checkpoint in one, timm:NAME, dino:FILE or config:NAME"


class Encoder(nn.Module):
    """Images to raw features, frozen.

    Attributes:
        name: what it is, for people.
        pooling: `cls`, `mean` (of the patch tokens) or `pooled` (the network's own).
        preprocess: what its images must go through.
        feature_dim: d.
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
        self.pooling = pooling
        self.feature_dim = feature_dim
        self.left_out = left_out

    def forward(self, images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b d"]:
        """Raw features of normalised images of one size; unit norm is the extraction's work."""
        return self.trunk.features(images, self.pooling)

    @functools.cached_property
    def fingerprint(self) -> str:
        """sha256 of the architecture and of the backbone's tensors in the order of their names.

        Preprocessing and pooling are no part of it. Computed once, when first asked for.
        """
        digest = hashlib.sha256(json.dumps(self.trunk.architecture, sort_keys=True).encode())
        for name, value in sorted(self.trunk.network.state_dict().items()):
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
                f"{self.name} takes only square images of {native} pixels: use --size {native} and a crop"
            )


def encoder_of_spec(spec: EncoderSpec) -> Encoder:
    """The encoder that a user means, in evaluation mode, on its device.

    Raises:
        CheckpointError: weights are missing, damaged, or of another model.
        ConfigError: the model is unknown, or an option does not apply to it.
    """
    device = choose_device(spec.device)
    spec.refuse_idle_options()
    left_out: list[str] = []
    trunk: SopTrunk | TimmTrunk
    name = spec.model
    if spec.kind == "run":
        trunk, checkpoint = trained_trunk(_existing_run(spec.place), student=spec.student)
        name = f"{spec.model} ({'student' if spec.student else 'teacher'} of {checkpoint.name})"
    elif spec.kind == "config":
        trunk = untrained_trunk(spec.place, _seed(spec.random_weights, spec.model))
    elif spec.kind == "dino":
        trunk, left_out = _official(spec)
    elif spec.weights is None:
        trunk = random_trunk(spec.place, _seed(spec.random_weights, spec.model))
    else:
        tensors = read_weights(spec.weights)
        trunk, left_out = filled_trunk(spec.place, tensors, file=spec.weights, by_position=spec.by_position)
    if left_out:
        few = ", ".join(left_out[:4]) + (", ..." if len(left_out) > 4 else "")
        _log.warning("%s: %d tensors of the file are no part of the encoder (%s)", name, len(left_out), few)
    if spec.random_weights is not None:
        name = f"{name} (random weights, seed {spec.random_weights})"
    return _assemble(spec, trunk, name, left_out).to(device)


def _official(spec: EncoderSpec) -> tuple[TimmTrunk, list[str]]:
    if spec.arch is None:
        raise ConfigError(f"{spec.model} needs --arch, the timm name of its network, such as vit_small_patch16_224")
    file = Path(spec.place)
    trunk, left_out = filled_trunk(spec.arch, read_official(file, student=spec.student), file=file)
    trunk.mean, trunk.std = IMAGENET_MEAN, IMAGENET_STD  # as their authors have it, not timm's weights of that name
    return trunk, left_out


def _assemble(spec: EncoderSpec, trunk: SopTrunk | TimmTrunk, name: str, left_out: list[str]) -> Encoder:
    pooling = spec.pooling or trunk.poolings[0]
    if pooling not in trunk.poolings:
        raise ConfigError(f"{spec.model} has no pooling {pooling!r}: wanted one of {', '.join(trunk.poolings)}")
    preprocess = Preprocess.square(
        trunk.native_size if spec.size is None else spec.size,
        mean=spec.mean or _triple(trunk.mean) or IMAGENET_MEAN,
        std=spec.std or _triple(trunk.std) or IMAGENET_STD,
        multiple=trunk.multiple,
    )
    trunk.eval().requires_grad_(False)
    encoder = Encoder(trunk, name, preprocess, pooling, 0, tuple(left_out)).eval()
    encoder.check_preprocess(preprocess)
    encoder.feature_dim = _probe(encoder)
    return encoder


def _existing_run(text: str) -> Path:
    path = Path(text)
    if path.is_dir():
        return path
    if path.is_file():
        raise CheckpointError(f"model {text} is a file; {_MODEL_FORMS}, or timm:NAME with --weights {text}")
    prefix = text.partition(":")[0]
    near = difflib.get_close_matches(prefix, ("timm", "dino", "config"), n=1) if ":" in text else []
    hint = f"; did you mean {near[0]}:?" if near else ""
    raise CheckpointError(f"model {text} does not exist; {_MODEL_FORMS}{hint}")


def _seed(random_weights: int | None, model: str) -> int:
    if random_weights is None:
        or_weights = "--weights FILE, or " if model.startswith("timm:") else ""
        raise CheckpointError(f"{model} comes without weights: give {or_weights}--random-weights SEED for a baseline")
    if not 0 <= random_weights < 2**63:
        raise ConfigError(f"--random-weights {random_weights}: wanted a seed of 0 or more")
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
            f"{encoder.name} takes no images of {side} pixels ({reason}): choose another --size"
        ) from None
    return int(features.shape[1])


def encoder_of_backbone(backbone: Backbone, config: Config, name: str) -> Encoder:
    """A live backbone, such as a teacher's in training, as an encoder; it is shared, not copied.

    The fingerprint is computed once: ask for it only of a backbone that no longer changes.
    """
    trunk = SopTrunk(backbone, config)
    preprocess = Preprocess.square(trunk.native_size, mean=trunk.mean, std=trunk.std, multiple=trunk.multiple)
    return Encoder(trunk, name, preprocess, trunk.poolings[0], backbone.feature_dim)


def load_encoder(
    model: str,
    *,
    weights: Path | None = None,
    arch: str | None = None,
    random_weights: int | None = None,
    pooling: str | None = None,
    size: int | None = None,
    mean: tuple[float, float, float] | None = None,
    std: tuple[float, float, float] | None = None,
    student: bool = False,
    by_position: bool = False,
    device: str = "cpu",
) -> Encoder:
    """Load an encoder for evaluation; the arguments are the fields of `EncoderSpec`.

    Example:
        `load_encoder("runs/photos")`, `load_encoder("timm:resnet50", weights=Path("resnet50.safetensors"))`,
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
        size,
        mean,
        std,
        student=student,
        by_position=by_position,
        device=device,
    )
    return spec.load()
