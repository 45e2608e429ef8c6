"""One image in every form that a user may have it in gives the same pixels, and anything else is refused by name."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sop_faiss.data.images.decode import decode_image
from sop_faiss.errors import DataError
from sop_faiss.model.encoders.image_input import ImageTransform, pixels_of
from sop_faiss.model.encoders.preprocess import Preprocess
from tests.images import encode, make_image
from tests.messages import assert_one_line

SHAPE = (20, 34)


@pytest.fixture(scope="module")
def image() -> np.ndarray:
    return make_image(np.random.default_rng(0), SHAPE)


def as_tensor(image: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(image).permute(2, 0, 1)


FORMS: dict[str, Callable[[np.ndarray], Any]] = {
    "pil": Image.fromarray,
    "array": lambda image: image,
    "strided array": lambda image: image[:, ::-1][:, ::-1],
    "read-only array": lambda image: np.frombuffer(image.tobytes(), np.uint8).reshape(image.shape),
    "float32 array": lambda image: image.astype(np.float32) / 255,
    "float64 array": lambda image: image / 255.0,
    "tensor": as_tensor,
    "float tensor": lambda image: as_tensor(image).float() / 255,
    "half tensor": lambda image: (as_tensor(image).float() / 255).half(),
    "tensor with a gradient": lambda image: (as_tensor(image).float() / 255).requires_grad_(),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_pixels_of_the_file(tmp_path: Path, image: np.ndarray, form: str) -> None:
    file = tmp_path / "image.png"
    file.write_bytes(encode(image, "PNG"))
    for path in (file, str(file)):
        assert np.array_equal(pixels_of(path, "image"), image)
    pixels = pixels_of(FORMS[form](image), "image")
    assert pixels.dtype == np.uint8 and np.array_equal(pixels, image)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16", "I", "F"])
def test_a_pillow_image_of_any_mode_is_seen_as_its_file_is(mode: str) -> None:
    gray = make_image(np.random.default_rng(1), SHAPE)[..., 0]
    if mode == "I;16":
        image = Image.fromarray(gray.astype(np.uint16) * 257)
    elif mode in ("I", "F"):
        image = Image.fromarray(gray).convert(mode)
    else:
        image = Image.fromarray(make_image(np.random.default_rng(1), SHAPE)).convert(mode)
    if mode == "RGBA":
        image.putalpha(Image.fromarray(gray))
    encoded = encode(image, "TIFF")
    before = image.tobytes()
    assert np.array_equal(pixels_of(image, "image"), decode_image(encoded))
    assert image.mode == mode and image.tobytes() == before


def test_a_pillow_image_is_turned_upright(tmp_path: Path, image: np.ndarray) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    file = tmp_path / "turned.jpg"
    file.write_bytes(encode(image, "JPEG", exif=exif.tobytes()))
    with Image.open(file) as opened:
        pixels = pixels_of(opened, "image")
    assert pixels.shape == (SHAPE[1], SHAPE[0], 3)
    assert np.abs(pixels.astype(int) - pixels_of(file, "image")).mean() < 1  # another JPEG decoder


WRONG: dict[str, tuple[Callable[[np.ndarray], Any], str]] = {
    "gray array": (lambda image: image[..., 0], "(20, 34)"),
    "channels first array": (lambda image: image.transpose(2, 0, 1), "(3, 20, 34)"),
    "channels last tensor": (torch.from_numpy, "(20, 34, 3)"),
    "four channels": (lambda image: np.concatenate([image, image[..., :1]], axis=2), "(20, 34, 4)"),
    "whole numbers": (lambda image: image.astype(np.int64), "int64"),
    "truth values": (lambda image: image > 9, "bool"),
    "complex": (lambda image: as_tensor(image).to(torch.complex64), "complex64"),
    "floats to 255": (lambda image: image.astype(np.float32), "wanted 0 to 1"),
    "normalized": (lambda image: as_tensor(image).float() / 127.5 - 1, "wanted 0 to 1"),
    "nan": (lambda image: np.full(image.shape, np.nan), "nan"),
    "no pixels": (lambda image: image[:0], "no pixels"),
    "a line": (lambda image: np.zeros((1, 300, 3), np.uint8), "elongated"),
    "bytes": (lambda image: image.tobytes(), "bytes"),
    "none": (lambda image: None, "NoneType"),
}


@pytest.mark.parametrize("what", WRONG)
def test_other_arrays_and_things_are_refused_by_name(image: np.ndarray, what: str) -> None:
    make, part = WRONG[what]
    with pytest.raises(DataError) as found:
        pixels_of.__wrapped__(make(image), "image 7")  # type: ignore[attr-defined]
    assert_one_line(found, "image 7", part)


@pytest.mark.parametrize("content", [b"", b"no image", None])
def test_a_file_that_is_not_an_image_is_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "photo.jpg"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DataError) as found:
        pixels_of(file, "image 0")
    assert_one_line(found, str(file))


@pytest.mark.parametrize("path", ["", ".", "a\0b", "https://example.org/a.jpg", "/dev/null"])
def test_a_path_that_is_not_a_file_is_one_line(tmp_path: Path, path: str) -> None:
    with pytest.raises(DataError) as found:
        pixels_of(path, "image 0")
    assert_one_line(found)


def test_the_transform_is_the_preprocessing_and_can_be_sent_to_a_process(tmp_path: Path, image: np.ndarray) -> None:
    preprocess = Preprocess(resize=18, crop=16, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    transform = pickle.loads(pickle.dumps(ImageTransform(preprocess)))
    expected = preprocess.normalize(torch.from_numpy(preprocess.apply(image))[None])[0]
    for form in (image, Image.fromarray(image), as_tensor(image)):
        assert torch.equal(transform(form), expected) and expected.shape == (3, 16, 16)
    with pytest.raises(DataError):
        transform(tmp_path / "missing.jpg")
