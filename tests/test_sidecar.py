"""Sidecars: equal to a fresh walk, noticed when stale, harmless when damaged, false or not writable."""

from __future__ import annotations

import errno
import json
import logging
import os
import pickle
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sop_faiss.config import DataConfig
from sop_faiss.data.images.source import open_source
from sop_faiss.data.pack import pack
from sop_faiss.data.shards import sidecar
from sop_faiss.data.shards.shard_index import LINK, walk_shard
from sop_faiss.data.shards.sidecar import index_digest, load_index, parse_sidecar, sidecar_of
from sop_faiss.errors import DataError
from tests.images import PickleTrap, encode, make_image, write_folder, write_shards, write_tar

IMAGE = encode(make_image(np.random.default_rng(0), 8))
MEMBERS = [
    ("a.jpg", IMAGE),
    ("a.cls", b"3"),
    ("d/b.c.PNG", b""),
    ("x.txt", b"x"),
    ("Größe 写真.webp", b"y" * 700),
    ("orphan.cls", b"1"),
    ("no suffix", b""),
    ("._a.jpg", b""),
]


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    return write_tar(tmp_path / "x.tar", MEMBERS)


def count_walks(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    walked: list[Path] = []

    def walk(path: Path) -> Any:
        walked.append(path)
        return walk_shard(path)

    monkeypatch.setattr(sidecar, "walk_shard", walk)
    return walked


def test_a_sidecar_says_what_a_walk_says(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tarfile.open(shard, "a") as tar:
        link = tarfile.TarInfo("link.jpg")
        link.type, link.linkname = tarfile.LNKTYPE, "a.jpg"
        tar.addfile(link)
    expected = walk_shard(shard)
    assert expected.ignored and expected.labels == [3, -1, -1, -1]
    assert expected.sizes[-1] == LINK and expected.stray_label == "orphan"
    walked = count_walks(monkeypatch)
    assert [load_index(shard) for _ in range(3)] == [expected] * 3
    assert walked == [shard]
    assert [path.name for path in shard.parent.iterdir() if path.name.startswith(".")] == []


NAMES = st.text('ab.é写\\" \udce9', min_size=1, max_size=20).map(lambda name: f"m{name}.jpg")


@given(st.dictionaries(NAMES, st.binary(max_size=600), max_size=6))
def test_any_names_survive(tmp_path_factory: pytest.TempPathFactory, members: dict[str, bytes]) -> None:
    path = write_tar(tmp_path_factory.mktemp("tar") / "x.tar", list(members.items()), tarfile.GNU_FORMAT)
    expected = walk_shard(path)
    load_index(path)
    read = parse_sidecar(sidecar_of(path).read_bytes(), path.stat().st_size)
    assert read == expected and index_digest(read) == index_digest(expected)


def test_a_source_from_sidecars_is_the_same(tmp_path: Path) -> None:
    folder = write_shards(tmp_path, metadata=True)
    first, again = open_source(folder), open_source(folder)
    assert len(list(folder.glob("*.tar.index"))) == 2
    assert first.keys == again.keys and np.array_equal(first.labels, again.labels)
    assert [first.read(i) for i in range(12)] == [again.read(i) for i in range(12)]


def test_a_changed_shard_is_walked_anew(shard: Path) -> None:
    load_index(shard)
    write_tar(shard, [("other.jpg", IMAGE)])
    assert load_index(shard).stems == ["other"]
    size = shard.stat().st_size
    write_tar(shard, [("equal.jpg", IMAGE)])  # of the same size
    assert shard.stat().st_size == size
    os.utime(shard, ns=(0, 12345))
    assert load_index(shard).stems == ["equal"]
    assert json.loads(sidecar_of(shard).read_text())["shard_changed_ns"] == 12345


def test_a_damaged_shard_is_refused_whatever_lies_beside_it(shard: Path) -> None:
    load_index(shard)
    os.truncate(shard, 600)
    with pytest.raises(DataError, match="cut off"):
        load_index(shard)


@pytest.mark.parametrize("cut", [0, 1, 40, -1])
def test_a_damaged_sidecar_is_written_anew(shard: Path, cut: int) -> None:
    expected = load_index(shard)
    whole = sidecar_of(shard).read_bytes()
    sidecar_of(shard).write_bytes(whole[:cut])
    assert load_index(shard) == expected
    assert sidecar_of(shard).read_bytes() == whole


def with_field(name: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda content: content | {name: value}


def changed(name: str, position: int, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda content: content | {name: [*content[name][:position], value, *content[name][position + 1 :]]}


@pytest.mark.parametrize(
    "falsify",
    [
        with_field("format", "another"),
        with_field("shard_bytes", 10**30),
        with_field("shard_changed_ns", 1.5),
        with_field("offsets", [512]),
        with_field("offsets", {"0": 512}),
        with_field("stems", "abc"),
        with_field("ignored", ["x"]),
        with_field("ignored", {"x": -1}),
        with_field("ignored", {"x": "y"}),
        with_field("stray_label", 1),
        with_field("format", "sop_faiss shard index 1"),
        changed("offsets", 0, -512),
        changed("offsets", 0, 0),
        changed("offsets", 1, 512),
        changed("offsets", 1, 513 * 3),
        changed("offsets", 2, 512 * 10**6),
        changed("offsets", 2, 2**63 - 512),
        changed("offsets", 2, 2**64),
        changed("offsets", 2, 1e3),
        changed("offsets", 2, True),
        changed("sizes", 0, -2),
        changed("sizes", 2, 10**9),
        changed("sizes", 2, 2**63 - 1),
        changed("sizes", 0, 2**70),
        changed("labels", 0, -2),
        changed("labels", 0, 2**31),
        changed("labels", 0, None),
        changed("stems", 1, "a"),
        changed("stems", 1, "../../etc/x"),
        changed("stems", 1, "/etc/x"),
        changed("stems", 1, 7),
        changed("suffixes", 1, ".pkl"),
        changed("suffixes", 1, None),
        lambda content: [content],
        lambda content: {},
    ],
)
def test_a_false_sidecar_is_as_good_as_none(shard: Path, falsify: Callable[[dict[str, Any]], Any]) -> None:
    expected = load_index(shard)
    whole = sidecar_of(shard).read_bytes()
    sidecar_of(shard).write_text(json.dumps(falsify(json.loads(whole))))
    assert load_index(shard) == expected
    assert sidecar_of(shard).read_bytes() == whole


def test_sidecars_of_other_kinds(shard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = walk_shard(shard)
    trap = pickle.dumps(PickleTrap(tmp_path / "sprung"))
    for content in (trap, b"[" * 100_000, b"9" * 10_000, b"\xff\xfe", b"null", b'{"format": NaN}'):
        sidecar_of(shard).write_bytes(content)
        assert load_index(shard) == expected
    assert not (tmp_path / "sprung").exists()
    monkeypatch.setattr(sidecar, "LONGEST_SIDECAR_BYTES", 100)
    sidecar_of(shard).write_bytes(b" " * 101)
    assert load_index(shard) == expected and sidecar_of(shard).read_bytes() == b" " * 101
    monkeypatch.undo()
    sidecar_of(shard).unlink()
    sidecar_of(shard).mkdir()
    assert load_index(shard) == expected


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_nothing_is_written_where_nothing_may_be(shard: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, content: str) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(sidecar, "write_file", refuse)
    assert load_index(shard) == walk_shard(shard)
    assert [path.name for path in shard.parent.iterdir()] == ["x.tar"]


@pytest.mark.parametrize("data_access", ["auto", "cached"])
def test_a_read_only_folder(
    tmp_path: Path, data_access: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As the system reports it: root may write where the mode forbids it, so the answer is made."""
    folder = write_shards(tmp_path / "mount", shards=2)
    settings = DataConfig(access=data_access, cache_dir=str(tmp_path / "cache"))
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder and access(path, mode))
    with caplog.at_level(logging.INFO):
        source = open_source(folder, settings)
    assert source.labels is not None and len(source) == 12 and source.read(11)
    assert sorted(path.name for path in folder.iterdir()) == ["photos-000000.tar", "photos-000001.tar"]
    assert sum(str(folder) in message and "index" in message for message in caplog.messages) == (data_access == "auto")


def test_many_at_once(shard: Path) -> None:
    expected = walk_shard(shard)
    with ThreadPoolExecutor(8) as threads:

        def load(number: int) -> bool:
            if number % 3 == 0:
                sidecar_of(shard).unlink(missing_ok=True)
            return load_index(shard) == expected

        assert all(threads.map(load, range(100)))
    assert sorted(path.name for path in shard.parent.iterdir()) in (["x.tar"], ["x.tar", "x.tar.index"])


def test_pack_writes_sidecars_that_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack(write_folder(tmp_path / "photos"), tmp_path / "out", samples_per_shard=5)
    walked = count_walks(monkeypatch)
    assert len(open_source(tmp_path / "out")) == 12
    assert walked == []
