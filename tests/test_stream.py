"""The stream: order, views and masks as pure functions of the step, whatever ranks, workers and restarts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sop_faiss.data import ordered_map as parallel
from sop_faiss.data.batch import BadSample
from sop_faiss.data.images.source import open_source
from sop_faiss.data.stream import Batches, batch_loader, epoch_order, split_holdout
from sop_faiss.data.views.device_color import normalize
from sop_faiss.errors import ConfigError, DataError
from tests.images import write_folder, write_shards
from tests.runs import tiny_config


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("stream"), classes=2, per_class=10, size=20)


def make(shards, tmp_path, *overrides, rank=0, world_size=1) -> Batches:
    source = open_source(shards)
    config = tiny_config(tmp_path, *overrides)
    return Batches(source, np.arange(len(source)), config, patch_size=4, rank=rank, world_size=world_size)


def same(a, b) -> bool:
    names = ("global_views", "local_views", "global_colors", "local_colors", "masks", "image_ids")
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in names)


def test_every_image_once_per_epoch_in_another_order(shards, tmp_path):
    batches = make(shards, tmp_path, "train.batch_size=5")
    assert batches.steps_per_epoch == 4
    epochs = [np.concatenate([batches.image_ids(4 * epoch + i) for i in range(4)]) for epoch in range(2)]
    for order in epochs:
        assert sorted(order) == list(range(20))
    assert list(epochs[0]) != list(epochs[1])
    assert list(epochs[0]) == list(epoch_order(20, 0, 0))


def test_nothing_is_hidden_before_the_epoch_that_masks_start_with(shards, tmp_path):
    always, later = (make(shards, tmp_path, f"masks.start_epoch={epoch}", "masks.probability=1") for epoch in (0, 2))
    for step in range(9):
        masked, batch = always[step], later[step]
        assert bool(masked.masks.any()) and torch.equal(batch.global_views, masked.global_views)
        assert torch.equal(batch.masks, masked.masks) if step >= 6 else not batch.masks.any()


def test_a_last_partial_batch_is_left_out(shards, tmp_path):
    assert make(shards, tmp_path, "train.batch_size=6").steps_per_epoch == 3


def test_shapes_and_types(shards, tmp_path):
    batch = make(shards, tmp_path)[0]
    assert batch.global_views.shape == (2, 6, 16, 16, 3)
    assert batch.local_views.shape == (1, 6, 8, 8, 3)
    assert batch.masks.shape == (2, 6, 16)
    assert batch.global_views.dtype == torch.uint8
    assert batch.bad == []


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("color", ["cpu", "device"])
def test_workers_threads_and_restarts_change_nothing(shards, tmp_path, workers, threads, color):
    settings = ("data.threads=1", f"views.color={color}")
    expected = [make(shards, tmp_path, *settings)[step] for step in range(5)]
    again = make(shards, tmp_path, *settings, f"data.workers={workers}", f"data.threads={threads}")
    for start in (0, 3):
        loaded = list(batch_loader(again, range(start, 5), pin_memory=False))
        assert len(loaded) == 5 - start
        assert all(same(a, b) for a, b in zip(expected[start:], loaded, strict=True))


def test_ranks_share_a_global_batch(shards, tmp_path):
    whole = make(shards, tmp_path)
    parts = [make(shards, tmp_path, rank=rank, world_size=3) for rank in range(3)]
    for step in (0, 2, 4):
        joined = [part[step] for part in parts]
        expected = whole[step]
        assert torch.equal(torch.cat([part.image_ids for part in joined]), expected.image_ids)
        assert torch.equal(torch.cat([part.global_views for part in joined], dim=1), expected.global_views)
        assert torch.equal(torch.cat([part.masks for part in joined], dim=1), expected.masks)


def test_cached_images_change_nothing(shards, tmp_path):
    cached = make(shards, tmp_path, "data.decoded_cache_bytes=5000")
    plain = make(shards, tmp_path)
    assert all(same(cached[step], plain[step]) for step in (0, 1, 4, 5))
    assert 0 < cached.writer._kept_bytes <= 5000
    assert cached.writer._kept_bytes == sum(image.nbytes for image in cached.writer._kept.values())


@pytest.mark.parametrize("workers", [0, 1])
def test_threads_list_bad_images_in_the_same_order(tmp_path, workers):
    folder = write_folder(tmp_path / "photos", classes=0, per_class=12, size=20)
    for number in (1, 4, 5, 8, 10):
        (folder / f"{number:04d}.jpg").write_bytes(b"nothing")
    settings = ("train.batch_size=12", f"data.workers={workers}")
    plain, threaded = (
        list(batch_loader(make(folder, tmp_path, *settings, f"data.threads={threads}"), range(3), pin_memory=False))
        for threads in (1, 3)
    )
    assert all(same(a, b) for a, b in zip(plain, threaded, strict=True))
    assert [batch.bad for batch in plain] == [batch.bad for batch in threaded]
    assert all(len(batch.bad) >= 5 for batch in plain)


def test_a_worker_makes_batches_in_shared_memory(shards, tmp_path):
    class Told(Batches):
        def make(self, step):
            batch = super().make(step)
            shared = [tensor.is_shared() for tensor in (batch.global_views, batch.local_views, batch.masks)]
            batch.bad.append(BadSample(0, str(all(shared)), "", "", 0, "told", "", ""))
            return batch

    source = open_source(shards)
    for workers, expected in ((0, "False"), (1, "True")):
        batches = Told(source, np.arange(len(source)), tiny_config(tmp_path, f"data.workers={workers}"), 4)
        assert next(batch_loader(batches, range(1), pin_memory=False)).bad[0].key == expected


def test_the_device_gets_plain_views_and_the_draws(shards, tmp_path):
    gray = ("views.gray=1", "views.jitter=1")
    on_cpu, on_device = (make(shards, tmp_path, *gray, f"views.color={color}")[0] for color in ("cpu", "device"))
    assert on_cpu.global_colors.shape == (2, 6, 0) and on_cpu.local_colors.shape == (1, 6, 0)
    assert on_device.global_colors.shape == (2, 6, 11) and on_device.local_colors.shape == (1, 6, 11)
    assert torch.equal(on_cpu.global_views[..., 0], on_cpu.global_views[..., 2])
    assert not torch.equal(on_device.global_views[..., 0], on_device.global_views[..., 2])
    assert torch.equal(on_cpu.masks, on_device.masks)
    config = tiny_config(tmp_path).views
    for name in ("global", "local"):
        ours, theirs = (
            normalize(getattr(b, f"{name}_views"), getattr(b, f"{name}_colors"), config, torch.device("cpu"))
            for b in (on_device, on_cpu)
        )
        assert (ours - theirs).abs().mean() < 0.8 / 255 / min(config.std)


def test_parts_of_a_batch_keep_their_colors(shards, tmp_path):
    batch = make(shards, tmp_path, "views.color=device")[1]
    parts = batch.split(3)
    assert torch.equal(torch.cat([part.global_colors for part in parts], 1), batch.global_colors)
    assert torch.equal(torch.cat([part.local_colors for part in parts], 1), batch.local_colors)
    assert torch.equal(batch.to(torch.device("cpu")).global_colors, batch.global_colors)


def test_default_threads(monkeypatch):
    monkeypatch.setattr(parallel, "processors", lambda: 16)
    assert [parallel.default_threads(*case) for case in ((0, 1), (2, 1), (8, 1), (10, 8))] == [4, 4, 2, 1]


def test_a_bad_image_is_replaced_the_same_way_each_time(tmp_path):
    folder = write_folder(tmp_path / "photos", classes=0, per_class=12, size=20)
    (folder / "0003.jpg").write_bytes(b"not an image")
    (folder / "0007.jpg").write_bytes((folder / "0007.jpg").read_bytes()[:200])
    batches = make(folder, tmp_path)
    first, again = [[batches[step] for step in range(2)] for _ in range(2)]
    assert all(same(a, b) for a, b in zip(first, again, strict=True))
    bad = [sample for batch in first for sample in batch.bad]
    assert {sample.position for sample in bad} >= {3, 7}
    assert {sample.reason for sample in bad} == {"not-an-image", "truncated"}
    for batch in first:
        assert len(batch.image_ids) == 6
        assert not {3, 7} & set(batch.image_ids.tolist())


def test_only_bad_images_is_an_error(tmp_path):
    folder = write_folder(tmp_path / "photos", classes=0, per_class=6, size=20)
    for path in folder.iterdir():
        path.write_bytes(b"nothing")
    for workers in (0, 1):
        batches = make(folder, tmp_path, f"data.workers={workers}")
        with pytest.raises(DataError, match="in a row cannot be read") as caught:
            next(batch_loader(batches, range(1), pin_memory=False))
        assert "Traceback" not in str(caught.value)


def test_impossible_batches(shards, tmp_path):
    with pytest.raises(ConfigError, match="exceeds the 20 training images"):
        make(shards, tmp_path, "train.batch_size=21")
    with pytest.raises(ConfigError, match="not divisible by the 4 ranks"):
        make(shards, tmp_path, world_size=4)


def test_holdout_is_a_seeded_split():
    trained, held = split_holdout(100, 0.2, 7)
    assert len(held) == 20
    assert sorted([*trained, *held]) == list(range(100))
    assert np.array_equal(held, split_holdout(100, 0.2, 7)[1])
    assert not np.array_equal(held, split_holdout(100, 0.2, 8)[1])
    assert len(split_holdout(100, 0.0, 7)[1]) == 0


def test_the_digest_tells_other_images_apart(shards, tmp_path):
    digest = make(shards, tmp_path).digest()
    assert digest == make(shards, tmp_path, "data.workers=1").digest()
    source = open_source(shards)
    assert Batches(source, np.arange(19), tiny_config(tmp_path), 4).digest() != digest


def test_without_a_cls_loss_no_local_views_are_made(shards, tmp_path):
    assert len(make(shards, tmp_path, "sop.cls.weight=0").make(0).local_views) == 0


def global_batch(parts) -> tuple:
    """What the ranks of one step hold together."""
    return (
        torch.cat([part.global_views for part in parts], 1),
        torch.cat([part.local_views for part in parts], 1),
        torch.cat([part.masks for part in parts], 1),
        torch.cat([part.image_ids for part in parts]),
        [sample for part in parts for sample in part.bad],
    )


@pytest.mark.parametrize("workers", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_the_stream_goes_on_whatever_ranks_and_workers_it_is_resumed_with(tmp_path, workers):
    """1 rank, then 2, then 1 again, each started anew at the step where the one before was killed; bad images too."""
    folder = write_folder(tmp_path / "photos", classes=0, per_class=14, size=20)
    (folder / "0005.jpg").write_bytes(b"not an image")
    expected = [global_batch([make(folder, tmp_path)[step]]) for step in range(7)]
    assert sum(len(batch[4]) for batch in expected) > 0
    found = []
    for (first, last), ranks, count in zip(((0, 3), (3, 5), (5, 7)), (1, 2, 1), workers, strict=True):
        loaders = [
            batch_loader(make(folder, tmp_path, f"data.workers={count}", rank=rank, world_size=ranks), range(first, 9),
                         pin_memory=False)
            for rank in range(ranks)
        ]  # fmt: skip
        found += [global_batch([next(loader) for loader in loaders]) for _ in range(first, last)]
        for loader in loaders:  # killed with batches still in its queue
            loader.close()
    for one, two in zip(expected, found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one[:4], two[:4], strict=True))
        assert one[4] == two[4]


def test_fewer_shards_than_workers_and_ranks(tmp_path):
    """Samples are shared out, not shards: all ranks get equal steps of one shard, and nothing hangs."""
    folder = write_shards(tmp_path / "one", classes=1, per_class=13, size=20, shards=1)
    parts = [make(folder, tmp_path, "data.workers=2", rank=rank, world_size=3) for rank in range(3)]
    assert [part.steps_per_epoch for part in parts] == [2, 2, 2]
    loaded = [list(batch_loader(part, range(4), pin_memory=False)) for part in parts]
    assert [len(batches) for batches in loaded] == [4, 4, 4]
    for epoch in range(2):
        seen = [image for rank in loaded for batch in rank[2 * epoch : 2 * epoch + 2] for image in batch.image_ids]
        assert len(seen) == len({int(image) for image in seen}) == 12
