"""The profile of the stream: its arithmetic against simulation, its stages against the views that training gets."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sop_faiss.data import profile
from sop_faiss.data.images.source import open_source
from sop_faiss.data.profile import STAGES, ideal_distinct, shuffle_quality, time_stages, time_stream
from sop_faiss.data.stream import Batches
from sop_faiss.data.views import multicrop
from sop_faiss.errors import ConfigError, DataError
from sop_faiss.verbs.training.profile_data import profile_data, wait_share
from tests.images import write_folder, write_shards
from tests.runs import tiny_config


@pytest.mark.parametrize(("sizes", "drawn"), [((5, 5, 5, 5), 6), ((1, 2, 30), 4), ((7,), 3), ((4, 4), 8), ((3, 9), 1)])
def test_ideal_distinct_is_what_drawing_gives(sizes: tuple[int, ...], drawn: int) -> None:
    rng = np.random.default_rng(0)
    group_of = np.repeat(np.arange(len(sizes)), sizes)
    met = [len(set(rng.choice(group_of, drawn, replace=False))) for _ in range(4000)]
    assert ideal_distinct(sizes, drawn) == pytest.approx(np.mean(met), abs=4 * np.std(met) / 4000**0.5 + 1e-9)


def test_the_known_figure_of_webdatasets_shuffle() -> None:
    """20 equal shards, batches of 64: a uniform draw meets 19 of them, a shuffle buffer of 1000 only 7.5."""
    assert ideal_distinct([1000] * 20, 64) == pytest.approx(19.2, abs=0.1)


def test_shuffle_quality_counts_shards_or_folders(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "set", classes=2, per_class=30, size=8, shards=10)
    source = open_source(shards)
    batches = Batches(source, np.arange(60), tiny_config(tmp_path), 4)
    mix = shuffle_quality(batches)
    by_hand = [len({source.source_of(int(i)) for i in batches.image_ids(step)}) for step in range(10)]
    assert (mix.groups, mix.distinct) == (10, np.mean(by_hand))
    assert mix.distinct / mix.ideal == pytest.approx(1.0, abs=0.15)
    one_shard = Batches(source, np.arange(6), tiny_config(tmp_path), 4)
    assert shuffle_quality(one_shard) == profile.ShuffleQuality(1, 1.0, 1.0)
    folder = open_source(write_folder(tmp_path / "photos", classes=3, per_class=4))
    assert shuffle_quality(Batches(folder, np.arange(12), tiny_config(tmp_path), 4)).groups == 3


def test_stages_do_what_the_stream_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stage runs once per image, view or mask; images that cannot be read are passed over."""
    folder = write_folder(tmp_path / "photos", classes=0, per_class=8, size=20)
    (folder / "0003.jpg").write_text("text")
    batches = Batches(open_source(folder), np.arange(8), tiny_config(tmp_path, "views.local_count=3"), 4)
    calls = dict.fromkeys(("decode_image", "write_view", "augment_colors", "draw_mask"), 0)
    for name in calls:
        module = multicrop if name == "decode_image" else profile
        real = getattr(module, name)

        def counted(*arguments: Any, _name: str = name, _real: Any = real, **options: Any) -> object:
            calls[_name] += 1
            return _real(*arguments, **options)

        monkeypatch.setattr(module, name, counted)
    seconds = time_stages(batches, list(range(8)))
    assert calls == {"decode_image": 8, "write_view": 7 * 5, "augment_colors": 7 * 5, "draw_mask": 7 * 2}
    assert tuple(seconds) == STAGES and all(0 < value < 10 for value in seconds.values())
    with pytest.raises(DataError, match="none of 1 images"):
        time_stages(batches, [3])
    on_device = Batches(open_source(folder), np.arange(8), tiny_config(tmp_path, "views.color=device"), 4)
    assert tuple(time_stages(on_device, [0])) == tuple(stage for stage in STAGES if stage != "color")


def test_the_stream_is_timed_whole(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "set", classes=2, per_class=10, size=20)
    calls: list[tuple[int, int]] = []
    batches = Batches(open_source(shards), np.arange(20), tiny_config(tmp_path, "data.workers=1"), 4)
    speed = time_stream(batches, range(4), lambda *call: calls.append(call))
    assert (speed.images, speed.steps, speed.bad) == (24, 4, 0) and speed.seconds > 0
    assert calls == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_wait_share() -> None:
    assert wait_share(2.0, 0.5, workers=2) == 0.75  # the stream sets the pace
    assert wait_share(0.5, 2.0, workers=2) == 0.0
    assert wait_share(1.0, 1.0, workers=0) == 0.5  # nothing is made meanwhile


def test_the_whole_profile(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "set", classes=2, per_class=10, size=20)
    told = profile_data(tiny_config(tmp_path, f"data.train={shards}"), steps=4, step_seconds=(1.0,))
    assert json.loads(json.dumps(told)) == told
    assert told["images_per_second"] == pytest.approx(6 / told["seconds_per_batch"])
    assert tuple(told["stages"]) == STAGES
    assert sum(stage["share"] for stage in told["stages"].values()) == pytest.approx(1.0)
    assert told["shuffle"]["groups"] == 2
    for options in ({"steps": 0}, {"step_seconds": (1.0, 0.0)}, {"step_seconds": (math.nan,)}):
        with pytest.raises(ConfigError, match="`" + next(iter(options))):
            profile_data(tiny_config(tmp_path, f"data.train={shards}"), **options)
