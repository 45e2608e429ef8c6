"""Images as a person sees them, from every format and mode; bad bytes give a reason and nothing else."""

from __future__ import annotations

import io
import multiprocessing
import random
import struct
import threading
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image, ImageOps

from sop_faiss.data.images import decode
from sop_faiss.data.images.decode import decode_image, decode_pillow, drop_reason
from sop_faiss.data.images.jpeg import plain_jpeg_size
from sop_faiss.errors import DataError
from tests.images import encode, make_image

RNG = np.random.default_rng(0)
PHOTO = make_image(RNG, (24, 40))


def reason_of(encoded: bytes, **options: int) -> str:
    with pytest.raises(DataError) as error:
        decode_image(encoded, **options)
    assert "\n" not in str(error.value)
    return drop_reason(error.value)


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF", "PPM"])
def test_lossless_formats_come_back_exactly(format: str) -> None:
    decoded = decode_image(encode(PHOTO, format))
    assert decoded.dtype == np.uint8 and decoded.flags.c_contiguous and decoded.flags.writeable
    np.testing.assert_array_equal(decoded, PHOTO)


@pytest.mark.parametrize(
    "options",
    [{}, {"progressive": True}, {"subsampling": 0}, {"quality": 30, "optimize": True}, {"restart_marker_blocks": 2}],
)
def test_jpeg_equals_pillow(options: dict) -> None:
    encoded = encode(PHOTO, **options)
    assert plain_jpeg_size(encoded) == (None if "progressive" in options else (40, 24))
    decoded = decode_image(encoded)
    assert decoded.flags.c_contiguous and decoded.flags.writeable
    np.testing.assert_array_equal(decoded, np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB")))


def test_webp_is_close() -> None:
    assert np.abs(decode_image(encode(PHOTO, "WEBP", quality=95)).astype(int) - PHOTO).mean() < 8
    np.testing.assert_array_equal(decode_image(encode(PHOTO, "WEBP", lossless=True)), PHOTO)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "TIFF"])
def test_gray(format: str) -> None:
    decoded = decode_image(encode(Image.fromarray(PHOTO).convert("L"), format))
    assert decoded.shape == PHOTO.shape
    np.testing.assert_array_equal(decoded[..., 0], decoded[..., 2])


def test_cmyk_jpeg() -> None:
    encoded = encode(Image.fromarray(PHOTO).convert("CMYK"), quality=95)
    assert plain_jpeg_size(encoded) is None
    assert np.abs(decode_image(encoded).astype(int) - PHOTO).mean() < 8


def test_transparency_is_over_white() -> None:
    layer = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    layer.paste((0, 0, 255, 255), (0, 0, 4, 8))
    layer.putpixel((7, 7), (0, 0, 0, 128))
    for format in ("PNG", "WEBP", "TIFF"):
        decoded = decode_image(encode(layer, format, **({"lossless": True} if format == "WEBP" else {})))
        assert decoded[0, 0].tolist() == [0, 0, 255] and decoded[0, 7].tolist() == [255, 255, 255]
        assert abs(int(decoded[7, 7, 0]) - 127) <= 1
    gray = Image.new("LA", (4, 4), (0, 0))
    assert decode_image(encode(gray, "PNG")).min() == 255


@pytest.mark.parametrize("format", ["PNG", "GIF"])
def test_palette_with_transparency(format: str) -> None:
    image = Image.new("P", (6, 6), 0)
    image.putpalette([10, 20, 30, 200, 100, 50] + [0] * 762)
    image.paste(1, (0, 0, 3, 6))
    decoded = decode_image(encode(image, format))
    assert decoded[0, 0].tolist() == [200, 100, 50] and decoded[0, 5].tolist() == [10, 20, 30]
    decoded = decode_image(encode(image, format, transparency=0))
    assert decoded[0, 0].tolist() == [200, 100, 50] and decoded[0, 5].tolist() == [255, 255, 255]
    if format == "PNG":
        alphas = bytes([0, 255])
        assert decode_image(encode(image, format, transparency=alphas))[0, 5].tolist() == [255, 255, 255]


def test_rgb_png_with_a_transparent_color() -> None:
    image = Image.new("RGB", (4, 4), (1, 2, 3))
    image.putpixel((0, 0), (9, 9, 9))
    decoded = decode_image(encode(image, "PNG", transparency=(1, 2, 3)))
    assert decoded[0, 0].tolist() == [9, 9, 9] and decoded[3, 3].tolist() == [255, 255, 255]


def test_one_bit() -> None:
    decoded = decode_image(encode(Image.new("1", (4, 4), 1), "PNG"))
    assert decoded.shape == (4, 4, 3) and decoded.min() == 255


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_sixteen_bit_gray_is_scaled_not_clipped(format: str) -> None:
    ramp = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    decoded = decode_image(encode(Image.fromarray(ramp), format))
    np.testing.assert_array_equal(decoded, np.repeat((ramp >> 8).astype(np.uint8)[..., None], 3, 2))


def test_deep_tiff() -> None:
    ramp = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)
    assert decode_image(encode(Image.fromarray(ramp), "TIFF")).max() == 255
    assert decode_image(encode(Image.fromarray(ramp * 200), "TIFF")).max() == 200
    ramp[0, 0] = np.nan
    assert decode_image(encode(Image.fromarray(ramp), "TIFF"))[0, 0].tolist() == [0, 0, 0]
    assert decode_image(encode(Image.fromarray(np.full((4, 4), 70_000, np.int32)), "TIFF")).min() == 255


def rgb16_png() -> bytes:
    """A 16-bit RGB PNG, which PIL cannot write: red rises, green is full, blue is 0x1234."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    rows = b"".join(b"\0" + b"".join(struct.pack(">HHH", x * 8192, 65535, 0x1234) for x in range(8)) for _ in range(2))
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 2, 16, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def test_sixteen_bit_rgb() -> None:
    assert decode_image(rgb16_png())[1].tolist() == [[x * 32, 255, 0x12] for x in range(8)]


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(10))
def test_exif_orientation(format: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    lossless = {"lossless": True} if format == "WEBP" else {}
    encoded = encode(PHOTO, format, exif=exif, **lossless)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(encoded)))
    assert upright.size == ((24, 40) if 5 <= orientation <= 8 else (40, 24))
    np.testing.assert_array_equal(decode_image(encoded), np.asarray(upright.convert("RGB")))


def test_orientation_in_xmp_is_the_same_on_both_paths() -> None:
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    encoded = encode(PHOTO, xmp=xmp)
    np.testing.assert_array_equal(decode_image(encoded), np.asarray(decode_pillow(encoded)))


def test_damaged_exif_is_no_reason_to_drop() -> None:
    for exif in (b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff"):
        encoded = encode(PHOTO, exif=exif)
        assert decode_image(encoded).shape == PHOTO.shape
        assert decode_pillow(encoded).size == (40, 24)
        assert decode_image(encode(PHOTO, "PNG", exif=exif)).shape == PHOTO.shape


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_animations_give_their_first_frame(format: str) -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ((250, 0, 0), (0, 250, 0))]
    encoded = encode(frames[0], format, save_all=True, append_images=frames[1:])
    assert np.abs(decode_image(encoded).astype(int) - [250, 0, 0]).max() < 16


def test_a_phone_image_of_several_parts() -> None:
    second = Image.fromarray(PHOTO[::-1])
    encoded = encode(PHOTO, "MPO", save_all=True, append_images=[second], quality=95)
    np.testing.assert_array_equal(decode_image(encoded), np.asarray(decode_pillow(encoded)))
    assert np.abs(decode_image(encoded).astype(int) - PHOTO).mean() < 8


# ----------------------------------------------------------------------------------------------------------- bad bytes


def test_reasons() -> None:
    assert reason_of(b"") == "empty"
    assert reason_of(b"this is a text file named photo.jpg") == "not-an-image"
    assert reason_of(b"\xff\xd8") == "not-an-image"
    assert reason_of(b"\0" * 1000) == "not-an-image"
    assert reason_of(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n") == "not-an-image"  # PIL would run a program
    assert reason_of(b"<svg xmlns='http://www.w3.org/2000/svg'/>") == "not-an-image"


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM"])
@pytest.mark.parametrize("share", [0.5, 0.9, 0.98])
def test_cut_files_are_errors(format: str, share: float) -> None:
    noise = np.random.default_rng(1).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    encoded = encode(noise, format)
    assert reason_of(encoded[: int(len(encoded) * share)]) in ("truncated", "damaged", "not-an-image")


def test_a_cut_jpeg_is_truncated() -> None:
    encoded = encode(make_image(RNG, 64))
    for length in range(700, len(encoded) - 2, 97):
        assert plain_jpeg_size(encoded[:length]) is None
        assert reason_of(encoded[:length]) == "truncated"


def test_pixels_are_bounded_before_decoding() -> None:
    assert reason_of(encode(PHOTO), max_pixels=24 * 40 - 1) == "too-many-pixels"
    assert decode_image(encode(PHOTO), max_pixels=24 * 40).shape == PHOTO.shape
    assert reason_of(encode(PHOTO, "PNG"), max_pixels=100) == "too-many-pixels"

    for width, height in ((30_000, 30_000), (9_000, 9_000), (2**31 - 1, 2**31 - 1)):
        bomb = bytearray(encode(Image.new("1", (8, 8)), "PNG"))
        bomb[16:24] = struct.pack(">II", width, height)
        bomb[29:33] = struct.pack(">I", zlib.crc32(bytes(bomb[12:29])))
        assert reason_of(bytes(bomb)) in ("too-many-pixels", "not-an-image")

    jpeg = bytearray(encode(PHOTO))
    frame = jpeg.index(b"\xff\xc0")
    jpeg[frame + 5 : frame + 9] = struct.pack(">HH", 65_000, 65_000)
    assert reason_of(bytes(jpeg)) == "too-many-pixels"
    jpeg[frame + 5 : frame + 9] = struct.pack(">HH", 0, 65_000)
    assert reason_of(bytes(jpeg)) in ("damaged", "not-an-image", "truncated")


def test_a_text_chunk_bomb_is_bounded() -> None:
    packed = zlib.compress(b"a" * 80_000_000)
    content = b"Comment\0\0" + packed
    chunk = struct.pack(">I", len(content)) + b"zTXt" + content + struct.pack(">I", zlib.crc32(b"zTXt" + content))
    png = encode(PHOTO, "PNG")
    assert reason_of(png[:33] + chunk + png[33:]) in ("damaged", "not-an-image")


def test_random_damage_gives_images_or_reasons() -> None:
    """The two JPEG paths agree on every damaged file, and nothing else than DataError leaves."""
    draw = random.Random(0)
    known = {"truncated", "damaged", "not-an-image", "too-many-pixels"}
    for format in ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "AVIF"):
        whole = encode(make_image(RNG, 32), format)
        for _ in range(40):
            damaged = bytearray(whole)
            for _ in range(draw.choice((1, 3, 20))):
                damaged[draw.randrange(len(damaged))] = draw.randrange(256)
            outcomes = []
            for function in (decode_image, decode_pillow):
                try:
                    outcomes.append(np.asarray(function(bytes(damaged), max_pixels=1_000_000)).tobytes())
                except DataError as error:
                    outcomes.append(drop_reason(error))
                    assert outcomes[-1] in known
            assert outcomes[0] == outcomes[1]


# -------------------------------------------------------------------------------------------------- threads and forks


def test_warnings_do_not_leak(recwarn: pytest.WarningsRecorder) -> None:
    warnings.simplefilter("always")
    exif = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\xff\0\0\0\xff\xff\xff\xff"
    for encoded in (encode(PHOTO, exif=exif), encode(PHOTO, "PNG", exif=exif)):
        decode_image(encoded)
        decode_pillow(encoded)
    image = Image.new("P", (4, 4))
    decode_image(encode(image, "PNG", transparency=b"\0\1"))
    big = encode(Image.new("1", (10_000, 9_500)), "PNG")  # above PIL's own warning
    with pytest.raises(DataError, match="too-many-pixels"):
        decode_image(big)
    assert [str(warning.message) for warning in recwarn] == []


def test_threads_and_the_warning_filters() -> None:
    images = [encode(PHOTO, "PNG"), encode(PHOTO), encode(Image.new("P", (4, 4)), "GIF")] * 30
    before = list(warnings.filters)
    with ThreadPoolExecutor(4) as pool:
        shapes = [image.shape for image in pool.map(decode_image, images)]
    assert shapes == [(24, 40, 3), (24, 40, 3), (4, 4, 3)] * 30
    assert warnings.filters == before


def test_a_fork_while_another_thread_opens_a_image() -> None:
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with decode._OPENING:
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 dislikes forks beside threads
            with multiprocessing.get_context("fork").Pool(1) as pool:
                result = pool.apply_async(decode_image, (encode(PHOTO, "PNG"),)).get(timeout=30)
    finally:
        leave.set()
        thread.join()
    np.testing.assert_array_equal(result, PHOTO)
