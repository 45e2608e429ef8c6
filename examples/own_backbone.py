"""An own backbone: a module with two of timm's methods, registered with timm under a name for `model.backbone`.

    python examples/own_backbone.py

A ViT of one's own is a subclass of timm's VisionTransformer under a name that begins with vit_. What is missing: the
commands import no modules of yours. Call `run_training` in a script that imports this one; who opens the run does, too.
"""

from dataclasses import replace

import timm
from own_data import random_images
from torch import Tensor, nn
from training import TINY, train


class TwoConvolutions(nn.Module):
    def __init__(self, width: int = 32, **_: object) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, width, 4, stride=4), nn.GroupNorm(4, width), nn.GELU(), nn.Conv2d(width, width, 2, stride=2)
        )

    def forward_features(self, images: Tensor) -> Tensor:
        return self.layers(images)  # a map: (batch, channels, rows, columns); its stride is that of a patch

    def forward_head(self, last_map: Tensor, pre_logits: bool = False) -> Tensor:
        return last_map.mean((2, 3))  # the global feature, without a classifier


@timm.models.register_model
def two_convolutions(pretrained: bool = False, **options: object) -> TwoConvolutions:
    return TwoConvolutions()


shape = {"patch_size": None, "embed_dim": None, "depth": None, "num_heads": None}  # of ViTs only
CONFIG = replace(TINY, model=replace(TINY.model, backbone="two_convolutions", **shape))

if __name__ == "__main__":
    print(train(random_images(), CONFIG)[1])
