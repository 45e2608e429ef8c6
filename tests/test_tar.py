"""The header walk: against tarfile as the oracle, and everything that is cut, damaged or joined."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sop_faiss.data.images.source import open_source
from sop_faiss.data.shards.tar import walk_tar
from sop_faiss.errors import DataError
from tests.images import encode, make_image, write_shards, write_tar
from tests.messages import assert_one_line

IMAGE = encode(make_image(np.random.default_rng(0), 8))


def tarfile_oracle(path: Path) -> list[tuple[str, int, int]]:
    with tarfile.open(path) as tar:
        return [(m.name, m.offset_data, m.size) for m in tar.getmembers() if m.isreg()]


def walk(path: Path) -> list[tuple[str, int, int]]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        members = walk_tar(partial(os.pread, descriptor), path.stat().st_size, str(path))
        return [(m.name, m.offset, m.size) for m in members if not m.is_link]
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_walk_agrees_with_tarfile(tmp_path: Path, format: int) -> None:
    members = [("a.jpg", b""), ("b/c.cls", b"3"), ("d" * 90 + "/" + "e" * 60 + ".png", b"x" * 513)]
    if format != tarfile.USTAR_FORMAT:
        members += [("f" * 300 + "/" + "g" * 200 + ".png", b"y" * 512), ("Größe/写真.jpg", b"z" * 511)]
    path = write_tar(tmp_path / "x.tar", members, format)
    assert walk(path) == tarfile_oracle(path)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.text("ab.é/_ 0", min_size=1, max_size=130).map(lambda s: "m" + s.strip("/")), st.binary(max_size=1200)
        ),
        max_size=8,
    )
)
def test_walk_agrees_with_tarfile_on_any_members(tmp_path_factory: pytest.TempPathFactory, members: list) -> None:
    path = write_tar(tmp_path_factory.mktemp("tar") / "x.tar", members)
    assert walk(path) == tarfile_oracle(path)


def test_walk_passes_over_folders_and_reads_pax_sizes(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        member = tarfile.TarInfo("folder/a.jpg")
        member.size = len(IMAGE)
        member.pax_headers = {"comment": "x" * 2000, "mtime": "1.5"}
        tar.addfile(member, io.BytesIO(IMAGE))
    assert walk(path) == tarfile_oracle(path)


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_walk_members_larger_than_8_gib(tmp_path: Path, format: int) -> None:
    huge = tarfile.TarInfo("huge.jpg")
    huge.size = 9 << 30
    after = tarfile.TarInfo("after.jpg")
    path = tmp_path / "x.tar"
    with path.open("wb") as file:  # sparse: takes no room
        file.write(huge.tobuf(format))
        file.seek(9 << 30, os.SEEK_CUR)
        file.write(after.tobuf(format) + bytes(1024))
    assert walk(path) == tarfile_oracle(path)


def test_walk_accepts_a_missing_padding_but_no_missing_end(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", [("a.jpg", IMAGE)])
    whole = path.read_bytes()
    content_end = 512 + -(-len(IMAGE) // 512) * 512
    path.write_bytes(whole[: content_end + 512])
    assert len(walk(path)) == 1
    path.write_bytes(whole[:content_end])
    with pytest.raises(DataError) as error:
        walk(path)
    assert_one_line(error, "cut off", str(path), f"offset {content_end}")


def test_every_cut_is_an_error(tmp_path: Path) -> None:
    folder = write_shards(tmp_path, shards=1, size=8)
    path = folder / "photos-000000.tar"
    whole = path.read_bytes()
    end = max(offset + -(-size // 512) * 512 for _, offset, size in tarfile_oracle(path))
    for length in {0, 1, 511, 512, 513, 700, end - 513, end - 512, end - 1, end, end + 511} | set(
        range(512, end, 1777)
    ):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError) as error:
            open_source(str(path))
        assert_one_line(error, str(path), "offset", "copy or make it again")


def test_damaged_header_names_the_offset(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", [("a.jpg", IMAGE), ("b.jpg", IMAGE)])
    content = bytearray(path.read_bytes())
    second = tarfile_oracle(path)[1][1] - 512
    content[second + 5] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        open_source(str(path))
    assert_one_line(error, "damaged", f"offset {second}")


@pytest.mark.parametrize("content", [b"no tar at all" * 100, b"\xff" * 2048, b" " * 1024])
def test_not_a_tar(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        open_source(path)
    assert_one_line(error, "not a tar file", "sop-data pack")


def test_gzip_named_tar_says_so(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(gzip.compress(os.urandom(2000)))
    with pytest.raises(DataError, match="gzip"):
        open_source(path)
    (tmp_path / "x.tar.gz").write_bytes(b"")
    with pytest.raises(DataError, match="unpack it"):
        open_source(tmp_path / "x.tar.gz")


def test_joined_tars_are_refused(tmp_path: Path) -> None:
    one = write_tar(tmp_path / "one.tar", [("a.jpg", IMAGE)])
    two = write_tar(tmp_path / "two.tar", [("b.jpg", IMAGE)])
    joined = tmp_path / "joined.tar"
    joined.write_bytes(one.read_bytes() + two.read_bytes())
    with pytest.raises(DataError, match="after its end mark"):
        open_source(joined)


def test_lying_pax_header(tmp_path: Path) -> None:
    header = tarfile.TarInfo("pax")
    header.type = tarfile.XHDTYPE
    for extension in (b"9999 path=x\n", b"xx path=y\n", b"3 a\n", b"12 size=abc\n"):
        header.size = len(extension)
        path = tmp_path / "x.tar"
        path.write_bytes(header.tobuf() + extension.ljust(512, b"\0") + bytes(1024))
        with pytest.raises(DataError, match="pax"):
            open_source(path)
    header.size = 1 << 40
    (tmp_path / "x.tar").write_bytes(header.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    with pytest.raises(DataError, match="extension"):
        open_source(tmp_path / "x.tar")
