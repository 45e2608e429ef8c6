"""Images to shards: what is kept, what is dropped, and that nothing half-made is left behind."""

from __future__ import annotations

import io
import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from webdataset.tariterators import group_by_keys, tar_file_expander

from sop_faiss.data.images.decode import decode_image
from sop_faiss.data.images.source import open_source
from sop_faiss.data.ordered_map import default_workers, map_ordered
from sop_faiss.data.pack import pack
from sop_faiss.data.shards.shard_writer import Sample, ShardWriter
from sop_faiss.errors import ConfigError, DataError, SopError
from sop_faiss.files import sha256_file
from tests.images import encode, make_image, write_bad_images, write_folder, write_shards

RNG = np.random.default_rng(0)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix != ".index"}


def test_pack_keeps_bytes_labels_and_order(tmp_path: Path) -> None:
    photos = write_folder(tmp_path / "photos", classes=3, per_class=4)
    calls: list[tuple[int, int]] = []
    summary = pack(photos, tmp_path / "out", samples_per_shard=5, progress=lambda *call: calls.append(call))
    before, after = open_source(photos), open_source(tmp_path / "out")
    assert after.keys == before.keys and after.class_names == before.class_names == ["class_0", "class_1", "class_2"]
    assert [after.read(i) for i in range(12)] == [before.read(i) for i in range(12)]
    np.testing.assert_array_equal(after.labels, before.labels)
    assert [(shard.name, shard.samples) for shard in summary.shards] == [
        ("photos-000000.tar", 5),
        ("photos-000001.tar", 5),
        ("photos-000002.tar", 2),
    ]
    assert (summary.samples, summary.labeled, summary.resized, summary.dropped) == (12, 12, 0, [])
    assert calls == [(n, 12) for n in range(1, 13)]


def test_manifest(tmp_path: Path) -> None:
    photos = write_folder(tmp_path / "photos", classes=2, per_class=3)
    summary = pack(photos, tmp_path / "out", samples_per_shard=4)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    for entry in manifest["shards"]:
        path = tmp_path / "out" / entry["name"]
        assert (entry["bytes"], entry["sha256"]) == (path.stat().st_size, sha256_file(path))
    assert [entry["samples"] for entry in manifest["shards"]] == [4, 2]
    assert (manifest["samples"], manifest["labeled"], manifest["bytes"]) == (6, 6, summary.bytes)
    assert manifest["classes"] == ["class_0", "class_1"]
    assert manifest["dropped"] == {"count": 0, "by_reason": {}, "images": []}


def test_the_same_images_give_the_same_bytes(tmp_path: Path) -> None:
    photos = write_folder(tmp_path / "photos", classes=2, per_class=8)
    for name, workers in (("a", 1), ("b", 3)):
        pack(photos, tmp_path / name, samples_per_shard=7, resize=16, workers=workers)
        time.sleep(0.01)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_webdataset_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_SECURE", "1")
    photos = write_folder(tmp_path / "photos", classes=2, per_class=2)
    for name in ("v1.5 final.jpg", "v1.6 final.jpg", "Größe.写真.jpg", "x" * 120 + ".jpg"):
        (photos / "class_1" / name).write_bytes(encode(make_image(RNG, 16)))
    pack(photos, tmp_path / "out")
    source = open_source(tmp_path / "out")
    with (tmp_path / "out" / "photos-000000.tar").open("rb") as stream:  # WebDataset itself leaves the file open
        samples = list(group_by_keys(tar_file_expander([{"url": "photos-000000.tar", "stream": stream}])))
    assert [sample["__key__"] for sample in samples] == source.keys
    assert "v1_5 final" in source.keys and "v1_6 final" in source.keys and "Größe_写真" in source.keys
    assert [sample["jpg"] for sample in samples] == [source.read(i) for i in range(len(source))]
    assert source.labels is not None
    assert [int(sample["cls"]) for sample in samples] == source.labels.tolist()


def test_dots_become_unique_keys(tmp_path: Path) -> None:
    for name in ("a.b.jpg", "a_b.jpg", "a.b.png", "a_b_2.jpg"):
        (tmp_path / "photos").mkdir(exist_ok=True)
        (tmp_path / "photos" / name).write_bytes(encode(make_image(RNG, 8), "PNG" if "png" in name else "JPEG"))
    pack(tmp_path / "photos", tmp_path / "out")
    keys = open_source(tmp_path / "out").keys
    assert len(set(keys)) == 4 and not any("." in key for key in keys)
    assert {"a_b", "a_b_2"} < set(keys)


def test_hidden_names_of_a_list_are_made_visible(tmp_path: Path) -> None:
    """A list may name what a folder or a shard passes over."""
    names = [".x.jpg", ".d/a.jpg", "e/.f/a.jpg", "__MACOSX/b.jpg", "a/b.jpg"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(encode(make_image(RNG, 8)))
    (tmp_path / "list.txt").write_text("\n".join(names))
    assert pack(tmp_path / "list.txt", tmp_path / "out").samples == len(open_source(tmp_path / "out")) == 5


def test_resize_shrinks_the_shorter_side_and_never_enlarges(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    sizes = {"wide.jpg": (40, 100), "tall.png": (90, 30), "small.jpg": (10, 12), "strip.jpg": (30, 600)}
    for name, size in sizes.items():
        image = make_image(RNG, size)
        (photos / name).write_bytes(encode(image, "PNG" if name.endswith("png") else "JPEG"))
    summary = pack(photos, tmp_path / "out", resize=20)
    source = open_source(tmp_path / "out")
    shapes = {key: decode_image(source.read(i)).shape[:2] for i, key in enumerate(source.keys)}
    assert shapes == {"wide": (20, 50), "tall": (60, 20), "small": (10, 12), "strip": (20, 400)}
    assert source.member_of(source.keys.index("tall")) == "tall.png"
    assert source.read(source.keys.index("small")) == (photos / "small.jpg").read_bytes()
    assert summary.resized == 3

    original = Image.open(photos / "tall.png").resize((20, 60), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(decode_image(source.read(source.keys.index("tall"))), np.asarray(original))


def test_formats(tmp_path: Path) -> None:
    """JPEG, PNG and WebP keep their bytes, whatever the file is named; others are encoded anew, without loss."""
    photos = tmp_path / "photos"
    photos.mkdir()
    image = make_image(RNG, 16)
    files = {
        "jpeg.png": encode(image, "JPEG"),
        "png.jpg": encode(image, "PNG"),
        "webp.webp": encode(image, "WEBP"),
        "bmp.bmp": encode(image, "BMP"),
        "gif.gif": encode(Image.fromarray(image).convert("P"), "GIF"),
        "tiff.tif": encode(image, "TIFF"),
        "deep.png": encode(Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000), "PNG"),
    }
    for name, content in files.items():
        (photos / name).write_bytes(content)
    assert pack(photos, tmp_path / "out").dropped == []
    source = open_source(tmp_path / "out")
    packed = {key: (source.member_of(i).rpartition(".")[2], source.read(i)) for i, key in enumerate(source.keys)}
    for key, suffix in (("jpeg", "jpg"), ("png", "png"), ("webp", "webp"), ("deep", "png")):
        assert packed[key] == (suffix, next(content for name, content in files.items() if name.startswith(f"{key}.")))
    for key in ("bmp", "tiff", "gif"):
        suffix, content = packed[key]
        assert suffix == "png"
        original = next(content for name, content in files.items() if name.startswith(f"{key}."))
        np.testing.assert_array_equal(decode_image(content), decode_image(original))


def test_orientation_survives_a_resize(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_bytes(encode(make_image(RNG, (40, 80)), exif=exif))
    pack(tmp_path / "photos", tmp_path / "out", resize=20)
    encoded = open_source(tmp_path / "out").read(0)
    assert decode_image(encoded).shape == (40, 20, 3)
    assert Image.open(io.BytesIO(encoded)).size == (20, 40)  # upright in itself: there is no tag to apply twice


def test_bad_images_are_dropped_counted_and_listed(tmp_path: Path) -> None:
    photos = write_folder(tmp_path / "photos", classes=0, per_class=5)
    write_bad_images(photos)
    summary = pack(photos, tmp_path / "out", max_pixels=300 * 299)
    assert summary.samples == 5 and open_source(tmp_path / "out").keys == [f"{n:04d}" for n in range(5)]
    reasons = {"truncated": 1, "not-an-image": 1, "empty": 1, "too-many-pixels": 1, "missing": 1}
    assert summary.dropped_by_reason == reasons
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["dropped"]["count"] == 5 and manifest["dropped"]["by_reason"] == reasons
    assert [item["image"] for item in manifest["dropped"]["images"]] == [
        "cut.jpg",
        "empty.png",
        "gone.jpg",
        "huge.png",
        "text.jpg",
    ]


def test_too_many_bad_images_are_fatal_and_leave_nothing(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    write_bad_images(photos)
    (photos / "huge.png").unlink()
    with pytest.raises(DataError) as error:
        pack(photos, tmp_path / "out")
    assert "4 of the 4 images" in str(error.value) and "\n" not in str(error.value)
    write_folder(photos, classes=0, per_class=12)
    with pytest.raises(DataError, match=r"4 of the 16 .* wanted at most 24.0%"):
        pack(photos, tmp_path / "out", max_bad_fraction=0.24)
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]
    assert pack(photos, tmp_path / "out", max_bad_fraction=0.25).samples == 12


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError])
def test_an_interrupted_pack_leaves_nothing(tmp_path: Path, failure: type[BaseException]) -> None:
    photos = write_folder(tmp_path / "photos")
    threads = threading.active_count()

    def fail(done: int, total: int) -> None:
        if done == 5:
            raise failure

    with pytest.raises(failure):
        pack(photos, tmp_path / "out", samples_per_shard=2, progress=fail)
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]
    assert threading.active_count() == threads


def test_what_stands_in_the_way(tmp_path: Path) -> None:
    photos = write_folder(tmp_path / "photos")
    out = tmp_path / "out"
    out.mkdir()
    pack(photos, out)
    before = contents(out)
    with pytest.raises(SopError, match="not empty"):
        pack(photos, out)
    assert contents(out) == before
    (tmp_path / "file").write_text("x")
    with pytest.raises(SopError, match="already exists"):
        pack(photos, tmp_path / "file")
    with pytest.raises(DataError, match="does not exist"):
        pack(tmp_path / "nothing", tmp_path / "out2")
    assert not (tmp_path / "out2").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"samples_per_shard": 0},
        {"resize": 0},
        {"workers": 0},
        {"max_bad_fraction": 1.5},
        {"name": "a/b"},
        {"name": ""},
        {"name": ".hidden"},
        {"shard_bytes": 0},
    ],
)
def test_impossible_options(tmp_path: Path, options: dict) -> None:
    photos = write_folder(tmp_path / "photos")
    with pytest.raises(ConfigError, match="wanted"):
        pack(photos, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_lists_and_shards_can_be_packed(tmp_path: Path) -> None:
    write_folder(tmp_path / "photos", classes=0, per_class=3)
    (tmp_path / "list.csv").write_text("path,label\nphotos/0002.jpg,dog\nphotos/0000.jpg,\n")
    summary = pack(tmp_path / "list.csv", tmp_path / "out", name="animals")
    source = open_source(tmp_path / "out" / "animals-000000.tar")
    assert source.keys == ["0002", "0000"] and source.labels is not None and source.labels.tolist() == [0, -1]
    assert source.class_names == ["dog"] and summary.labeled == 1

    shards = write_shards(tmp_path / "shards", shards=3)
    pack(shards, tmp_path / "again", samples_per_shard=100)
    before, after = open_source(shards), open_source(tmp_path / "again")
    assert after.keys == before.keys and [after.read(i) for i in range(12)] == [before.read(i) for i in range(12)]
    np.testing.assert_array_equal(after.labels, before.labels)


def test_a_shard_ends_at_its_size_too(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, "x", samples_per_shard=3, shard_bytes=1000) as writer:
        for number, size in enumerate((400, 400, 400, 10, 10, 10, 2000, 5)):
            writer.write(Sample(str(number), "jpg", bytes(size), -1))
    assert [entry.samples for entry in writer.entries] == [3, 3, 1, 1]
    assert open_source(tmp_path).keys == [str(number) for number in range(8)]


# ------------------------------------------------------------------------------------------------------------- threads


def test_map_ordered_keeps_the_order_and_is_bounded() -> None:
    taken: list[int] = []

    def items() -> object:
        for number in range(100):
            taken.append(number)
            yield number

    def slow(number: int) -> int:
        time.sleep(0.002 * (number % 3))
        return number * number

    results = map_ordered(slow, items(), workers=3)  # type: ignore[arg-type]
    assert next(results) == 0 and len(taken) == 12
    assert list(results) == [number * number for number in range(1, 100)]
    assert list(map_ordered(slow, [], workers=2)) == []
    assert default_workers() >= 1


def test_map_ordered_raises_at_its_place() -> None:
    def fail(number: int) -> int:
        if number == 3:
            raise DataError("three")
        return number

    results = map_ordered(fail, range(10), workers=2)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(DataError, match="three"):
        next(results)
