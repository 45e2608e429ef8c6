"""Colored rectangles on gray images, annotated as COCO does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.images import encode

HEIGHT, WIDTH = 48, 64
CATEGORIES = {3: "red", 7: "green"}
"""With gaps between the ids."""
_COLORS = {3: (220, 40, 40), 7: (40, 200, 60)}


def run_lengths(mask: np.ndarray) -> list[int]:
    """Lengths of runs of 0 and 1 down the columns, the first of 0."""
    flat = mask.T.ravel()
    ends = np.flatnonzero(np.diff(flat)) + 1
    counts = np.diff([0, *ends.tolist(), flat.size]).tolist()
    return [0, *counts] if flat[0] else counts


def packed(counts: list[int]) -> str:
    """Run lengths as COCO packs them into text."""
    letters = []
    for place, count in enumerate(counts):
        value = count - (counts[place - 2] if place > 2 else 0)
        more = True
        while more:
            digit, value = value & 31, value >> 5
            more = value != (-1 if digit & 16 else 0)
            letters.append(chr(48 + digit + 32 * more))
    return "".join(letters)


def rectangle(category: int, left: int, top: int, width: int, height: int, form: int, **more: Any) -> dict[str, Any]:
    """An annotation without ids; the mask as a polygon (form 0), run lengths (1) or packed ones (2)."""
    segmentation: Any
    right, bottom = left + width, top + height
    segmentation = [[left, top, right, top, right, bottom, left, bottom]]
    if form:
        mask = np.zeros((HEIGHT, WIDTH), np.uint8)
        mask[top:bottom, left:right] = 1
        counts = run_lengths(mask)
        segmentation = {"size": [HEIGHT, WIDTH], "counts": packed(counts) if form == 2 else counts}
    box = {"bbox": [left, top, width, height], "area": width * height}
    return {"category_id": category, **box, "iscrowd": 0, "segmentation": segmentation, **more}


def write_coco(root: Path, count: int = 6, *, official: bool = False, seed: int = 0) -> Path:
    """Write `count` images each for training and testing.

    Image 0 has no annotation; of image 1 a crowd is annotated, too.
    """
    rng = np.random.default_rng(seed)
    for split in ("train", "val"):
        folder = root / (f"{split}2017" if official else f"images/{split}")
        folder.mkdir(parents=True)
        images, annotations = [], []
        for number in range(count):
            pixels = rng.integers(110, 140, (HEIGHT, WIDTH, 3)).astype(np.uint8)
            own = []
            for place in range(min(number, 1 + number % 2)):
                category = (3, 7)[(number + place) % 2]
                left, width = 4 + 32 * place, int(rng.integers(10, 24))
                top, height = int(rng.integers(2, 16)), int(rng.integers(10, 28))
                pixels[top : top + height, left : left + width] = _COLORS[category]
                own.append(rectangle(category, left, top, width, height, (number + place) % 3))
            if number == 1:
                own.append(rectangle(3, 40, 4, 20, 40, 1, iscrowd=1))
            (folder / f"{number:03d}.jpg").write_bytes(encode(pixels, quality=95))
            images.append({"id": 10 * number + 5, "file_name": f"{number:03d}.jpg", "height": HEIGHT, "width": WIDTH})
            annotations += [{**each, "image_id": 10 * number + 5} for each in own]
        named = [{"id": number, "name": name, "supercategory": "shape"} for number, name in CATEGORIES.items()]
        numbered = [{**each, "id": 100 + place} for place, each in enumerate(annotations)]
        content = {"info": {}, "images": images, "annotations": numbered, "categories": named[::-1]}
        (root / "annotations").mkdir(exist_ok=True)
        file = root / "annotations" / f"instances_{split}{'2017' if official else ''}.json"
        file.write_text(json.dumps(content))
    return root
