"""Networks for images of 32 to 64 pixels, which timm lacks: they are registered with timm under names of their own.

`resnet_small`       the residual network of He et al. 2016 (section 4.2, CIFAR-10) with one block per stage
`vit_tiny_convstem`  a ViT whose patches come from 3 x 3 convolutions of stride 2 (Xiao et al. 2021, "Early convolutions
                     help transformers see better")

Both learn from few small images where random patch embeddings hardly do: a convolution has few weights, and each is
used at every place.
"""

from __future__ import annotations

from typing import Any

from timm.layers import PatchEmbed
from timm.models import VisionTransformer, build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.resnet import BasicBlock, ResNet
from torch import nn

SMALL_SIZES = {"resnet_small": ("depth", "embed_dim"), "vit_tiny_convstem": ()}
"""The fields of the model section, beside those of every ViT, that change the size of these networks."""

_FIRST_WIDTHS = (32, 64)
_CONFIG = {
    "num_classes": 1000,
    "input_size": (3, 32, 32),
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225),
    "crop_pct": 0.875,
    "interpolation": "bicubic",
}
default_cfgs = generate_default_cfgs(
    {
        "resnet_small": {**_CONFIG, "pool_size": (8, 8), "first_conv": "conv1", "classifier": "fc"},
        "vit_tiny_convstem": {**_CONFIG, "first_conv": "patch_embed.proj.0", "classifier": "head"},
    }
)
"""What timm records of its models; it finds them under this name."""


class SmallResNet(ResNet):  # type: ignore[misc]
    """timm's ResNet with a stem of one 3 x 3 convolution that keeps the size, and three stages: its stride is 4.

    The last batch norm of each residual branch starts with a scale of 0, so that a block starts as its shortcut.

    Args:
        depth: blocks per stage.
        embed_dim: width of the last stage; the first two have 32 and 64.
        options: of timm's ResNet.
    """

    def __init__(self, depth: int = 1, embed_dim: int = 128, **options: Any) -> None:
        first = _FIRST_WIDTHS[0]
        super().__init__(
            BasicBlock,
            (depth,) * 3,
            channels=(*_FIRST_WIDTHS, embed_dim),
            stem_type="deep",  # timm's one stem whose width can be chosen, twice the number; it is replaced below
            stem_width=first // 2,
            **options,
        )
        self.conv1 = nn.Conv2d(options.get("in_chans", 3), first, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")  # as timm's others
        self.maxpool = nn.Identity()
        self.layer4 = nn.Sequential()  # timm passes through four stages
        for info, reduction in zip(self.feature_info, (1, 1, 2, 4), strict=True):
            info["reduction"] = reduction


class ConvStem(PatchEmbed):  # type: ignore[misc]
    """A patch embedding of 3 x 3 convolutions of stride 2 with batch norm and GELU, then a 1 x 1 convolution.

    A patch of 8 pixels takes three of them; the widths double up to the last. Neighboring patches see some of each
    other's pixels.

    Raises:
        ValueError: the patch is not a power of 2 above 1.
    """

    def __init__(
        self, img_size: int = 32, patch_size: int = 8, in_chans: int = 3, embed_dim: int = 192, **options: Any
    ) -> None:
        halvings = int(patch_size).bit_length() - 1
        if halvings < 1 or 2**halvings != patch_size:
            raise ValueError(f"a stem of stride-2 convolutions makes patches of 2, 4, 8, ... pixels, not {patch_size}")
        super().__init__(img_size, patch_size, in_chans, embed_dim, **options)
        layers, width = [], in_chans
        for place in range(halvings):
            wider = max(8, embed_dim >> (halvings - place))
            layers += [nn.Conv2d(width, wider, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(wider), nn.GELU()]
            width = wider
        self.proj = nn.Sequential(*layers, nn.Conv2d(width, embed_dim, 1))


@register_model  # type: ignore[untyped-decorator]
def resnet_small(pretrained: bool = False, **options: Any) -> SmallResNet:
    """Make a residual network of three stages, 307,360 weights without a classifier."""
    features = {"out_indices": (0, 1, 2, 3)}  # of timm's `features_only`: the stem and three stages
    return build_model_with_cfg(SmallResNet, "resnet_small", pretrained, feature_cfg=features, **options)


@register_model  # type: ignore[untyped-decorator]
def vit_tiny_convstem(pretrained: bool = False, **options: Any) -> VisionTransformer:
    """Make a ViT with a convolutional stem: patches of 8 pixels, width 192, 6 blocks of 3 heads."""
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 192, "depth": 6, "num_heads": 3}
    return build_model_with_cfg(
        VisionTransformer, "vit_tiny_convstem", pretrained, **{**sizes, "embed_layer": ConvStem, **options}
    )
