"""HEIC photos: upright exactly once, bounded before they are decoded, and named as such where they cannot be read."""

from __future__ import annotations

import io
import random
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from sop_faiss.data.images import heif, listing, source
from sop_faiss.data.images.decode import decode_image, decode_pillow, drop_reason, open_image
from sop_faiss.data.images.heif import is_heif
from sop_faiss.data.images.keys import IMAGE_SUFFIXES
from sop_faiss.data.pack import pack
from sop_faiss.errors import DataError
from tests.images import encode, make_image

PHOTO = make_image(np.random.default_rng(0), (64, 96))
HEAD = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"
needs_heif = pytest.mark.skipif(not heif.READS_HEIF, reason="pillow-heif is not installed")


def heic(image: np.ndarray | Image.Image = PHOTO, **options: Any) -> bytes:
    """The image as the bytes of a HEIC file."""
    pillow_heif = pytest.importorskip("pillow_heif")
    stream = io.BytesIO()
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    others = options.pop("others", [])
    file = pillow_heif.from_pillow(image)
    for other in others:
        file.add_from_pillow(other)
    file.save(stream, **{"quality": 95} | options)
    return stream.getvalue()


def reason_of(encoded: bytes, **options: int) -> str:
    with pytest.raises(DataError) as error:
        decode_image(encoded, **options)
    assert "\n" not in str(error.value)
    return drop_reason(error.value)


def assert_close(decoded: np.ndarray, wanted: np.ndarray) -> None:
    assert decoded.shape == wanted.shape and np.abs(decoded.astype(int) - wanted).mean() < 6


@pytest.mark.parametrize(
    ("head", "found"),
    [
        (HEAD, True),
        (HEAD.replace(b"ftypheic", b"ftypheix"), True),
        (b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic", True),
        (b"\0\0\0\x18ftypmif1\0\0\0\0mif1avif", False),
        (b"\0\0\0\x18ftypavif\0\0\0\0mif1avif", False),
        (b"\0\0\0\x18ftypqt  \0\0\0\0qt  qt  ", False),
        (b"\0\0\0\x18ftypisom\0\0\0\0isommp42", False),
        (b"\0\0\0\x18ftyphea", False),
        (b"ftypheic", False),
        (b"", False),
    ],
)
def test_heic_is_known_by_its_first_bytes(head: bytes, found: bool) -> None:
    assert is_heif(head) is found


@needs_heif
def test_a_photo_and_its_size_before_it_is_decoded() -> None:
    encoded = heic()
    image = open_image(encoded)
    assert is_heif(encoded) and image.size == (96, 64) and image.format == "HEIF"
    decoded = decode_image(encoded)
    assert decoded.dtype == np.uint8 and decoded.flags.c_contiguous and decoded.flags.writeable
    assert_close(decoded, PHOTO)
    assert type(decode_pillow(encoded)) is Image.Image  # with no file behind it


@needs_heif
@pytest.mark.parametrize("orientation", range(1, 9))
def test_photos_are_upright_exactly_once(orientation: int) -> None:
    """The writer turns the EXIF orientation into the container's own turn, and keeps the EXIF, as phones do."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(encode(PHOTO, "PNG", exif=exif))))
    encoded = heic(exif=exif.tobytes())
    assert (b"irot" in encoded or b"imir" in encoded) == (orientation > 1) and exif.tobytes()[6:] in encoded
    assert open_image(encoded).size == upright.size
    assert_close(decode_image(encoded), np.asarray(upright))


@needs_heif
def test_an_exif_orientation_alone_turns_nothing() -> None:
    """In HEIC the EXIF orientation is for information only, and programs that turn a photo leave it behind."""
    exif = Image.Exif()
    exif[0x0112] = 6
    encoded = heic(exif=exif.tobytes())
    turn = encoded.index(b"irot") + 4
    unturned = encoded[:turn] + b"\0" + encoded[turn + 1 :]
    assert_close(decode_image(unturned), PHOTO)


@needs_heif
def test_ten_bits_gray_and_alpha() -> None:
    pillow_heif = pytest.importorskip("pillow_heif")
    stream = io.BytesIO()
    deep = PHOTO.astype(np.uint16) << 8
    pillow_heif.encode("RGB;16", PHOTO.shape[1::-1], deep.tobytes(), stream)
    assert pillow_heif.open_heif(stream.getvalue()).info["bit_depth"] == 10
    assert_close(decode_image(stream.getvalue()), PHOTO)
    gray = Image.fromarray(PHOTO).convert("L")
    assert_close(decode_image(heic(gray)), np.asarray(gray.convert("RGB")))
    layer = Image.new("RGBA", (64, 64), (255, 0, 0, 0))
    layer.paste((0, 0, 255, 255), (0, 0, 32, 64))
    over_white = decode_image(heic(layer))
    assert np.abs(over_white[32, [8, 56]].astype(int) - [[0, 0, 255], [255, 255, 255]]).max() < 8


@needs_heif
@pytest.mark.parametrize("primary", [0, 2])
def test_of_several_images_the_primary_one(primary: int) -> None:
    colors = [(250, 0, 0), (0, 250, 0), (0, 0, 250)]
    first, *others = [Image.new("RGB", (64, 64 + 8 * number), color) for number, color in enumerate(colors)]
    decoded = decode_image(heic(first, others=others, primary_index=primary))
    assert decoded.shape[0] == 64 + 8 * primary and np.abs(decoded.astype(int) - colors[primary]).max() < 16


@needs_heif
def test_pixels_are_bounded_before_decoding() -> None:
    encoded = heic()
    assert reason_of(encoded, max_pixels=64 * 96 - 1) == "too-many-pixels"
    assert decode_image(encoded, max_pixels=64 * 96).shape == PHOTO.shape
    assert reason_of(claiming(encoded, 60_000, 60_000)) == "too-many-pixels"
    assert reason_of(claiming(encoded, 30_000, 8)) == "elongated"
    assert reason_of(claiming(encoded, 0, 8)) == "damaged"


@needs_heif
@pytest.mark.parametrize("grid", [False, True])
def test_a_file_of_more_pixels_than_it_states_is_not_decoded(grid: bool) -> None:
    """Else the bound would be no bound."""
    encoded = heic(np.zeros((288, 288, 3), np.uint8), quality=10, tile_size=144 if grid else 0)
    assert (b"grid" in encoded) == grid
    assert reason_of(claiming(encoded, 64, 64)) == "damaged"


def claiming(encoded: bytes, width: int, height: int) -> bytes:
    """The file with another size in its header."""
    parts = encoded.split(b"ispe\0\0\0\0")
    assert len(parts) > 1
    return parts[0] + b"".join(b"ispe\0\0\0\0" + struct.pack(">II", width, height) + part[8:] for part in parts[1:])


@needs_heif
def test_cut_and_damaged_files_give_images_or_reasons() -> None:
    whole = heic()
    for share in (0.02, 0.1, 0.3, 0.5, 0.9, 0.99):
        assert reason_of(whole[: int(len(whole) * share)]) in ("truncated", "damaged", "not-an-image")
    draw = random.Random(0)
    for _ in range(60):
        damaged = bytearray(whole)
        for _ in range(draw.choice((1, 3, 20))):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        try:
            decode_image(bytes(damaged), max_pixels=1_000_000)
        except DataError as error:
            assert drop_reason(error) in ("truncated", "damaged", "not-an-image", "too-many-pixels", "elongated")


@needs_heif
def test_threads() -> None:
    encoded, wanted = heic(), decode_image(heic())
    with ThreadPoolExecutor(4) as pool:
        for decoded in pool.map(decode_image, [encoded] * 24):
            np.testing.assert_array_equal(decoded, wanted)


@needs_heif
def test_a_folder_of_heic_is_read_and_packed_as_jpeg(tmp_path: Path) -> None:
    (tmp_path / "phone").mkdir()
    for name in ("a.HEIC", "b.heif", "c.hif"):
        (tmp_path / "phone" / name).write_bytes(heic())
    images = source.open_source(tmp_path / "phone")
    assert images.keys == ["a", "b", "c"] and is_heif(images.read(0))
    pack(tmp_path / "phone", tmp_path / "shards")
    packed = source.open_source(tmp_path / "shards")
    assert packed.member_of(0).endswith(".jpg") and len(packed) == 3
    assert_close(decode_image(packed.read(0)), PHOTO)


# ------------------------------------------------------------------------------------------------ without pillow-heif


def test_without_pillow_heif_an_image_is_said_to_be_heic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    assert reason_of(HEAD + bytes(100)) == "no-heic-reader"
    with pytest.raises(DataError, match=r"HEIC.*sop-faiss\[heic\]"):
        decode_image(HEAD + bytes(100))


def test_without_pillow_heif_files_are_skipped_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    suffixes = tuple(suffix for suffix in IMAGE_SUFFIXES if suffix not in heif.HEIF_SUFFIXES)
    monkeypatch.setattr(listing, "IMAGE_SUFFIXES", suffixes)
    monkeypatch.setattr(source, "IMAGE_SUFFIXES", suffixes)
    (tmp_path / "a.HEIC").write_bytes(HEAD)
    for place in (tmp_path, tmp_path / "a.HEIC"):
        with pytest.raises(DataError, match=r"sop-faiss\[heic\]"):
            source.open_source(place)
    caplog.clear()
    (tmp_path / "b.jpg").write_bytes(encode(PHOTO))
    assert source.open_source(tmp_path).keys == ["b"]
    assert "1 .heic" in caplog.text and "pip install 'sop-faiss[heic]'" in caplog.text
