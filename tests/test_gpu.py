"""What needs a CUDA device: the memory searched in place, the losses and their kernel, and a short run in bf16."""

from __future__ import annotations

import itertools

import pytest
import torch

from sop_faiss.neighbors.mirror import RingMirror, has_bf16
from sop_faiss.neighbors.selftest import count_faiss_gpus
from sop_faiss.sop import kernel
from sop_faiss.sop.loss import MemberWeights, assignment_cross_entropy, log_assignment
from sop_faiss.sop.memory import Memory
from sop_faiss.verbs.training.train import run_training
from tests.images import write_shards
from tests.oracle import dense_assignment, product_and_topk
from tests.runs import tiny_config
from tests.test_bf16 import RECALL_FLOOR, clustered, recall
from tests.unit_vectors import random_unit as unit

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.fixture(params=itertools.product(("faiss", "torch", "auto"), ("float32", "bf16")), ids="-".join)
def engine_and_precision(request) -> tuple[str, str]:
    engine, precision = request.param
    if precision == "bf16" and not has_bf16(CUDA):
        pytest.skip("no bfloat16 arithmetic")
    if engine == "faiss" and count_faiss_gpus() == 0:
        pytest.skip("FAISS has no GPU code here")
    return engine, precision


@pytest.mark.parametrize(("capacity", "k"), [(500, 9), (5001, 9), (300, 300)])
def test_the_ring_is_searched_in_place(engine_and_precision, capacity, k):
    mirror = RingMirror(capacity, 64, CUDA, *engine_and_precision)
    mirror.rows.copy_(unit(capacity, 64))
    storage = mirror.rows.data_ptr()
    mirror.search(mirror.rows[:20], k)
    mirror.rows[123] = mirror.rows[7]  # past the mirror's own method
    mirror.write(capacity - 2, mirror.rows[40:45].clone())  # round the end
    found = mirror.search(mirror.rows[:20], k)
    oracle, _ = product_and_topk(mirror.rows[:20].double(), mirror.rows.double(), k)
    claimed = (mirror.rows[found.rows].double() * mirror.rows[:20].double().unsqueeze(1)).sum(-1)
    torch.testing.assert_close(found.similarities.double(), oracle, rtol=0, atol=1e-5)
    torch.testing.assert_close(claimed, oracle, rtol=0, atol=1e-5)
    assert found.rows[7, :2].tolist() == [7, 123]
    assert mirror.engine in ("faiss", "torch")
    assert mirror.rows.data_ptr() == storage


def test_searches_follow_the_current_stream(engine_and_precision):
    mirror = RingMirror(20_000, 64, CUDA, *engine_and_precision)
    mirror.rows.copy_(unit(20_000, 64))
    new = unit(100, 64, seed=5).cuda()
    mirror.search(new, 3)  # a trial would wait for all streams
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)  # what follows on this stream is late: a search on another would see old rows
        mirror.write(0, new)
        rows = mirror.search(new, 1).rows.flatten()
    torch.cuda.synchronize()
    assert rows.tolist() == list(range(100))


def test_a_trial_is_made_once_said_and_kept(caplog):
    if count_faiss_gpus() == 0:
        pytest.skip("FAISS has no GPU code here")
    with caplog.at_level("INFO"):
        memory = Memory(3000, 32, torch.Generator().manual_seed(0), "cuda")
        assert memory.engine == "auto" and "neighbor_engine" not in memory.state_dict()
        for _ in range(2):
            memory.search(unit(64, 32).cuda(), 9)
    lines = [record.getMessage() for record in caplog.records if "neighbors.engine=auto takes" in record.getMessage()]
    assert len(lines) == 1 and memory.engine in lines[0] and "64 queries in 3000 x 32" in lines[0]
    for engine in ("faiss", "torch"):
        state = memory.state_dict() | {"neighbor_engine": torch.tensor(("faiss", "torch").index(engine))}
        resumed = Memory(3000, 32, torch.Generator().manual_seed(1), "cuda")
        resumed.load_state_dict(state)
        resumed.search(unit(64, 32).cuda(), 9)
        assert resumed.engine == engine
        assert int(resumed.state_dict()["neighbor_engine"]) == int(state["neighbor_engine"])


def test_more_neighbors_than_faiss_can_find():
    mirror = RingMirror(3000, 16, CUDA)
    mirror.rows.copy_(unit(3000, 16))
    found = mirror.search(mirror.rows[:5], 2500)
    oracle, _ = product_and_topk(mirror.rows[:5], mirror.rows, 2500)
    torch.testing.assert_close(found.similarities, oracle, rtol=0, atol=1e-5)


def test_bf16_finds_what_float32_finds():
    if not has_bf16(CUDA):
        pytest.skip("no bfloat16 arithmetic")
    rows = clustered(16_384, 256).cuda()
    mirror = RingMirror(len(rows), 256, CUDA, precision="bf16")
    mirror.rows.copy_(rows)
    found = mirror.search(rows[:1000], 9)
    assert recall(found.similarities, rows[:1000] @ rows.T) >= RECALL_FLOOR


def test_the_loss_equals_the_dense_formula():
    members, weights = unit(12, 3, 16).cuda(), torch.full((12, 3), 0.8).cuda()
    u = unit(9, 16).cuda().requires_grad_()
    targets = torch.softmax(torch.randn(9, 12), 1).cuda()
    rows = torch.full((9,), 1 / 9).cuda()
    value = assignment_cross_entropy(u, targets, rows, MemberWeights.of(members, weights), 0.1)
    dense = dense_assignment(u.detach().cpu().double(), members.cpu().double(), weights.cpu().double(), 0.1)
    oracle = -(targets.cpu().double() * dense.log()).sum(1).mean()
    assert value.item() == pytest.approx(oracle.item(), rel=1e-5)


def kernel_case(rows: int, count: int, size: int, dim: int, eps: float):
    members = unit(count, size, dim).cuda()
    anchors = members[:, :1]
    weights = (members * anchors).sum(-1).clamp(1 / count, 1)
    weights[:, 0] = 1 - eps
    return members, weights, unit(rows, dim, seed=1).cuda()


@pytest.mark.parametrize("student_temp", [0.1, 0.04])
@pytest.mark.parametrize(
    ("rows", "count", "size", "dim"),
    [(97, 4096, 9, 256), (16, 4096, 9, 256), (1, 5, 3, 40), (700, 512, 1, 192), (33, 100, 2, 320), (50, 64, 2, 128)],
)
@pytest.mark.parametrize("eps", [0.1, 0.0])
def test_the_kernel_equals_the_blocks_in_float64(rows, count, size, dim, eps, student_temp):
    members, weights, u = kernel_case(rows, count, size, dim, eps)
    if not kernel.kernel_available(u.device):
        pytest.skip("the kernel does not run on this device")
    row_weights = torch.linspace(0.1, 1, rows).cuda()
    teacher, results = unit(rows, dim, seed=2).cuda(), []
    exact_targets = log_assignment(teacher.double(), MemberWeights.of(members.double(), weights.double()), 0.05).exp()
    for dtype in (torch.float64, torch.float32):
        leaf, member_weights = u.to(dtype).requires_grad_(), MemberWeights.of(members.to(dtype), weights.to(dtype))
        value = assignment_cross_entropy(leaf, exact_targets, row_weights, member_weights, student_temp)
        value.backward()
        results.append((value.detach().double(), leaf.grad.double()))
    (exact, exact_gradient), (value, gradient) = results
    targets = log_assignment(teacher, MemberWeights.of(members, weights), 0.05).exp()
    torch.testing.assert_close(targets.double(), exact_targets, rtol=2e-5, atol=1e-9)
    torch.testing.assert_close(targets.sum(1), torch.ones(rows).cuda(), rtol=0, atol=2e-5)
    torch.testing.assert_close(value, exact, rtol=1e-5, atol=0)
    assert float((gradient - exact_gradient).norm() / exact_gradient.norm()) <= max(1e-5, 1e-6 / student_temp)


def test_the_kernel_takes_a_cuda_device_with_tf32():
    device = torch.device("cuda", torch.cuda.current_device())
    if torch.version.cuda is None or torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("no NVIDIA device with TF32")
    pytest.importorskip("triton")
    assert kernel.why_unavailable(device) is None


def test_the_kernel_is_finite_at_log_of_zero_and_gives_the_same_bits_twice():
    members, _, u = kernel_case(40, 300, 2, 64, 0.1)
    member_weights = MemberWeights.of(members, torch.ones(300, 2).cuda())
    targets = torch.eye(300).cuda()[:40]
    gradients = []
    for _ in range(2):
        leaf = u.clone().requires_grad_()
        value = assignment_cross_entropy(leaf, targets, torch.ones(40).cuda(), member_weights, 0.005)
        value.backward()
        assert torch.isfinite(value)
        assert torch.isfinite(leaf.grad).all()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)


def test_a_short_run_in_bf16(tmp_path):
    shards = write_shards(tmp_path / "shards", classes=2, per_class=12, size=20)
    config = tiny_config(tmp_path, f"data.train={shards}", "train.device=cuda", "train.epochs=2")
    assert run_training(config, tmp_path / "run").finished
