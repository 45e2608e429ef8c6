"""An encoder: whatever turns images into features, for evaluation, and a live backbone as one.

It is a model, a pooling and a preprocessing; perhaps a whitening. Its fingerprint says whether two sets of features may
be compared. `load.py` makes one of the name that a user gives.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Float32
from torch import Tensor, nn

from sop_faiss.errors import ConfigError
from sop_faiss.model.encoders.image_input import ImageInput, ImageTransform
from sop_faiss.model.encoders.pooling import pooled_width
from sop_faiss.model.encoders.preprocess import Preprocess
from sop_faiss.model.encoders.whitening import Whitening
from sop_faiss.progress import ProgressCallback

if TYPE_CHECKING:
    from sop_faiss.config import Config
    from sop_faiss.model.backbones.backbone import Backbone, Tokens
    from sop_faiss.model.encoders.sop_encoder import SopModel
    from sop_faiss.model.encoders.timm_encoder import TimmModel


class Encoder(nn.Module):
    """Images to raw features, frozen.

    Attributes:
        name: what it is, for people.
        token_pooling: `cls`, `mean` (of the patch tokens), `cls_mean`, `gem`, `quadrants` or `pooled` (the model's
            own); with `_lastN` behind it, of the last N blocks.
        preprocess: what its images must go through.
        token_dimension: width of what the model gives, before any whitening.
        whitening: what the extraction applies to its unit-norm features.
        cache: the directory in which the extraction keeps features; None: they are not kept.
        scores: of the run it is from, as `scores_of_run` gives them; None: none, or not of a run.
        spec: how it is opened again, as of `remembered_spec`; None: it is not made of files, as a live backbone.
        left_out: names of tensors in the weights file that are not part of it, such as a classifier's.
    """

    def __init__(
        self,
        model: SopModel | TimmModel,
        name: str,
        preprocess: Preprocess,
        pooling: str,
        feature_dim: int,
        left_out: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self.model = model
        self.name = name
        self.preprocess = preprocess
        self.token_pooling = pooling
        self.token_dimension = feature_dim
        self.left_out = left_out
        self.whitening: Whitening | None = None
        self.cache: Path | None = None
        self.scores: dict[str, Any] | None = None
        self.spec: dict[str, Any] | None = None

    def forward(self, images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b d"]:
        """Compute raw features of normalized images of one size; the extraction scales them to unit norm."""
        return self.model.features(images, self.token_pooling)

    def encode(
        self,
        images: ImageInput | Iterable[ImageInput],
        *,
        batch_size: int = 64,
        preprocess: Preprocess | None = None,
        progress: ProgressCallback | None = None,
    ) -> Float32[np.ndarray, "n d"]:
        """Return unit-norm features, one row for each image in the order given: those of a feature store.

        Files are read in threads and nothing is written; `cache` is not used. For more images than you would wait for,
        use `sop-embed`, which skips unreadable ones and continues after a kill.

        Args:
            images: one or several paths, bytes of files, PIL images, arrays or tensors (see `ImageInput`), or one
                array or tensor of several images. An array has the shape (height, width, 3), a tensor (3, height,
                width); values are RGB, uint8 from 0 to 255 or floats from 0 to 1, not normalized.
            batch_size: images per forward pass on a GPU; on a CPU at most 8 at a time, which is faster and takes less
                memory. Features do not depend on it beyond the last bits of float32.
            preprocess: another than the encoder's own, such as `encoder.preprocess.keeping_aspect(512)`.
            progress: called with the number of images done and the total after each forward pass.

        Raises:
            DataError: an image cannot be read, or is of another kind, shape or range; it is named.
            FeatureError: the encoder's features are not finite or zero.
            ConfigError: the batch size is out of range, or the encoder does not take images of this size.
        """
        from sop_faiss.model.encoders.encode import encode_images

        return encode_images(self, images, batch_size=batch_size, preprocess=preprocess, progress=progress)

    @property
    def transform(self) -> ImageTransform:
        """Return the preprocessing of one image, for a data set of one's own: image to normalized tensor (3, h, w)."""
        return ImageTransform(self.preprocess)

    def tokens(self, images: Float[Tensor, "b 3 h w"]) -> tuple[Float[Tensor, "b d"], Tokens]:
        """Compute raw features as a call does, and the [CLS] and patch tokens with their grid.

        A convolutional network's patches are the positions of its last map. What has no [CLS] gives its pooled feature
        in its place.

        Raises:
            ConfigError: the model does not make tokens or a map.
        """
        return self.model.features_and_tokens(images, self.token_pooling)

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
        """Whiten features from now on, for images of any size and scales.

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

        Preprocessing and pooling are not part of it, nor is the token of masked patches, which no feature depends on:
        an export, which leaves it out, has its run's fingerprint. Computed once, when first asked for.
        """
        return fingerprint_of(self.model.architecture, self.model.backbone.state_dict())

    def check_preprocess(self, preprocess: Preprocess) -> None:
        """Check that images preprocessed in this way fit the model.

        Raises:
            ConfigError: the model takes images of one size only and these would have another.
        """
        native = self.model.native_size
        if self.model.fixed and (preprocess.keep_aspect or preprocess.crop != native):
            raise ConfigError(
                f"{self.name} takes only square images of {native} pixels: use `size={native}` and a crop"
            )
        if self.model.fixed and preprocess.scales != (1.0,):
            raise ConfigError(f"{self.name} takes only images of {native} pixels: leave `scales` out")


def fingerprint_of(architecture: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Return the sha256 of an architecture and of a backbone's tensors, as `Encoder.fingerprint`."""
    digest = hashlib.sha256(json.dumps(architecture, sort_keys=True).encode())
    for name, value in sorted(tensors.items()):
        if name == "mask_token":
            continue
        digest.update(f"\n{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def encoder_of_backbone(
    backbone: Backbone, config: Config, name: str, *, pooling: str = "", mirrored: bool = False
) -> Encoder:
    """Make an encoder of a live backbone, such as a teacher's in training; it is shared, not copied.

    The fingerprint is computed once: read it only when the backbone no longer changes.

    Args:
        backbone: of the student or the teacher.
        name: what it is, for people.
        pooling: over the last block; empty: the backbone's own.
        mirrored: add the feature of the mirrored image.

    Raises:
        ConfigError: the backbone does not offer this pooling.
    """
    from sop_faiss.model.encoders.sop_encoder import SopModel

    model = SopModel(backbone, config)
    preprocess = Preprocess.square(
        model.native_size, mean=model.mean, std=model.std, multiple=model.multiple, top_value=model.top_value
    )
    pooling = pooling or model.poolings[0]
    if pooling not in model.poolings:
        raise ConfigError(
            f"evaluate.pooling = {pooling} with {config.model.backbone}: wanted one of {', '.join(model.poolings)}"
        )
    width = pooled_width(backbone.feature_dim, pooling)
    return Encoder(model, name, replace(preprocess, mirrored=mirrored), pooling, width)
