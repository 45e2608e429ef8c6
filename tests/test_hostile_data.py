"""What bad, hostile and changing data does: nothing but the outcome defined here, and never a member's own code."""

from __future__ import annotations

import io
import itertools
import os
import pickle
import struct
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile

from sop_faiss.data.check import check
from sop_faiss.data.images.decode import MAX_ASPECT, MAX_PIXELS, decode_image, decode_pillow, drop_reason
from sop_faiss.data.images.source import open_source
from sop_faiss.data.pack import pack
from sop_faiss.data.shards.shard_stream import Damage, ShardStream
from sop_faiss.data.stream import Batches
from sop_faiss.data.views.scaled_decoding import upright_jpeg_size
from sop_faiss.errors import DataError
from tests.images import PickleTrap, encode, make_image, write_shards, write_tar
from tests.messages import assert_one_line
from tests.runs import tiny_config

IMAGE = encode(make_image(np.random.default_rng(0), 20))
GOOD = [(f"good_{number}.jpg", IMAGE) for number in range(6)]


def add(tar: tarfile.TarFile, name: str, content: bytes = b"", **fields: object) -> None:
    header = tarfile.TarInfo(name)
    header.size = len(content)
    for field, value in fields.items():
        setattr(header, field, value)
    tar.addfile(header, io.BytesIO(content))


def member(name: str, content: bytes = IMAGE, **fields: object) -> Callable[[Path], None]:
    """A good shard with one more member."""

    def write(path: Path) -> None:
        with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
            for good_name, good in GOOD:
                add(tar, good_name, good)
            add(tar, name, content, **fields)

    return write


def cut(at: Callable[[int], int]) -> Callable[[Path], None]:
    """A shard of which `at(content end)` bytes are left."""

    def write(path: Path) -> None:
        write_tar(path, GOOD)
        with tarfile.open(path) as tar:
            last = tar.getmembers()[-1]
        os.truncate(path, at(last.offset_data + -(-last.size // 512) * 512))

    return write


def beyond_the_end(path: Path) -> None:
    header = tarfile.TarInfo("a.jpg")
    header.size = 1 << 40
    path.write_bytes(header.tobuf(tarfile.GNU_FORMAT) + IMAGE.ljust(2048, b"\0"))


def nul_in_a_name(path: Path) -> None:
    records = b"18 path=a\0b/c.jpg\n"
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, len(records)
    content = tarfile.TarInfo("x.jpg")
    path.write_bytes(header.tobuf() + records.ljust(512, b"\0") + content.tobuf() + bytes(1024))


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "zero bytes": (lambda path: path.write_bytes(b""), "cut off"),
    "cut in a header": (cut(lambda end: 700), "cut off"),
    "cut in an image": (cut(lambda end: end - 600), "cut off"),
    "without the end blocks": (cut(lambda end: end), "no end mark"),
    "a size beyond the file": (beyond_the_end, "beyond the end"),
    "a key twice": (member("good_3.png"), "two images with the key good_3"),
    "a label twice": (lambda path: write_tar(path, [*GOOD, ("good_1.cls", b"1"), ("good_1.cls", b"2")]), "two labels"),
    "a path upwards": (member("../../etc/passwd.jpg"), "points out of the shard"),
    "a path upwards within": (member("a/../../b.jpg"), "points out of the shard"),
    "an absolute path": (member("/etc/passwd.jpg"), "points out of the shard"),
    "a NUL in a name": (nul_in_a_name, "NUL in a name"),
    "a name without end": (member("x" * 300_000 + ".jpg"), "a name of 300004 letters"),
    "a name that is not UTF-8": (
        lambda path: write_tar(path, [*GOOD, ("caf\udce9.jpg", IMAGE)], tarfile.GNU_FORMAT),
        "not UTF-8",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_shard_that_is_refused(tmp_path: Path, case: str) -> None:
    write, message = REFUSED[case]
    path = tmp_path / "bad.tar"
    write(path)
    with pytest.raises(DataError) as error:
        open_source(path)
    assert_one_line(error, "bad.tar" if "UTF-8" not in message else "caf", message)
    assert len(str(error.value)) < 1000
    write_tar(tmp_path / "good.tar", GOOD)
    report = check(tmp_path)  # names it, and goes on
    assert report.good == 6 and len(report.problems) == 1 and message in report.problems[0]


def sparse_with_a_long_map(path: Path) -> None:
    """As GNU tar writes a sparse file of many pieces: its map goes on in three blocks after the header."""
    write_tar(path, GOOD)
    header = bytearray(tarfile.TarInfo("a.jpg").tobuf(tarfile.GNU_FORMAT))
    header[156:157], header[482] = b"S", 1
    header[148:156] = b"%06o\0 " % (sum(header[:148]) + 8 * 32 + sum(header[156:]))
    chain = b"".join(b"7" * 504 + bytes([more]) + bytes(7) for more in (1, 1, 0))
    path.write_bytes(bytes(header) + chain + path.read_bytes())


LINKS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a symbolic link": (member("a.jpg", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd"), "--dereference"),
    "a hard link": (member("a.jpg", b"", type=tarfile.LNKTYPE, linkname="good_1.jpg"), "--hard-dereference"),
    "a sparse file (GNU)": (member("a.jpg", b"", type=tarfile.GNUTYPE_SPARSE), "--sparse"),
    "a sparse file (GNU) with a long map": (sparse_with_a_long_map, "--sparse"),
    "a sparse file (pax)": (
        member("GNUSparseFile.7/a.jpg", pax_headers={"GNU.sparse.major": "1", "GNU.sparse.name": "a.jpg"}),
        "--sparse",
    ),
}


@pytest.mark.parametrize("case", LINKS)
def test_a_link_spoils_one_image_and_not_the_shard(tmp_path: Path, case: str) -> None:
    write, remedy = LINKS[case]
    path = tmp_path / "x.tar"
    write(path)
    for source in (open_source(path), open_source(path)):  # walked, then from the sidecar
        position = source.keys.index("a")
        assert [source.read(other) for other in range(7) if other != position] == [IMAGE] * 6
        with pytest.raises(DataError) as error:
            source.read(position)
        assert drop_reason(error.value) == "link"
        assert_one_line(error, "a.jpg in x.tar", remedy)
    report = check(path)
    assert report.bad_by_reason == {"link": 1} and report.good == 6
    bad = Batches(source, np.arange(7), tiny_config(tmp_path, "train.batch_size=7"), 4).make(0).bad
    assert [(sample.key, sample.reason) for sample in bad] == [("a", "link")]
    items = list(itertools.islice(ShardStream("x", [str(path)]).images(0, 1, 1, 0, 0), 7))
    assert [(item.key, item.reason) for item in items if isinstance(item, Damage)] == [("x/a", "link")]


def test_a_label_that_is_a_link_spoils_its_image(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for name in ("a", "b"):
            add(tar, f"{name}.jpg", IMAGE)
        add(tar, "a.cls", b"3")
        add(tar, "b.cls", type=tarfile.LNKTYPE, linkname="a.cls")
    source = open_source(tmp_path / "x.tar")
    assert source.labels is not None and source.labels.tolist() == [3, -1] and source.read(0) == IMAGE
    with pytest.raises(DataError, match=r"label .*--hard-dereference"):
        source.read(1)


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it is so large."""
    png = bytearray(encode(Image.new("1", (8, 8)), "PNG"))
    png[16:24] = struct.pack(">II", width, height)
    png[29:33] = struct.pack(">I", zlib.crc32(bytes(png[12:29])))
    return bytes(png)


DROPPED: dict[str, tuple[bytes, str]] = {
    "an empty member": (b"", "empty"),
    "text": (b"not an image", "not-an-image"),
    "a cut JPEG": (IMAGE[: len(IMAGE) // 2], "truncated"),
    "a cut PNG": (encode(make_image(np.random.default_rng(1), 32), "PNG")[:900], "truncated"),
    "PostScript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not-an-image"),
    "100,000 x 100,000 pixels": (bomb(100_000, 100_000), "too-many-pixels"),
    "9,000 x 9,000 pixels": (bomb(9_000, 9_000), "too-many-pixels"),
    "a line of pixels": (bomb(1, 60_000_000), "elongated"),
}


@pytest.mark.parametrize("case", DROPPED)
def test_a_member_that_is_dropped_and_replaced(tmp_path: Path, case: str) -> None:
    content, reason = DROPPED[case]
    source = open_source(write_tar(tmp_path / "x.tar", [*GOOD, ("bad.jpg", content)]))
    batches = Batches(source, np.arange(7), tiny_config(tmp_path, "train.batch_size=7"), 4)
    first, again = batches.make(0), batches.make(0)
    assert [(sample.key, sample.reason, sample.shard) for sample in first.bad] == [("bad", reason, "x.tar")]
    [sample] = first.bad
    assert (tmp_path / "x.tar").read_bytes()[sample.offset :].startswith(content)
    assert sample.replacement in source.keys and sample.replacement != "bad"
    assert source.keys.index(sample.replacement) in first.image_ids
    assert len(first.image_ids) == 7 and first.bad == again.bad
    assert (first.global_views == again.global_views).all()
    report = check(tmp_path / "x.tar")
    assert report.bad_by_reason == {reason: 1} and report.good == 6


def test_the_size_is_judged_before_any_pixel_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(_: object) -> None:
        raise OSError("decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    for decoder in (decode_image, decode_pillow):
        with pytest.raises(DataError, match="too-many-pixels"):
            decoder(bomb(100_000, 100_000))
        for width, height in ((1, 60_000_000), (1, MAX_ASPECT + 1), (2 * MAX_ASPECT + 1, 2)):
            with pytest.raises(DataError, match="elongated"):
                decoder(bomb(width, height))
        for width, height in ((8, 8), (1, MAX_ASPECT), (2 * MAX_ASPECT, 2)):
            with pytest.raises(DataError, match="decoded"):
                decoder(bomb(width, height))


def test_a_long_jpeg_is_elongated_on_the_quick_ways_too() -> None:
    """Also where a JPEG is turned by its EXIF, and where it is decoded at a fraction."""
    for height, expected in ((MAX_ASPECT, (8, 8 * MAX_ASPECT)), (MAX_ASPECT + 1, None)):
        exif = Image.Exif()
        exif[0x0112] = 6
        long = encode(Image.new("RGB", (8, 8 * height)), exif=exif)
        assert upright_jpeg_size(long, MAX_PIXELS) == expected
        if expected is None:
            with pytest.raises(DataError, match="elongated"):
                decode_image(long)
        else:
            assert decode_image(long).shape == (*expected, 3)


HARMLESS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "dots in names": (
        lambda path: write_tar(path, [("v1.0/a.b.jpg", IMAGE), ("v1.0/a.c.jpg", IMAGE)]),
        ["v1.0/a.b", "v1.0/a.c"],
    ),
    "GNU long names": (
        lambda path: write_tar(path, [("d" * 200 + "/" + "e" * 200 + ".jpg", IMAGE)], tarfile.GNU_FORMAT),
        ["d" * 200 + "/" + "e" * 200],
    ),
    "pax long names": (
        lambda path: write_tar(path, [("d" * 200 + "/" + "é" * 200 + ".jpg", IMAGE)], tarfile.PAX_FORMAT),
        ["d" * 200 + "/" + "é" * 200],
    ),
    "devices, pipes and folders": (
        lambda path: write_special(path),
        ["good"],
    ),
    "signs that terminals obey": (lambda path: write_tar(path, [("a\x1b]0;x\x07.jpg", IMAGE)]), ["a\x1b]0;x\x07"]),
}


def write_special(path: Path) -> None:
    with tarfile.open(path, "w") as tar:
        for number, kind in enumerate((tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE)):
            add(tar, f"special_{number}.jpg", type=kind)
        add(tar, "good.jpg", IMAGE)


@pytest.mark.parametrize("case", HARMLESS)
def test_a_shard_that_is_read_as_it_is(tmp_path: Path, case: str) -> None:
    write, keys = HARMLESS[case]
    write(tmp_path / "x.tar")
    source = open_source(tmp_path / "x.tar")
    assert source.keys == keys
    assert all(source.read(position) == IMAGE for position in range(len(source)))
    pack(tmp_path / "x.tar", tmp_path / "out")  # names go into names of members, never of files
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "x.tar", "x.tar.index"]
    assert sorted(path.suffix for path in (tmp_path / "out").iterdir()) == [".index", ".json", ".json", ".tar"]


def test_keys_twice_across_shards_get_the_shard_before_them(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_tar(tmp_path / f"{name}.tar", [("a.jpg", IMAGE), (f"{name}.jpg", IMAGE)])
    assert open_source(tmp_path).keys == ["one/a", "one", "two/a", "two"]


# ------------------------------------------------------------------------------------------- files that change in a run


def change_in_place(shard: Path) -> None:
    """Other bytes in the same file, of the same size."""
    content = shard.read_bytes()
    with shard.open("r+b") as file:
        file.write(bytes(reversed(content)))
    os.utime(shard, ns=(1, 1))  # a tick of the clock later, whatever the file system's


def grow(shard: Path) -> None:
    with shard.open("ab") as file:
        file.write(bytes(10240))


@pytest.mark.parametrize("change", [change_in_place, grow, lambda shard: os.truncate(shard, 3000)])
@pytest.mark.parametrize("is_open", [True, False])
def test_other_bytes_are_never_read_in_silence(tmp_path: Path, change: Callable[[Path], None], is_open: bool) -> None:
    source = open_source(write_shards(tmp_path, shards=1))
    if is_open:
        source.read(1)
    change(tmp_path / "photos-000000.tar")
    for position in (0, 1, len(source) - 1):
        with pytest.raises(DataError) as error:
            source.read(position)
        assert drop_reason(error.value) == "changed"
        assert_one_line(error, "photos-000000.tar")


def test_a_shard_put_in_the_place_of_another(tmp_path: Path) -> None:
    """A rename: who has the old file open goes on with it, who has not is told."""
    folder = write_shards(tmp_path / "set", shards=1)
    reading, waiting = open_source(folder), open_source(folder)
    before = reading.read(0)
    other = write_shards(tmp_path / "other", shards=1, seed=5) / "photos-000000.tar"
    other.rename(folder / "photos-000000.tar")
    assert reading.read(0) == before
    with pytest.raises(DataError, match="changed: shard"):
        waiting.read(0)


def test_a_shard_that_vanishes_is_a_bad_sample_for_each_of_its_images(tmp_path: Path) -> None:
    source = open_source(write_shards(tmp_path, classes=2, per_class=10, size=20, shards=4))
    (tmp_path / "photos-000002.tar").unlink()
    batches = Batches(source, np.arange(20), tiny_config(tmp_path, "train.batch_size=20"), 4)
    bad = batches.make(0).bad
    assert {sample.reason for sample in bad} == {"missing"}
    assert {sample.position for sample in bad} == set(range(10, 15))
    assert {sample.shard for sample in bad} == {"photos-000002.tar"}
    assert not {sample.replacement for sample in bad} & {source.keys[number] for number in range(10, 15)}


# ------------------------------------------------------------------------------------------------ code in place of data


class Traps:
    """A shard whose members run code when they are unpickled, and whether one did."""

    suffixes = ("pyd", "pickle", "pkl", "pth")

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "sprung"
        self.folder.mkdir()
        members = [(f"good_0.{name}", pickle.dumps(PickleTrap(self.folder / name))) for name in self.suffixes]
        self.shard = write_tar(folder / "trap.tar", [*GOOD[:1], *members, *GOOD[1:]])

    def sprung(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


def test_no_member_is_run(tmp_path: Path) -> None:
    traps = Traps(tmp_path)
    source = open_source(traps.shard)
    batches = Batches(source, np.arange(len(source)), tiny_config(tmp_path), 4)
    assert batches.make(0).bad == []
    assert check(traps.shard).ignored_members == {".pyd": 1, ".pickle": 1, ".pkl": 1, ".pth": 1}
    pack(traps.shard, tmp_path / "out")
    with tarfile.open(tmp_path / "out" / "photos-000000.tar") as tar:
        assert {Path(name).suffix for name in tar.getnames()} == {".jpg"}
    assert traps.sprung() == []


def test_webdatasets_own_decoder_would_have_run_them(tmp_path: Path) -> None:
    """That the traps above are real: its default executes what ours passes over."""
    webdataset = pytest.importorskip("webdataset")
    from webdataset.autodecode import Decoder
    from webdataset.tariterators import group_by_keys, tar_file_expander

    if webdataset.utils.enforce_security:
        pytest.skip("WDS_SECURE is set")
    traps = Traps(tmp_path)
    with traps.shard.open("rb") as stream:
        samples = list(group_by_keys(tar_file_expander([{"url": "trap.tar", "stream": stream}])))
    for suffix in ("pyd", "pickle", "pkl"):
        Decoder([])({"__key__": "good_0", suffix: samples[0][suffix]})
    assert traps.sprung() == ["pickle", "pkl", "pyd"]


def test_no_address_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for verb in (open_source, check, lambda src: pack(src, tmp_path / "out")):
        with pytest.raises(DataError) as error:
            verb(f"pipe:touch {tmp_path}/mark")
        assert_one_line(error, "never run")
    assert list(tmp_path.iterdir()) == []


def test_webdataset_itself_would_have_run_it(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    if webdataset.utils.enforce_security:
        pytest.skip("WDS_SECURE is set")
    with webdataset.gopen(f"pipe:touch {tmp_path}/mark") as stream:
        stream.read()
    assert (tmp_path / "mark").exists()
