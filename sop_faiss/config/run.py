"""The sections of a configuration about the run: optimiser, length and bookkeeping, online evaluation."""

from __future__ import annotations

from dataclasses import dataclass

from sop_faiss.config.checks import require, require_between, require_finite, require_one_of, require_share

__all__ = ["EvaluateConfig", "OptimConfig", "TrainConfig"]


@dataclass(frozen=True)
class OptimConfig:
    """AdamW, its schedules, and the teacher's momentum (docs/method.md, 5)."""

    base_lr: float = 5e-4
    """Learning rate for a batch of 256; the peak is base_lr * batch_size / 256."""
    min_lr: float = 1e-6
    """Where the cosine ends."""
    warmup_epochs: float = 10.0
    weight_decay: float = 0.04
    weight_decay_end: float = 0.4
    """Cosine from `weight_decay`; none on biases and 1-d parameters."""
    projector_warmup_epochs: float = 0.0
    """At first the backbone is frozen and only the projector learns, so that a fresh projector does not spoil a
    backbone that `model.init` has filled; steps are cheaper meanwhile. Then the backbone's learning rate rises from 0
    within `warmup_epochs`."""
    layer_decay: float = 1.0
    """Layer-wise learning rates, as in BEiT: the projector's times this for the backbone's last layer, times this again
    for each layer below, as timm counts layers. 1: the same everywhere."""
    clip_norm: float = 3.0
    """Gradient norm limit of each parameter by itself; 0 switches it off."""
    beta1: float = 0.9
    beta2: float = 0.999
    momentum: float = 0.996
    """The teacher keeps this share of itself per step (EMA); cosine to `momentum_end`."""
    momentum_end: float = 1.0

    def __post_init__(self) -> None:
        require_finite("optim", self)
        require(self.base_lr > 0, f"optim.base_lr = {self.base_lr}: wanted more than 0")
        require(self.min_lr >= 0, f"optim.min_lr = {self.min_lr}: wanted 0 or more")
        for name in ("warmup_epochs", "projector_warmup_epochs"):
            require(getattr(self, name) >= 0, f"optim.{name} = {getattr(self, name)}: wanted 0 or more")
        require(0 < self.layer_decay <= 1, f"optim.layer_decay = {self.layer_decay}: wanted more than 0, at most 1")
        for name in ("weight_decay", "weight_decay_end", "clip_norm"):
            require(getattr(self, name) >= 0, f"optim.{name} = {getattr(self, name)}: wanted 0 or more")
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, f"optim.{name} = {getattr(self, name)}: wanted 0 <= beta < 1")
        for name in ("momentum", "momentum_end"):
            require_share(f"optim.{name}", getattr(self, name))


@dataclass(frozen=True)
class TrainConfig:
    """Length, size and bookkeeping of the run."""

    epochs: float = 800.0
    """Passes over the data; schedules are stretched over them."""
    batch_size: int = 1024
    """Images per step over all ranks."""
    accumulate: int = 1
    """A rank's images are taken in this many equal parts, one after the other: the same step with less memory."""
    views_apart: bool = False
    """The local views go forward and backward before the global ones, not with them: the same, with less memory."""
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
        require_finite("train", self)
        require(0 < self.epochs <= 1e6, f"train.epochs = {self.epochs}: wanted more than 0, and at most 1,000,000")
        require(self.batch_size >= 1, f"train.batch_size = {self.batch_size}: wanted 1 or more")
        require(0 <= self.seed < 2**63, f"train.seed = {self.seed}: wanted 0 or more")
        require_one_of("train.precision", self.precision, ("auto", "float32", "bf16"))
        for name in ("stop_after_steps", "keep_every_steps"):
            require(getattr(self, name) >= 0, f"train.{name} = {getattr(self, name)}: wanted 0 or more")
        for name in ("accumulate", "checkpoint_every_steps", "keep_last", "log_every_steps"):
            require(getattr(self, name) >= 1, f"train.{name} = {getattr(self, name)}: wanted 1 or more")


@dataclass(frozen=True)
class EvaluateConfig:
    """k-NN while training, on labelled images; off without `test`."""

    train: str = ""
    """SRC of the labelled gallery."""
    test: str = ""
    """SRC of the labelled queries; `holdout`: the images that `data.holdout_share` leaves out, scored against the
    images trained on."""
    every_steps: int = 0
    """Score at step 0, at every multiple of this, and at the last step (0: never)."""
    k: int = 20
    batch_size: int = 256
    max_train_images: int = 0
    """Use only this many gallery images, a seeded draw (0: all)."""

    def __post_init__(self) -> None:
        require_finite("evaluate", self)
        require(self.every_steps >= 0, f"evaluate.every_steps = {self.every_steps}: wanted 0 or more")
        require(self.k >= 1, f"evaluate.k = {self.k}: wanted 1 or more")
        require_between("evaluate.batch_size", self.batch_size, 1, 65_536)
        require(self.max_train_images >= 0, f"evaluate.max_train_images = {self.max_train_images}: wanted 0 or more")
        require(
            not self.every_steps or bool(self.test),
            f"evaluate.every_steps = {self.every_steps} without evaluate.test: name labelled images to score on",
        )
        require(
            self.test != "holdout" or not self.train,
            "evaluate.test = holdout is scored against the other training images: leave evaluate.train empty",
        )
        require(
            self.test == "holdout" or bool(self.train) == bool(self.test),
            "evaluate.train and evaluate.test: wanted both or neither",
        )
