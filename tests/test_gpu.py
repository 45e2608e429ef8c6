"""What needs a CUDA device: the memory searched in place, the losses, and a short run in bf16."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from sop_faiss.neighbors.mirror import RingMirror, search_by_blocks
from sop_faiss.pipeline.train import run_training
from sop_faiss.sop.loss import MemberShares, assignment_cross_entropy
from tests.images import write_shards
from tests.oracle import dense_assignment
from tests.runs import tiny_config

pytestmark = pytest.mark.gpu


def unit(*shape: int) -> torch.Tensor:
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(0)), dim=-1)


@pytest.mark.parametrize("engine", ["auto", "torch"])
def test_the_ring_is_searched_in_place(engine):
    mirror = RingMirror(500, 64, torch.device("cuda"), engine)
    mirror.rows.copy_(unit(500, 64))
    storage = mirror.rows.data_ptr()
    mirror.rows[123] = mirror.rows[7]
    found = mirror.search(mirror.rows[:20], 9)
    oracle = search_by_blocks(mirror.rows[:20].double().float(), mirror.rows, 9)
    torch.testing.assert_close(found.similarities, oracle.similarities, rtol=1e-5, atol=1e-5)
    assert found.rows[7, :2].tolist() == [7, 123]
    assert mirror.rows.data_ptr() == storage


def test_the_loss_equals_the_dense_formula():
    members, weights = unit(12, 3, 16).cuda(), torch.full((12, 3), 0.8).cuda()
    u = unit(9, 16).cuda().requires_grad_()
    targets = torch.softmax(torch.randn(9, 12), 1).cuda()
    rows = torch.full((9,), 1 / 9).cuda()
    value = assignment_cross_entropy(u, targets, rows, MemberShares.of(members, weights), 0.1)
    dense = dense_assignment(u.detach().cpu().double(), members.cpu().double(), weights.cpu().double(), 0.1)
    oracle = -(targets.cpu().double() * dense.log()).sum(1).mean()
    assert value.item() == pytest.approx(oracle.item(), rel=1e-5)


def test_a_short_run_in_bf16(tmp_path):
    shards = write_shards(tmp_path / "shards", classes=2, per_class=12, size=20)
    config = tiny_config(tmp_path, f"data.train={shards}", "train.device=cuda", "train.epochs=2")
    assert run_training(config, tmp_path / "run").finished
