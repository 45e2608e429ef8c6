"""Small videos in the layout of DAVIS-2017: bright squares on a smooth ground, which move by a few pixels a frame."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from tests.images import encode, make_image

HEIGHT, WIDTH = 64, 110
_COLORS = ((250, 30, 30), (30, 30, 250), (30, 250, 30))


def write_davis(
    root: Path, names: tuple[str, ...] = ("cat", "dog"), frames: int = 6, objects: int = 2, white: bool = False
) -> Path:
    """Write frames and masks; with `white` the masks are 0 and 255, of one object."""
    (root / "ImageSets" / "2017").mkdir(parents=True)
    (root / "ImageSets" / "2017" / "val.txt").write_text("".join(f"{name}\n" for name in names))
    for seed, name in enumerate(names):
        folders = [root / kind / "480p" / name for kind in ("JPEGImages", "Annotations")]
        for folder in folders:
            folder.mkdir(parents=True)
        ground = make_image(np.random.default_rng(seed), (HEIGHT, WIDTH))
        for place in range(frames):
            image, mask = ground.copy(), np.zeros((HEIGHT, WIDTH), np.uint8)
            for number in range(1, objects + 1):
                top, left = 4 + 2 * place, 2 + 35 * (number - 1) + 2 * place
                image[top : top + 26, left : left + 26] = _COLORS[number - 1]
                mask[top : top + 26, left : left + 26] = 255 if white else number
            (folders[0] / f"{place:05d}.jpg").write_bytes(encode(image))
            made = Image.fromarray(mask)
            if not white:
                made.putpalette([0, 0, 0, 128, 0, 0, 0, 128, 0, 128, 128, 0])
            made.save(folders[1] / f"{place:05d}.png")
    return root


def mask_file(root: Path, name: str, place: int) -> Path:
    return root / "Annotations" / "480p" / name / f"{place:05d}.png"


def frame_file(root: Path, name: str, place: int) -> Path:
    return root / "JPEGImages" / "480p" / name / f"{place:05d}.jpg"
