"""The built-in demo set `scenes`: cuttings of color photos, each photographed again several times.

The photos ship inside two packages, so nothing is downloaded: china.jpg and flower.jpg of scikit-learn (by Alexander
Jakubowski and dany13, CC BY 2.0), and photos of scikit-image, whose documentation names the source of each.

A *thing* is a square of a photo that no other thing overlaps. A photograph of it is a window in this square: shifted,
scaled and turned, in other light and with other colors, blurred and noisy. So pixels of the same place differ, and
those who want to find a thing again have to know what does not change.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np
from jaxtyping import Float32, Int64, UInt8
from PIL import Image, ImageFilter

from sop_faiss.data.demo import write_labeled_part, write_retrieval_part
from sop_faiss.errors import DataError
from sop_faiss.files import atomic_directory

SIDE_PIXELS = 48
TRAIN_PER_THING, KNOWN_PER_THING, ASKED_PER_THING = 8, 4, 2
"""Photographs: to train on, and of each thing of the test those that are known and those that are asked for."""
_PHOTOS = (
    ("sklearn.datasets.images", "china.jpg"),
    ("sklearn.datasets.images", "flower.jpg"),
    ("skimage.data", "astronaut.png"),
    ("skimage.data", "chelsea.png"),
    ("skimage.data", "coffee.png"),
    ("skimage.data", "ihc.png"),
    ("skimage.data", "motorcycle_left.png"),
    ("skimage.data", "rocket.jpg"),
)
_THING_PIXELS = 72
_LEAST_CONTRAST = 18.0
"""Standard deviation of a thing's brightness, of 255: sky, walls and backgrounds look the same everywhere."""
_TEST_SHARE = 0.3
_SEED = 0


@dataclass(frozen=True)
class ScenesSummary:
    """Where the demo set is, the number of images in each part, and of how many things they are."""

    out: Path
    train: int
    train_things: int
    known: int
    asked: int
    test_things: int


def write_scenes(out: Path, *, for_choosing: bool = False) -> ScenesSummary:
    """Write `train/`, `known/` and `asked/` (shards, labeled by thing) and `retrieval/` (asked in known).

    The things of `known` and `asked` are not those of `train`, and share no pixel with them. The images are RGB PNGs of
    48 px; the bytes are always the same.

    Args:
        out: the folder to make; must be absent or empty.
        for_choosing: settings are to be chosen on it: it leaves out the things of the test, and holds out as large a
            share of the others.

    Raises:
        DataError: scikit-learn or scikit-image is not installed.
        SopError: `out` exists and is not empty.
    """
    things = _things()
    order = np.random.Generator(np.random.Philox(_SEED)).permutation(len(things))
    test, train = np.split(order, [round(_TEST_SHARE * len(order))])
    if for_choosing:
        test, train = np.split(train, [round(_TEST_SHARE * len(train))])
    with atomic_directory(out) as folder:
        pngs, labels = _photograph(things, train, TRAIN_PER_THING)
        write_labeled_part(folder / "train", "scenes", pngs, labels)
        pngs, labels = _photograph(things, test, KNOWN_PER_THING + ASKED_PER_THING)
        is_asked = np.arange(len(labels)) % (KNOWN_PER_THING + ASKED_PER_THING) >= KNOWN_PER_THING
        known, asked = np.flatnonzero(~is_asked), np.flatnonzero(is_asked)
        for name, rows in (("known", known), ("asked", asked)):
            write_labeled_part(folder / name, "scenes", [pngs[row] for row in rows], labels[rows])
        write_retrieval_part(folder / "retrieval", pngs, labels, asked, known)
    return ScenesSummary(out, len(train) * TRAIN_PER_THING, len(train), len(known), len(asked), len(test))


def _photos() -> Iterator[Image.Image]:
    for package, name in _PHOTOS:
        try:
            resource = files(package) / name
        except ModuleNotFoundError:
            raise DataError(
                "scikit-learn and scikit-image, which contain the demo's photos, are not both installed: "
                "pip install 'sop-faiss[demo]'"
            ) from None
        with as_file(resource) as file, Image.open(file) as photo:
            yield photo.convert("RGB")


def _things() -> list[Image.Image]:
    """Cut all photos into squares, and leave out the plain ones."""
    things = []
    for photo in _photos():
        for top in range(0, photo.height - _THING_PIXELS + 1, _THING_PIXELS):
            for left in range(0, photo.width - _THING_PIXELS + 1, _THING_PIXELS):
                thing = photo.crop((left, top, left + _THING_PIXELS, top + _THING_PIXELS))
                if np.asarray(thing.convert("L"), np.float32).std() >= _LEAST_CONTRAST:
                    things.append(thing)
    return things


def _photograph(
    things: list[Image.Image], chosen: Int64[np.ndarray, " t"], count: int
) -> tuple[list[bytes], Int64[np.ndarray, " n"]]:
    """Photograph each of the chosen things a number of times; return PNGs and the number of each one's thing."""
    pngs = []
    for number in chosen:
        rng = np.random.Generator(np.random.Philox(key=[_SEED, int(number)]))
        for _ in range(count):
            stream = io.BytesIO()
            Image.fromarray(photograph(things[number], rng)).save(stream, "PNG")
            pngs.append(stream.getvalue())
    return pngs, np.repeat(np.arange(len(chosen)), count)


def photograph(thing: Image.Image, rng: np.random.Generator) -> UInt8[np.ndarray, "48 48 3"]:
    """Return a square thing as another photograph shows it."""
    angle = np.deg2rad(rng.uniform(-25.0, 25.0))
    fits = thing.width / (abs(np.cos(angle)) + abs(np.sin(angle)))
    side = fits * rng.uniform(0.7, 1.0)
    free = (thing.width - side * (abs(np.cos(angle)) + abs(np.sin(angle)))) / 2
    center = thing.width / 2 + rng.uniform(-free, free, 2)
    scale = side / (2 * SIDE_PIXELS)  # twice the pixels, then their means: no aliasing
    cos, sin = scale * np.cos(angle), scale * np.sin(angle)
    corner = center - SIDE_PIXELS * np.array([cos - sin, sin + cos])
    turned = thing.transform(
        (2 * SIDE_PIXELS, 2 * SIDE_PIXELS),
        Image.Transform.AFFINE,
        (cos, -sin, corner[0], sin, cos, corner[1]),
        Image.Resampling.BICUBIC,
    ).reduce(2)
    blurred = turned.filter(ImageFilter.GaussianBlur(rng.uniform(0.0, 0.8)))
    return _in_other_light(np.asarray(blurred, np.float32) / 255, rng)


def _in_other_light(pixels: Float32[np.ndarray, "h w 3"], rng: np.random.Generator) -> UInt8[np.ndarray, "h w 3"]:
    """Change brightness, contrast, saturation and the color of the light, and add noise."""
    gray = pixels @ np.array([0.299, 0.587, 0.114], np.float32)
    pixels = gray[..., None] + (pixels - gray[..., None]) * rng.uniform(0.3, 1.3)
    pixels = pixels.mean() + (pixels - pixels.mean()) * rng.uniform(0.5, 1.3)
    pixels = pixels * rng.uniform(0.5, 1.5) * np.exp(rng.uniform(-0.3, 0.3, 3))
    pixels = pixels + rng.normal(0.0, rng.uniform(0.0, 0.03), pixels.shape)
    return np.rint(np.clip(pixels, 0, 1) * 255).astype(np.uint8)
