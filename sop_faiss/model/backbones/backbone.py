"""timm models behind one interface: images in, a [CLS] and patch tokens out, with masking (docs/method.md, 1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from timm.layers import PatchEmbed
from timm.models.eva import Eva
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from sop_faiss import distributed
from sop_faiss.config import Config
from sop_faiss.errors import ConfigError
from sop_faiss.model.backbones.last_block import block_on_rows, works_on_rows


class Tokens(NamedTuple):
    """What a backbone makes of views, after its final norm."""

    cls: Float[Tensor, "b d"]
    """[CLS], or what a model without one has in its place."""
    patches: Float[Tensor, "b n d"]
    """In row-major order."""
    grid: tuple[int, int]
    """Rows and columns of the patches."""


class Backbone(nn.Module):
    """A timm model with a learnable mask token. Public attributes say what comes out."""

    trunk: Any
    """The timm model. Checkpoints name its tensors `backbone.trunk.*`, so the attribute keeps this name."""
    feature_dim: int
    """d: width of the tokens."""
    patch_size: int
    """Side of a patch token's square, in pixels; the unit of the masks."""
    freezes_batchnorm: bool
    """Whether batch norms use their running statistics while training, too."""
    linears_are_pointwise = False
    """Whether linear layers are another way to write 1 x 1 convolutions."""

    def __init__(
        self, model: nn.Module, feature_dim: int, patch_size: int, mask_dim: int, *, freezes_batchnorm: bool = False
    ) -> None:
        super().__init__()
        self.freezes_batchnorm = freezes_batchnorm
        self.trunk = model
        self.feature_dim = feature_dim
        self.patch_size = patch_size
        self.mask_token = nn.Parameter(torch.zeros(mask_dim))

    def check_size(self, name: str, pixels: int) -> None:
        """Raise ConfigError unless views of this side can be cut into patches."""
        if pixels % self.patch_size:
            near = max(self.patch_size, round(pixels / self.patch_size) * self.patch_size)
            raise ConfigError(
                f"{name} = {pixels} pixels is not divisible by the backbone's patch of {self.patch_size}: "
                f"set {name}={near}"
            )

    def train(self, mode: bool = True) -> Backbone:
        """Set the mode as of any module, except that frozen batch norms stay in evaluation mode."""
        super().train(mode)
        for module in self._batch_norms() if self.freezes_batchnorm else ():
            module.eval()
        return self

    def _batch_norms(self) -> list[nn.Module]:
        return [module for module in self.trunk.modules() if isinstance(module, _BatchNorm)]

    def check_batch_norms(self, config: Config) -> None:
        """Raise ConfigError if batch norms that follow the batch would see only parts of it."""
        if self.freezes_batchnorm or not self._batch_norms():
            return
        for what, parts in (("train.accumulate", config.train.accumulate), ("ranks", distributed.world_size())):
            if parts > 1:
                raise ConfigError(
                    f"{what} = {parts} with model.batchnorm = {config.model.batchnorm}: {config.model.backbone} would "
                    "normalize each part of the batch by itself, which is another step; set model.batchnorm=frozen or "
                    "take one"
                )

    def check_settings(self, config: Config) -> None:
        """Raise ConfigError where the configuration asks for what this kind of backbone does not have."""
        self.check_batch_norms(config)
        if config.masks.pixels:
            raise ConfigError(
                f"masks.pixels is for convolutional backbones, and {config.model.backbone} has tokens to hide: leave "
                "it out"
            )

    def forward(self, images: Float[Tensor, "b 3 h w"], masks: Bool[Tensor, "b n"] | None = None) -> Tokens:
        """Return the tokens of a batch of equal-sized views.

        Args:
            images: normalized images whose sides are multiples of `patch_size`.
            masks: True where a patch is replaced by the mask token, in row-major order.
        """
        raise NotImplementedError

    def read(
        self,
        images: Float[Tensor, "b 3 h w"],
        masks: Bool[Tensor, "b n"] | None = None,
        patches: Int64[Tensor, " m"] | None = None,
        wants_cls: bool = True,
    ) -> Float[Tensor, "rows d"]:
        """Return some of the tokens that `forward` makes: each view's [CLS], if wanted, then the named patches.

        Args:
            images: see `forward`.
            masks: see `forward`.
            patches: which ones, counted over the whole batch in row-major order; None: none.
            wants_cls: whether the [CLS] tokens are wanted.
        """
        tokens = self(images, masks)
        cls = tokens.cls if wants_cls else tokens.cls[:0]
        return cls if patches is None else torch.cat([cls, tokens.patches.flatten(0, 1)[patches]])

    def blocks(self) -> list[nn.Module]:
        """Return the parts that `forward` and `read` call one after the other, to be compiled or sharded one by one."""
        return []

    def checkpoint_activations(self) -> None:
        """Keep only the input of each block from now on, and compute the rest again in the backward pass.

        Raises:
            ConfigError: timm does not support it for this model.
        """
        try:
            self.trunk.set_grad_checkpointing(True)
        except (AssertionError, AttributeError):  # timm's ways of refusing
            raise ConfigError(
                f"train.checkpoint_activations = true, and {type(self.trunk).__name__} cannot do it: leave it out"
            ) from None

    def drop_hidden(self, config: Config) -> None:
        """Leave masked patches out from now on, instead of putting the mask token in their place.

        Raises:
            ConfigError: this kind of backbone cannot leave patches out.
        """
        raise ConfigError(
            f"masks.drop = {config.masks.drop:g} does not apply to {config.model.backbone}: only a ViT without rotary "
            "positions can leave patches out; set masks.drop=0"
        )

    def _masked(
        self, patches: Float[Tensor, "b rows cols c"], masks: Bool[Tensor, "b n"] | None, side: int
    ) -> Float[Tensor, "b rows cols c"]:
        """Put the mask token, before the position embedding, where `masks` says; a mask covers side x side patches."""
        if masks is None:
            return patches
        rows, cols = patches.shape[1] // side, patches.shape[2] // side
        grid = masks.view(-1, rows, cols).repeat_interleave(side, 1).repeat_interleave(side, 2)
        return torch.where(grid.unsqueeze(-1), self.mask_token.to(patches.dtype), patches)


class VitBackbone(Backbone):
    """A timm vision transformer, its Eva family (registers, RoPE, SwiGLU) included.

    Positions are interpolated to the size of the view.
    """

    def __init__(self, model: VisionTransformer | Eva, *, freezes_batchnorm: bool = False) -> None:
        if model.cls_token is None or not isinstance(model.fc_norm, nn.Identity):
            raise ConfigError("model.backbone has no [CLS] token of its own: choose another, as vit_small_patch16_224")
        if not isinstance(model.patch_embed, PatchEmbed):
            raise ConfigError("model.backbone cuts its patches from a convolutional stem: choose a plain timm ViT")
        width, side = model.embed_dim, model.patch_embed.patch_size[0]
        super().__init__(model, width, side, width, freezes_batchnorm=freezes_batchnorm)
        self._checkpoints = False
        self._drops = False
        self._reads_rows = works_on_rows(model.blocks[-1])

    def blocks(self) -> list[nn.Module]:
        """See `Backbone.blocks`; the last block is not one of them, since `read` takes it apart."""
        return list(self.trunk.blocks[:-1])

    def checkpoint_activations(self) -> None:
        """See `Backbone.checkpoint_activations`."""
        self._checkpoints = True

    def drop_hidden(self, config: Config) -> None:
        """See `Backbone.drop_hidden`; every view must then have the same number of masked patches."""
        if isinstance(self.trunk, Eva):
            super().drop_hidden(config)
        self._drops = True

    def forward(self, images: Float[Tensor, "b 3 h w"], masks: Bool[Tensor, "b n"] | None = None) -> Tokens:
        """See `Backbone.forward`."""
        tokens, rope = self._before_last_block(images, masks)
        tokens = self.trunk.norm(self._run(self.trunk.blocks[-1], tokens, *rope))
        rows, columns = (side // self.patch_size for side in images.shape[2:])
        return Tokens(tokens[:, 0], tokens[:, self.trunk.num_prefix_tokens :], (rows, columns))

    def read(
        self,
        images: Float[Tensor, "b 3 h w"],
        masks: Bool[Tensor, "b n"] | None = None,
        patches: Int64[Tensor, " m"] | None = None,
        wants_cls: bool = True,
    ) -> Float[Tensor, "rows d"]:
        """See `Backbone.read`; the last block computes only these tokens, where its build is known."""
        if not self._reads_rows:
            return super().read(images, masks, patches, wants_cls)
        tokens, rope = self._before_last_block(images, masks)
        views, count, _ = tokens.shape
        prefix, rows = self.trunk.num_prefix_tokens, []
        if wants_cls:
            rows.append(torch.arange(0, views * count, count, device=tokens.device))
        if patches is not None:
            rows.append(patches + prefix * (patches // (count - prefix) + 1))
        return self.trunk.norm(self._run(block_on_rows, self.trunk.blocks[-1], tokens, torch.cat(rows), *rope))

    def _before_last_block(
        self, images: Float[Tensor, "b 3 h w"], masks: Bool[Tensor, "b n"] | None
    ) -> tuple[Float[Tensor, "b tokens d"], tuple[Tensor, ...]]:
        """Return what the last block is given: tokens, and rotary positions if the model has any."""
        tokens, ropes = self._embed(images, masks)
        for block, rope in zip(self.trunk.blocks[:-1], ropes[:-1], strict=True):
            tokens = self._run(block, tokens, *rope)
        return tokens, ropes[-1]

    @torch.compiler.disable  # the gradient of resized position embeddings cannot be compiled for shapes that change
    def _embed(
        self, images: Float[Tensor, "b 3 h w"], masks: Bool[Tensor, "b n"] | None
    ) -> tuple[Float[Tensor, "b tokens d"], list[tuple[Tensor, ...]]]:
        """Return tokens before the first block, and each block's rotary positions, if any."""
        model = self.trunk
        patches = self._masked(model.patch_embed(images), None if self._drops else masks, side=1)
        embedded = model._pos_embed(patches)
        tokens, rope = embedded if isinstance(model, Eva) else (embedded, None)
        if self._drops and masks is not None:
            tokens = _without(tokens, masks, model.num_prefix_tokens)
        if rope is None:
            ropes: list[tuple[Tensor, ...]] = [()] * len(model.blocks)
        else:  # mixed: learned, and different in each block
            ropes = [(own,) for own in rope] if model.rope_mixed else [(rope,)] * len(model.blocks)
        return model.norm_pre(tokens), ropes

    def _run(self, block: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """Return a block's output; with checkpoints its activations are not kept."""
        if self._checkpoints and torch.is_grad_enabled():
            return checkpoint(block, *arguments, use_reentrant=False)
        return block(*arguments)


def _without(tokens: Float[Tensor, "b tokens d"], masks: Bool[Tensor, "b n"], prefix: int) -> Float[Tensor, "b kept d"]:
    """Leave out each view's masked patches, as many in each; the `prefix` tokens before the patches stay."""
    before = masks.new_zeros(len(masks), prefix)
    kept = (~torch.cat([before, masks], 1)).flatten().nonzero().squeeze(1)
    return tokens.flatten(0, 1).index_select(0, kept).unflatten(0, (len(tokens), -1))


class SwinBackbone(Backbone):
    """A timm Swin transformer: its [CLS] is the mean of the final tokens, a mask unit is 32 pixels."""

    def __init__(self, model: SwinTransformer) -> None:
        embed = model.patch_embed
        self._unit = 2 ** (len(model.layers) - 1)
        super().__init__(model, model.num_features, embed.patch_size[0] * self._unit, embed.proj.out_channels)

    def blocks(self) -> list[nn.Module]:
        """See `Backbone.blocks`."""
        return [block for layer in self.trunk.layers for block in layer.blocks]

    def forward(self, images: Float[Tensor, "b 3 h w"], masks: Bool[Tensor, "b n"] | None = None) -> Tokens:
        """See `Backbone.forward`."""
        model = self.trunk
        patches = self._masked(model.patch_embed(images), masks, side=self._unit)
        last_map = model.norm(model.layers(patches))
        _, rows, columns, _ = last_map.shape
        tokens = last_map.flatten(1, 2)
        return Tokens(tokens.mean(1), tokens, (rows, columns))
