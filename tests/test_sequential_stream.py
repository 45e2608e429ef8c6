"""Training batches from shards read in sequence: whole, without end, on any number of ranks and workers."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from sop_faiss.data.batch import Batch
from sop_faiss.data.images.source import find_streams
from sop_faiss.data.sequential_stream import SequentialBatches
from sop_faiss.data.shards.shard_stream import ShardStream, stable_image_id
from sop_faiss.data.stream import batch_loader
from sop_faiss.errors import ConfigError, DataError
from sop_faiss.verbs.training.data_preview import draw_preview
from sop_faiss.verbs.training.dry_run import describe_run
from sop_faiss.verbs.training.profile_data import profile_data
from sop_faiss.verbs.training.train import run_training
from tests.images import encode, make_image, write_shards, write_tar
from tests.runs import tiny_config

SEQUENTIAL = ("data.access=sequential", "data.samples_per_epoch=20", "data.shuffle_buffer=5")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("stream"), classes=2, per_class=10, size=20, shards=2)


def make(shards: Path, tmp_path: Path, *overrides: str, rank: int = 0, world_size: int = 1) -> SequentialBatches:
    config = tiny_config(tmp_path, *SEQUENTIAL, *overrides)
    return SequentialBatches(ShardStream("set", find_streams(shards)), config, 4, rank, world_size)


def load(batches: SequentialBatches, steps: range) -> list[Batch]:
    return list(batch_loader(batches, steps, pin_memory=False))


@pytest.mark.parametrize(("workers", "number"), [(0, 2), (1, 2), (2, 2), (2, 1)])
def test_batches_are_whole_and_go_on(tmp_path: Path, workers: int, number: int) -> None:
    shards = write_shards(tmp_path / "shards", classes=2, per_class=10, size=20, shards=number)
    batches = load(make(shards, tmp_path, f"data.workers={workers}"), range(8))
    assert len(batches) == 8
    for batch in batches:
        assert batch.global_views.shape == (2, 6, 16, 16, 3) and batch.masks.shape == (2, 6, 16)
        assert batch.bad == [] and int(batch.image_ids.min()) >= 0
    assert len({int(number) for batch in batches for number in batch.image_ids}) == 20


def test_the_same_again_and_another_order_when_resumed(shards: Path, tmp_path: Path) -> None:
    first, again = (load(make(shards, tmp_path, "data.workers=2"), range(4)) for _ in range(2))
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a.image_ids, b.image_ids) and torch.equal(a.global_views, b.global_views)
    resumed = load(make(shards, tmp_path, "data.workers=2"), range(2, 4))
    assert not torch.equal(resumed[0].image_ids, first[2].image_ids)


def test_ranks_have_equal_steps_and_other_images(shards: Path, tmp_path: Path) -> None:
    ranks = [make(shards, tmp_path, rank=rank, world_size=2) for rank in range(2)]
    assert [batches.steps_per_epoch for batches in ranks] == [3, 3]
    ids = [{int(n) for batch in load(batches, range(3)) for n in batch.image_ids} for batches in ranks]
    assert [len(met) for met in ids] == [9, 9] and not ids[0] & ids[1]  # a shard of 10 each


def test_bad_images_are_passed_over_and_counted(tmp_path: Path, shards: Path) -> None:
    images = [f"photos-00000{number}.tar" for number in range(2)]
    assert sorted(path.name for path in shards.glob("*.tar")) == images
    bad = write_tar(tmp_path / "bad.tar", [("a.jpg", b"not an image"), ("b.jpg", b"")])
    config = tiny_config(tmp_path, *SEQUENTIAL)
    batches = SequentialBatches(ShardStream("set", [*find_streams(shards), str(bad)]), config, 4)
    loaded = load(batches, range(4))
    found = {(sample.key, sample.reason) for batch in loaded for sample in batch.bad}
    assert {("bad/a", "not-an-image"), ("bad/b", "empty")} >= found and found
    assert all(len(batch.image_ids) == 6 for batch in loaded)


def test_threads_change_nothing_and_bad_images_say_where_they_lie(tmp_path: Path) -> None:
    image = encode(make_image(np.random.default_rng(0), 20))
    members = [(f"{number:02d}.jpg", image if number % 3 else b"text") for number in range(18)]
    shard = write_tar(tmp_path / "x.tar", members)
    alone, together = (
        load(make(shard, tmp_path, "data.workers=0", f"data.threads={threads}"), range(4)) for threads in (1, 3)
    )
    for a, b in zip(alone, together, strict=True):
        assert torch.equal(a.image_ids, b.image_ids) and torch.equal(a.global_views, b.global_views)
        assert torch.equal(a.masks, b.masks) and a.bad == b.bad
    keys = {f"x/{number:02d}": stable_image_id(f"x/{number:02d}") for number in range(18)}
    content = shard.read_bytes()
    bad = [sample for batch in alone for sample in batch.bad]
    assert {sample.member for sample in bad} == {f"{number:02d}.jpg" for number in range(0, 18, 3)}
    for sample in bad:
        assert (sample.shard, sample.position, sample.reason) == ("x.tar", keys[sample.key], "not-an-image")
        assert content[sample.offset : sample.offset + 4] == b"text" and int(sample.replacement[2:]) % 3


@pytest.mark.parametrize("workers", [0, 1])
def test_only_bad_images_is_an_error(tmp_path: Path, workers: int) -> None:
    write_tar(tmp_path / "bad.tar", [(f"{number}.jpg", b"not an image") for number in range(9)])
    with pytest.raises(DataError, match="in a row cannot be read"):
        load(make(tmp_path / "bad.tar", tmp_path, f"data.workers={workers}"), range(1))
    write_tar(tmp_path / "none.tar", [("a.txt", b"x")])
    with pytest.raises(DataError, match="no image"):
        load(make(tmp_path / "none.tar", tmp_path, f"data.workers={workers}"), range(1))


def test_settings_that_do_not_go_together(tmp_path: Path, shards: Path) -> None:
    with pytest.raises(ConfigError, match="samples_per_epoch = 0"):
        tiny_config(tmp_path, "data.access=sequential")
    with pytest.raises(ConfigError, match="samples_per_epoch = 9"):
        tiny_config(tmp_path, "data.samples_per_epoch=9")
    with pytest.raises(ConfigError, match="nothing can be held out"):
        tiny_config(tmp_path, *SEQUENTIAL, "data.holdout_share=0.1")
    with pytest.raises(ConfigError, match="not cached"):
        tiny_config(tmp_path, *SEQUENTIAL, "data.decoded_cache_bytes=9")
    config = tiny_config(tmp_path, *SEQUENTIAL, f"data.train={shards}")
    for use in (profile_data, lambda config: draw_preview(config, tmp_path / "views.png")):
        with pytest.raises(ConfigError, match="reads single images"):
            use(config)
    with pytest.raises(ConfigError, match="did you mean 'sequential'"):
        tiny_config(tmp_path, "data.access=sequentiel")
    with pytest.raises(ConfigError, match="exceeds the 20 training images of set"):
        make(shards, tmp_path, "train.batch_size=21")


def test_a_run_trains_stops_and_goes_on(tmp_path: Path, shards: Path, caplog: pytest.LogCaptureFixture) -> None:
    base = (*SEQUENTIAL, f"data.train={shards}", "train.epochs=2")
    with caplog.at_level(logging.INFO):
        result = run_training(tiny_config(tmp_path, *base, "train.stop_after_steps=3"), tmp_path / "run")
    assert result.step == 3 and sum("is read in sequence" in message for message in caplog.messages) == 1
    result = run_training(tiny_config(tmp_path, *base), tmp_path / "run", resume=True)
    assert result.finished and result.step == 6 and np.isfinite(result.last_metrics["loss"])
    described = describe_run(tiny_config(tmp_path, *base))
    assert (described["training_images"], described["steps"]) == (20, 6)
