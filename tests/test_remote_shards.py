"""Shards behind addresses: the same images as on disk, through a cache that is bounded, whole and shared."""

from __future__ import annotations

import itertools
import json
import logging
import os
import pickle
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest

from sop_faiss.config import DataConfig
from sop_faiss.data.images.source import ImageSource, find_streams, open_source
from sop_faiss.data.pack import pack
from sop_faiss.data.shards import remote
from sop_faiss.data.shards.address import hide_secrets
from sop_faiss.data.shards.remote import RemoteFile
from sop_faiss.data.shards.shard_cache import ShardCache
from sop_faiss.data.shards.shard_stream import ShardStream
from sop_faiss.data.shards.sidecar import sidecar_of
from sop_faiss.data.stream import Batches, batch_loader
from sop_faiss.errors import DataError, UnreachableError
from tests.images import write_folder, write_shards, write_tar
from tests.messages import assert_one_line
from tests.runs import tiny_config
from tests.servers import Server, serve


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_FIRST_PAUSE_SECONDS", 0.0)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "shards", shards=3)


@pytest.fixture
def server(shards: Path) -> Iterator[Server]:
    pytest.importorskip("aiohttp", reason="http needs sop-faiss[remote]")
    with serve(shards) as server:
        yield server


@pytest.fixture
def settings(tmp_path: Path) -> DataConfig:
    return DataConfig(cache_dir=str(tmp_path / "cache"))


def to_memory(folder: Path) -> str:
    """Copy a folder to memory://; its address."""
    address = f"memory://{uuid.uuid4().hex}"
    files = fsspec.filesystem("memory")
    for path in folder.iterdir():
        files.pipe_file(f"{address}/{path.name}", path.read_bytes())
    return address


def contents(source: ImageSource) -> list[tuple[str, bytes]]:
    return [(source.keys[i], source.read(i)) for i in range(len(source))]


def cached_tars(settings: DataConfig) -> list[Path]:
    return sorted(Path(settings.cache_dir).glob("*/*.tar"), key=lambda path: path.name)


def test_http_is_the_same_as_the_disk(server: Server, shards: Path, settings: DataConfig) -> None:
    expected = open_source(shards)
    for name in ("/photos-{000000..000002}.tar", "/photos-*.tar", "/", ""):
        source = open_source(server.address + name, settings)
        assert contents(source) == contents(expected)
        assert np.array_equal(source.labels, expected.labels)
        assert pickle.loads(pickle.dumps(source)).read(0) == expected.read(0)
    assert [path.read_bytes() for path in cached_tars(settings)] == [
        path.read_bytes() for path in sorted(shards.glob("*.tar"))
    ]
    assert source.root / source.source_of(0) == cached_tars(settings)[0]


def test_each_shard_is_fetched_once(server: Server, settings: DataConfig, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        contents(open_source(f"{server.address}/photos-{{000000..000002}}.tar", settings))
        contents(open_source(f"{server.address}/photos-{{000000..000002}}.tar", settings))
    assert [server.bodies[f"/photos-00000{number}.tar"] for number in range(3)] == [1, 1, 1]
    assert sum("fetching" in message for message in caplog.messages) == 3
    assert any("opened 3 of 3 shards" in message for message in caplog.messages)


def test_memory_and_file_addresses(shards: Path, settings: DataConfig) -> None:
    expected = contents(open_source(shards))
    address = to_memory(shards)
    for name in (address, f"{address}/photos-00000{{0,1,2}}.tar", f"{address}/*.tar", f" {address}/"):
        assert contents(open_source(name, settings)) == expected
    assert len(cached_tars(settings)) == 3
    for name in (f"file://{shards}", f"file://localhost{shards}/*.tar", f"FILE://{shards}/photos-00000{{0..2}}.tar"):
        source = open_source(name, settings)
        assert contents(source) == expected and source.root == shards
    with pytest.raises(DataError, match="another machine"):
        open_source("file://elsewhere/x.tar")


@pytest.mark.parametrize("name", ["a#1", "a?b", "50%", "a?b=c#d"])
def test_names_that_would_be_queries_on_the_web(tmp_path: Path, settings: DataConfig, name: str) -> None:
    """In an object store `?` and `#` are letters like others."""
    expected = contents(open_source(write_shards(tmp_path / "plain", shards=1)))
    files, base = fsspec.filesystem("memory"), f"memory://{uuid.uuid4().hex}"
    shard = (tmp_path / "plain" / "photos-000000.tar").read_bytes()
    for folder in (f"{name}/x", "axb/x", f"x/{name}", "x/axb", "x/.hidden"):
        files.pipe_file(f"{base}/{folder}.tar", shard)
    for address in (f"{base}/x/{name}.tar", f"{base}/{name}"):
        source = open_source(address, settings)
        assert contents(source) == expected
        assert len(find_streams(address)) == 1
        assert len(list(itertools.islice(ShardStream("x", find_streams(address)).images(0, 1, 1, 0, 0), 12))) == 12
    assert len(find_streams(f"{base}/x/*.tar")) == 2
    if "=" not in name:
        assert hide_secrets(f"{base}/x/{name}.tar") == f"{base}/x/{name}.tar"


@pytest.mark.parametrize("name", ["a#1", "a?b", "50%"])
def test_a_manifest_may_name_them_on_the_web_too(tmp_path: Path, settings: DataConfig, name: str) -> None:
    pytest.importorskip("aiohttp", reason="http needs sop-faiss[remote]")
    pack(write_folder(tmp_path / "photos"), tmp_path / "out", samples_per_shard=5, name=name)
    expected = contents(open_source(tmp_path / "out"))
    assert contents(open_source(to_memory(tmp_path / "out"), settings)) == expected
    with serve(tmp_path / "out") as server:
        assert contents(open_source(server.address, settings)) == expected


def test_shards_of_this_machine_through_the_cache(shards: Path, settings: DataConfig) -> None:
    source = open_source(shards, replace(settings, access="cached"))
    assert contents(source) == contents(open_source(shards))
    assert len(cached_tars(settings)) == 3 and Path(settings.cache_dir) in (source.root, *source.root.parents)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    pack(write_folder(tmp_path / "photos"), tmp_path / "packed", samples_per_shard=5)
    return tmp_path / "packed"


def test_with_sidecars_a_shard_is_fetched_when_it_is_read(packed: Path, settings: DataConfig) -> None:
    source = open_source(to_memory(packed), settings)
    assert len(source) == 12 and source.class_names == ["class_0", "class_1", "class_2"]
    assert cached_tars(settings) == []
    source.read(6)
    assert [path.name for path in cached_tars(settings)] == ["photos-000001.tar"]
    assert contents(source) == contents(open_source(packed))


def test_a_false_sidecar_is_found_out(packed: Path, settings: DataConfig) -> None:
    address = to_memory(packed)
    files = fsspec.filesystem("memory")
    beside = f"{address}/photos-000000.tar.index"
    content = json.loads(files.cat_file(beside))
    files.pipe_file(beside, json.dumps(content | {"stems": ["a", "b", "c", "d", "e"]}).encode())
    source = open_source(address, settings)
    for _ in range(2):
        with pytest.raises(UnreachableError) as error:
            source.read(0)
        assert_one_line(error, "photos-000000.tar", ".index")
    files.pipe_file(beside, b"[" * 100_000)
    assert contents(open_source(address, settings)) == contents(open_source(packed))


def test_the_manifest_is_believed_and_verified(packed: Path, settings: DataConfig) -> None:
    address = to_memory(packed)
    files = fsspec.filesystem("memory")
    name = f"{address}/photos-000001.tar"
    whole = files.cat_file(name)
    files.pipe_file(name, whole[:-1] + b"x")
    source = open_source(address, settings)
    with pytest.raises(UnreachableError) as error:
        source.read(6)
    assert_one_line(error, "photos-000001.tar", "sha256")
    files.rm(name)
    with pytest.raises(UnreachableError, match="does not exist"):
        source.read(6)
    assert cached_tars(settings) == [] and list(Path(settings.cache_dir).rglob(".*.tmp")) == []
    files.pipe_file(name, whole)
    assert source.read(6) == open_source(packed).read(6)


@pytest.mark.parametrize("name", ["../x.tar", "/etc/x.tar", "a/b.tar", "http://other/x.tar", "x.tar?y", ".x.tar"])
def test_a_manifest_names_plain_files_only(packed: Path, settings: DataConfig, name: str) -> None:
    manifest = json.loads((packed / "manifest.json").read_text())
    manifest["shards"][1]["name"] = name
    (packed / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError) as error:
        open_source(to_memory(packed), settings)
    assert_one_line(error, "manifest.json is damaged")


def test_a_manifest_of_another_kind_says_nothing(shards: Path, settings: DataConfig) -> None:
    for content in (b"<html>", b"[]", b"{}", b'{"shards": 5}', b"[" * 100_000):
        (shards / "manifest.json").write_bytes(content)
        assert len(open_source(to_memory(shards), settings)) == 12


@pytest.mark.parametrize("how", ["status", "cut"])
def test_what_passes_is_tried_again(server: Server, settings: DataConfig, how: str) -> None:
    server.how, server.fail = how, {"/photos-000001.tar": 2}
    assert len(open_source(f"{server.address}/photos-{{000000..000002}}.tar", settings)) == 12
    assert server.bodies["/photos-000001.tar"] == 3


@pytest.mark.parametrize("how", ["status", "cut"])
def test_what_does_not_pass_is_one_line(server: Server, settings: DataConfig, how: str) -> None:
    server.how, server.fail = how, {"/photos-000001.tar": 100}
    with pytest.raises(UnreachableError) as error:
        open_source(f"{server.address}/photos-{{000000..000002}}.tar", settings)
    assert_one_line(error, "photos-000001.tar cannot be fetched", "503" if how == "status" else "")
    assert server.bodies["/photos-000001.tar"] == 4
    assert [path.name for path in cached_tars(settings)] == [
        "photos-000000.tar",
        "photos-000002.tar",
    ] or how == "status"
    assert list(Path(settings.cache_dir).rglob(".*.tmp")) == []


def test_a_server_that_is_not_there(server: Server, settings: DataConfig) -> None:
    with pytest.raises(UnreachableError) as error:
        open_source(f"{server.address}/nothing.tar", settings)
    assert_one_line(error, "nothing.tar does not exist")
    with pytest.raises(UnreachableError) as error:
        open_source("http://127.0.0.1:1/x.tar", settings)
    assert_one_line(error, "127.0.0.1:1", "cannot be")
    with pytest.raises(DataError, match="has no shards"):
        open_source(f"{server.address}/nothing-*.tar", settings)


def test_a_length_that_is_not_told(server: Server, settings: DataConfig) -> None:
    server.lengths = False
    with pytest.raises(DataError) as error:
        open_source(f"{server.address}/photos-000000.tar", settings)
    assert_one_line(error, "photos-000000.tar", "data.access=sequential")


def test_secrets_are_never_shown(server: Server, settings: DataConfig, caplog: pytest.LogCaptureFixture) -> None:
    host = server.address.removeprefix("http://")
    caplog.set_level(logging.DEBUG, "sop_faiss")
    server.fail = {"/photos-000000.tar": 100}
    for name in ("photos-000000.tar", "nothing.tar", "nothing-*.tar", "x.tar; rm", "photos-{5..1}.tar"):
        with pytest.raises(DataError) as error:
            open_source(f"http://me:s3cret@{host}/{name}?token=s3cret#s3cret", settings)
        assert_one_line(error)
        assert "s3cret" not in str(error.value) and "me:" not in str(error.value)
    server.fail = {}
    source = open_source(f"http://me:s3cret@{host}/photos-000000.tar?token=s3cret", settings)
    assert source.description == f"http://{host}/photos-000000.tar"
    assert "s3cret" not in caplog.text


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("nonsense://host/x.tar", ["nonsense:// is unknown"]),
        ("abfs://host/x.tar", ["adlfs"]),
        ("zip://x.tar::https://host/x.zip", ["inside an address"]),
        ("simplecache::https://me:s3cret@host/x.tar", ["inside an address"]),
        ("reference://x.tar", ["reference://"]),
        ("tar://x.tar", ["tar://"]),
        ("pipe:curl https://me:s3cret@host/x.tar", ["is a command"]),
        ("pipe:curl https://me:s3cret@host/x.tar |", ["is a command"]),
        ("https://host/x.tar | sh", ["is a command"]),
        ("https://host/$(touch x).tar", ["is a command"]),
        ("https://host/x.tar\nHost: other", ["control characters"]),
    ],
)
def test_addresses_that_are_refused(name: str, parts: list[str], settings: DataConfig) -> None:
    with pytest.raises(DataError) as error:
        open_source(name, settings)
    assert_one_line(error, *parts)
    assert "s3cret" not in str(error.value)
    if "command" in parts[0] or "inside" in parts[0]:
        with pytest.raises(DataError, match=parts[0]):
            find_streams(name)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, settings: DataConfig) -> None:
    def refuse(protocol: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(remote.fsspec, "get_filesystem_class", refuse)
    with pytest.raises(DataError) as error:
        open_source("s3://bucket/x.tar", settings)
    assert_one_line(error, "Install s3fs", "pip install 'sop-faiss[remote]'")


def test_s3_leaves_trying_again_to_us(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {}
    monkeypatch.setattr(remote.fsspec, "get_filesystem_class", lambda protocol: object)
    monkeypatch.setattr(remote, "url_to_fs", lambda address, **options: given.update(options) or (None, address))
    assert remote._file_system("S3://bucket/x.tar") == (None, "s3://bucket/x.tar")
    assert given["config_kwargs"]["retries"] == {"max_attempts": 0}


# --------------------------------------------------------------------------------------------------------------- cache


def test_a_data_set_larger_than_the_cache_is_refused(shards: Path, settings: DataConfig) -> None:
    total = sum(path.stat().st_size for path in shards.glob("*.tar"))
    small = replace(settings, cache_bytes=total - 1)
    with pytest.raises(DataError) as error:
        open_source(to_memory(shards), small)
    assert_one_line(error, f"{total} bytes", f"data.cache_bytes = {total - 1}", "data.access=sequential")
    assert cached_tars(small) == []
    open_source(to_memory(shards), replace(settings, cache_bytes=total))


def test_other_data_sets_leave_the_least_recently_used_first(tmp_path: Path) -> None:
    files = fsspec.filesystem("memory")
    tar = write_tar(tmp_path / "x.tar", [("a.jpg", b"x" * 5000)]).read_bytes()
    address = f"memory://{uuid.uuid4().hex}"
    for name in "abcd":
        files.pipe_file(f"{address}/{name}.tar", tar)
    remote_files = {name: RemoteFile(f"{address}/{name}.tar", len(tar), "1", "") for name in "abcd"}
    folder = tmp_path / "cache"
    (folder / "somebody's").mkdir(parents=True)
    (folder / "somebody's" / "y.tar").write_bytes(bytes(100_000))
    room = int(3.9 * len(tar))
    for number, name in enumerate("abc"):  # each a data set of its own, opened and closed
        path = ShardCache(folder, room).fetch(remote_files[name])
        os.utime(path, ns=(number * 10**9, path.stat().st_mtime_ns))
    ShardCache(folder, room).fetch(remote_files["a"])  # used again, so b is the oldest now
    cache = ShardCache(folder, room)
    cache.keep([remote_files["d"]])
    cache.fetch(remote_files["d"])
    assert [name for name in "abcd" if cache.has(remote_files[name])] == ["a", "c", "d"]
    both = ShardCache(folder, room)
    with pytest.raises(DataError, match=r"data\.cache_bytes"):
        both.keep([remote_files[name] for name in "abc"])  # beside d, which is in use
    assert (folder / "somebody's" / "y.tar").exists()


def test_only_whole_files_are_used(shards: Path, settings: DataConfig) -> None:
    address = to_memory(shards)
    expected = contents(open_source(address, settings))
    first = cached_tars(settings)[0]
    (first.parent / f".{first.name}.12345678.tmp").write_bytes(b"half")
    first.write_bytes(first.read_bytes()[:1000])
    assert contents(open_source(address, settings)) == expected
    assert list(first.parent.glob(".*.tmp")) == []
    first = cached_tars(settings)[0]
    os.utime(first)  # something else has written there
    assert contents(open_source(address, settings)) == expected


def test_a_shard_that_changes_is_another(shards: Path, settings: DataConfig) -> None:
    address = to_memory(shards)
    source = open_source(address, settings)
    write_tar(shards / "photos-000001.tar", [("new.jpg", b"new")])
    fsspec.filesystem("memory").pipe_file(f"{address}/photos-000001.tar", (shards / "photos-000001.tar").read_bytes())
    assert "new" in open_source(address, settings).keys
    assert len(contents(source)) == 12  # its own version is still here


def test_a_shard_that_left_the_cache_is_fetched_again(shards: Path, settings: DataConfig) -> None:
    source = open_source(to_memory(shards), settings)
    expected = contents(source)
    copy = pickle.loads(pickle.dumps(source))
    for path in cached_tars(settings):
        sidecar_of(path).unlink()
        path.unlink()
    assert contents(copy) == expected and len(cached_tars(settings)) == 3


def test_many_at_once_fetch_once(server: Server, settings: DataConfig) -> None:
    def read(_: int) -> list[tuple[str, bytes]]:
        return contents(open_source(f"{server.address}/photos-{{000000..000002}}.tar", settings))

    with ThreadPoolExecutor(6) as threads:
        results = list(threads.map(read, range(6)))
    assert all(result == results[0] for result in results)
    assert [server.bodies[f"/photos-00000{number}.tar"] for number in range(3)] == [1, 1, 1]


def test_a_damaged_shard_names_its_address(tmp_path: Path, settings: DataConfig) -> None:
    shard = write_tar(tmp_path / "one" / "x.tar", [("a.jpg", b"x" * 2000)])
    os.truncate(shard, 1100)
    address = to_memory(shard.parent)
    with pytest.raises(DataError) as error:
        open_source(address, settings)
    assert_one_line(error, f"shard {address}/x.tar is cut off")
    assert cached_tars(settings) == []


def test_a_cache_that_cannot_be_made(shards: Path, settings: DataConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError) as error:
        open_source(to_memory(shards), replace(settings, cache_dir=str(tmp_path / "file")))
    assert_one_line(error, "data.cache_dir")


# ------------------------------------------------------------------------------------------------------------ training


@pytest.mark.parametrize("workers", [0, 2])
def test_training_batches_are_the_same_as_from_the_disk(packed: Path, tmp_path: Path, workers: int) -> None:
    config = tiny_config(tmp_path, f"data.workers={workers}", f"data.cache_dir={tmp_path / 'cache'}")
    local, elsewhere = open_source(packed), open_source(to_memory(packed), config.data)
    expected, found = (
        list(batch_loader(Batches(source, np.arange(12), config, 4), range(4), pin_memory=False))
        for source in (local, elsewhere)
    )
    for a, b in zip(expected, found, strict=True):
        assert a.image_ids.tolist() == b.image_ids.tolist() and bool((a.global_views == b.global_views).all())
    assert Batches(local, np.arange(12), config, 4).digest() == Batches(elsewhere, np.arange(12), config, 4).digest()


def test_a_shard_out_of_reach_ends_the_run_at_once(packed: Path, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, f"data.cache_dir={tmp_path / 'cache'}")
    address = to_memory(packed)
    batches = Batches(open_source(address, config.data), np.arange(12), config, 4)
    fsspec.filesystem("memory").rm(f"{address}/photos-000000.tar")
    with pytest.raises(UnreachableError, match="does not exist"):
        list(batch_loader(batches, range(2), pin_memory=False))
