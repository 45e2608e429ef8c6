"""Make a small set like ImageNet-9 of COCO's instance masks: for trying `sop-eval backgrounds`, not for publishing.

    python benchmarks/make_backgrounds.py coco/ coco_backgrounds/

It follows Xiao et al. 2020 ("Noise or Signal"), section 2: the same eight sets, named and laid out as theirs, and
`original/train`. Classes are COCO's supercategories; an image is a square around one object. Masks are the annotated
ones, where ImageNet-9 has those of GrabCut, and nothing is checked by hand. Backgrounds of mixed images are tiled ones
(`only_bg_t`) of other test images. Needs faster-coco-eval, which decodes the masks.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import cv2
import numpy as np
from faster_coco_eval.core import mask as coco_mask
from jaxtyping import Bool, UInt8
from PIL import Image

from sop_faiss.files import atomic_directory, read_json

SPLITS = ("train", "val")
"""Of COCO, which are taken together, and of the sets."""
SIDE = 192
AROUND = 1.6
"""Side of the square, in longer sides of the object's box."""
SMALLEST = 64
"""Pixels of the square before it is resized."""
FEWEST = 10
"""A class with fewer objects for training, or for testing, is left out."""
MOST = 25
"""Objects of a class for training, and for testing, the largest ones, so that persons do not outnumber the others."""

T = TypeVar("T")
Pixels = UInt8[np.ndarray, "side side 3"]


class Cut(NamedTuple):
    """An object and what is around it."""

    name: str
    pixels: Pixels
    mask: Bool[np.ndarray, "side side"]


def main() -> None:
    """Write the sets."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("coco", type=Path, help="images/{train,val} and annotations/instances_{train,val}.json")
    parser.add_argument("out", type=Path, help="a new directory")
    arguments = parser.parse_args()
    cuts = read_cuts(arguments.coco)
    names = sorted(name for name in cuts["val"] if all(len(each.get(name, [])) >= FEWEST for each in cuts.values()))
    with atomic_directory(arguments.out) as directory:
        for number, name in enumerate(names):
            for cut in cuts["train"][name]:
                save(directory / "original" / "train", number, name, cut.name, cut.pixels)
        write_sets(directory, [cuts["val"][name] for name in names], names)
    for split, of_class in cuts.items():
        print(split, {name: len(of_class[name]) for name in names})


def read_cuts(coco: Path) -> dict[str, dict[str, list[Cut]]]:
    """Cut the largest objects of each supercategory out: every other image is for training, the others for testing."""
    found: dict[str, dict[str, list[Cut]]] = {split: defaultdict(list) for split in SPLITS}
    for split in SPLITS:
        content = read_json(coco / "annotations" / f"instances_{split}.json")
        files = {image["id"]: coco / "images" / split / image["file_name"] for image in content["images"]}
        own = {number: SPLITS[place % 2] for place, number in enumerate(sorted(files))}
        classes = {category["id"]: category["supercategory"] for category in content["categories"]}
        for each in sorted(content["annotations"], key=lambda each: -each["area"]):
            of_class = found[own[each["image_id"]]][classes[each["category_id"]]]
            if not each["iscrowd"] and len(of_class) < MOST:
                cut = cut_out(f"{split}_{each['id']}", files[each["image_id"]], each)
                if cut is not None:
                    of_class.append(cut)
    return found


def cut_out(name: str, file: Path, annotation: Mapping[str, Any]) -> Cut | None:
    """Cut a square around an object.

    None if it is small, the object does not cover a tenth to two thirds of it, or nothing is left to tile.
    """
    pixels = np.array(Image.open(file).convert("RGB"))
    height, width = pixels.shape[:2]
    mask = coco_mask.decode(annotation["segmentation"]).astype(bool)
    left, top, box_width, box_height = annotation["bbox"]
    side = round(min(AROUND * max(box_width, box_height), height, width))
    if side < SMALLEST:
        return None
    y = int(np.clip(top + box_height / 2 - side / 2, 0, height - side))
    x = int(np.clip(left + box_width / 2 - side / 2, 0, width - side))
    inside = mask[y : y + side, x : x + side].astype(np.uint8)
    square = cv2.resize(pixels[y : y + side, x : x + side], (SIDE, SIDE), interpolation=cv2.INTER_AREA)
    small = cv2.resize(inside, (SIDE, SIDE), interpolation=cv2.INTER_NEAREST).astype(bool)
    if not 0.1 <= small.mean() <= 2 / 3 or largest_strip(square, small).size < square.size // 20:
        return None
    return Cut(name, square, small)


def box_of(mask: Bool[np.ndarray, "side side"]) -> tuple[slice, slice]:
    """Return rows and columns of the smallest box around the mask."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)


def largest_strip(pixels: Pixels, mask: Bool[np.ndarray, "side side"]) -> UInt8[np.ndarray, "h w 3"]:
    """Return the largest of the four strips above, below, left and right of the object's box."""
    rows, columns = box_of(mask)
    strips = pixels[: rows.start], pixels[rows.stop :], pixels[:, : columns.start], pixels[:, columns.stop :]
    return max(strips, key=lambda strip: strip.size)


def with_tiled_box(cut: Cut) -> Pixels:
    """Return the image with the object's box filled by its largest strip of background, repeated."""
    strip = largest_strip(cut.pixels, cut.mask)
    tiled = np.tile(strip, (-(-SIDE // strip.shape[0]), -(-SIDE // strip.shape[1]), 1))[:SIDE, :SIDE]
    filled = cut.pixels.copy()
    filled[box_of(cut.mask)] = tiled[box_of(cut.mask)]
    return filled


def write_sets(directory: Path, of_classes: Sequence[Sequence[Cut]], names: Sequence[str]) -> None:
    """Write the eight sets of the objects to be tested on; backgrounds are drawn with a fixed seed."""
    generator = np.random.default_rng(0)

    def draw(choices: Sequence[T]) -> T:
        return choices[int(generator.integers(len(choices)))]

    for number, (name, cuts) in enumerate(zip(names, of_classes, strict=True)):
        for place, cut in enumerate(cuts):
            shape = cut.mask[..., None]
            boxed = cut.pixels.copy()
            boxed[box_of(cut.mask)] = 0
            made = {
                "original": cut.pixels,
                "only_fg": np.where(shape, cut.pixels, 0),
                "no_fg": np.where(shape, 0, cut.pixels),
                "only_bg_b": boxed,
                "only_bg_t": with_tiled_box(cut),
            }
            others = [other for at, other in enumerate(cuts) if at != place]
            behind = {
                "mixed_same": others,
                "mixed_rand": draw(of_classes),
                "mixed_next": of_classes[(number + 1) % len(names)],
            }
            for kind, choice in behind.items():
                made[kind] = np.where(shape, cut.pixels, with_tiled_box(draw(choice)))
            for kind, pixels in made.items():
                save(directory / kind / "val", number, name, cut.name, pixels)


def save(folder: Path, number: int, name: str, key: str, pixels: Pixels) -> None:
    """Write an image to the folder of its class."""
    place = folder / f"{number:02d}_{name}"
    place.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype(np.uint8)).save(place / f"{key}.jpg", quality=95)


if __name__ == "__main__":
    import report as report  # mistakes are one line

    main()
