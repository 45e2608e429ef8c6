"""DDP, FSDP2 and gradients averaged by hand give the same training; ranks that differ are noticed."""

from __future__ import annotations

import pytest
import torch

from sop_faiss.distributed import checksum
from sop_faiss.train.parallel import share_student
from sop_faiss.train.state import RunState
from tests.forked import launch
from tests.images import write_shards
from tests.runs import tiny_config


@pytest.mark.slow
@pytest.mark.distributed
def test_ways_to_share_the_student_train_alike(tmp_path):
    shards = write_shards(tmp_path / "shards", classes=2, per_class=12, size=20)
    launch(tmp_path / "log", ["-m", "tests.parallel_ranks"], tmp_path, shards)


def test_one_rank_shares_nothing(tmp_path):
    state = RunState(tiny_config(tmp_path, "train.parallel=fsdp"), torch.device("cpu"), 24)
    assert not state.is_sharded
    assert share_student(state.networks.shared_student, state.config, torch.device("cpu"), None) == (
        state.networks.shared_student,
        False,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16, torch.bool])
def test_a_checksum_tells_one_changed_element_and_two_swapped_ones(dtype):
    values = (torch.rand(1_500_000, generator=torch.Generator().manual_seed(0)) * 100 - 50).relu().to(dtype)
    before = checksum(values)
    assert -(2**63) <= before < 2**63
    assert checksum(values.clone()) == before == checksum(values.view(1500, 1000).T.contiguous().T)
    for place in (0, 5, 1_048_576, 1_499_999):
        changed = values.clone()
        changed[place] = changed[place] == 0
        assert checksum(changed) != before
    swapped = values.clone()
    other = int((values != values[7]).nonzero()[0])
    swapped[[7, other]] = values[[other, 7]]
    assert checksum(swapped) != before
    assert checksum(values[:0]) == 0
