"""The configuration of a run: frozen dataclasses, their checks, YAML files and dotted overrides.

Every knob of the method is a field here, with its meaning and the paper's value as default (design 2.5).
Durations are in epochs here and in steps everywhere else.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sop_faiss.errors import ConfigError

__all__ = [
    "Config",
    "DataConfig",
    "EvaluateConfig",
    "LevelConfig",
    "LossConfig",
    "MasksConfig",
    "MemoryConfig",
    "ModelConfig",
    "NeighborsConfig",
    "OptimConfig",
    "SopConfig",
    "TrainConfig",
    "ViewsConfig",
    "load_config",
    "to_yaml",
]


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ConfigError(what)


def _require_one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        near = difflib.get_close_matches(value, allowed, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{name} = {value!r}: wanted one of {', '.join(allowed)}{hint}")


def _require_range(name: str, bounds: tuple[float, float], low: float, high: float) -> None:
    _require(low <= bounds[0] <= bounds[1] <= high, f"{name} = {bounds}: wanted {low} <= smaller <= larger <= {high}")


def _require_finite(section: str, settings: Any) -> None:
    """Refuse NaN and infinity in any field of a section."""
    for entry in fields(settings):
        value = getattr(settings, entry.name)
        for number in value if isinstance(value, tuple) else (value,):
            _require(
                not isinstance(number, float) or math.isfinite(number),
                f"{section}.{entry.name} = {value}: wanted finite numbers",
            )


def _require_share(name: str, value: float) -> None:
    _require(0.0 <= value <= 1.0, f"{name} = {value}: wanted a share between 0 and 1")


@dataclass(frozen=True)
class DataConfig:
    """Where the training images are and how they are read."""

    train: str = ""
    """SRC of the training images: shard pattern, folder, or list."""
    workers: int = 2
    """Processes that decode and augment, per rank; 0 does it in the training process."""
    holdout_share: float = 0.0
    """Share of the images left out of training (a seeded draw); `evaluate` may score on them."""
    max_bad_fraction: float = 0.01
    """Stop when more than this share of the samples asked for could not be read."""
    max_image_pixels: int = 64_000_000
    """Larger pictures are refused before they are decoded."""
    decoded_cache_bytes: int = 0
    """Keep decoded pictures in memory, up to this many bytes per worker (0: none). For small images."""

    def __post_init__(self) -> None:
        _require_finite("data", self)
        _require(self.workers >= 0, f"data.workers = {self.workers}: wanted 0 or more")
        _require(0.0 <= self.holdout_share < 1.0, f"data.holdout_share = {self.holdout_share}: wanted 0 <= share < 1")
        _require_share("data.max_bad_fraction", self.max_bad_fraction)
        _require(self.max_image_pixels > 0, f"data.max_image_pixels = {self.max_image_pixels}: wanted more than 0")
        _require(
            self.decoded_cache_bytes >= 0,
            f"data.decoded_cache_bytes = {self.decoded_cache_bytes}: wanted 0 or more",
        )


@dataclass(frozen=True)
class ViewsConfig:
    """The multi-crop views of an image (design 2.1; iBOT's augmentations)."""

    global_count: int = 2
    global_size: int = 224
    """Side in pixels."""
    global_scale: tuple[float, float] = (0.25, 1.0)
    """Area of the crop as a share of the image."""
    local_count: int = 10
    local_size: int = 96
    local_scale: tuple[float, float] = (0.05, 0.25)
    aspect: tuple[float, float] = (0.75, 4.0 / 3.0)
    """Width over height of a crop box."""
    flip: float = 0.5
    """Probability of a horizontal flip."""
    max_rotation_degrees: float = 0.0
    """Rotate by an angle uniform in +- this before the crop (0 in the paper; the digits use it)."""
    max_shear_degrees: float = 0.0
    jitter: float = 0.8
    """Probability of colour jitter."""
    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.2
    hue: float = 0.1
    grey: float = 0.2
    """Probability of dropping colour."""
    blur_global1: float = 1.0
    """Probability of Gaussian blur on the first global view."""
    blur_global2: float = 0.1
    """... on every further global view."""
    blur_local: float = 0.5
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    """Standard deviation in pixels, uniform."""
    solarize_global2: float = 0.2
    """Probability of solarization on every global view but the first."""
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        _require_finite("views", self)
        _require(self.global_count >= 1, f"views.global_count = {self.global_count}: wanted 1 or more")
        _require(self.local_count >= 0, f"views.local_count = {self.local_count}: wanted 0 or more")
        _require(
            self.global_count >= 2 or self.local_count >= 1,
            "views.global_count = 1 and views.local_count = 0: wanted at least two views of an image to compare",
        )
        for name in ("global_size", "local_size"):
            _require(8 <= getattr(self, name) <= 4096, f"views.{name} = {getattr(self, name)}: wanted 8 to 4096 pixels")
        for name in ("global_scale", "local_scale"):
            _require_range(f"views.{name}", getattr(self, name), 1e-4, 1.0)
        _require_range("views.aspect", self.aspect, 0.1, 10.0)
        _require_range("views.blur_sigma", self.blur_sigma, 0.01, 100.0)
        for name in ("flip", "jitter", "grey", "blur_global1", "blur_global2", "blur_local", "solarize_global2"):
            _require_share(f"views.{name}", getattr(self, name))
        for name in ("brightness", "contrast", "saturation"):
            _require(0.0 <= getattr(self, name) <= 1.0, f"views.{name} = {getattr(self, name)}: wanted 0 to 1")
        _require(0.0 <= self.hue <= 0.5, f"views.hue = {self.hue}: wanted 0 to 0.5")
        for name in ("max_rotation_degrees", "max_shear_degrees"):
            _require(0.0 <= getattr(self, name) <= 80.0, f"views.{name} = {getattr(self, name)}: wanted 0 to 80")
        _require(min(self.std) > 0, f"views.std = {self.std}: wanted positive numbers")
        for name in ("mean", "std"):
            value = getattr(self, name)
            _require(
                0 <= min(value) <= max(value) <= 1, f"views.{name} = {value}: wanted values of 0 to 1, not 0 to 255"
            )

    @property
    def count(self) -> int:
        """Views per image, V."""
        return self.global_count + self.local_count


@dataclass(frozen=True)
class MasksConfig:
    """Which patches of the student's global views are hidden (design 2.1)."""

    kind: str = "block"
    """`block` (BEiT), `random`, or `none`."""
    probability: float = 0.5
    """Probability that a view is masked at all (`block`; `random` masks every view as iBOT's `rand` does)."""
    ratio: tuple[float, float] = (0.1, 0.5)
    """Share of patches hidden, uniform in this range (`block`)."""
    random_ratio: float = 0.7
    """Share of patches hidden (`random`)."""
    aspect: tuple[float, float] = (0.3, 1.0 / 0.3)
    """Height over width of a block."""

    def __post_init__(self) -> None:
        _require_finite("masks", self)
        _require_one_of("masks.kind", self.kind, ("block", "random", "none"))
        _require_share("masks.probability", self.probability)
        _require_range("masks.ratio", self.ratio, 0.0, 1.0)
        _require_share("masks.random_ratio", self.random_ratio)
        _require_range("masks.aspect", self.aspect, 0.05, 20.0)


@dataclass(frozen=True)
class ModelConfig:
    """Backbone and projector."""

    backbone: str = "vit_small_patch16_224"
    """A timm ViT or Swin, made with random weights."""
    patch_size: int | None = None
    """Overrides the backbone's own (ViT)."""
    embed_dim: int | None = None
    """Overrides the width (ViT)."""
    depth: int | None = None
    """Overrides the number of blocks (ViT)."""
    num_heads: int | None = None
    """Overrides the attention heads (ViT)."""
    window_size: int | None = None
    """Overrides the attention window (Swin)."""
    drop_path: float = 0.1
    """Stochastic depth of the student; the teacher has none."""
    global_token: str = "cls"
    """What stands for the whole view: `cls`, or `mean` of the final patch tokens (Swin: always `mean`)."""
    projector_layers: int = 3
    projector_hidden: int = 2048
    embedding_dim: int = 256
    """d: dimension of the unit-norm embeddings and of the memories."""

    def __post_init__(self) -> None:
        _require_finite("model", self)
        _require(bool(self.backbone), "model.backbone is empty: wanted the name of a timm ViT or Swin")
        _require_one_of("model.global_token", self.global_token, ("cls", "mean"))
        _require(0.0 <= self.drop_path < 1.0, f"model.drop_path = {self.drop_path}: wanted 0 <= drop_path < 1")
        _require(self.projector_layers >= 1, f"model.projector_layers = {self.projector_layers}: wanted 1 or more")
        for name in ("projector_hidden", "embedding_dim"):
            _require(getattr(self, name) >= 2, f"model.{name} = {getattr(self, name)}: wanted 2 or more")
        for name in ("patch_size", "embed_dim", "depth", "num_heads", "window_size"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"model.{name} = {value}: wanted 1 or more")
        if self.embed_dim is not None and self.num_heads is not None:
            _require(
                self.embed_dim % self.num_heads == 0,
                f"model.embed_dim = {self.embed_dim} is not divisible by model.num_heads = {self.num_heads}",
            )


@dataclass(frozen=True)
class MemoryConfig:
    """The two FIFO memories (design 2.2)."""

    cls_capacity: int = 65536
    """N_C, rows of the [CLS] memory."""
    patch_capacity: int = 8192
    """N_P, rows of the patch memory."""
    fill: str = "random"
    """What the memories hold at first: `random` unit vectors (the paper), or `teacher` embeddings of a fill pass."""

    def __post_init__(self) -> None:
        for name in ("cls_capacity", "patch_capacity"):
            _require(getattr(self, name) >= 2, f"memory.{name} = {getattr(self, name)}: wanted 2 or more")
        _require_one_of("memory.fill", self.fill, ("random", "teacher"))


@dataclass(frozen=True)
class NeighborsConfig:
    """How the nearest rows of the anchors are found."""

    engine: str = "auto"
    """`faiss`, `torch` (exact, by blocks), or `auto`: FAISS wherever it has code for the device."""
    exclude_same_image: str = "auto"
    """Rows of the anchor's own image are no supports: `always`, `never`, or `auto`: when the data set has fewer
    images than twice the memory's capacity, so that the memory holds several rows of an image."""

    def __post_init__(self) -> None:
        _require_one_of("neighbors.engine", self.engine, ("auto", "faiss", "torch"))
        _require_one_of("neighbors.exclude_same_image", self.exclude_same_image, ("auto", "always", "never"))


@dataclass(frozen=True)
class LevelConfig:
    """The prototypes of one loss level (design 2.3)."""

    num_anchors: int = 4096
    """K, prototypes (SOPs) per task."""
    num_supports: int = 8
    """k, supports per anchor; a prototype has S = k + 1 members."""
    tasks: int = 4
    """T, independent draws of prototypes per step; the loss is their mean."""


@dataclass(frozen=True)
class SopConfig:
    """Self-organizing prototypes (design 2.3, 2.6)."""

    cls: LevelConfig = field(default_factory=LevelConfig)
    patch: LevelConfig = field(default_factory=lambda: LevelConfig(num_anchors=512, num_supports=0, tasks=1))
    contributions: str = "similarity"
    """`similarity` (the released code's, clamped), `smooth` (the paper's pseudo-code), or `one_hot`."""
    eps: float = 0.1
    """The anchor gives 1 - eps to its own prototype."""
    anchors: str = "random"
    """`random` every step, `fixed_rows` (same positions), or `fixed_vectors` (copied at step 0)."""

    def __post_init__(self) -> None:
        _require_finite("sop", self)
        _require_one_of("sop.contributions", self.contributions, ("similarity", "smooth", "one_hot"))
        _require_one_of("sop.anchors", self.anchors, ("random", "fixed_rows", "fixed_vectors"))
        for name in ("cls", "patch"):
            level: LevelConfig = getattr(self, name)
            _require(level.num_anchors >= 2, f"sop.{name}.num_anchors = {level.num_anchors}: wanted 2 or more")
            _require(level.num_supports >= 0, f"sop.{name}.num_supports = {level.num_supports}: wanted 0 or more")
            _require(level.tasks >= 1, f"sop.{name}.tasks = {level.tasks}: wanted 1 or more")
            limit = 1.0 - 1.0 / level.num_anchors
            _require(
                0.0 <= self.eps < limit,
                f"sop.eps = {self.eps}: wanted 0 <= eps < 1 - 1/num_anchors = {limit:.3f}, "
                "or an anchor would give more to other prototypes than to its own",
            )


@dataclass(frozen=True)
class LossConfig:
    """Temperatures and weights (design 2.4)."""

    student_temp: float = 0.1
    teacher_temp_start: float = 0.04
    teacher_temp: float = 0.07
    """Teacher temperature from `teacher_temp_epochs` on; linear from `teacher_temp_start` before."""
    teacher_temp_epochs: float = 30.0
    cls_weight: float = 1.0
    """lambda_1; 0 switches the [CLS] loss off, with its memory, search and forward."""
    patch_weight: float = 1.0
    """lambda_2; 0 switches the patch loss off."""

    def __post_init__(self) -> None:
        _require_finite("loss", self)
        for name in ("student_temp", "teacher_temp_start", "teacher_temp"):
            _require(getattr(self, name) >= 0.005, f"loss.{name} = {getattr(self, name)}: wanted 0.005 or more")
        _require(self.teacher_temp_epochs >= 0, f"loss.teacher_temp_epochs = {self.teacher_temp_epochs}: wanted >= 0")
        for name in ("cls_weight", "patch_weight"):
            _require(getattr(self, name) >= 0, f"loss.{name} = {getattr(self, name)}: wanted 0 or more")
        _require(
            self.cls_weight + self.patch_weight > 0,
            "loss.cls_weight and loss.patch_weight are both 0: nothing would be learned",
        )


@dataclass(frozen=True)
class OptimConfig:
    """AdamW, its schedules, and the teacher's momentum (design 2.5)."""

    base_lr: float = 5e-4
    """Learning rate for a batch of 256; the peak is base_lr * batch_size / 256."""
    min_lr: float = 1e-6
    """Where the cosine ends."""
    warmup_epochs: float = 10.0
    weight_decay: float = 0.04
    weight_decay_end: float = 0.4
    """Cosine from `weight_decay`; none on biases and 1-d parameters."""
    clip_norm: float = 3.0
    """Gradient norm limit of each parameter by itself; 0 switches it off."""
    beta1: float = 0.9
    beta2: float = 0.999
    momentum: float = 0.996
    """The teacher keeps this share of itself per step (EMA); cosine to `momentum_end`."""
    momentum_end: float = 1.0

    def __post_init__(self) -> None:
        _require_finite("optim", self)
        _require(self.base_lr > 0, f"optim.base_lr = {self.base_lr}: wanted more than 0")
        _require(self.min_lr >= 0, f"optim.min_lr = {self.min_lr}: wanted 0 or more")
        _require(self.warmup_epochs >= 0, f"optim.warmup_epochs = {self.warmup_epochs}: wanted 0 or more")
        for name in ("weight_decay", "weight_decay_end", "clip_norm"):
            _require(getattr(self, name) >= 0, f"optim.{name} = {getattr(self, name)}: wanted 0 or more")
        for name in ("beta1", "beta2"):
            _require(0 <= getattr(self, name) < 1, f"optim.{name} = {getattr(self, name)}: wanted 0 <= beta < 1")
        for name in ("momentum", "momentum_end"):
            _require_share(f"optim.{name}", getattr(self, name))


@dataclass(frozen=True)
class TrainConfig:
    """Length, size and bookkeeping of the run."""

    epochs: float = 800.0
    """Passes over the data; schedules are stretched over them."""
    batch_size: int = 1024
    """Images per step over all ranks."""
    seed: int = 0
    precision: str = "auto"
    """`float32`, `bf16` (autocast of the backbone), or `auto`: bf16 on CUDA, float32 elsewhere."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`."""
    stop_after_steps: int = 0
    """Save and stop after this step, with schedules unchanged (0: run to the end)."""
    checkpoint_every_steps: int = 1000
    keep_last: int = 3
    """Checkpoints kept beside the ones `keep_every_steps` names."""
    keep_every_steps: int = 0
    """Keep every checkpoint at a multiple of this for good (0: none)."""
    log_every_steps: int = 20

    def __post_init__(self) -> None:
        _require_finite("train", self)
        _require(self.epochs > 0, f"train.epochs = {self.epochs}: wanted more than 0")
        _require(self.batch_size >= 1, f"train.batch_size = {self.batch_size}: wanted 1 or more")
        _require(0 <= self.seed < 2**63, f"train.seed = {self.seed}: wanted 0 or more")
        _require_one_of("train.precision", self.precision, ("auto", "float32", "bf16"))
        for name in ("stop_after_steps", "keep_every_steps"):
            _require(getattr(self, name) >= 0, f"train.{name} = {getattr(self, name)}: wanted 0 or more")
        for name in ("checkpoint_every_steps", "keep_last", "log_every_steps"):
            _require(getattr(self, name) >= 1, f"train.{name} = {getattr(self, name)}: wanted 1 or more")


@dataclass(frozen=True)
class EvaluateConfig:
    """k-NN while training, on labelled images; off without `test`."""

    train: str = ""
    """SRC of the labelled gallery."""
    test: str = ""
    """SRC of the labelled queries; `holdout`: the images that `data.holdout_share` leaves out, scored against the
    images trained on."""
    every_steps: int = 0
    """Score at step 0, at every multiple of this, and at the end (0: never)."""
    k: int = 20
    batch_size: int = 256
    max_train_images: int = 0
    """Use only this many gallery images, a seeded draw (0: all)."""

    def __post_init__(self) -> None:
        _require(self.every_steps >= 0, f"evaluate.every_steps = {self.every_steps}: wanted 0 or more")
        _require(self.k >= 1, f"evaluate.k = {self.k}: wanted 1 or more")
        _require(self.batch_size >= 1, f"evaluate.batch_size = {self.batch_size}: wanted 1 or more")
        _require(self.max_train_images >= 0, f"evaluate.max_train_images = {self.max_train_images}: wanted 0 or more")
        _require(
            not self.every_steps or bool(self.test),
            f"evaluate.every_steps = {self.every_steps} without evaluate.test: name labelled images to score on",
        )
        _require(
            self.test != "holdout" or not self.train,
            "evaluate.test = holdout is scored against the other training images: leave evaluate.train empty",
        )
        _require(
            self.test == "holdout" or bool(self.train) == bool(self.test),
            "evaluate.train and evaluate.test: wanted both or neither",
        )


@dataclass(frozen=True)
class Config:
    """Everything that determines a run."""

    data: DataConfig = field(default_factory=DataConfig)
    views: ViewsConfig = field(default_factory=ViewsConfig)
    masks: MasksConfig = field(default_factory=MasksConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    neighbors: NeighborsConfig = field(default_factory=NeighborsConfig)
    sop: SopConfig = field(default_factory=SopConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)

    def __post_init__(self) -> None:
        levels = (
            ("cls", self.loss.cls_weight, self.memory.cls_capacity, self.sop.cls),
            ("patch", self.loss.patch_weight, self.memory.patch_capacity, self.sop.patch),
        )
        for name, weight, capacity, level in levels:
            if weight == 0:
                continue
            _require(
                level.num_anchors <= capacity,
                f"sop.{name}.num_anchors = {level.num_anchors} exceeds memory.{name}_capacity = {capacity}: "
                "lower the one or raise the other",
            )
            _require(
                level.num_supports < capacity,
                f"sop.{name}.num_supports = {level.num_supports}: wanted fewer than memory.{name}_capacity = "
                f"{capacity}, since an anchor is not its own support",
            )
        _require(
            self.loss.patch_weight == 0 or self.masks.kind != "none",
            "masks.kind = none leaves the patch loss without patches: set loss.patch_weight=0 as well",
        )
        masks = self.masks
        never = masks.random_ratio == 0 if masks.kind == "random" else 0 in (masks.probability, masks.ratio[1])
        _require(
            self.loss.patch_weight == 0 or masks.kind == "none" or not never,
            "masks hides no patch (probability or ratio 0), which leaves the patch loss without any: "
            "raise it, or set loss.patch_weight=0",
        )
        _require(
            self.optim.warmup_epochs <= self.train.epochs,
            f"optim.warmup_epochs = {self.optim.warmup_epochs} exceeds train.epochs = {self.train.epochs}: "
            "the learning rate would never reach its peak; lower the warm-up",
        )
        _require(
            self.evaluate.test != "holdout" or self.data.holdout_share > 0,
            "evaluate.test = holdout needs data.holdout_share above 0",
        )


def _known_keys(schema: type[Any], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for entry in fields(schema):
        name = f"{prefix}{entry.name}"
        keys.append(name)
        default = entry.default_factory() if callable(entry.default_factory) else None
        if default is not None and is_dataclass(default):
            keys.extend(_known_keys(type(default), f"{name}."))
    return keys


def _reject_unknown_keys(content: dict[str, Any], origin: str, prefix: str = "") -> None:
    known = _known_keys(Config)
    for key, value in content.items():
        name = f"{prefix}{key}"
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            if not near:
                near = [option for option in known if option.rsplit(".", 1)[-1] == str(key).rsplit(".", 1)[-1]][:1]
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{origin}: unknown configuration key {name}{hint}")
        if value == "???":
            raise ConfigError(f"{origin}: {name} = ??? is a placeholder: give a value")
        if isinstance(value, dict):
            _reject_unknown_keys(value, origin, f"{name}.")


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OSError, UnicodeDecodeError, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"config {path} cannot be read: {str(error).splitlines()[0]}") from None
    except Exception as error:  # yaml's own errors, whose classes OmegaConf does not re-export
        raise ConfigError(f"config {path} is not valid YAML: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"config {path} holds {type(content).__name__}: wanted sections such as 'data:' and 'views:'")
    return {str(key): value for key, value in content.items()}


def packaged_configs() -> dict[str, Path]:
    """The configurations that come with the package, by name."""
    folder = resources.files("sop_faiss.configs")
    return {Path(str(entry)).stem: Path(str(entry)) for entry in folder.iterdir() if str(entry).endswith(".yaml")}


def find_config(name_or_file: str | Path) -> Path:
    """The file of a configuration: a path that exists, else the name of a packaged one.

    Raises:
        ConfigError: neither; the nearest names are suggested.
    """
    path = Path(name_or_file)
    if path.is_file():
        return path
    packaged = packaged_configs()
    if str(name_or_file) in packaged:
        return packaged[str(name_or_file)]
    near = difflib.get_close_matches(str(name_or_file), packaged, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(
        f"config {name_or_file}: no such file, and the packaged ones are {', '.join(sorted(packaged))}{hint}"
    )


def _parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    pairs = list(overrides)
    for pair in pairs:
        if "=" not in pair or not pair.split("=", 1)[0].strip():
            raise ConfigError(f"override {pair!r}: wanted key=value, for example train.batch_size=64")
    try:
        content = OmegaConf.to_container(OmegaConf.from_dotlist(pairs))
    except Exception as error:
        raise ConfigError(f"overrides {' '.join(pairs)}: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"overrides {' '.join(pairs)}: wanted key=value pairs")
    return {str(key): value for key, value in content.items()}


def load_config(name_or_file: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read a configuration, apply dotted overrides, and check it.

    Args:
        name_or_file: a YAML file, else the name of a packaged configuration.
        overrides: `section.field=value` strings, applied in order.

    Raises:
        ConfigError: an unknown key (the nearest is suggested), a wrong type, or an impossible value.
    """
    path = find_config(name_or_file)
    merged = OmegaConf.structured(Config)
    _make_writable(merged)
    for origin, content in ((f"config {path}", _read_mapping(path)), ("overrides", _parse_overrides(overrides))):
        _reject_unknown_keys(content, origin)
        try:
            merged = OmegaConf.merge(merged, content)
        except OmegaConfBaseException as error:
            key = getattr(error, "full_key", None) or "value"
            raise ConfigError(f"{origin}: {key}: {str(error).splitlines()[0]}") from None
    try:
        built = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "value"
        raise ConfigError(f"config {path} with overrides: {key}: {str(error).splitlines()[0]}") from None
    if not isinstance(built, Config):
        raise ConfigError(f"config {path} is not a configuration")
    return built


def _make_writable(node: DictConfig) -> None:
    """Frozen dataclasses make read-only OmegaConf nodes; merging needs them open."""
    OmegaConf.set_readonly(node, False)
    for key in node:
        child = node._get_node(key)
        if isinstance(child, DictConfig):
            _make_writable(child)


def to_yaml(config: Config) -> str:
    """The resolved configuration as YAML, readable by `load_config`."""
    return OmegaConf.to_yaml(OmegaConf.create(asdict(config)))
