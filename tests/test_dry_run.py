"""What a dry run tells of the data and of the memory that a device needs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sop_faiss.data.images.source import open_source
from sop_faiss.errors import ConfigError
from sop_faiss.model.networks import Network
from sop_faiss.objectives.choose import choose_objective
from sop_faiss.verbs.training import dry_run
from sop_faiss.verbs.training.dry_run import activation_bytes, describe_run
from tests.images import write_folder, write_shards
from tests.runs import conv_config, networks_of, tiny_config


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    return write_shards(tmp_path_factory.mktemp("train"), classes=3, per_class=8, size=20)


def described(folder: Path, source: object, *overrides: str) -> dict:
    return describe_run(tiny_config(folder, f"data.train={source}", *overrides))


def test_where_shards_come_from(tmp_path, shards):
    told = described(tmp_path, shards)["data"]
    sizes = sum(path.stat().st_size for path in shards.glob("*.tar"))
    assert told == {
        "source": str(shards),
        "remote": False,
        "kind": "shards",
        "shards": 2,
        "bytes": sizes,
        "root": str(shards),
        "images": 24,
        "labeled_images": 24,
        "classes": 3,
    }
    assert described(tmp_path, shards)["data"] == told  # by now each shard has an index beside it
    cache = ("data.access=cached", f"data.cache_dir={tmp_path / 'cache'}")
    cached = described(tmp_path, shards, *cache)["data"]
    assert cached["cache"] == {"folder": str(tmp_path / "cache"), "limit_bytes": 100_000_000_000, "shards_here": 0}
    open_source(shards, tiny_config(tmp_path, *cache).data).read(0)
    assert described(tmp_path, shards, *cache)["data"]["cache"]["shards_here"] == 1
    stream = described(tmp_path, shards, "data.access=sequential", "data.samples_per_epoch=12")["data"]
    assert (stream["kind"], stream["shards"], stream["images_per_epoch"]) == ("shards, read in sequence", 2, 12)


def test_where_files_come_from(tmp_path):
    photos = write_folder(tmp_path / "photos", classes=2, per_class=12, size=20)
    told = described(tmp_path, photos)["data"]
    assert (told["kind"], told["folders"], told["images"], told["classes"]) == ("folder of images", 2, 24, 2)
    (tmp_path / "list.txt").write_text("".join(f"photos/class_0/{number:04d}.jpg\n" for number in range(12)))
    told = described(tmp_path, tmp_path / "list.txt", "sop.cls.num_supports=1")["data"]
    assert (told["kind"], told["folders"], told["images"]) == ("list of images", 1, 12)
    assert (told["classes"], told["labeled_images"]) == (0, 0)


class _Known(Network):
    """Of this one it can be said by hand what autograd keeps: the input (for the weight) and the exponential."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.backbone = SimpleNamespace(patch_size=4)
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, images, masks, patches, wants_cls):
        kept = (images * self.weight).exp()
        return kept, kept.detach()  # the second is no other storage


def activations_of(config: Config, student: Network | None = None) -> tuple[int, int]:
    needs = choose_objective(config).needs(torch.device("cpu"), 100)
    return activation_bytes(student or _Known(), config, needs)


def test_activations_are_what_autograd_keeps(tmp_path):
    assert activations_of(tiny_config(tmp_path)) == (2 * 3 * 16 * 16 * 4, 2 * 3 * 8 * 8 * 4)
    assert activations_of(tiny_config(tmp_path, "views.local_count=0"))[1] == 0
    assert activations_of(tiny_config(tmp_path, "sop.cls.weight=0"))[1] == 0


def test_dropped_patches_keep_nothing(tmp_path):
    common = ("masks.kind=none", "sop.patch.weight=0", "model.drop_path=0")
    kept = []
    for drop in (0, 0.25, 0.5):
        config = tiny_config(tmp_path, *common, f"masks.drop={drop}")
        kept.append(activations_of(config, networks_of(config)[0])[0])
    assert kept[1] < 0.9 * kept[0] and kept[2] < 0.9 * kept[1]


def test_activations_grow_with_depth_and_draw_nothing(tmp_path):
    kept = []
    for depth in (2, 4, 6):
        config = tiny_config(tmp_path, f"model.depth={depth}", "model.drop_path=0")
        state = torch.get_rng_state()
        kept.append(activations_of(config, networks_of(config)[0])[0])
        assert torch.equal(torch.get_rng_state(), state)
    assert kept[2] - kept[1] == kept[1] - kept[0] > 0


def test_the_total_is_the_sum_and_shrinks_with_ranks_and_parts(tmp_path, shards, monkeypatch):
    common = ("train.batch_size=12", "model.drop_path=0")
    whole = described(tmp_path, shards, *common)
    parts = [value for key, value in whole.items() if key.endswith("_bytes") and key != "checkpoint_bytes"]
    assert whole["device_bytes_estimate"] == sum(parts) and len(parts) == 11
    assert "bf16" in whole["device_bytes_estimate_is"]
    assert (whole["world_size"], whole["batch_size_per_rank"], whole["device"]) == (1, 12, "cpu")
    assert whole["gradient_buckets_bytes"] == 0
    assert (
        described(tmp_path, shards, *common, "train.accumulate=3")["activations_bytes"] * 3
        == whole["activations_bytes"]
    )
    apart = described(tmp_path, shards, *common, "train.views_apart=true")["activations_bytes"]
    assert whole["activations_bytes"] / 2 <= apart < whole["activations_bytes"]
    half = described(tmp_path, shards, *common, "train.precision=bf16")["activations_bytes"]
    assert half * 2 == whole["activations_bytes"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    two = described(tmp_path, shards, *common)
    assert (two["world_size"], two["batch_size_per_rank"]) == (2, 6)
    assert two["activations_bytes"] * 2 == whole["activations_bytes"]
    parameters = whole["backbone_parameters"] + whole["projector_parameters"]
    assert two["gradient_buckets_bytes"] == parameters * 4
    assert (whole["parallel"], two["parallel"]) == ("none", "ddp")
    assert whole["weights_and_optimizer_bytes"] == two["weights_and_optimizer_bytes"] == parameters * 4 * 5
    sharded = described(tmp_path, shards, *common, "train.parallel=fsdp")
    assert (sharded["parallel"], sharded["gradient_buckets_bytes"]) == ("fsdp", 0)
    assert sharded["weights_and_optimizer_bytes"] == (parameters + 4 * -(-parameters // 2)) * 4
    assert 0 < sharded["gathered_weights_bytes"] <= parameters * 4 * 2
    monkeypatch.setenv("WORLD_SIZE", "5")
    with pytest.raises(ConfigError, match="not divisible by the 5 ranks"):
        described(tmp_path, shards, *common)
    assert dry_run.with_total({"a_bytes": 1, "rows": 7, "b_bytes": 2})["device_bytes_estimate"] == 3


def test_a_view_that_ends_as_one_value_per_channel_is_counted(tmp_path, shards):
    """Batch norm in training mode refuses a batch of one."""
    small, large = (
        describe_run(conv_config(tmp_path, f"data.train={shards}", f"views.local_size={size}"))["activations_bytes"]
        for size in (32, 64)
    )
    assert 0 < small < large
