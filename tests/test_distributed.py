"""Gather and average, with and without a process group; one rank and two give the same training."""

from __future__ import annotations

import pytest
import torch

from sop_faiss import distributed
from sop_faiss.errors import ConfigError
from sop_faiss.model.checkpoint import find_checkpoint, read_tensors
from sop_faiss.train.log.monitor import read_metrics
from tests.forked import end, launch, start
from tests.images import write_shards
from tests.runs import tiny_config_file

GATHER = """
import torch, weakref
from sop_faiss import distributed
distributed.join_process_group("cpu")
rank = distributed.rank()
rows = torch.arange(3 * rank, dtype=torch.float32).view(-1, 1) + 10 * rank  # 0, 3, 6 ... rows
gathered = distributed.gather_rows(rows)
assert gathered.flatten().tolist() == [10, 11, 12], gathered
equal = torch.arange(6.0).view(3, 2).T + 10 * rank  # not contiguous
assert torch.equal(distributed.gather_equal_rows(equal), distributed.gather_rows(equal))
mean = distributed.average(torch.tensor([float(rank)]))
assert mean.tolist() == [0.5], mean
import torch.distributed.nn.functional  # its defaults must not keep the group, whose threads may abort a process later
group = weakref.ref(torch.distributed.group.WORLD)
distributed.leave_process_group()
assert group() is None
assert distributed.world_size() == 1
"""


def test_alone():
    rows = torch.arange(6).view(3, 2)
    assert distributed.gather_rows(rows) is rows and distributed.gather_equal_rows(rows) is rows
    assert distributed.average(rows) is rows
    assert (distributed.rank(), distributed.world_size(), distributed.is_main()) == (0, 1, True)
    assert distributed.join_process_group("cpu") == torch.device("cpu")


def test_devices_that_are_not_there():
    with pytest.raises(ConfigError, match="wanted cpu, cuda or auto"):
        distributed.join_process_group("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA device"):
            distributed.join_process_group("cuda")


@pytest.mark.distributed
def test_two_ranks_gather_unequal_rows(tmp_path):
    launch(tmp_path / "log", ["-c", GATHER])


@pytest.mark.distributed
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("masks.kind=none", "sop.patch.weight=0"),
        ("sop.cls.weight=0", "sop.anchors=fixed_vectors"),
        ("train.accumulate=3", "train.views_apart=true"),
        ("optim.projector_warmup_epochs=0.5", "optim.layer_decay=0.7"),
    ],
)
def test_one_and_two_ranks_train_alike(tmp_path, overrides):
    shards = write_shards(tmp_path / "shards", classes=2, per_class=12, size=20)
    common = [tiny_config_file(tmp_path), f"data.train={shards}", "train.epochs=2", "model.drop_path=0", *overrides]
    for ranks in (1, 2):
        words = [*common, "--output", tmp_path / f"ranks{ranks}"]
        assert end(start(words, tmp_path / "log", ranks=ranks)) == [0] * ranks, (tmp_path / "log").read_text()
    one, two = (read_metrics(tmp_path / f"ranks{ranks}") for ranks in (1, 2))
    assert len(one) == len(two) == 8
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        for key in a.keys() - {"images_per_second", "data_wait_share", "memory_peak_bytes"}:
            expected = None if b[key] is None else pytest.approx(b[key], rel=1e-3, abs=1e-5)
            assert a[key] == expected, key
    memories = [read_tensors(find_checkpoint(tmp_path / f"ranks{ranks}"), "objective") for ranks in (1, 2)]
    for key in memories[0]:
        torch.testing.assert_close(memories[0][key], memories[1][key], rtol=1e-3, atol=1e-3)


@pytest.mark.distributed
def test_an_occupied_output_is_refused_on_every_rank(tmp_path):
    shards = write_shards(tmp_path / "shards", classes=2, per_class=12, size=20)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("precious")
    words = [tiny_config_file(tmp_path), f"data.train={shards}", "--output", tmp_path / "run"]
    launch(tmp_path / "log", ["-m", "sop_faiss.cli.train"], *words, status=1)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.txt"]
