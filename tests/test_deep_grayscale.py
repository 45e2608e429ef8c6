"""Grayscale images of 16 bits and of floats: which value is white, in training, in encoding and in shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sop_faiss.config import config_of
from sop_faiss.data.check import check
from sop_faiss.data.images.decode import decode_image
from sop_faiss.data.images.deep_grayscale import DeepImage, DeepTally
from sop_faiss.data.images.source import open_source
from sop_faiss.data.pack import pack
from sop_faiss.data.views.multicrop import MultiCrop
from sop_faiss.errors import ConfigError, IndexMismatchError
from sop_faiss.evaluate.sets.retrieval_set import CroppedFiles
from sop_faiss.features.extract import extract_features
from sop_faiss.index.build import build_index
from sop_faiss.index.search import FeatureIndex
from sop_faiss.model.encoders.load import load_encoder
from sop_faiss.model.encoders.preprocess import Preprocess
from tests.encoders import write_run
from tests.images import encode

RAMP = np.linspace(0, 4095, 64 * 64).astype(np.uint16).reshape(64, 64)
EIGHT = (RAMP >> 4).astype(np.uint8)
"""The same in 8 bits."""


def gray(encoded: bytes, top_value: float = 0.0) -> np.ndarray:
    decoded = decode_image(encoded, top_value=top_value)
    assert (decoded[..., 0] == decoded[..., 2]).all()
    return decoded[..., 0]


def tiff(values: np.ndarray, **tags: Any) -> bytes:
    numbers = {"MaxSampleValue": 281, "SMaxSampleValue": 341}
    return encode(Image.fromarray(values), "TIFF", tiffinfo={numbers[name]: value for name, value in tags.items()})


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_twelve_bits_in_sixteen(format: str) -> None:
    encoded = encode(Image.fromarray(RAMP), format)
    np.testing.assert_array_equal(gray(encoded, 4095.0), EIGHT)
    np.testing.assert_array_equal(gray(encoded), RAMP >> 8)
    np.testing.assert_array_equal(gray(encoded, 65535.0), RAMP >> 8)
    assert gray(encoded, 1000.0)[RAMP >= 1000].min() == 255  # above white is white


def test_floats_of_twelve_bits_are_read_as_whole_numbers_are() -> None:
    encoded = tiff(RAMP.astype(np.float32))
    assert np.abs(gray(encoded, 4095.0).astype(int) - RAMP / 4095 * 255).max() <= 0.51
    assert np.abs(gray(encoded).astype(int) - RAMP / 65535 * 255).max() <= 0.51  # dark, and told; not all white
    infinite = RAMP.astype(np.float32)
    infinite[0, 0], infinite[0, 1] = np.inf, -np.inf
    assert gray(tiff(infinite), 4095.0)[0, :2].tolist() == [255, 0]


@pytest.mark.parametrize("values", [RAMP, RAMP.astype(np.float32), RAMP.astype(np.int32)])
@pytest.mark.parametrize("tag", ["MaxSampleValue", "SMaxSampleValue"])
def test_a_tiff_states_what_is_white(values: np.ndarray, tag: str) -> None:
    top: Any = (4095.0,) if values.dtype.kind == "f" and tag == "SMaxSampleValue" else (4095,)
    encoded = tiff(values, **{tag: top})
    assert np.abs(gray(encoded).astype(int) - EIGHT).max() <= 1 and gray(encoded).max() == 255
    assert gray(encoded, 65535.0).max() <= 16  # the user's word comes first
    belied = tiff(values, **{tag: (100.0,) if isinstance(top[0], float) else (100,)})
    assert gray(belied).max() <= 16


def test_a_tiff_of_twelve_bits() -> None:
    packed = bytearray()
    for first, second in RAMP.reshape(-1, 2).tolist():
        packed += bytes([first >> 4, (first & 15) << 4 | second >> 8, second & 255])
    encoded = bytearray(encode(Image.fromarray(RAMP), "TIFF"))
    place = encoded.index(RAMP.tobytes())
    encoded[place : place + RAMP.nbytes] = packed.ljust(RAMP.nbytes, b"\0")
    for tag, before, after in ((258, 16, 12), (279, RAMP.nbytes, len(packed))):  # BitsPerSample, StripByteCounts
        at = encoded.index(tag.to_bytes(2, "little"), 8) + 8
        assert int.from_bytes(encoded[at : at + 2], "little") == before
        encoded[at : at + 2] = after.to_bytes(2, "little")
    np.testing.assert_array_equal(gray(bytes(encoded)), EIGHT)


@pytest.mark.parametrize(
    ("images", "parts"),
    [
        ([], []),
        ([DeepImage(60000.0, 65535.0, False), DeepImage(900.0, 65535.0, False)], []),
        (
            [DeepImage(4000.0, 65535.0, False), DeepImage(900.0, 65535.0, False)],
            [["2 deep", "4,000", "`top_value=4095`"]],
        ),
        ([DeepImage(200.0, 65535.0, False)], [["1 deep", "200", "`top_value=255`"]]),
        ([DeepImage(4000.0, 4095.0, True)], []),
        ([DeepImage(0.9, 1.0, False)], []),
        ([DeepImage(200.0, 255.0, False)], []),
        ([DeepImage(5000.0, 4095.0, True)], [["1 deep", "5,000", "4,095", "`top_value=5000`"]]),
        ([DeepImage(70000.0, 65535.0, False)], [["70,000", "`top_value="]]),
        ([DeepImage(900.0, 1000.0, True), DeepImage(900.0, 2000.0, True)], [["1,000", "2,000", "`top_value="]]),
    ],
)
def test_notices(images: list[DeepImage], parts: list[list[str]]) -> None:
    tally = DeepTally()
    tally.add(None)
    for image in images:
        tally.add(image)
    notices = tally.notices()
    assert len(notices) == len(parts) and tally.images == len(images)
    for notice, expected in zip(notices, parts, strict=True):
        assert all(part in notice for part in [*expected, "data.top_value"]), notice


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    folder = tmp_path / "scans"
    folder.mkdir()
    (folder / "a.png").write_bytes(encode(Image.fromarray(RAMP), "PNG"))
    (folder / "b.tif").write_bytes(tiff(RAMP[::-1].astype(np.float32)))
    (folder / "c.jpg").write_bytes(encode(Image.fromarray(EIGHT)))
    return folder


def test_pack_and_check_give_notice(scans: Path, tmp_path: Path) -> None:
    summary = pack(scans, tmp_path / "dark")
    report = check(scans)
    assert summary.notices == report.notices and len(report.notices) == 1 and "4095" in report.notices[0]
    assert report.problems == [] and report.to_dict()["notices"] == report.notices
    deep = json.loads((tmp_path / "dark/manifest.json").read_text())["deep_grayscale"]
    assert deep["images"] == deep["unknown"] == 2 and deep["largest"] == 4095 and deep["top_value"] == 0
    assert check(scans, top_value=4095.0).notices == [] == check(tmp_path / "dark", top_value=4095.0).notices


def test_shards_packed_with_a_top_value_need_none(scans: Path, tmp_path: Path) -> None:
    assert pack(scans, tmp_path / "shards", top_value=4095.0).notices == []
    source = open_source(tmp_path / "shards")
    for position, expected in enumerate((EIGHT, EIGHT[::-1])):
        assert np.abs(gray(source.read(position)).astype(int) - expected).max() <= 1
    assert source.read(2) == (scans / "c.jpg").read_bytes()
    assert check(tmp_path / "shards").to_dict()["deep_grayscale"]["images"] == 0


def test_training_and_its_encoder_see_the_same(scans: Path, tmp_path: Path) -> None:
    config = config_of({"data": {"top_value": 4095}, "views": {"global_size": 32}}, "here")
    encoded = (scans / "a.png").read_bytes()
    image, _ = MultiCrop(config, 0).load(0, 0, encoded)
    np.testing.assert_array_equal(image[..., 0], EIGHT)

    run = write_run(tmp_path / "run")
    dark = load_encoder(str(run))
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("top_value: 0.0", "top_value: 4095"))
    bright = load_encoder(str(run))
    assert (dark.preprocess.top_value, bright.preprocess.top_value) == (0, 4095)
    assert load_encoder(str(run), top_value=0.0).preprocess == dark.preprocess
    store = extract_features(bright, open_source(scans))
    plain = extract_features(dark, open_source(pack(scans, tmp_path / "shards", top_value=4095.0).out))
    np.testing.assert_allclose(store.features, plain.features, atol=1e-5)
    assert store.manifest["preprocess"]["top_value"] == 4095 and "top_value" not in plain.manifest["preprocess"]
    assert store.manifest["preprocess"] == bright.preprocess.to_dict()
    build_index(store, tmp_path / "index")
    index = FeatureIndex.open(tmp_path / "index")
    index.check_encoder(bright)
    with pytest.raises(IndexMismatchError, match="top_value"):
        index.check_encoder(dark)


def test_a_cropped_query_is_as_bright_as_its_image(scans: Path) -> None:
    queries = CroppedFiles("queries", ["a"], None, None, scans, ["a.png"], [(0.0, 0.0, 8.0, 8.0)], 4095.0)
    np.testing.assert_array_equal(gray(queries.read(0)), EIGHT[:8, :8])


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_impossible_top_values(value: float, scans: Path, tmp_path: Path) -> None:
    attempts = (
        lambda: check(scans, top_value=value),
        lambda: pack(scans, tmp_path / "out", top_value=value),
        lambda: Preprocess(32, 32, top_value=value),
        lambda: config_of({"data": {"top_value": value}}, "here"),
    )
    for attempt in attempts:
        with pytest.raises(ConfigError, match="top_value"):
            attempt()
    assert not (tmp_path / "out").exists()
