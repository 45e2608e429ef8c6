"""What a person sees: one image of four colors, stored in every way that images are stored."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from sop_faiss.data.images.decode import decode_image
from tests.images import encode

# top left, top right, bottom left, bottom right
COLORS = ((220, 30, 40), (30, 160, 60), (40, 60, 200), (230, 210, 60))
WHITE = (255, 255, 255)
HEIGHT, WIDTH = 32, 48


QUARTER = np.array([[0, 1], [2, 3]]).repeat(HEIGHT // 2, 0).repeat(WIDTH // 2, 1)


def quarters() -> Image.Image:
    return Image.fromarray(np.array(COLORS, np.uint8)[QUARTER])


def luma() -> tuple:
    """Their gray, by ITU-R 601."""
    return tuple((round(0.299 * r + 0.587 * g + 0.114 * b),) * 3 for r, g, b in COLORS)


def with_alpha(mode: str, alpha: int) -> Image.Image:
    """The right half is that opaque, the left wholly."""
    layer = quarters().convert(mode)
    layer.putalpha(Image.fromarray(np.where(QUARTER % 2, alpha, 255).astype(np.uint8)))
    return layer


def over_white(colors: tuple, alpha: float) -> tuple:
    return tuple(
        tuple(round(level * alpha + 255 * (1 - alpha)) for level in color) if number % 2 else color
        for number, color in enumerate(colors)
    )


def palette(transparent: tuple[int, ...] = ()) -> tuple[Image.Image, bytes]:
    image = Image.new("P", (WIDTH, HEIGHT))
    image.putpalette([level for color in COLORS for level in color])
    image.putdata(QUARTER.ravel().tolist())
    return image, bytes(0 if index in transparent else 255 for index in range(4))


def deep_png(kind: int, values: np.ndarray) -> bytes:
    """A PNG of 16 bits a channel, which PIL writes for gray only; kind 0 gray, 2 RGB, 4 gray and alpha, 6 RGBA."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    height, width = values.shape[:2]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    head = struct.pack(">IIBBBBB", width, height, 16, kind, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def deep(image: Image.Image) -> np.ndarray:
    return np.asarray(image).astype(np.uint16) * 257


def without_adobe(encoded: bytes) -> bytes:
    """A CMYK JPEG without the marker that says how its inks are meant."""
    start = encoded.index(b"\xff\xee")
    return encoded[:start] + encoded[start + 2 + int.from_bytes(encoded[start + 2 : start + 4], "big") :]


def upside(orientation: int) -> bytes:
    """Stored so that this EXIF orientation turns it upright (EXIF 2.3, tag 0x0112)."""
    back = {
        1: None,
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,  # counter-clockwise: the camera's top is the image's right
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }[orientation]
    stored = quarters() if back is None else quarters().transpose(back)
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(stored, exif=exif, quality=95, subsampling=0)


def animated(format: str, **options: bool) -> bytes:
    black = Image.new("RGB", (WIDTH, HEIGHT))
    return encode(quarters(), format, save_all=True, append_images=[black, black], duration=40, **options)


CASES: dict[str, tuple[Callable[[], bytes], tuple]] = {
    "color JPEG": (lambda: encode(quarters(), quality=95), COLORS),
    "progressive JPEG": (lambda: encode(quarters(), quality=95, progressive=True), COLORS),
    "gray JPEG": (lambda: encode(quarters().convert("L"), quality=95), luma()),
    "gray PNG": (lambda: encode(quarters().convert("L"), "PNG"), luma()),
    "gray WebP": (lambda: encode(quarters().convert("L"), "WEBP", lossless=True), luma()),
    "CMYK JPEG, Adobe's inverted inks": (lambda: encode(quarters().convert("CMYK"), quality=95), COLORS),
    "CMYK JPEG without Adobe's marker": (
        lambda: without_adobe(encode(quarters().convert("CMYK"), quality=95)),
        COLORS,
    ),
    "CMYK TIFF": (lambda: encode(quarters().convert("CMYK"), "TIFF"), COLORS),
    "palette PNG": (lambda: encode(palette()[0], "PNG"), COLORS),
    "palette GIF": (lambda: encode(palette()[0], "GIF"), COLORS),
    "palette PNG, one color transparent": (
        lambda: encode(palette()[0], "PNG", transparency=palette((2,))[1]),
        (*COLORS[:2], WHITE, COLORS[3]),
    ),
    "palette GIF, one color transparent": (
        lambda: encode(palette()[0], "GIF", transparency=1),
        (COLORS[0], WHITE, *COLORS[2:]),
    ),
    "RGBA PNG, half transparent": (lambda: encode(with_alpha("RGB", 128), "PNG"), over_white(COLORS, 128 / 255)),
    "RGBA WebP, transparent": (
        lambda: encode(with_alpha("RGB", 0), "WEBP", lossless=True, exact=True),
        over_white(COLORS, 0),
    ),
    "gray and alpha PNG": (lambda: encode(with_alpha("L", 128), "PNG"), over_white(luma(), 128 / 255)),
    "16-bit gray PNG": (lambda: deep_png(0, deep(quarters().convert("L"))), luma()),
    "16-bit RGB PNG": (lambda: deep_png(2, deep(quarters())), COLORS),
    "16-bit gray and alpha PNG": (
        lambda: deep_png(4, deep(with_alpha("L", 128))),
        over_white(luma(), 128 / 255),
    ),
    "16-bit RGBA PNG": (lambda: deep_png(6, deep(with_alpha("RGB", 0))), over_white(COLORS, 0)),
    "animated GIF": (lambda: animated("GIF"), COLORS),
    "animated WebP": (lambda: animated("WEBP", lossless=True), COLORS),
    "animated PNG": (lambda: animated("PNG"), COLORS),
    **{f"EXIF orientation {n}": (lambda n=n: upside(n), COLORS) for n in range(1, 9)},
}


@pytest.mark.parametrize("case", CASES)
def test_a_image_is_decoded_as_a_person_sees_it(case: str) -> None:
    make, expected = CASES[case]
    decoded = decode_image(make())
    assert decoded.shape == (HEIGHT, WIDTH, 3) and decoded.dtype == np.uint8
    for number, color in enumerate(expected):
        top, left = number // 2 * HEIGHT // 2, number % 2 * WIDTH // 2
        seen = decoded[top + 4 : top + 12, left + 6 : left + 18].reshape(-1, 3).astype(int)
        assert np.abs(seen - color).max() <= 8, (case, number, seen.mean(0), color)  # JPEG and rounding
