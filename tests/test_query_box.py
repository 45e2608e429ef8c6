"""Queries that are parts of images: the pixels that are seen, and boxes that cannot be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sop_faiss.data.images.box import parse_box
from sop_faiss.data.images.decode import decode_image
from sop_faiss.errors import ConfigError, DataError
from sop_faiss.verbs.finding.query_box import boxed
from sop_faiss.verbs.finding.query_files import open_images


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    pixels = np.arange(20 * 30 * 3, dtype=np.uint32).reshape(20, 30, 3) % 251
    Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


@pytest.mark.parametrize("text", ["6,5,15,20", "0.2,0.25,0.5,1", " 6.2, 4.8,15,20"])
def test_the_part_inside_is_seen(photo: Path, text: str) -> None:
    part = decode_image(boxed(open_images([photo]), parse_box(text)).read(0))
    assert np.array_equal(part, decode_image(photo.read_bytes())[5:20, 6:15])


def test_a_box_in_the_turned_image(tmp_path: Path) -> None:
    """A photo that a camera marked as turned: pixels count as it is shown."""
    pixels = np.zeros((10, 20, 3), np.uint8)
    pixels[:, :4] = 255
    marked = Image.Exif()
    marked[0x0112] = 6  # shown with its left side up
    Image.fromarray(pixels).save(tmp_path / "turned.png", exif=marked)
    part = decode_image(boxed(open_images([tmp_path / "turned.png"]), parse_box("0,0,10,4")).read(0))
    assert part.shape == (4, 10, 3)
    assert part.min() == 255


@pytest.mark.parametrize(
    "text",
    ["", "1,2,3", "1,2,3,4,5", "a,b,c,d", "5,5,5,9", "9,1,5,5", "-1,0,5,5", "nan,0,5,5", "0,0,inf,5", "0,0,1e999,1"],
)
def test_what_is_not_a_box(text: str) -> None:
    with pytest.raises(ConfigError, match="box="):
        parse_box(text)


@pytest.mark.parametrize("text", ["0,0,31,20", "0,0,30,21", "100,100,200,200", "3,3,3.2,9", "0.5,0.5,0.501,0.9"])
def test_boxes_outside_of_the_image(photo: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="30 x 20"):
        boxed(open_images([photo]), parse_box(text))


def test_a_file_that_is_not_an_image(tmp_path: Path) -> None:
    (tmp_path / "x.jpg").write_bytes(b"text")
    with pytest.raises(DataError):
        boxed(open_images([tmp_path / "x.jpg"]), parse_box("0,0,1,1"))
