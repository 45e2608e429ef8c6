"""The check finds every problem, says where, and goes on."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from sop_faiss.data.check import check
from sop_faiss.data.pack import pack
from sop_faiss.errors import ConfigError, DataError
from tests.images import PickleTrap, encode, make_image, write_folder, write_shards, write_tar

IMAGE = encode(make_image(np.random.default_rng(0), 32))


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    photos = write_folder(tmp_path / "photos", classes=3, per_class=4, size=(20, 30))
    pack(photos, tmp_path / "out", samples_per_shard=5)
    return tmp_path / "out"


def test_good_shards(packed: Path) -> None:
    calls: list[tuple[int, int]] = []
    report = check(packed, progress=lambda *call: calls.append(call))
    assert report.problems == [] and report.has_manifest
    assert (report.shards, report.samples, report.good, report.labeled) == (3, 12, 12, 12)
    assert report.label_counts == {0: 4, 1: 4, 2: 4} and report.formats == {"JPEG": 12}
    assert report.bytes == sum(path.stat().st_size for path in packed.glob("*.tar"))
    assert report.shorter_side is not None
    assert (report.shorter_side.smallest, report.shorter_side.median, report.shorter_side.largest) == (20, 20, 20)
    assert calls[-1] == (12, 12) and len(calls) == 12
    content = json.loads(json.dumps(report.to_dict()))
    assert content["ok"] is True and content["label_counts"] == {"0": 4, "1": 4, "2": 4}


def test_folders_lists_and_shards_without_a_manifest(tmp_path: Path) -> None:
    photos = write_folder(tmp_path / "photos", classes=2, per_class=2)
    (photos / "class_0" / "bad.jpg").write_text("text")
    report = check(photos)
    assert (report.samples, report.good, report.shards) == (5, 4, 0)
    assert report.problems == ["1 images are bad: not-an-image"] and report.bad[0].member == "class_0/bad.jpg"
    report = check(f"{write_shards(tmp_path / 'shards')}/photos-*.tar")
    assert report.problems == [] and not report.has_manifest


def test_one_flipped_byte_is_found(packed: Path) -> None:
    shard = packed / "photos-000001.tar"
    content = bytearray(shard.read_bytes())
    padding = 512 + len((packed.parent / "photos/class_1/0001.jpg").read_bytes())
    content[padding] ^= 1
    shard.write_bytes(content)
    report = check(packed)
    assert any("photos-000001.tar has another sha256" in problem for problem in report.problems)


def test_a_cut_shard_does_not_hide_the_others(packed: Path) -> None:
    os.truncate(packed / "photos-000001.tar", 1500)
    write_tar(packed / "photos-000002.tar", [("a.jpg", IMAGE), ("b.jpg", IMAGE[:-40]), ("c.jpg", b"")])
    (packed / "photos-000000.tar").unlink()
    write_tar(packed / "extra.tar", [("a.jpg", IMAGE)])
    report = check(packed)
    expected = [
        "photos-000001.tar is cut off: at offset",
        "photos-000001.tar has 1500 bytes, the manifest says",
        "photos-000002.tar has 3 samples, the manifest says 2",
        "photos-000000.tar is in the manifest but missing",
        "extra.tar is not in the manifest",
        "1 images are bad: truncated",
        "1 images are bad: empty",
    ]
    for part in expected:
        assert any(part in problem for problem in report.problems), (part, report.problems)
    assert all("\n" not in problem for problem in report.problems)
    assert report.good == 2 and report.repeated_keys == 1


def test_members_that_are_never_read_are_counted(tmp_path: Path) -> None:
    trap = pickle.dumps(PickleTrap(tmp_path / "sprung"))
    members = [("a.jpg", IMAGE), ("a.pkl", trap), ("b.pth", trap), ("a.json", b"{}")]
    report = check(write_tar(tmp_path / "x.tar", members))
    assert report.ignored_members == {".pkl": 1, ".pth": 1}
    assert report.problems == [] and not (tmp_path / "sprung").exists()


def test_manifests_that_are_wrong(packed: Path) -> None:
    manifest = json.loads((packed / "manifest.json").read_text())
    (packed / "manifest.json").write_text(json.dumps({**manifest, "classes": ["one"]}))
    assert check(packed).problems == ["labels go up to 2, the manifest names 1 classes"]
    for content in ("{", "[]", '{"shards": [{"name": "photos-000000.tar"}]}'):
        (packed / "manifest.json").write_text(content)
        report = check(packed)
        assert len(report.problems) >= 1 and "manifest" in report.problems[-1]


def test_nothing_to_check(tmp_path: Path) -> None:
    for name in ("nothing", "nothing-{0..3}.tar", "pipe:cat x.tar"):
        with pytest.raises(DataError):
            check(str(tmp_path / name) if "pipe" not in name else name)
    with pytest.raises(DataError, match="empty"):
        check(tmp_path)
    with pytest.raises(ConfigError, match="workers"):
        check(tmp_path, workers=0)
