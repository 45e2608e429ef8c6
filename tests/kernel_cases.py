"""The loss's Triton kernel against dense Y in float64, on the CPU under Triton's interpreter.

Not collected by itself: `test_kernel.py` runs it in a process of its own, since TRITON_INTERPRET must be set before
Triton is imported and would change every kernel of the process.
"""

from __future__ import annotations

import os

import pytest
import torch

from sop_faiss.sop import kernel, loss
from sop_faiss.sop.loss import MemberWeights, assignment_cross_entropy, log_assignment
from sop_faiss.sop.prototypes import contributions
from tests.oracle import dense_assignment
from tests.unit_vectors import random_unit as unit


def tolerance(temperature: float) -> float:
    """1e-5, and more where the temperature divides a float32 similarity's own error of about 1e-7 by less than 0.1."""
    return max(1e-5, 1e-6 / temperature)


@pytest.fixture(autouse=True)
def on_the_kernel(monkeypatch):
    """Everything goes to the kernel, and nothing to the blocks."""
    assert os.environ.get("TRITON_INTERPRET") == "1"

    def blocks(*_arguments: object) -> None:
        raise AssertionError("the blocks were used")

    monkeypatch.setattr(kernel, "kernel_available", lambda device: True)
    monkeypatch.setattr(loss, "_assign_block", blocks)


def check(u: torch.Tensor, members: torch.Tensor, weights: torch.Tensor, temperature: float) -> None:
    """P, the loss and its gradient against the oracle, in every row."""
    count = len(members)
    member_weights = MemberWeights.of(members, weights)
    targets = torch.softmax(5 * unit(len(u), count, seed=7), dim=1)
    row_weights = torch.linspace(0.1, 1.0, len(u))
    ours, theirs = u.clone().requires_grad_(), u.double().requires_grad_()

    exact = dense_assignment(theirs, members.double(), weights.double(), temperature)
    with torch.no_grad():
        assigned = log_assignment(u, member_weights, temperature).exp()
    torch.testing.assert_close(assigned.double(), exact.detach(), rtol=tolerance(temperature), atol=1e-8)
    torch.testing.assert_close(assigned.sum(1), torch.ones(len(u)), rtol=0, atol=tolerance(temperature))

    value = assignment_cross_entropy(ours, targets, row_weights, member_weights, temperature)
    oracle = -(row_weights.double()[:, None] * targets.double() * exact.log()).sum()
    value.backward()
    oracle.backward()
    torch.testing.assert_close(value.detach().double(), oracle.detach(), rtol=1e-5, atol=0)
    error = (ours.grad.double() - theirs.grad).norm(dim=1)
    # A row's gradient is weight/temperature times a sum of member_weights p that may cancel; each has the error above.
    rounding = 1e-7 / temperature * row_weights / temperature
    assert (error <= tolerance(temperature) * theirs.grad.norm(dim=1) + rounding).all()


@pytest.mark.parametrize(
    ("rows", "count", "supports", "dim", "kind", "eps", "temperature"),
    [
        (1, 2, 0, 3, "one_hot", 0.1, 0.1),
        (7, 33, 2, 20, "similarity", 0.1, 0.1),
        (40, 70, 1, 16, "smooth", 0.1, 0.04),
        (17, 40, 8, 9, "similarity", 0.0, 0.07),
        (5, 12, 3, 64, "similarity", 0.0, 0.01),
        (5, 12, 3, 70, "one_hot", 0.1, 0.01),
        (3, 9, 1, 272, "similarity", 0.1, 1.0),  # more dimensions than one program of the gradient makes
        (33, 130, 0, 192, "similarity", 0.1, 0.1),
    ],
)
def test_equal_to_dense_labels(rows, count, supports, dim, kind, eps, temperature):
    members = unit(count, supports + 1, dim, seed=rows)
    similarities = (members[:, 1:] * members[:, :1]).sum(-1)
    weights = contributions(similarities.unsqueeze(0), kind, eps)[0]
    check(unit(rows, dim, seed=rows + 1), members, weights, temperature)


def test_members_may_be_equal():
    members = unit(20, 3, 8, seed=1)
    members[3:9] = members[2]
    members[:, 2] = members[:, 1]
    check(unit(6, 8, seed=2), members, torch.full((20, 3), 0.9), 0.1)


def test_half_precision_embeddings_are_computed_in_float32():
    members, weights, u = unit(20, 2, 16, seed=1), torch.full((20, 2), 0.8), unit(5, 16, seed=2).bfloat16()
    member_weights = MemberWeights.of(members, weights)
    with torch.no_grad():
        assigned = log_assignment(u, member_weights, 0.1)
    assert assigned.dtype == torch.float32
    exact = dense_assignment(u.double(), members.double(), weights.double(), 0.1)
    torch.testing.assert_close(assigned.double(), exact.log(), rtol=1e-5, atol=1e-5)
    leaf = u.clone().requires_grad_()
    assignment_cross_entropy(leaf, assigned.exp(), torch.ones(5), member_weights, 0.2).backward()
    assert leaf.grad.dtype == torch.bfloat16
    assert torch.isfinite(leaf.grad).all()


def test_finite_where_the_dense_formula_underflows():
    members = torch.stack([unit(4, seed=1), -unit(4, seed=1)]).unsqueeze(1)
    member_weights = MemberWeights.of(members, torch.ones(2, 1))
    u = members[0].clone().requires_grad_()
    with torch.no_grad():
        assigned = log_assignment(u, member_weights, 0.005)
    assert assigned[0, 1].item() == pytest.approx(-400.0, rel=1e-4)
    value = assignment_cross_entropy(u, torch.tensor([[0.0, 1.0]]), torch.ones(1), member_weights, 0.005)
    value.backward()
    assert value.item() == pytest.approx(400.0, rel=1e-4)
    assert torch.isfinite(u.grad).all()


def test_the_cut_into_programs_does_not_change_the_result(monkeypatch):
    members, u = unit(100, 2, 8, seed=1), unit(9, 8, seed=2)
    member_weights = MemberWeights.of(members, torch.full((100, 2), 0.9))
    targets = torch.softmax(5 * unit(9, 100, seed=3), dim=1)
    results = []
    for programs in (1, 3, 1000):
        monkeypatch.setattr(kernel, "_PROGRAMS_OF_THE_INTERPRETER", programs)
        results.append(kernel.cross_entropy(u, targets, torch.ones(9), member_weights, 0.1, True))
    for value, gradient in results[1:]:
        torch.testing.assert_close(value, results[0][0], rtol=1e-6, atol=0)
        torch.testing.assert_close(gradient, results[0][1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_the_self_test_is_passed(mode):
    with mode():
        assert kernel.self_test_error(torch.device("cpu")) < 1e-4
