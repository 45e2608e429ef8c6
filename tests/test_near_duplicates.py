"""Duplicates: against comparing every pair, and what pack and check say of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from sop_faiss.data.check import check
from sop_faiss.data.images.decode import decode_pillow
from sop_faiss.data.images.near_duplicates import Signature, find_near, image_signature
from sop_faiss.data.images.source import open_source
from sop_faiss.data.pack import pack
from tests.images import encode, make_image


def every_pair(signatures: list[Signature]) -> list[list[int]]:
    """Near groups by comparing every image with every other."""
    groups: list[set[int]] = []
    for i, one in enumerate(signatures):
        near = {
            j
            for j, two in enumerate(signatures)
            if (one.dhash ^ two.dhash).bit_count() <= 3
            and max(abs(a // 16 - b // 16) for a, b in zip(one.color, two.color, strict=True)) <= 1
        }
        joined = [group for group in groups if group & near]
        groups = [group for group in groups if not group & near] + [{i}.union(near, *joined)]
    return sorted(sorted(group) for group in groups if len(group) > 1)


def some_signatures(rng: np.random.Generator, count: int, centers: int, flipped: int) -> list[Signature]:
    """Hashes in clouds about some centers, many of them a few bits apart, with colors that are sometimes far apart."""
    seeds = [int(rng.integers(0, 2**63)) * 2 + int(rng.integers(2)) for _ in range(centers)]
    made = []
    for number in range(count):
        value = seeds[int(rng.integers(centers))]
        for bit in rng.integers(0, 64, int(rng.integers(flipped + 1))):
            value ^= 1 << int(bit)
        color = tuple(int(level) for level in 100 + rng.integers(0, 3, 3) * 16)
        made.append(Signature(number.to_bytes(32, "big"), value, color))  # type: ignore[arg-type]
    return made


@pytest.mark.parametrize("large_group", [2048, 2])
@pytest.mark.parametrize(("centers", "flipped"), [(1, 8), (5, 4), (60, 3), (200, 0)])
def test_near_groups_are_those_of_all_pairs(large_group: int, centers: int, flipped: int) -> None:
    signatures = some_signatures(np.random.default_rng(centers), 200, centers, flipped)
    assert find_near(signatures, large_group=large_group) == every_pair(signatures)


def test_a_pair_three_bits_apart_is_found_wherever_the_bits_are() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        bits = rng.choice(64, 4, replace=False)
        three = sum(1 << int(bit) for bit in bits[:3])
        four = three | 1 << int(bits[3])
        gray = (9, 9, 9)
        assert find_near([Signature(b"", 0, gray), Signature(b"", three, gray)]) == [[0, 1]]
        assert find_near([Signature(b"", 0, gray), Signature(b"", four, gray)]) == []
    assert find_near([]) == [] and find_near([Signature(b"", 0, (1, 1, 1))]) == []


def test_what_a_person_calls_the_same_image() -> None:
    rng = np.random.default_rng(1)
    photo = Image.fromarray(make_image(rng, (120, 160)))
    same = [
        encode(photo, "PNG"),
        encode(photo, quality=60),
        encode(photo.resize((80, 60), Image.Resampling.BICUBIC)),
        encode(ImageEnhance.Brightness(photo).enhance(1.03)),
    ]
    others = [encode(make_image(rng, (120, 160))) for _ in range(12)]
    others += [encode(Image.new("RGB", (9, 9), color)) for color in ("red", "blue", "white", "black")]
    signatures = [image_signature(encoded, decode_pillow(encoded)) for encoded in same + others]
    assert find_near(signatures) == [[0, 1, 2, 3]]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Six images: c/2 repeats a/0 in bytes, c/3 nearly a/1 (PNG for JPEG)."""
    rng = np.random.default_rng(2)
    images = {name: make_image(rng, (120, 160)) for name in ("a/0.jpg", "a/1.jpg", "b/4.jpg", "b/5.jpg")}
    for name, image in images.items():
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "photos" / name).write_bytes(encode(image))
    (tmp_path / "photos" / "c").mkdir()
    (tmp_path / "photos" / "c" / "2.jpg").write_bytes((tmp_path / "photos" / "a" / "0.jpg").read_bytes())
    (tmp_path / "photos" / "c" / "3.png").write_bytes(encode(images["a/1.jpg"], "PNG"))
    return tmp_path / "photos"


def test_pack_reports_and_keeps_duplicates(photos: Path, tmp_path: Path) -> None:
    summary = pack(photos, tmp_path / "out")
    assert summary.samples == 6
    assert summary.duplicates == {"exact": 1, "exact_are_left_out": False, "near": 1}
    report = json.loads((tmp_path / "out" / "duplicates.json").read_text())
    assert report["images"] == 6 and report["exact_are_left_out"] is False
    assert report["exact"]["found"] == [{"images": ["a/0.jpg", "c/2.jpg"], "labels_differ": True}]
    assert report["near"]["found"] == [{"images": ["a/1.jpg", "c/3.png"], "labels_differ": True}]
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["duplicates"] == summary.duplicates


@pytest.mark.parametrize("workers", [1, 3])
def test_pack_leaves_exact_duplicates_out(photos: Path, tmp_path: Path, workers: int) -> None:
    summary = pack(photos, tmp_path / "out", drop_exact_duplicates=True, workers=workers)
    assert summary.samples == summary.labeled == 5 and summary.dropped == []
    assert open_source(tmp_path / "out").keys == ["0", "1", "4", "5", "3"]  # the first is kept
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["duplicates"] == {"exact": 1, "exact_are_left_out": True, "near": 1}
    assert check(tmp_path / "out", find_duplicates=True).problems == []


def test_check_counts_duplicates_where_asked(photos: Path, tmp_path: Path) -> None:
    pack(photos, tmp_path / "out", samples_per_shard=2)
    assert check(tmp_path / "out").duplicates is None
    found = check(tmp_path / "out", find_duplicates=True)
    assert found.problems == [] and found.duplicates is not None
    assert found.duplicates["exact"]["found"][0]["images"] == [
        "0.jpg in photos-000000.tar",
        "2.jpg in photos-000002.tar",
    ]
    assert found.duplicates["near"]["groups"] == 1
    json.dumps(found.to_dict())
