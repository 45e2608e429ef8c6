"""Images of one group as views of each other: the views are those of the other image, and nothing else changes."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from sop_faiss.data import batch_writer, groups, stream
from sop_faiss.data.groups import Groups
from sop_faiss.data.images.source import open_source
from sop_faiss.data.shards import shard_stream
from sop_faiss.data.stream import Batches, batch_loader
from sop_faiss.errors import ConfigError
from sop_faiss.verbs.training.train import run_training
from tests.images import write_folder
from tests.runs import tiny_config

GROUPED = "data.groups=labels"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("groups"), classes=3, per_class=4)


def batches_of(folder: Path, tmp_path: Path, *overrides: str) -> Batches:
    source = open_source(folder)
    return Batches(source, np.arange(len(source)), tiny_config(tmp_path, *overrides), patch_size=4)


def test_partners_are_the_others_of_the_group_equally_often():
    labels = np.array([0, 1, 0, -1, 0, 1, 2, -1])
    groups = Groups(np.array([0, 1, 2, 3, 4, 6, 7]), labels)  # 5 is held out
    for image_id, others in {0: {2, 4}, 2: {0, 4}, 4: {0, 2}}.items():
        drawn = Counter(groups.partner(image_id, seed=0, epoch=epoch) for epoch in range(200))
        assert set(drawn) == others and min(drawn.values()) > 70
    for alone in (1, 3, 6, 7):
        assert {groups.partner(alone, seed=0, epoch=epoch) for epoch in range(5)} == {alone}
    assert groups.partner(0, seed=1, epoch=3) == groups.partner(0, seed=1, epoch=3)


def test_all_draws_have_keys_of_their_own():
    keys = [groups._PARTNER, stream._ORDER, stream._HOLDOUT, batch_writer._REPLACEMENT, shard_stream._SHARD_ORDER]
    assert len(set(keys)) == len(keys) and min(keys) >= 2**63


def test_every_second_view_is_the_other_images(folder: Path, tmp_path: Path):
    """Against the views that the loader makes of the partner's bytes in place of the image's own."""
    common = ("views.local_count=3", "train.batch_size=12")
    grouped, plain = batches_of(folder, tmp_path, GROUPED, *common), batches_of(folder, tmp_path, *common)
    batch, own = grouped.make(1), plain.make(1)
    assert torch.equal(batch.image_ids, own.image_ids)
    assert grouped.writer.groups is not None
    for place, image_id in enumerate(batch.image_ids.tolist()):
        partner = grouped.writer.groups.partner(image_id, seed=0, epoch=1)
        assert partner != image_id and plain.source.labels[partner] == plain.source.labels[image_id]  # type: ignore[index]
        stand_in = batches_of(folder, tmp_path, *common)
        read = stand_in.source.read
        stand_in.source.read = lambda wanted, i=image_id, p=partner, r=read: r(p if wanted == i else wanted)  # type: ignore[method-assign]
        other = stand_in.make(1)
        for name in ("global_views", "local_views"):
            for number in range(len(getattr(batch, name))):
                index = number + (0 if name == "global_views" else 2)
                expected = getattr(other if index % 2 else own, name)
                assert torch.equal(getattr(batch, name)[number, place], expected[number, place]), (name, number)
        assert torch.equal(batch.masks[0, place], own.masks[0, place])


@pytest.mark.parametrize("overrides", [(), ("data.scaled_decoding=true",), ("data.decoded_cache_bytes=1000000",)])
def test_workers_threads_and_kept_images_change_nothing(folder: Path, tmp_path: Path, overrides: tuple[str, ...]):
    expected = [batches_of(folder, tmp_path, GROUPED, "data.threads=1").make(step) for step in range(4)]
    again = batches_of(folder, tmp_path, GROUPED, "data.workers=2", "data.threads=2", *overrides)
    for batch, wanted in zip(batch_loader(again, range(4), pin_memory=False), expected, strict=True):
        if "data.scaled_decoding=true" not in overrides:  # whose views may differ slightly
            assert torch.equal(batch.global_views, wanted.global_views)
            assert torch.equal(batch.local_views, wanted.local_views)
        assert torch.equal(batch.masks, wanted.masks)


def test_a_bad_partner_is_counted_and_replaced_by_the_image_itself(folder: Path, tmp_path: Path):
    grouped = batches_of(folder, tmp_path, GROUPED, "train.batch_size=12", "data.threads=1")
    assert grouped.writer.groups is not None
    plain = batches_of(folder, tmp_path, "train.batch_size=12").make(0)
    victim = grouped.writer.groups.partner(0, seed=0, epoch=0)
    read = grouped.source.read
    grouped.source.read = lambda wanted: b"" if wanted == victim else read(wanted)  # type: ignore[method-assign]
    batch = grouped.make(0)
    place = batch.image_ids.tolist().index(0)
    assert torch.equal(batch.global_views[:, place], plain.global_views[:, place])
    assert {sample.position for sample in batch.bad} == {victim}
    assert {sample.replacement for sample in batch.bad} >= {grouped.source.keys[0]}


def test_reads_of_partners_are_attempts_of_which_a_share_may_fail(folder: Path, tmp_path: Path):
    """A bad image fails as a partner as often as in its own place: that is no larger share of all attempts."""
    photos = shutil.copytree(folder, tmp_path / "photos")
    sorted(photos.rglob("*.*"))[0].write_bytes(b"no image")
    steps = ("train.batch_size=12", "train.epochs=6", "data.max_bad_fraction=0.12", GROUPED)
    config = tiny_config(tmp_path, f"data.train={photos}", *steps)
    run_training(config, tmp_path / "run")
    bad = (tmp_path / "run" / "bad_samples.jsonl").read_text().count("\n")
    assert bad / (6 * 12 + bad) > 0.12 > bad / (2 * 6 * 12 + bad)


def test_other_groups_are_another_run(folder: Path, tmp_path: Path):
    one, two, plain = (batches_of(folder, tmp_path, *extra) for extra in ((GROUPED,), (GROUPED,), ()))
    assert one.digest() == two.digest() != plain.digest()


def test_sources_without_groups_are_refused(tmp_path: Path):
    flat = write_folder(tmp_path / "flat", classes=0, per_class=6)
    with pytest.raises(ConfigError, match=r"data\.groups"):
        batches_of(flat, tmp_path, GROUPED)
    single = write_folder(tmp_path / "single", classes=6, per_class=1)
    with pytest.raises(ConfigError, match=r"data\.groups"):
        batches_of(single, tmp_path, GROUPED)
    for wrong in ("data.groups=folders", "data.groups=1"):
        with pytest.raises(ConfigError, match=r"data\.groups"):
            tiny_config(tmp_path, wrong)
    with pytest.raises(ConfigError, match=r"data\.groups"):
        tiny_config(tmp_path, GROUPED, "data.access=sequential", "data.samples_per_epoch=8")
