"""Which encoder a user means; a file of its own, so that a command reads its options without loading torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from sop_faiss.errors import ConfigError

PACKAGED_ENCODERS = ("lite0", "lite1", "lite2")
"""Encoders whose weights the extra `encoder` installs (see `packaged.py`)."""
ADAPTER_FILE = "adapter.json"
"""The file by which a directory is an adapter (see `model/adapter.py`)."""
POSITION_RESIZES = ("timm", "dino")
OF_FROZEN_FEATURES = ("scales", "mirrored", "whitening", "cache")
"""Fields of a spec that are of no use where the network is trained."""
OF_ONE_FEATURE = ("pooling", "last_blocks", *OF_FROZEN_FEATURES)
"""Fields of a spec that say how one feature is made of an image: of no use where patch tokens are taken."""

_READ_BY = {
    "run": ("student",),
    "timm": ("weights", "random_weights", "student", "by_position", "position_resize"),
    "dino": ("arch", "student", "position_resize"),
    "config": ("random_weights",),
    "packaged": (),
    "adapter": ("weights",),
}
"""The options that each kind of model reads, of those that some kind does not."""


@dataclass(frozen=True)
class EncoderSpec:
    """Which encoder a user means; `encoder_of_spec` makes it. The commands' options of the same names fill it."""

    model: str
    """M: `lite0`, `lite1` or `lite2`; a run directory or a checkpoint in it, an export, an adapter, `timm:NAME`,
    `dino:FILE`, or `config:NAME|FILE`; or a choice that `sop-index tune` wrote (.json). `lite0` is always the packaged
    encoder, `./lite0` a directory of that name."""
    weights: Path | None = None
    """Weights file of a `timm:` model: .safetensors, .pth or .bin. Of an adapter: the weights that it belongs to, where
    these are not a packaged encoder's; a file, or a run directory."""
    arch: str | None = None
    """timm name of the ViT or Swin in a `dino:` file."""
    random_weights: int | None = None
    """Seed of random weights, for a baseline: of `timm:` and `config:` models."""
    pooling: str | None = None
    """`cls`, `mean`, `cls_mean`, `gem`, `quadrants` or `pooled`; None: the model's own."""
    last_blocks: int | None = None
    """Concatenate the [CLS] tokens of this many last blocks, of ViTs; with `cls_mean` the last mean token, too."""
    size: int | None = None
    """Side of the images in pixels; None: the model's own."""
    mean: tuple[float, float, float] | None = None
    """Of the images, per channel, in [0, 1]; None: what the model was trained with."""
    std: tuple[float, float, float] | None = None
    scales: tuple[float, ...] | None = None
    """Sizes at which each image is seen, relative to `size`; None: (1,)."""
    whitening: Path | None = None
    """A whitening that sop-embed --whiten has learned: its file, or the feature store that it is in."""
    cache: Path | None = None
    """Directory that keeps the features of images, so that no image is encoded twice in the same way."""
    top_value: float | None = None
    """White in grayscale images of more than 8 bits; 0: what each file states; None: as the model was trained."""
    mirrored: bool = False
    """Add the feature of the mirrored image."""
    student: bool = False
    """The student of a run instead of the teacher; of a file with two networks the learning one instead of its moving
    average."""
    by_position: bool = False
    """Match the tensors of `weights` by order and shape: weights of the same model saved under other names."""
    position_resize: str | None = None
    """How a ViT's position embeddings are resized to images of another size: `timm` or `dino` (see
    `model.position_resize`). None: as a run was trained, `dino` for `dino:` files of ViTs without registers, else
    `timm`."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:N`, or `auto`: CUDA where there is one."""

    @property
    def kind(self) -> str:
        """What `model` names: `packaged`, `run` (or an export), `adapter`, `timm`, `dino` or `config`."""
        return self._split[0]

    @property
    def place(self) -> str:
        """`model` without the prefix of its kind."""
        return self._split[1]

    @property
    def _split(self) -> tuple[str, str]:
        if self.model in PACKAGED_ENCODERS:
            return "packaged", self.model
        kind, colon, rest = self.model.partition(":")
        if colon and kind in ("timm", "dino", "config"):
            return kind, rest
        is_adapter = self.model != "" and os.path.isfile(f"{self.model}/{ADAPTER_FILE}")  # noqa: PTH113 - never raises
        return "adapter" if is_adapter else "run", self.model

    def refuse_idle_options(self) -> None:
        """Refuse options that the kind of model does not read, instead of ignoring them.

        Raises:
            ConfigError: there is one, or two exclude each other.
        """
        given = {
            "weights": self.weights is not None,
            "arch": self.arch is not None,
            "random_weights": self.random_weights is not None,
            "student": self.student,
            "by_position": self.by_position,
            "position_resize": self.position_resize is not None,
        }
        for option, is_given in given.items():
            if is_given and option not in _READ_BY[self.kind]:
                named = {"run": "a run", "adapter": "an adapter"}
                users = [named.get(other, f"{other}:") for other, read in _READ_BY.items() if option in read]
                raise ConfigError(f"`{option}` does not apply to {self.model}: it is for {' and '.join(users)}")
        if self.weights is not None and self.random_weights is not None:
            raise ConfigError("`weights` and `random_weights` exclude each other: take one")
        if self.by_position and self.weights is None:
            raise ConfigError("`by_position` says how to read `weights`: give a weights file")
        if self.student and self.kind == "timm" and self.weights is None:
            raise ConfigError(
                f"`student` does not apply to {self.model} without a file of two networks: give `weights`"
            )
        if self.position_resize not in (None, *POSITION_RESIZES):
            raise ConfigError(f"`position_resize` {self.position_resize}: wanted {' or '.join(POSITION_RESIZES)}")
