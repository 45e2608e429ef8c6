"""Shards read in sequence: every image once per pass, however they are dealt out, and nothing is decoded or run."""

from __future__ import annotations

import itertools
import os
import pickle
import tarfile
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest

from sop_faiss.data.images.source import find_streams, open_source
from sop_faiss.data.shards import remote, shard_stream
from sop_faiss.data.shards.shard_stream import Damage, ShardStream, StreamedImage, stable_image_id
from sop_faiss.errors import DataError, UnreachableError
from tests.images import PickleTrap, encode, make_image, write_folder, write_shards, write_tar
from tests.messages import assert_one_line
from tests.servers import Server, serve

IMAGE = encode(make_image(np.random.default_rng(0), 8))


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_FIRST_PAUSE_SECONDS", 0.0)


def stream_of(*shards: Path | str) -> ShardStream:
    return ShardStream("the shards", [str(shard) for shard in shards])


def take(
    stream: ShardStream, count: int, consumer: int = 0, consumers: int = 1, buffer: int = 1, start: int = 0
) -> list:
    images = stream.images(consumer, consumers, buffer, 7, start)
    return list(itertools.islice(images, count))


def keys(items: list) -> list[str]:
    return [item.key for item in items]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "shards", classes=2, per_class=10, shards=4)


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    pytest.importorskip("aiohttp", reason="http needs sop-faiss[remote]")
    with serve(folder) as server:
        yield server


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_the_same_images_as_by_random_access(tmp_path: Path, format: int) -> None:
    members = [
        ("a.jpg", b"1"),
        ("a.cls", b"1"),
        ("d.e/b.c.PNG", b"x" * 512),
        ("big.txt", b"y" * 3000),
        ("z.webp", b"z" * 513),
    ]
    if format != tarfile.USTAR_FORMAT:
        members += [("f" * 200 + "/" + "Größe" * 30 + ".jpg", b"w" * 5000)]
    path = write_tar(tmp_path / "x.tar", members, format)
    source = open_source(path)
    expected = [(f"x/{source.keys[i]}", source.read(i)) for i in range(len(source))]
    found = take(stream_of(path), len(expected))
    assert [(item.key, item.encoded) for item in found] == expected


@pytest.mark.parametrize("consumers", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("buffer", [1, 5, 1000])
def test_every_image_once_per_pass(folder: Path, consumers: int, buffer: int) -> None:
    stream = stream_of(*sorted(folder.glob("*.tar")))
    whole = sorted(keys(take(stream, 20)))
    assert len(set(whole)) == 20
    shares = Counter(number % consumers for number in range(20))
    if consumers <= 4:  # by shards of 5
        shares = Counter({consumer: 5 * len(range(consumer, 4, consumers)) for consumer in range(consumers)})
    met = [key for c in range(consumers) for key in keys(take(stream, shares[c], c, consumers, buffer))]
    assert sorted(met) == whole


def test_passes_and_starts_have_other_orders(folder: Path) -> None:
    stream = stream_of(*sorted(folder.glob("*.tar")))
    first, second = np.split(np.array(keys(take(stream, 40, buffer=10))), 2)
    assert sorted(first) == sorted(second) and list(first) != list(second)
    assert keys(take(stream, 20, buffer=10)) == list(first)
    assert keys(take(stream, 20, buffer=10, start=3)) != list(first)
    assert len({key.partition("/")[0] for key in keys(take(stream, 20, buffer=10))[:8]}) > 1


def test_few_images_reach_all_of_many_consumers(tmp_path: Path) -> None:
    stream = stream_of(write_tar(tmp_path / "x.tar", [("a.jpg", b"1"), ("b.jpg", b"2")]))
    for consumer in range(5):
        assert len(take(stream, 6, consumer, 5)) == 6


def test_only_shards_are_read_in_sequence(tmp_path: Path, folder: Path) -> None:
    assert [Path(path).name for path in find_streams(folder)] == [f"photos-00000{n}.tar" for n in range(4)]
    with pytest.raises(DataError, match=str(tmp_path / "photos")):
        find_streams(write_folder(tmp_path / "photos"))


def test_ids_are_stable_and_fit() -> None:
    assert stable_image_id("x/a") == stable_image_id("x/a") == 7126543548698175479
    ids = [stable_image_id(f"x/{number}") for number in range(1000)]
    assert len(set(ids)) == 1000 and min(ids) >= 0 and max(ids) < 2**63
    stable_image_id("caf\udce9")


# ------------------------------------------------------------------------------------------------------------ bad data


def test_damage_is_named_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members = [("a.jpg", b"1"), ("a.jpg", b"2"), ("../../etc/b.jpg", b"3"), ("big.jpg", b"4" * 600), ("c.jpg", b"")]
    monkeypatch.setattr(shard_stream, "_LARGEST_IMAGE_BYTES", 599)
    items = take(stream_of(write_tar(tmp_path / "x.tar", members)), 5)
    assert [(type(item), item.key) for item in items] == [
        (StreamedImage, "x/a"),
        (Damage, "x/a"),
        (Damage, "x/../../etc/b"),
        (Damage, "x/big"),
        (StreamedImage, "x/c"),
    ]
    assert [item.reason for item in items if isinstance(item, Damage)] == ["bad-member", "bad-member", "too-large"]


@pytest.mark.parametrize("cut", [1024 + 100, 1536, 2048, 2048 + 10])
def test_a_cut_shard_gives_what_it_has(tmp_path: Path, cut: int) -> None:
    path = write_tar(tmp_path / "x.tar", [(f"{name}.jpg", b"x" * 600) for name in "abc"])
    os.truncate(path, cut)
    items = take(stream_of(path), 3)
    whole = (cut - 512) // 1536 + ((cut - 512) % 1536 >= 600)
    assert [isinstance(item, StreamedImage) for item in items[: whole + 1]] == [True] * whole + [False]
    assert items[whole].reason == "bad-shard" and "cut off" in items[whole].message


@pytest.mark.parametrize("content", [b"", b"not a tar" * 1000, b"\x1f\x8b" + b"x" * 1000])
def test_what_is_no_tar_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.tar").write_bytes(content)
    images = stream_of(tmp_path / "x.tar").images(0, 1, 1, 0, 0)
    assert isinstance(next(images), Damage)
    with pytest.raises(DataError, match="1 shards"):
        next(images)


@pytest.mark.parametrize("consumers", [1, 3])
def test_shards_without_images_end_in_an_error_not_in_silence(tmp_path: Path, consumers: int) -> None:
    shards = [write_tar(tmp_path / f"{number}.tar", [("a.txt", b"x")]) for number in range(3)]
    for consumer in range(consumers):
        with pytest.raises(DataError) as error:
            take(stream_of(*shards), 1, consumer, consumers)
        assert_one_line(error, "3 shards")
    write_tar(shards[1], [("a.jpg", b"x")])
    assert keys(take(stream_of(*shards), 3)) == ["1/a"] * 3


def test_nothing_is_decoded_or_run(tmp_path: Path) -> None:
    trap = pickle.dumps(PickleTrap(tmp_path / "sprung"))
    members = [(f"a.{suffix}", trap) for suffix in ("pkl", "pickle", "pyd", "pth", "npy", "json", "cls", "txt")]
    path = write_tar(tmp_path / "x.tar", [*members, ("a.jpg", IMAGE)])
    assert take(stream_of(path), 2) == [StreamedImage("x/a", "x.tar", "a.jpg", 8 * 1024 + 512, IMAGE)] * 2
    assert not (tmp_path / "sprung").exists()


# ------------------------------------------------------------------------------------------------------------- network


def test_over_http_and_memory(server: Server, folder: Path) -> None:
    addresses = [f"{server.address}/{path.name}" for path in sorted(folder.glob("*.tar"))]
    expected = take(stream_of(*sorted(folder.glob("*.tar"))), 20)
    assert take(stream_of(*addresses), 20) == expected
    server.lengths = False
    assert take(stream_of(*addresses), 20) == expected
    files, base = fsspec.filesystem("memory"), f"memory://{uuid.uuid4().hex}"
    for path in folder.glob("*.tar"):
        files.pipe_file(f"{base}/{path.name}", path.read_bytes())
    assert take(stream_of(*find_streams(base)), 20) == expected


@pytest.mark.parametrize("how", ["status", "cut"])
def test_a_connection_that_breaks_is_taken_up_again(tmp_path: Path, how: str) -> None:
    pytest.importorskip("aiohttp", reason="http needs sop-faiss[remote]")
    path = write_tar(tmp_path / "x.tar", [(f"{name}.jpg", name.encode() * 300_000) for name in "abcd"])
    with serve(tmp_path) as server:
        server.how, server.fail = how, {"/x.tar": 3}
        assert take(stream_of(f"{server.address}/x.tar"), 4) == take(stream_of(path), 4)
        assert server.bodies["/x.tar"] == 4
        server.fail = {"/x.tar": 100}
        with pytest.raises(UnreachableError) as error:
            take(stream_of(f"{server.address}/x.tar?token=s3cret"), 4)
        assert_one_line(error, "/x.tar cannot be read")
        assert "s3cret" not in str(error.value)
