"""Small images, folders and shards for tests. Deterministic: equal arguments give equal bytes."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def make_image(rng: np.random.Generator, size: int | tuple[int, int] = 32, label: int | None = None) -> np.ndarray:
    """A smooth random RGB image, uint8 (height, width, 3); images of one `label` share color and stripes."""
    height, width = (size, size) if isinstance(size, int) else size
    rows, columns = np.mgrid[0:height, 0:width] / max(height, width)
    style = rng if label is None else np.random.default_rng(1000 + label)
    colors = style.uniform(40, 215, (2, 3))
    angle, frequency = style.uniform(0, np.pi), style.uniform(2, 5)
    phase = rng.uniform(0, 2 * np.pi)
    wave = 0.5 + 0.5 * np.sin(2 * np.pi * frequency * (np.cos(angle) * columns + np.sin(angle) * rows) + phase)
    image = colors[0] * wave[..., None] + colors[1] * (1 - wave[..., None])
    image = image + rng.uniform(-15, 15, 3) + rng.normal(0, 4, image.shape)
    return np.clip(image, 0, 255).astype(np.uint8)


def encode(image: np.ndarray | Image.Image, format: str = "JPEG", **options: Any) -> bytes:
    """The image as the bytes of a file; `options` go to PIL's `save`."""
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    if format.upper() == "JPEG":
        options = {"quality": 90} | options
    stream = io.BytesIO()
    image.save(stream, format=format, **options)
    return stream.getvalue()


def write_folder(
    path: Path,
    classes: int = 3,
    per_class: int = 4,
    size: int | tuple[int, int] = 32,
    seed: int = 0,
    prefix: str = "class_",
) -> Path:
    """Write `path/class_0/0000.jpg` and so on (class_: `prefix`).

    With `classes=0` the `per_class` images lie in `path` itself.
    """
    rng = np.random.default_rng(seed)
    for label in range(max(classes, 1)):
        folder = path / f"{prefix}{label}" if classes else path
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(per_class):
            image = make_image(rng, size, label if classes else None)
            (folder / f"{number:04d}.jpg").write_bytes(encode(image))
    return path


def write_tar(path: Path, members: list[tuple[str, bytes]], format: int = tarfile.PAX_FORMAT) -> Path:
    """Write a tar with these (name, bytes) members, in order; hostile names and repeated names are written as given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=format) as tar:
        for name, content in members:
            header = tarfile.TarInfo(name)
            header.size = len(content)
            tar.addfile(header, io.BytesIO(content))
    return path


def write_shards(
    path: Path,
    classes: int = 3,
    per_class: int = 4,
    size: int | tuple[int, int] = 32,
    seed: int = 0,
    shards: int = 2,
    name: str = "photos",
    labels: bool = True,
    metadata: bool = False,
) -> Path:
    """Write `path/photos-000000.tar` and so on, classes interleaved, keys `00000000` and rising over all shards.

    Returns the folder, which is a SRC; `path / "photos-{000000..000001}.tar"` is one too. No manifest is written.
    """
    rng = np.random.default_rng(seed)
    count = classes * per_class
    samples: list[list[tuple[str, bytes]]] = []
    for number in range(count):
        label = number % classes
        sample = [(f"{number:08d}.jpg", encode(make_image(rng, size, label)))]
        if labels:
            sample.append((f"{number:08d}.cls", str(label).encode()))
        if metadata:
            sample.append((f"{number:08d}.json", json.dumps({"number": number}).encode()))
        samples.append(sample)
    for shard in range(shards):
        part = samples[shard * count // shards : (shard + 1) * count // shards]
        write_tar(path / f"{name}-{shard:06d}.tar", [member for sample in part for member in sample])
    return path


def write_bad_images(folder: Path) -> Path:
    """One bad image of each kind: `cut.jpg`, `text.jpg`, `empty.png`, `gone.jpg` (a link to nowhere), and `huge.png`.

    The last, of 300 x 300 pixels, is bad only where fewer are allowed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    good = encode(make_image(np.random.default_rng(0), 64))
    (folder / "cut.jpg").write_bytes(good[: len(good) // 2])
    (folder / "text.jpg").write_text("not an image")
    (folder / "empty.png").write_bytes(b"")
    (folder / "huge.png").write_bytes(encode(Image.new("1", (300, 300)), "PNG"))
    (folder / "gone.jpg").symlink_to(folder / "nowhere.jpg")
    return folder


class PickleTrap:
    """Unpickling this leaves a file at `path`: put `pickle.dumps` of it where nothing may be unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))
