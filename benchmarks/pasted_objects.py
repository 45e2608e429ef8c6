"""Make a retrieval set of objects in parts of images: COCO's objects pasted into other photos at a tenth of the area.

    python benchmarks/pasted_objects.py coco/ photos/ pasted/
    sop-retrieve --model lite0 --dataset pasted --rerank local --token-size 512

A query is the box around an object in its own image, background included; relevant is the one photo into which the same
object (without background) was pasted, upright, at a random place, so that its box has a tenth of the photo's area. The
other photos are wrong. COCO as of `make_backgrounds.py`; PHOTOS is a folder or shards, as SRC of every command.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import report as report  # mistakes are one line
from faster_coco_eval.core import mask as coco_mask
from PIL import Image

from sop_faiss.data.images.decode import decode_image
from sop_faiss.data.images.source import open_source
from sop_faiss.files import read_json

_OBJECTS = 60
_PHOTOS = 400
_SHARE = 0.1
_SIDE = 448
"""Shorter side of the photos, enlarged where they are smaller, so that a pasted object is not a blur."""
_LEAST_AREA = 8_000
"""Pixels of an object's mask."""


def objects_of(coco: Path, place: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the largest object of each image: the pixels of its box, and its mask there; the largest first.

    Where `place` is 1 the second largest, and so on.
    """
    objects: dict[Path, list[dict[str, Any]]] = {}
    for split in ("train", "val"):
        content = read_json(coco / "annotations" / f"instances_{split}.json")
        files = {each["id"]: coco / "images" / split / each["file_name"] for each in content["images"]}
        for each in content["annotations"]:
            if not each.get("iscrowd") and each["area"] > _LEAST_AREA:
                objects.setdefault(files[each["image_id"]], []).append(each)
    ranked = {file: sorted(each, key=lambda one: -one["area"])[place : place + 1] for file, each in objects.items()}
    largest = {file: each[0] for file, each in ranked.items() if each}
    found = []
    for file, each in sorted(largest.items(), key=lambda pair: (-pair[1]["area"], str(pair[0]))):
        pixels, mask = decode_image(file.read_bytes()), coco_mask.decode(each["segmentation"]).astype(bool)
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        box = np.s_[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        if mask[box].size < 0.7 * mask.size:  # else there is nothing but the object
            found.append((pixels[box], mask[box]))
    return found


def pasted(photo: np.ndarray, pixels: np.ndarray, mask: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Return the photo with an object at a random place; its box has a tenth of the area where it fits."""
    height, width = photo.shape[:2]
    scale = np.sqrt(_SHARE * height * width / mask.size)
    scale = min(scale, height / mask.shape[0], width / mask.shape[1])
    size = tuple(max(1, int(scale * side)) for side in mask.shape)
    small = cv2.resize(pixels, size[::-1], interpolation=cv2.INTER_AREA)
    alpha = cv2.resize(mask.astype(np.float32), size[::-1], interpolation=cv2.INTER_AREA)[..., None]
    top, left = (
        int(generator.integers(0, whole - part + 1)) for whole, part in zip((height, width), size, strict=True)
    )
    out = photo.copy()
    place = np.s_[top : top + size[0], left : left + size[1]]
    out[place] = (alpha * small + (1 - alpha) * photo[place]).round().astype(np.uint8)
    return out


def write_set(coco: Path, photos: str, out: Path, split: int = 0) -> str:
    """Write OUT/query and OUT/database, in class folders: one for each object, and one of photos without."""
    generator = np.random.default_rng(0)
    source = open_source(photos)
    drawn = generator.permutation(len(source))[split * _PHOTOS : (split + 1) * _PHOTOS].tolist()
    objects = objects_of(coco, split)[:_OBJECTS]
    for number, position in enumerate(drawn):
        photo = decode_image(source.read(position))
        scale = max(1.0, _SIDE / min(photo.shape[:2]))
        photo = cv2.resize(photo, None, fx=scale, fy=scale, interpolation=cv2.INTER_CUBIC)
        name = f"object_{number:03d}" if number < len(objects) else "other"
        if number < len(objects):
            _save(objects[number][0], out / "query" / name / "query.jpg")
            photo = pasted(photo, *objects[number], generator)
        _save(photo, out / "database" / name / f"photo_{number:03d}.jpg")
    return f"{len(objects)} objects in {len(drawn)} photos: {out}"


def _save(pixels: np.ndarray, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, "JPEG", quality=92)
    file.write_bytes(encoded.getvalue())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("coco", type=Path)
    parser.add_argument("photos")
    parser.add_argument("out", type=Path)
    parser.add_argument("--split", type=int, default=0, help="other objects and other photos, to choose settings on")
    arguments = parser.parse_args()
    print(write_set(arguments.coco, arguments.photos, arguments.out, arguments.split))
