"""A look at some images before a run: what is wrong with all of them, and images nothing is wrong with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sop_faiss.data.degenerate_images import LOOKED_AT, describe_degenerate_images
from sop_faiss.data.images.source import ImageSource, open_source
from tests.images import encode, make_image

RNG = np.random.default_rng(0)


def folder(path: Path, images: list[np.ndarray | Image.Image], format: str = "PNG") -> ImageSource:
    path.mkdir()
    for number, image in enumerate(images):
        (path / f"{number:03d}.png").write_bytes(encode(image, format))
    return open_source(path)


def look(source: ImageSource) -> str | None:
    return describe_degenerate_images(source, np.arange(len(source)), 0, 10_000)


def dark(level: int) -> Image.Image:
    """12 bits in 16: nearly black once decoded."""
    return Image.fromarray((RNG.random((20, 30)) * level).astype(np.uint16))


@pytest.mark.parametrize(
    ("images", "words"),
    [
        ([np.zeros((20, 20 + i, 3), np.uint8) for i in range(20)], ("brightness", "0 to 0")),
        ([np.full((20, 20, 3), 255, np.uint8)] * 2, ("brightness", "255 to 255")),
        ([dark(4095) for _ in range(20)], ("brightness",)),
        ([make_image(np.random.default_rng(1), 20)] * 20, ("the same", "--duplicates")),
        ([np.full((20, 20, 3), (200, 0, 0), np.uint8)] * 3, ("the same",)),
    ],
)
def test_images_that_teach_nothing(tmp_path, images, words):
    told = look(folder(tmp_path / "images", images))
    assert told is not None and f"all {min(len(images), LOOKED_AT)} images" in told and "\n" not in told
    assert all(word in told for word in words)


def test_copies_saved_at_other_qualities_are_the_same(tmp_path):
    image = Image.fromarray(make_image(np.random.default_rng(1), 256))
    (tmp_path / "images").mkdir()
    for quality in range(80, 96):
        (tmp_path / "images" / f"{quality}.jpg").write_bytes(encode(image, quality=quality))
    assert "the same" in str(describe_degenerate_images(open_source(tmp_path / "images"), np.arange(16), 0, 100_000))


@pytest.mark.parametrize(
    "images",
    [
        [make_image(RNG, 20) for _ in range(20)],
        [make_image(RNG, 20, label=1) for _ in range(20)],
        [np.zeros((20, 20, 3), np.uint8)] * 15 + [make_image(RNG, 20)],
        [np.full((20, 20, 3), 12 * i, np.uint8) for i in range(20)],  # plain, and not of one color
        [make_image(RNG, 20)],  # nothing to compare it with
        [np.zeros((200, 200, 3), np.uint8)] * 5,  # more pixels than are read
    ],
)
def test_images_that_may_be_learned_from(tmp_path, images):
    assert look(folder(tmp_path / "images", images)) is None


def test_images_that_cannot_be_read_are_left_out(tmp_path):
    source = folder(tmp_path / "images", [np.zeros((20, 20, 3), np.uint8)] * 8)
    (tmp_path / "images" / "003.png").write_bytes(b"")
    assert "all 7 images" in str(look(source))


def test_the_images_are_those_that_the_run_begins_with(tmp_path):
    source = folder(tmp_path / "images", [make_image(RNG, 20) for _ in range(4)])
    read = []
    source.read = lambda position, read_file=source.read: read.append(position) or read_file(position)  # type: ignore[method-assign]
    describe_degenerate_images(source, np.array([1, 3]), 0, 10_000)
    assert sorted(read) == [1, 3]
