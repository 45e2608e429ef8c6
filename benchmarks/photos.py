"""The photos that `bench_data.py` measures on: JPEGs of 500 x 375, the usual size of ImageNet's.

They are made from a folder of Imagenette's photos at 224 px (shards `*.tar`): six photos in two rows of three, of which
the middle 500 x 375 are cut out and written at quality 90. So detail and file size are those of photos, which would not
be the case for enlarged ones. Without such a folder they are smooth waves with noise, which compress and resize much as
photos do.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from sop_faiss.data.images.decode import decode_pillow
from sop_faiss.data.images.source import open_source

__all__ = ["HEIGHT", "WIDTH", "write_photos"]

HEIGHT, WIDTH, TILE = 375, 500, 224
CLASSES = 10  # folders, as iBOT reads classes


def write_photos(count: int, imagenette: Path, folder: Path) -> str:
    """Write `count` photos into class folders of `folder`; return what they were made from."""
    known = imagenette.is_dir() and any(imagenette.glob("*.tar"))
    images = mosaics(imagenette, count) if known else waves(count)
    for number, image in enumerate(images):
        path = folder / f"class_{number % CLASSES}" / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(image))
    return "Imagenette photos" if known else "generated images"


def encoded(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=90)
    return stream.getvalue()


def mosaics(imagenette: Path, count: int) -> Iterator[Image.Image]:
    source = open_source(imagenette)
    order = np.random.default_rng(0).permutation(len(source))
    for six in np.resize(order, (count, 6)).tolist():
        canvas = Image.new("RGB", (3 * TILE, 2 * TILE))
        for place, position in enumerate(six):
            photo = decode_pillow(source.read(position)).resize((TILE, TILE))
            canvas.paste(photo, (TILE * (place % 3), TILE * (place // 3)))
        left, top = (3 * TILE - WIDTH) // 2, (2 * TILE - HEIGHT) // 2
        yield canvas.crop((left, top, left + WIDTH, top + HEIGHT))


def waves(count: int) -> Iterator[Image.Image]:
    generator = np.random.default_rng(0)
    rows, columns = np.mgrid[0:HEIGHT, 0:WIDTH] / WIDTH
    for _ in range(count):
        image = np.full((HEIGHT, WIDTH, 3), 128.0)
        for frequency in (2, 5, 11, 23, 47):
            angle, phase = generator.uniform(0, 2 * np.pi, 2)
            wave = np.sin(2 * np.pi * frequency * (np.cos(angle) * columns + np.sin(angle) * rows) + phase)
            image += wave[..., None] * generator.uniform(-200, 200, 3) / np.sqrt(frequency)
        image += generator.normal(0, 6, image.shape)
        yield Image.fromarray(np.clip(image, 0, 255).astype(np.uint8))
