"""Images in shards: against tarfile as the oracle, and hostile or damaged shards."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import pickle
import tarfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from sop_faiss.data.check import check
from sop_faiss.data.images.decode import drop_reason
from sop_faiss.data.images.source import ImageSource, open_source
from sop_faiss.data.shards import shard_source as shards_module
from sop_faiss.data.shards.shard_stream import ShardStream
from sop_faiss.errors import DataError
from tests.images import PickleTrap, encode, make_image, write_folder, write_shards, write_tar
from tests.messages import assert_one_line

IMAGE = encode(make_image(np.random.default_rng(0), 8))


def test_shards_agree_with_tarfile(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "set", metadata=True)
    source = open_source(folder)
    assert isinstance(source, ImageSource)
    expected = []
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as tar:
            files = {m.name: tar.extractfile(m).read() for m in tar.getmembers()}  # type: ignore[union-attr]
        expected += [
            (name[:-4], files[name], int(files[name[:-3] + "cls"]), shard.name, name)
            for name in files
            if name.endswith("jpg")
        ]
    assert source.labels is not None and source.labels.dtype == np.int64
    found = [
        (source.keys[i], source.read(i), int(source.labels[i]), source.source_of(i), source.member_of(i))
        for i in range(len(source))
    ]
    assert found == expected
    assert source.root == folder and source.class_names is None and source.description == str(folder)


def test_names_with_dots_do_not_merge(tmp_path: Path) -> None:
    members = [("a.b.jpg", b"1"), ("a.b.cls", b"1"), ("a.c.jpg", b"2"), ("a.c.cls", b"2"), ("v1.0/d.e.PNG", b"3")]
    source = open_source(write_tar(tmp_path / "x.tar", members))
    assert source.keys == ["a.b", "a.c", "v1.0/d.e"]
    assert source.labels is not None and source.labels.tolist() == [1, 2, -1]
    assert [source.read(i) for i in range(3)] == [b"1", b"2", b"3"]
    assert source.member_of(2) == "v1.0/d.e.PNG"


TWO_PART = {  # names of images and labels; the image's label, -1 for none; labels that belong to no image
    "a label up to the first dot": ({"a.image.jpg": 1, "a.cls": 1, "b.image.jpg": 2, "b.cls": 2}, 0),
    "two parts on both sides": ({"d.e/a.input.jpg": 1, "d.e/a.label.cls": 1, "b.jpg": 2, "b.label.cls": 2}, 0),
    "a sample of several images": ({"a.left.jpg": 1, "a.right.png": 1, "a.cls": 1}, 0),
    "its own label comes first": ({"a.b.jpg": 1, "a.b.cls": 1, "a.c.jpg": 2, "a.cls": 2}, 0),
    "not the label of another image": ({"a.jpg": 1, "a.cls": 1, "a.b.jpg": -1}, 0),
    "names with dots, an image and a label left over": (
        {"a.1.jpg": 1, "a.1.cls": 1, "a.2.jpg": 2, "a.2.cls": 2, "a.3.jpg": -1, "a.4.cls": 4},
        1,
    ),
    "two labels to choose from": ({"a.jpg": -1, "a.coarse.cls": 1, "a.fine.cls": 2}, 2),
    "two images to choose from": ({"a.left.jpg": -1, "a.right.jpg": -1, "a.label.cls": 1}, 1),
    "another folder": ({"x/a.image.jpg": -1, "a.cls": 1}, 1),
}


@pytest.mark.parametrize("case", TWO_PART)
def test_webdatasets_two_part_extensions(tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture) -> None:
    names, strays = TWO_PART[case]
    expected = [label for name, label in names.items() if not name.endswith(".cls")]
    members = [(name, str(label).encode() if name.endswith(".cls") else IMAGE) for name, label in names.items()]
    for path in (
        write_tar(tmp_path / "x.tar", members),
        tmp_path / "x.tar",  # now from the sidecar
        write_tar(tmp_path / "labels_first.tar", [*reversed(members)]),
    ):
        caplog.clear()
        source = open_source(path)
        labels = [-1] * len(source) if source.labels is None else source.labels.tolist()
        assert labels == (expected[::-1] if path.stem == "labels_first" else expected)
        warned = [message for message in caplog.messages if ".cls" in message]
        assert len(warned) == (strays > 0) and all(path.name in message for message in warned)
        problems = check(path).problems
        assert len(problems) == (strays > 0) and all(path.name in problem and ".cls" in problem for problem in problems)


def test_hidden_members_are_passed_over_as_in_a_folder(tmp_path: Path) -> None:
    """What macOS puts into tars: a `._NAME` for each NAME, and `__MACOSX`."""
    names = ["./._a.jpg", "./a.jpg", "./._a.cls", "./a.cls", "__MACOSX/b.jpg", "__MACOSX/._b.jpg", ".x.jpg", ".d/c.jpg"]
    names += ["e/.x.cls", "e/..y.jpg", "e/f.jpg", ".DS_Store"]
    shard = write_tar(tmp_path / "x.tar", [(name, b"3" if name == "./a.cls" else IMAGE) for name in names])
    for name in names:
        (tmp_path / "folder" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / name).write_bytes(IMAGE)
    source = open_source(shard)
    assert source.keys == ["a", "e/f"] and open_source(tmp_path / "folder").keys == ["a", "f"]
    assert source.labels is not None and source.labels.tolist() == [3, -1]
    assert isinstance(source, shards_module.ShardSource) and source.ignored == {"hidden": 9}
    assert check(shard).problems == [] and check(shard).good == 2
    streamed = itertools.islice(ShardStream("x", [str(shard)]).images(0, 1, 1, 0, 0), 4)
    assert sorted(item.key for item in streamed) == ["x/a", "x/a", "x/e/f", "x/e/f"]
    write_tar(tmp_path / "hidden.tar", [("._a.jpg", IMAGE)])
    with pytest.raises(DataError) as error:
        open_source(tmp_path / "hidden.tar")
    assert_one_line(error, "hidden.tar", "1 hidden")


def test_hidden_shards_are_passed_over(tmp_path: Path) -> None:
    folder = write_shards(tmp_path, shards=1)
    (folder / "._photos-000000.tar").write_bytes(b"\0\5\x16\7")
    (folder / "manifest.json").write_text(json.dumps({"shards": [{"name": "photos-000001.tar"}]}))
    assert len(open_source(f"{folder}/*.tar")) == 12
    report = check(folder)  # which names what is missing, and goes on
    assert report.good == 12 and not any("._" in problem for problem in report.problems)


def test_unicode_names_and_a_leading_dot_slash(tmp_path: Path) -> None:
    source = open_source(write_tar(tmp_path / "x.tar", [("./Größe 写真.jpg", b"1"), ("./Größe 写真.cls", b"4\n")]))
    assert source.keys == ["Größe 写真"] and source.labels is not None and source.labels.tolist() == [4]
    assert source.member_of(0) == "./Größe 写真.jpg"


def test_keys_that_collide_get_the_shard(tmp_path: Path) -> None:
    for name in ("one", "two", "deep/one"):
        write_tar(tmp_path / f"{name}.tar", [("000.jpg", b"x"), (f"{name[:2]}.jpg", b"y")])
    source = open_source(f"{tmp_path}/{{one,two}}.tar")
    assert source.keys == ["one/000", "on", "two/000", "tw"]
    source = open_source(f"{tmp_path}/{{one,deep/one}}.tar")
    assert source.keys == ["one/000", "on", "deep/one/000", "de"]
    assert source.root == tmp_path and source.source_of(2) == "deep/one.tar"


def test_a_key_twice_in_a_shard(tmp_path: Path) -> None:
    for name in ("a.jpg", "a.png"):
        with pytest.raises(DataError) as error:
            open_source(write_tar(tmp_path / "x.tar", [("a.jpg", IMAGE), ("a.cls", b"1"), (name, IMAGE)]))
        assert_one_line(error, "two images", "x.tar", "key a")
    with pytest.raises(DataError, match="two labels"):
        open_source(write_tar(tmp_path / "x.tar", [("a.jpg", IMAGE), ("a.cls", b"1"), ("a.cls", b"2")]))


@pytest.mark.parametrize("label", [b"", b"cat", b"1.5", b"-3", b"1_0", b"9" * 21, b"9" * 19, "٣".encode(), b"--1"])
def test_labels_that_are_no_class_numbers(tmp_path: Path, label: bytes) -> None:
    with pytest.raises(DataError) as error:
        open_source(write_tar(tmp_path / "x.tar", [("a.jpg", IMAGE), ("a.cls", label)]))
    assert_one_line(error, "a.cls", "wanted")


def test_no_labels_and_some_labels(tmp_path: Path) -> None:
    assert open_source(write_shards(tmp_path / "a", labels=False)).labels is None
    assert open_source(write_tar(tmp_path / "b.tar", [("a.jpg", b"x"), ("a.cls", b"-1")])).labels is None
    source = open_source(write_tar(tmp_path / "c.tar", [("a.cls", b" 7\n"), ("a.jpg", b"x"), ("b.jpg", b"x")]))
    assert source.labels is not None and source.labels.tolist() == [7, -1]


def test_nothing_but_images_and_labels_is_read(tmp_path: Path) -> None:
    trap = pickle.dumps(PickleTrap(tmp_path / "sprung"))
    members = [(f"a.{suffix}", trap) for suffix in ("pkl", "pickle", "pyd", "pth", "npy", "json", "txt")]
    source = open_source(write_tar(tmp_path / "x.tar", [("a.jpg", IMAGE), *members, ("b.cls", b"1")]))
    assert source.keys == ["a"] and source.read(0) == IMAGE and not (tmp_path / "sprung").exists()
    assert isinstance(source, shards_module.ShardSource)
    assert source.ignored[".pkl"] == 1 and source.ignored[".cls without an image"] == 1


@pytest.mark.parametrize("name", ["../../etc/a.jpg", "/etc/a.jpg", "a/../../b.jpg", ".."])
def test_names_that_point_out_of_the_shard(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError) as error:
        open_source(write_tar(tmp_path / "x.tar", [(name, IMAGE)]))
    assert_one_line(error, "x.tar")


def test_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        open_source(write_tar(tmp_path / "x.tar", [("caf\udce9.jpg", IMAGE)], tarfile.GNU_FORMAT))
    assert_one_line(error, "not UTF-8", r"caf\udce9")
    str(error.value).encode()


def test_an_empty_member_fails_when_read(tmp_path: Path) -> None:
    source = open_source(write_tar(tmp_path / "x.tar", [("a.jpg", b""), ("b.jpg", IMAGE)]))
    with pytest.raises(DataError) as error:
        source.read(0)
    assert drop_reason(error.value) == "empty"
    assert_one_line(error, "a.jpg in x.tar")
    assert source.read(1) == IMAGE


def test_a_shard_without_images(tmp_path: Path) -> None:
    for members in ([], [("a.txt", b"x")]):
        with pytest.raises(DataError, match="no image"):
            open_source(write_tar(tmp_path / "x.tar", members))


def test_a_shard_that_changes_after_it_was_opened(tmp_path: Path) -> None:
    folder = write_shards(tmp_path, shards=1)
    shard = folder / "photos-000000.tar"
    source, other = open_source(folder), open_source(folder)
    source.read(0)
    os.truncate(shard, 600)
    with pytest.raises(DataError) as error:
        source.read(5)
    assert drop_reason(error.value) == "changed"
    with pytest.raises(DataError, match=r"changed: shard .* start again"):
        other.read(0)
    shard.unlink()
    with pytest.raises(DataError) as error:
        pickle.loads(pickle.dumps(other)).read(0)
    assert drop_reason(error.value) == "missing"


def read_all(source: ImageSource) -> list[bytes]:
    return [source.read(position) for position in range(len(source))]


@pytest.mark.parametrize("kind", ["shards", "folder"])
def test_sources_work_in_other_processes_and_threads(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards_module, "_OPEN_FILES_LIMIT", 1)  # opening and closing all the time
    source = open_source(write_shards(tmp_path) if kind == "shards" else write_folder(tmp_path))
    expected = read_all(source)
    copy = pickle.loads(pickle.dumps(source))
    assert read_all(copy) == expected and copy.keys == source.keys
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 dislikes forks beside threads
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(read_all, [source, source]) == [expected, expected]
    with ThreadPoolExecutor(4) as threads:
        positions = list(range(len(source))) * 20
        assert list(threads.map(source.read, positions)) == expected * 20


def test_class_names_come_from_the_manifest_or_classes_txt(tmp_path: Path) -> None:
    folder = write_shards(tmp_path)
    (folder / "classes.txt").write_text("0\tn01\ttench\n1\tn02\tEnglish springer\nradio\n")
    assert open_source(folder).class_names == ["tench", "English springer", "radio"]
    (folder / "manifest.json").write_text(json.dumps({"classes": ["a", "b", "c"], "shards": []}))
    assert open_source(folder).class_names == ["a", "b", "c"]
    (folder / "manifest.json").write_text(json.dumps({"classes": ["a"], "shards": []}))
    assert open_source(folder).class_names is None
    (folder / "manifest.json").write_text(json.dumps(["another", "kind"]))
    assert open_source(folder).class_names is None
    (folder / "manifest.json").write_text(json.dumps({"classes": 3, "shards": 5}))
    assert open_source(folder).class_names is None
    (folder / "manifest.json").write_text("{")
    with pytest.raises(DataError) as error:
        open_source(folder)
    assert_one_line(error, "manifest.json", "remove it")


def test_a_folder_that_lacks_a_shard_of_its_manifest(tmp_path: Path) -> None:
    folder = write_shards(tmp_path)
    shards = [{"name": f"photos-{number:06d}.tar"} for number in range(3)]
    (folder / "manifest.json").write_text(json.dumps({"shards": shards}))
    with pytest.raises(DataError) as error:
        open_source(folder)
    assert_one_line(error, "1 of the 3 shards", "photos-000002.tar")
    assert len(open_source(f"{folder}/*.tar")) == 12
