"""The first layer filled with the whitening of the training images' own patches, in place of random weights.

Source: the principal components of patches, each divided by its standard deviation and with both signs, are the first
layer of the fastest small networks on CIFAR-10 (K. Jordan, arXiv 2404.00498, section 3.1; there 2 x 2 pixels).
"""

from __future__ import annotations

import torch
from jaxtyping import Float32
from torch import Tensor, nn
from torch.nn import functional

from sop_faiss.errors import ConfigError

_PATCHES_PER_IMAGE = 64
_FLOOR = 5e-4
"""Added to the variances, relative to their mean: directions of less variance hold JPEG's rounding and no image."""
_LEAST = 1e-8
"""Mean variance of normalized pixels: two neighboring levels of gray have about 1e-4."""


def first_layer(backbone: nn.Module) -> nn.Conv2d:
    """Return the convolution that sees the pixels.

    Raises:
        ConfigError: the backbone does not begin with an ordinary convolution.
    """
    for module in backbone.modules():
        if isinstance(module, nn.Conv2d):
            if module.groups == 1 and module.dilation == (1, 1):
                return module
            break
    raise ConfigError(
        "model.first_layer: this backbone does not begin with an ordinary convolution: set model.first_layer=random"
    )


@torch.no_grad()
def whiten_first_layer(backbone: nn.Module, images: Float32[Tensor, "n 3 h w"], seed: int) -> int:
    """Fill the first convolution with the principal components of patches of the images; return their number.

    Each component is there twice, with both signs, and scaled to unit variance. Filters that are left over when the
    layer has more than two for each component keep their weights.

    Args:
        backbone: whose first convolution is filled, its bias included.
        images: normalized, at least as large as a patch.
        seed: of the places of the patches.

    Raises:
        ConfigError: the backbone has no such layer, or the images are too few or too small.
    """
    layer = first_layer(backbone)
    patches = _patches(images, (layer.kernel_size[0], layer.kernel_size[1]), seed).double()
    filters, size = layer.out_channels, patches.shape[1]
    if len(patches) < 2 * size:
        raise ConfigError(
            f"model.first_layer: {len(images)} images give {len(patches)} patches, fewer than twice the {size} numbers "
            "of a patch: set model.first_layer=random"
        )
    mean = patches.mean(0)
    variances, directions = torch.linalg.eigh((patches - mean).T @ (patches - mean) / len(patches))
    if variances.mean() < _LEAST:
        raise ConfigError("model.first_layer: all images are one and the same color: set model.first_layer=random")
    kept = min(filters // 2, size)
    variances, directions = variances.flip(0)[:kept], directions.flip(1)[:, :kept]  # most variance first
    # the sign of an eigenvector is arbitrary, and both signs are used; in this order they are the same everywhere
    directions = directions * directions.gather(0, directions.abs().argmax(0, keepdim=True)).sign()
    components = (directions / (variances + _FLOOR * variances.mean()).sqrt()).T
    both = torch.cat([components, -components])
    layer.weight[: 2 * kept] = both.view(2 * kept, *layer.weight.shape[1:]).to(layer.weight)
    if layer.bias is not None:
        layer.bias[: 2 * kept] = -(both @ mean).to(layer.bias)
    return kept


def _patches(images: Float32[Tensor, "n 3 h w"], size: tuple[int, int], seed: int) -> Float32[Tensor, "p d"]:
    """Return patches at random places, each flattened as a convolution's weights are."""
    rows, columns = images.shape[2] - size[0] + 1, images.shape[3] - size[1] + 1
    if rows < 1 or columns < 1:
        raise ConfigError(f"model.first_layer: images of {images.shape[2]} px are smaller than a patch of {size[0]}")
    generator = torch.Generator().manual_seed(seed)
    found = [torch.empty(0, images.shape[1] * size[0] * size[1])]
    for image in images.cpu():
        every = functional.unfold(image[None], size)[0].T  # one for each place, row by row
        found.append(every[torch.randint(rows * columns, (_PATCHES_PER_IMAGE,), generator=generator)])
    return torch.cat(found)
