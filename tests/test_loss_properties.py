"""What holds of the loss whatever goes in: it is finite, P sums to 1, and the order of the members says nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from sop_faiss.sop.loss import MemberWeights, assignment_cross_entropy, log_assignment
from sop_faiss.sop.prototypes import contributions
from tests.unit_vectors import random_unit as unit

KINDS = ("similarity", "smooth", "one_hot")


def make_member_weights(members: Tensor, kind: str, eps: float) -> MemberWeights:
    similarities = (members[:, 1:] * members[:, :1]).sum(-1)
    weights = contributions(similarities.float().unsqueeze(0), kind, eps)[0]
    return MemberWeights.of(members, weights.to(members.dtype))


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(1, 5),
    count=st.integers(2, 10),
    supports=st.integers(0, 3),  # S = 1 with none
    dim=st.integers(2, 8),
    kind=st.sampled_from(KINDS),
    eps=st.sampled_from([0.0, 0.1]),
    temperature=st.sampled_from([0.005, 0.01, 0.1]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    copies=st.sampled_from(["none", "members", "prototypes", "all"]),
    where=st.sampled_from(["anywhere", "on a member", "opposite a member"]),
    seed=st.integers(0, 1000),
)
def test_finite_always_and_p_sums_to_1(rows, count, supports, dim, kind, eps, temperature, dtype, copies, where, seed):
    members = unit(count, supports + 1, dim, seed=seed)
    if copies in ("members", "all"):
        members[:] = members[:, :1].clone()
    if copies in ("prototypes", "all"):
        members[:] = members[:1].clone()
    member_weights = make_member_weights(members, kind, eps)
    u = unit(rows, dim, seed=seed + 1)
    if where != "anywhere":
        u[:] = members[0, 0] if where == "on a member" else -members[0, 0]
    leaf = u.to(dtype).requires_grad_()

    assigned = log_assignment(leaf.detach(), member_weights, temperature)
    assert assigned.dtype == torch.float32
    assert torch.isfinite(assigned).all()
    # a logit of 1/temperature has a rounding error of 6e-8/temperature, and P that error relative to itself
    torch.testing.assert_close(assigned.exp().sum(1), torch.ones(rows), rtol=0, atol=1e-6 / temperature)

    teachers = log_assignment(unit(rows, dim, seed=seed + 2), member_weights, 0.01).exp()
    farthest = F.one_hot(assigned.argmin(1), count).float()
    for targets in (teachers, farthest):
        (gradient,) = torch.autograd.grad(
            value := assignment_cross_entropy(leaf, targets, torch.ones(rows), member_weights, temperature), leaf
        )
        assert torch.isfinite(value)
        assert gradient.dtype == dtype
        assert torch.isfinite(gradient).all()


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(2, 12),
    supports=st.integers(0, 4),
    kind=st.sampled_from(KINDS),
    eps=st.sampled_from([0.0, 0.1]),
    temperature=st.sampled_from([0.01, 0.04, 0.1]),
    seed=st.integers(0, 1000),
)
def test_the_order_of_members_and_prototypes_changes_neither_loss_nor_gradient(
    count, supports, kind, eps, temperature, seed
):
    members = unit(count, supports + 1, 6, seed=seed, dtype=torch.float64)
    member_weights = make_member_weights(members, kind, eps)
    parts = (member_weights.members, member_weights.log_own, member_weights.log_other)  # all first members come first
    generator = torch.Generator().manual_seed(seed)
    prototypes = torch.randperm(count, generator=generator).unsqueeze(1)
    slots = torch.stack([torch.randperm(supports + 1, generator=generator) for _ in range(count)])
    moved = MemberWeights(*(part.transpose(0, 1)[prototypes, slots].transpose(0, 1).contiguous() for part in parts))
    results = []
    for ordered in (member_weights, moved):
        student = unit(5, 6, seed=seed + 1, dtype=torch.float64).requires_grad_()
        targets = log_assignment(unit(5, 6, seed=seed + 2, dtype=torch.float64), ordered, 0.04).exp()
        value = assignment_cross_entropy(student, targets, torch.full((5,), 0.2), ordered, temperature)
        value.backward()
        results.append((value.detach(), student.grad))
    (value, gradient), (moved_value, moved_gradient) = results
    assert moved_value.item() == pytest.approx(value.item(), rel=1e-10)
    torch.testing.assert_close(moved_gradient, gradient, rtol=1e-8, atol=1e-10)
