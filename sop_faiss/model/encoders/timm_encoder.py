"""Models of the timm library as encoders: made without a download, filled from a file or at random from a seed."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from jaxtyping import Float
from timm.models.beit import Beit
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from sop_faiss.errors import CheckpointError, ConfigError
from sop_faiss.model.backbones.backbone import Tokens
from sop_faiss.model.backbones.positions import resize_as_dino, resize_in_architecture
from sop_faiss.model.encoders.methods import names_of_model
from sop_faiss.model.encoders.pooling import TOKEN_POOLINGS, features_of_last_blocks, pool_tokens, split_pooling
from sop_faiss.model.encoders.weights import fit_tensors, fit_tensors_by_position

_ANY_SIZE_OPTIONS: tuple[dict[str, Any], ...] = ({"dynamic_img_size": True}, {"strict_img_size": False}, {})
"""How timm's families take images of any size: ViTs, windowed models, and those that always do."""


def require_timm_name(name: str) -> None:
    """Check that timm has this model.

    Raises:
        ConfigError: it does not; the nearest names are suggested.
    """
    base, _, tag = name.partition(".")
    if ":" in name or "/" in name or not timm.is_model(base):
        near = difflib.get_close_matches(base, timm.list_models(), n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else "; timm.list_models() lists them"
        raise ConfigError(f"timm has no model {name!r}{hint}")
    tags = [known.partition(".")[2] for known in timm.list_models(f"{base}.*", pretrained=True)]
    if tag and tag not in tags:
        raise ConfigError(f"timm has no weights {tag!r} of {base}; it has {', '.join(tags) or 'none'}")


class TimmModel(nn.Module):
    """A timm model without its classifier, whose features are chosen by the name of a pooling.

    Attributes:
        poolings: what it offers, the default first: `pooled`, timm's own; `cls`, `mean` and `cls_mean` of ViTs with a
            [CLS] token; `gem` of the patch tokens or of the last map's positions.
        blocks: how many blocks of a ViT with a [CLS] token can be chosen from; 0 for others.
        multiple: sides of images are multiples of this, in pixels.
        native_size: side of the images it was made for, in pixels.
        fixed: it does not take images of any other size.
        position_resize: `timm` or `dino`, as `resample_positions` has it.
        top_value: white in deep grayscale images it was trained on; 0: what each file states (see `Preprocess`).
        mean, std: of the images it was trained on, as timm records them; empty if it does not.
        made_with: timm's options that follow its weights file, as the grid of positions.
    """

    def __init__(self, model: nn.Module, name: str, *, any_size: bool, position_resize: str = "timm") -> None:
        super().__init__()
        self.made_with: dict[str, Any] = {}
        self.position_resize = position_resize
        if position_resize == "dino":
            resize_as_dino(model, name)
        self.backbone = model.to(memory_format=torch.channels_last)  # the layout that images come in
        self.timm_name = name.partition(".")[0]
        settings = timm_settings(name)
        self.mean: tuple[float, ...] = tuple(settings.get("mean", ()))
        self.std: tuple[float, ...] = tuple(settings.get("std", ()))
        self.top_value = 0.0
        self.poolings = _poolings(model)
        blocks: Any = model.blocks if isinstance(model, VisionTransformer | Eva) and "cls" in self.poolings else ()
        self.blocks = len(blocks)
        self.fixed = not any_size and bool(settings.get("fixed_input_size"))
        patches = getattr(model, "patch_embed", None)
        self.multiple = _patch_stride(patches)
        self.native_size = int(settings.get("input_size", (3, 224, 224))[-1])
        if isinstance(getattr(model, "pos_embed", None), Tensor):
            self.native_size = int((getattr(patches, "img_size", None) or (self.native_size,))[-1])

    @property
    def architecture(self) -> dict[str, Any]:
        """What the model is, apart from its tensors; part of the fingerprint."""
        heads = {name: value for name, value in self.made_with.items() if name == "num_heads"}
        return {"timm": self.timm_name, **heads, **resize_in_architecture(self.position_resize)}

    def features(self, images: Float[Tensor, "b 3 h w"], pooling: str) -> Float[Tensor, "b d"]:
        """Compute raw features; `pooling` is one of `poolings`, or of the last blocks (see `pooling_name`)."""
        if pooling == "pooled":
            pooled: Tensor = self.backbone(images)
            return pooled.flatten(1)
        name, blocks = split_pooling(pooling)
        if blocks > 1:
            return features_of_last_blocks(self.backbone, images, blocks, name)
        if name == "quadrants":
            return self.features_and_tokens(images, pooling)[0]
        forward_features: Any = self.backbone.forward_features
        positions, grid = self._positions(forward_features(images))
        return pool_tokens(positions[:, 0], positions[:, self._prefix_tokens :], grid or (1, 1), name)

    def features_and_tokens(
        self, images: Float[Tensor, "b 3 h w"], pooling: str
    ) -> tuple[Float[Tensor, "b d"], Tokens]:
        """Compute raw features as `features` does, and the tokens or the positions of the last map.

        Raises:
            ConfigError: the model makes neither.
        """
        model: Any = self.backbone
        last = model.forward_features(images)
        positions, grid = self._positions(last)
        patches = positions[:, self._prefix_tokens :]
        if grid is None:
            grid = (images.shape[2] // self.multiple, images.shape[3] // self.multiple)
            if grid[0] * grid[1] != patches.shape[1]:
                raise ConfigError(
                    f"{self.timm_name} makes {patches.shape[1]} tokens of {images.shape[2]} x {images.shape[3]} "
                    "pixels, which are not a grid of patches: use its features alone"
                )
        pooled = model.forward_head(last).flatten(1)
        tokens = Tokens(positions[:, 0] if _has_cls(model) else pooled, patches, grid)
        name, blocks = split_pooling(pooling)
        if blocks > 1:
            return self.features(images, pooling), tokens
        return (pooled if name == "pooled" else pool_tokens(tokens.cls, patches, grid, name)), tokens

    @property
    def _prefix_tokens(self) -> int:
        """[CLS] and registers before the patch tokens."""
        return int(getattr(self.backbone, "num_prefix_tokens", 0))

    def _positions(self, features: Any) -> tuple[Float[Tensor, "b n d"], tuple[int, int] | None]:
        """Tokens, or the positions of a map, whichever of its three layouts the model has; and the grid of a map."""
        if isinstance(features, Tensor) and features.ndim == 3:
            return features, None
        if not isinstance(features, Tensor) or features.ndim != 4:
            raise ConfigError(f"{self.timm_name} does not make a map or tokens: use `pooling=pooled` and no tokens")
        if getattr(self.backbone, "output_fmt", "NCHW") != "NHWC":
            features = features.permute(0, 2, 3, 1)
        return features.flatten(1, 2), (features.shape[1], features.shape[2])


def timm_settings(name: str) -> dict[str, Any]:
    """Return what timm records of a model's training images and classifier; empty for one without weights."""
    known = timm.models.get_pretrained_cfg(name)
    return dict(known.to_dict()) if known else {}


def _poolings(model: nn.Module) -> tuple[str, ...]:
    """Return the poolings a model offers, its own first. [CLS] and patches count if they leave it normalized."""
    pooling = getattr(model, "global_pool", None)
    distilled = hasattr(model, "dist_token")  # its feature is the mean of two tokens
    normalized = isinstance(getattr(model, "fc_norm", None), nn.Identity | None)
    if distilled or not normalized:
        return ("pooled",)
    if not _has_cls(model):
        return ("pooled", "gem", "quadrants")
    return TOKEN_POOLINGS if pooling == "token" else ("pooled", *TOKEN_POOLINGS)


def _has_cls(model: nn.Module) -> bool:
    return getattr(model, "num_prefix_tokens", 0) >= 1 and isinstance(getattr(model, "cls_token", None), Tensor)


def _patch_stride(patches: Any) -> int:
    """Return the pixels from one patch to the next of a model's patch embedding; 1 for a model without one."""
    if hasattr(patches, "feat_ratio"):
        return int(patches.feat_ratio())
    stride: Any = getattr(getattr(patches, "proj", None), "stride", None) or getattr(patches, "patch_size", 1)
    return int(stride if isinstance(stride, int) else max(stride))


def _create(name: str, options: Mapping[str, Any], position_resize: str) -> TimmModel:
    for any_size in _ANY_SIZE_OPTIONS:
        try:
            model = timm.create_model(name, pretrained=False, num_classes=0, **any_size, **options)
        except TypeError as error:
            if not any_size or not any(option in str(error) for option in any_size):
                raise ConfigError(f"timm model {name} cannot be made: {error}") from None
        else:
            made = TimmModel(model, name, any_size=bool(any_size), position_resize=position_resize)
            made.made_with = dict(options)
            return made
    raise AssertionError("the last options are empty")


def random_model(
    name: str, seed: int, position_resize: str = "timm", made_with: Mapping[str, Any] | None = None
) -> TimmModel:
    """Make a timm model with the random weights that `seed` gives; the caller's random state stays as it is.

    `made_with` is that of a `TimmModel` which is to be made again.

    Raises:
        ConfigError: timm has no such model.
    """
    require_timm_name(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _create(name, made_with or {}, position_resize)


def filled_model(
    name: str,
    tensors: Mapping[str, Tensor],
    *,
    file: Path,
    by_position: bool = False,
    position_resize: str = "timm",
    heads: Mapping[int, int] | None = None,
) -> tuple[TimmModel, list[str]]:
    """Make a timm model with the given weights; return it and the names of the tensors that were left out.

    A ViT's grid of position embeddings, a Swin's window, and whether a ViT's last norm comes before or after pooling
    follow the file. A ViT gets the attention heads that `heads` has for its width, since no tensor shows them.

    Raises:
        ConfigError: timm has no such model.
        CheckpointError: the tensors do not fit it.
    """
    require_timm_name(name)
    with torch.random.fork_rng(devices=[]):
        model = _create(name, {}, position_resize)
        options = {} if by_position else _sizes_in(tensors, model) | _norm_in(tensors, model.backbone)
        wanted = wanted_heads(model.backbone, heads or {})
        if wanted is not None:
            options["num_heads"] = wanted
        if options:
            model = _create(name, options, position_resize)
    classifier = timm_settings(name).get("classifier") or ()
    names = (classifier,) if isinstance(classifier, str) else tuple(classifier)
    origin, target = f"weights {file}", f"timm model {name}"
    if not by_position:
        ends = tuple(f"{head}." for head in names)
        renamed = names_of_model(model.backbone.state_dict(), tensors)
        return model, fit_tensors(model.backbone, renamed, origin=origin, target=target, heads=ends)
    if file.suffix == ".safetensors":
        raise CheckpointError(f"{origin} cannot be matched by position: safetensors keeps no order; use the .pth file")
    return model, fit_tensors_by_position(model.backbone, tensors, origin=origin, target=target)


def wanted_heads(model: nn.Module, heads: Mapping[int, int]) -> int | None:
    """Return the attention heads that a ViT of this width should have; None if it has them, or they are not known."""
    wanted = heads.get(model.embed_dim) if isinstance(model, VisionTransformer) else None
    blocks: Any = model.blocks if wanted is not None else None
    return None if wanted is None or wanted == blocks[0].attn.num_heads else wanted


def _sizes_in(tensors: Mapping[str, Tensor], model: TimmModel) -> dict[str, Any]:
    """Return options under which the model gets the file's grid of positions or attention window; {} if it has them."""
    own = model.backbone.state_dict()
    positions = tensors.get("pos_embed")
    if positions is not None and "pos_embed" in own and positions.ndim == own["pos_embed"].ndim == 3:
        surplus = own["pos_embed"].shape[1] - (model.native_size // model.multiple) ** 2  # [CLS] and registers
        grid = math.isqrt(max(0, positions.shape[1] - surplus))
        fits = grid > 0 and grid**2 == positions.shape[1] - surplus
        return {"img_size": grid * model.multiple} if fits and positions.shape != own["pos_embed"].shape else {}
    name = "layers.0.blocks.0.attn.relative_position_bias_table"
    if name in tensors and name in own and tensors[name].shape != own[name].shape:
        side = math.isqrt(tensors[name].shape[0])  # of the (2 w - 1)^2 offsets in a window of w
        return {"window_size": (side + 1) // 2} if side % 2 and side**2 == tensors[name].shape[0] else {}
    return {}


def _norm_in(tensors: Mapping[str, Tensor], vit: nn.Module) -> dict[str, Any]:
    """Return options under which a ViT norms before pooling, as pretraining does, or after it; {} if it does already.

    BEiT's and MAE's fine-tuning norm the mean of the patch tokens.
    """
    is_plain = isinstance(vit, VisionTransformer)
    if not (is_plain or isinstance(vit, Eva | Beit)):
        return {}
    before, after = "norm.weight" in tensors, "fc_norm.weight" in tensors
    own = vit.state_dict()
    if before == after or (before and "norm.weight" in own) or (after and "fc_norm.weight" in own):
        return {}
    if before:
        return {"fc_norm" if is_plain else "use_fc_norm": False}
    return {"global_pool": "avg", "fc_norm" if is_plain else "use_fc_norm": True}
