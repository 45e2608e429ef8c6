"""Augmented images for fine-tuning: each a pure function of the seed, the epoch and its place."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float32, Int64, UInt8
from PIL import Image
from timm.data import create_transform
from timm.data.auto_augment import RandAugment
from torch import Tensor
from torchvision import transforms

from sop_faiss.evaluate.trained.finetune_choices import FinetuneChoices
from sop_faiss.evaluate.trained.training_batches import Plan, plan_batches, seeded
from sop_faiss.model.encoders.preprocess import Preprocess

_SHIFTED_SIDE = 32
"""Up to this side in pixels BEiT's script shifts images and takes no random crops."""
_SHIFT = 4
_MOST_POSTERIZED = 9.99
"""Of a magnitude of 10: there timm would keep no bit, a black image, which Pillow 13 refuses; this keeps one."""


class Augmentation:
    """Make the network's input of a training image; called with its pixels and what its random draws depend on."""

    def __init__(self, preprocess: Preprocess, choices: FinetuneChoices) -> None:
        side = preprocess.crop
        self.preprocess = preprocess
        chain: Any = create_transform(
            side,
            is_training=True,
            scale=(choices.min_crop, 1.0),
            hflip=choices.flip,
            color_jitter=None,  # RandAugment takes its place in the recipe
            auto_augment=f"rand-m{choices.randaugment}-mstd0.5-inc1" if choices.randaugment else None,
            interpolation="bicubic",
            mean=preprocess.mean,
            std=preprocess.std,
            re_prob=choices.erasing,
            re_mode="pixel",
            re_count=1,
        )
        for augment in (each for each in chain.transforms if isinstance(each, RandAugment)):
            for operation in augment.ops:
                if operation.name.startswith("Posterize"):
                    operation.magnitude_max = _MOST_POSTERIZED
        self.crops = choices.min_crop < 1 and side > _SHIFTED_SIDE
        if not self.crops:
            chain.transforms[0] = transforms.RandomCrop(side, padding=_SHIFT if choices.min_crop < 1 else 0)
        self.chain = chain

    def __call__(self, pixels: UInt8[np.ndarray, "h w 3"], *key: int | str) -> Float32[Tensor, "3 rows columns"]:
        """Augment one image."""
        with seeded(*key):
            made: Tensor = self.chain(Image.fromarray(pixels if self.crops else self.preprocess.apply(pixels)))
        return made


def plan_epoch(rows: Int64[np.ndarray, " n"], choices: FinetuneChoices, *key: int | str, images: int = 0) -> Plan:
    """Shuffle an epoch's images into batches as `plan_batches` does, without an odd one where batches are mixed.

    Args:
        rows: the images.
        choices: size of a batch, and copies of an image in it.
        key: what the order depends on.
        images: of the set; copies of an image are this many rows apart.
    """
    size = choices.batch_size
    if len(rows) < size:
        size = len(rows) - (len(rows) % 2 if choices.mixes else 0)
    plan = plan_batches(rows, size, *key)
    if choices.repeats == 1:
        return plan
    order = np.concatenate(plan)
    copies = (order[:, None] + images * np.arange(choices.repeats)).ravel()[: len(order)]
    return list(copies.reshape(len(plan), -1))
