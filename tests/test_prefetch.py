"""Shards are fetched before they are needed, in the order of need, and nothing depends on it."""

from __future__ import annotations

import threading
from pathlib import Path

import fsspec
import numpy as np
import pytest

from sop_faiss.data.images.source import open_source
from sop_faiss.data.pack import pack
from sop_faiss.data.shards.prefetch import fetch_ahead, shards_by_need
from sop_faiss.data.shards.shard_source import ShardSource
from sop_faiss.data.stream import Batches, batch_loader
from sop_faiss.errors import UnreachableError
from tests.images import write_folder
from tests.runs import tiny_config
from tests.test_remote_shards import to_memory


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    pack(write_folder(tmp_path / "photos"), tmp_path / "shards", samples_per_shard=3)
    return tmp_path / "shards"


def wait() -> None:
    for thread in threading.enumerate():
        if thread.name == "fetch ahead":
            thread.join(20)


def local(shards: Path) -> ShardSource:
    source = open_source(shards)
    assert isinstance(source, ShardSource)
    return source


def test_shards_by_need(shards):
    source, order = local(shards), np.random.default_rng(0).permutation(12)
    needed = []
    for position in order:  # the oracle: walk along
        number = int(source.shard_numbers[position])
        if number not in needed:
            needed.append(number)
    assert shards_by_need(source, order) == needed and sorted(needed) == [0, 1, 2, 3]
    assert shards_by_need(source, np.array([11, 4, 3])) == [3, 1]


def test_they_come_in_the_order_of_need(shards):
    source, fetched = local(shards), []
    source.fetch = fetched.append
    order = np.array([9, 0, 1, 6, 3])
    with fetch_ahead(source, lambda: order, threads=1):
        wait()
    assert fetched == [3, 0, 2, 1]


def test_nothing_is_done_for_shards_that_are_here(shards):
    source = local(shards)
    with fetch_ahead(source, lambda: pytest.fail("asked for an order")), fetch_ahead(object(), lambda: pytest.fail()):
        assert all(thread.name != "fetch ahead" for thread in threading.enumerate())


def test_it_ends_with_the_block(shards):
    source, fetched, at_it, go_on = local(shards), [], threading.Event(), threading.Event()

    def slow(number):
        fetched.append(number)
        at_it.set()
        assert go_on.wait(20)

    source.fetch = slow
    with pytest.raises(KeyboardInterrupt), fetch_ahead(source, lambda: np.arange(12), threads=1):
        assert at_it.wait(20)
        raise KeyboardInterrupt
    go_on.set()
    wait()
    assert fetched == [0]
    with fetch_ahead(source, lambda: np.arange(12)):
        pass
    assert all(thread.name != "fetch ahead" for thread in threading.enumerate())


@pytest.mark.parametrize("workers", [0, 1])
def test_training_fetches_what_the_coming_steps_need(shards, tmp_path, workers):
    config = tiny_config(
        tmp_path, "train.batch_size=2", f"data.workers={workers}", f"data.cache_dir={tmp_path / 'cache'}"
    )
    source = open_source(to_memory(shards), config.data)
    batches = Batches(source, np.arange(12), config, 4)
    assert list((tmp_path / "cache").glob("*/*.tar")) == []
    loader = batch_loader(batches, range(6), pin_memory=False)
    first = next(loader)
    wait()
    assert len(list((tmp_path / "cache").glob("*/*.tar"))) == 4  # with two images read
    same = next(batch_loader(Batches(local(shards), np.arange(12), config, 4), range(6), pin_memory=False))
    assert bool((first.global_views == same.global_views).all())
    loader.close()


def test_the_reader_tells_what_cannot_be_fetched(shards, tmp_path):
    config = tiny_config(tmp_path, "train.batch_size=2", f"data.cache_dir={tmp_path / 'cache'}")
    address = to_memory(shards)
    source = open_source(address, config.data)
    batches = Batches(source, np.arange(12), config, 4)
    names = [f"photos-{number:06}.tar" for number in range(4)]
    lost = names[int(source.shard_numbers[batches.image_ids(5)[0]])]
    fsspec.filesystem("memory").rm(f"{address}/{lost}")
    made = 0
    with pytest.raises(UnreachableError, match=f"{lost} does not exist"):
        for _ in batch_loader(batches, range(6), pin_memory=False):
            made += 1
            wait()
    assert made < 6
