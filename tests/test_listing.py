"""Folders, lists and single images, and what is wrong with them."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sop_faiss.data.check import check
from sop_faiss.data.images.decode import drop_reason
from sop_faiss.data.images.listing import open_folder
from sop_faiss.data.images.source import ImageSource, open_source
from sop_faiss.data.pack import pack
from sop_faiss.errors import DataError
from tests.images import encode, make_image, write_folder, write_shards
from tests.messages import assert_one_line

IMAGE = encode(make_image(np.random.default_rng(0), 8))


def test_folder_with_classes(tmp_path: Path) -> None:
    source = open_source(write_folder(tmp_path, classes=3, per_class=2))
    assert isinstance(source, ImageSource)
    assert source.class_names == ["class_0", "class_1", "class_2"]
    assert source.labels is not None and source.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert source.keys[:3] == ["class_0/0000", "class_0/0001", "class_1/0000"]
    assert source.member_of(2) == "class_1/0000.jpg" and source.source_of(2) == "" and source.root == tmp_path
    assert source.read(2) == (tmp_path / "class_1/0000.jpg").read_bytes()


def test_flat_and_mixed_folders(tmp_path: Path) -> None:
    source = open_source(write_folder(tmp_path, classes=0, per_class=2))
    assert source.labels is None and source.class_names is None and source.keys == ["0000", "0001"]
    (tmp_path / "b" / "deep").mkdir(parents=True)
    (tmp_path / "b" / "deep" / "x.y.JPG").write_bytes(IMAGE)
    (tmp_path / "0000.png").write_bytes(IMAGE)
    (tmp_path / "notes.txt").write_text("no image")
    source = open_source(tmp_path)
    assert source.keys == ["0000.jpg", "0000.png", "0001", "x.y"]
    assert source.labels is not None and source.labels.tolist() == [-1, -1, -1, 0] and source.class_names == ["b"]


def test_hidden_files_are_passed_over(tmp_path: Path) -> None:
    for name in ("a.jpg", "._a.jpg", ".thumbs/a.jpg", "__MACOSX/a.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(IMAGE)
    assert open_source(tmp_path).keys == ["a"]


def test_files_that_are_not_readable_images_are_counted_by_kind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_folder(tmp_path, classes=1, per_class=2)
    for name in ("a.JXL", "class_0/b.jxl", "c.dng", ".d.jxl", "notes.txt", "film.MP4", "README"):
        (tmp_path / name).write_bytes(b"x")
    assert len(open_folder("photos/", tmp_path).keys) == 2
    assert [record.getMessage() for record in caplog.records] == [
        "folder photos/: 6 files of other kinds skipped (2 .jxl, 1 without a suffix, 1 .dng, 1 .mp4, 1 .txt): "
        "save images among them as JPEG"
    ]


def test_few_kinds_of_files_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_folder(tmp_path, classes=0, per_class=1)
    for number in range(40):
        (tmp_path / f"x.{number:0100d}").write_bytes(b"x")
    open_folder("photos/", tmp_path)
    (record,) = caplog.records
    assert "28 others" in record.getMessage() and len(record.getMessage()) < 400


def test_links_in_folders(tmp_path: Path) -> None:
    real = write_folder(tmp_path / "real", classes=0, per_class=2)
    folder = tmp_path / "folder"
    (folder / "c").mkdir(parents=True)
    (folder / "a.jpg").symlink_to(real / "0000.jpg")
    (folder / "c" / "loop").symlink_to(folder)
    (folder / "d").symlink_to(real)
    (folder / "gone.jpg").symlink_to(tmp_path / "nowhere.jpg")
    source = open_source(folder)
    assert source.keys == ["a", "0000", "0001", "gone"]
    assert source.read(0) == (real / "0000.jpg").read_bytes()
    with pytest.raises(DataError) as error:
        source.read(3)
    assert drop_reason(error.value) == "missing"


def test_odd_files_fail_when_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jpg")
    (tmp_path / "b.jpg").write_bytes(b"")
    source = open_source(tmp_path)
    reasons = []
    for position in range(2):
        with pytest.raises(DataError) as error:
            source.read(position)
        reasons.append(drop_reason(error.value))
    assert reasons == ["not-a-file", "empty"]


def reasons_of(source: ImageSource) -> dict[str, str]:
    """By member; "" for one that can be read."""
    reasons = {}
    for position in range(len(source)):
        try:
            source.read(position)
            reason = ""
        except DataError as error:
            reason = drop_reason(error)
        reasons[source.member_of(position)] = reason
    return reasons


def test_one_bad_name_or_link_spoils_one_image(tmp_path: Path) -> None:
    write_folder(tmp_path, classes=2, per_class=1)
    (tmp_path / "class_0/self.jpg").symlink_to("self.jpg")
    (tmp_path / "class_0/album").symlink_to("album")
    (tmp_path / "class_1" / os.fsdecode(b"caf\xe9.jpg")).write_bytes(IMAGE)
    (tmp_path / os.fsdecode(b"d\xe9")).mkdir()
    (tmp_path / os.fsdecode(b"d\xe9") / "x.jpg").write_bytes(IMAGE)
    source = open_source(tmp_path)
    assert reasons_of(source) == {
        "class_0/0000.jpg": "",
        "class_0/album": "unreadable",
        "class_0/self.jpg": "unreadable",
        "class_1/0000.jpg": "",
        "class_1/caf\\xe9.jpg": "not-utf8",
        "d\\xe9/x.jpg": "not-utf8",
    }
    assert source.class_names == ["class_0", "class_1", "d\\xe9"]
    assert source.labels is not None and source.labels.tolist() == [0, 0, 0, 1, 1, 2]
    "".join([*source.keys, *source.class_names]).encode()
    report = check(tmp_path)
    assert report.good == 2 and report.bad_by_reason == {"unreadable": 2, "not-utf8": 2}
    summary = pack(tmp_path, tmp_path / "out")
    assert summary.samples == 2 and {item.image for item in summary.dropped} >= {"class_1/caf\\xe9.jpg"}
    assert json.loads((tmp_path / "out/manifest.json").read_text())["dropped"]["count"] == 4


def test_a_sub_folder_that_may_not_be_read_is_one_bad_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path, classes=3, per_class=2)
    locked = tmp_path / "class_1"
    locked.chmod(0)
    if os.geteuid() == 0:  # who may read all
        scandir = os.scandir

        def refuse(path: Path) -> Any:
            if Path(path) == locked:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return scandir(path)

        monkeypatch.setattr(os, "scandir", refuse)
    try:
        source = open_source(tmp_path)
        reasons = reasons_of(source)
        assert reasons.pop("class_1") in ("unreadable", "not-a-file") and list(reasons.values()) == [""] * 4
        assert source.class_names == ["class_0", "class_1", "class_2"]  # as with it, so that labels stay
        assert source.labels is not None and source.labels.tolist() == [0, 0, 1, 2, 2]
        assert [image.member for image in check(tmp_path).bad] == ["class_1"]
        with pytest.raises(DataError, match="class_1"):
            open_folder("class_1", locked)
    finally:
        locked.chmod(0o755)


def test_folders_that_cannot_be_a_source(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is empty"):
        open_source(tmp_path)
    (tmp_path / "notes.md").write_text("x")
    with pytest.raises(DataError, match="no image"):
        open_source(tmp_path)
    write_shards(tmp_path / "train")
    with pytest.raises(DataError) as error:
        open_source(tmp_path)
    assert_one_line(error, "shards only in its sub-folders", str(tmp_path / "train"))
    write_folder(tmp_path / "images")
    with pytest.raises(DataError, match="both images and shards"):
        open_source(tmp_path)


def test_one_image(tmp_path: Path) -> None:
    (tmp_path / "my.cat.jpg").write_bytes(IMAGE)
    source = open_source(tmp_path / "my.cat.jpg")
    assert len(source) == 1 and source.keys == ["my.cat"] and source.read(0) == IMAGE and source.root == tmp_path


def listed(tmp_path: Path, text: str | bytes, name: str = "list.csv") -> ImageSource:
    if not (tmp_path / "a").exists():
        write_folder(tmp_path / "a", classes=0, per_class=3)
        shutil.copy(tmp_path / "a" / "0000.jpg", tmp_path / "with, comma.jpg")
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return open_source(path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("list.csv", "path,label\na/0000.jpg,dog\n\na/0001.jpg,\n'with, comma.jpg',cat\n".replace("'", '"')),
        ("list.csv", '\ufeffa/0000.jpg,dog\r\na/0001.jpg\r\n"with, comma.jpg",cat\r\n'),
        ("list.txt", "a/0000.jpg,dog\na/0001.jpg\n\n with, comma.jpg,cat"),
        ("list.tsv", "a/0000.jpg\tdog\r\n./a/0001.jpg\t\r\nwith, comma.jpg\tcat\r\n"),
        ("list.tsv", "Path\tlabel\r\na/0000.jpg\tdog\r\na/0001.jpg\t\r\nwith, comma.jpg\tcat\r\n"),
        ("list.txt", "\nimage,class\na/0000.jpg,dog\na/0001.jpg\n with, comma.jpg,cat"),
    ],
)
def test_lists_with_names_of_classes(tmp_path: Path, name: str, text: str) -> None:
    source = listed(tmp_path, text, name)
    assert [source.member_of(i) for i in range(3)] == ["a/0000.jpg", "a/0001.jpg", "with, comma.jpg"]
    assert source.labels is not None and source.labels.tolist() == [1, -1, 0]
    assert source.class_names == ["cat", "dog"] and source.keys == ["0000", "0001", "with, comma"]


def test_lists_with_numbers_or_nothing(tmp_path: Path) -> None:
    source = listed(tmp_path, "a/0000.jpg,7\na/0001.jpg,-1\na/0002.jpg\n")
    assert source.labels is not None and source.labels.tolist() == [7, -1, -1] and source.class_names is None
    source = listed(tmp_path, "with, comma.jpg\na/0002.jpg\n", "list.txt")
    assert source.labels is None and source.keys == ["with, comma", "0002"]
    source = listed(tmp_path, "a/0000.jpg,07\na/0001.jpg,b1\n")
    assert source.class_names == ["07", "b1"]


def test_headings_and_columns_of_a_list_with_tabs(tmp_path: Path) -> None:
    source = listed(tmp_path, "filename\na/0000.jpg\n", "list.tsv")
    assert source.keys == ["0000"] and source.labels is None
    (tmp_path / "image").write_bytes(IMAGE)  # a file of that name is no heading
    assert listed(tmp_path, "image\na/0000.jpg\n", "list.txt").keys == ["image", "0000"]
    with pytest.raises(DataError) as error:
        listed(tmp_path, "path\tlabel\tsplit\na/0000.jpg\tdog\ttrain\n", "list.tsv")
    assert_one_line(error, "line 2", "3 columns")


def test_line_breaks_within_a_cell_of_a_list_stay(tmp_path: Path) -> None:
    write_folder(tmp_path / "a", classes=0, per_class=3)
    names = ["two\nlines.jpg", "a\u2028b.jpg"]
    for name in names:
        (tmp_path / name).write_bytes(IMAGE)
    source = listed(tmp_path, f'"{names[0]}","a\nb"\r\n{names[1]},c\r\n')
    assert [source.member_of(place) for place in range(2)] == names and source.class_names == ["a\nb", "c"]


def test_lists_with_paths_elsewhere(tmp_path: Path) -> None:
    write_folder(tmp_path / "b", classes=0, per_class=2)
    (tmp_path / "lists").mkdir()
    source = listed(tmp_path, f"../b/0000.jpg\n{tmp_path}/a/0000.jpg\n", "lists/list.txt")
    assert source.root == tmp_path and source.keys == ["b/0000", "a/0000"]
    assert source.read(1) == (tmp_path / "a" / "0000.jpg").read_bytes()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["no image"]),
        ("path,label\n", ["no image"]),
        ("a/0000.jpg\nb.jpg\nc.jpg\n", ["line 2", "b.jpg does not exist", "2 of 3"]),
        ("a/0000.jpg,1\na/../a/0000.jpg,1\n", ["line 2", "line 1", "once"]),
        ("a/0000.jpg,-2\n", ["line 1", "-2"]),
        ("a/0000.jpg,1,2\n", ["line 1", "3 columns"]),
        ("a/0000.jpg\n,3\n", ["line 2", "not a path"]),
        ("a/0000.jpg\nx\0y.jpg\n", ["list.csv"]),
        ("a/0000.jpg\na\n", ["line 2", "folder"]),
        ('a/0000.jpg\n"a/0001.jpg\n', ["line 2", "CSV"]),
        (b"a/\xff.jpg\n", ["UTF-8"]),
    ],
)
def test_wrong_lists(tmp_path: Path, text: str | bytes, parts: list[str]) -> None:
    with pytest.raises(DataError) as error:
        listed(tmp_path, text)
    assert_one_line(error, "list", *parts)
