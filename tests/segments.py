"""Small images with masks, in both layouts: squares of the color of their class on a smooth ground of class 1."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from tests.images import encode

COLORS = ((40, 90, 60), (250, 40, 40), (40, 60, 250))
NAMES = {0: "unlabeled", 1: "person", 3: "car", 184: "tree-merged"}


def write_segments(root: Path, count: tuple[int, int] = (6, 4), *, ade: bool = False, size: int = 48) -> Path:
    """Write training and test images; the upper left corner is void, class 3 is in no test mask.

    The values of masks are 1, 2, 3 in ADE20K's layout, else those of `NAMES`.
    """
    folder, names = ("annotations", ("training", "validation")) if ade else ("semantic", ("train", "val"))
    values = np.array([0, 1, 2, 3] if ade else list(NAMES), np.uint8)
    rng = np.random.default_rng(0)
    for name, images in zip(names, count, strict=True):
        for kind in ("images", folder):
            (root / kind / name).mkdir(parents=True)
        for number in range(images):
            mask = np.ones((size, size + 16), np.uint8)
            for label in (2, 3) if name == names[0] else (2,):
                top, left = rng.integers(0, size // 2, 2)
                mask[top : top + size // 2, left : left + size // 2] = label
            pixels = np.array(COLORS)[mask - 1] + rng.normal(0, 6, (*mask.shape, 3))
            mask[:4, :6] = 0
            image = np.clip(pixels, 0, 255).astype(np.uint8)
            (root / "images" / name / f"{number}.jpg").write_bytes(encode(image))
            Image.fromarray(values[mask]).save(root / folder / name / f"{number}.png")
    if not ade:
        text = "".join(f"  {value}: {name}\n" for value, name in NAMES.items())
        (root / "semantic" / "classes.yaml").write_text(f"classes:\n{text}")
    return root
