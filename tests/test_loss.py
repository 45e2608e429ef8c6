"""Assignment and losses against dense Y and plain loops, for values and gradients."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sop_faiss.config import TermConfig
from sop_faiss.errors import ConfigError
from sop_faiss.sop.loss import (
    MemberWeights,
    assignment_cross_entropy,
    cls_loss,
    log_assignment,
    masked_row_weights,
    patch_loss,
)
from sop_faiss.sop.memory import Memory
from sop_faiss.sop.prototypes import PrototypeMaker, contributions
from tests.oracle import dense_assignment, loop_cls_loss, loop_patch_loss
from tests.unit_vectors import random_unit

KINDS = ("similarity", "smooth", "one_hot")
unit = partial(random_unit, dtype=torch.float64)


def random_task(count: int, supports: int, dim: int, kind: str, eps: float, seed: int):
    members = unit(count, supports + 1, dim, seed=seed)
    similarities = (members[:, 1:] * members[:, :1]).sum(-1)
    weights = contributions(similarities.float().unsqueeze(0), kind, eps)[0].double()
    return members, weights


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 7),
    count=st.integers(2, 12),
    supports=st.integers(0, 4),
    dim=st.integers(2, 9),
    kind=st.sampled_from(KINDS),
    eps=st.sampled_from([0.0, 0.1, 0.3]),
    temperature=st.sampled_from([0.01, 0.04, 0.1, 1.0]),
    seed=st.integers(0, 10_000),
)
def test_assignment_and_gradient_equal_dense_labels(rows, count, supports, dim, kind, eps, temperature, seed):
    members, weights = random_task(count, supports, dim, kind, eps, seed)
    member_weights = MemberWeights.of(members, weights)
    u = unit(rows, dim, seed=seed + 1)
    fast = log_assignment(u, member_weights, temperature).exp()
    dense = dense_assignment(u, members, weights, temperature)
    torch.testing.assert_close(fast, dense, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(fast.sum(1), torch.ones(rows, dtype=torch.float64), rtol=1e-10, atol=1e-10)

    targets = torch.softmax(unit(rows, count, seed=seed + 2) * 5, dim=1)
    row_weights = unit(rows, 1, seed=seed + 3).abs().squeeze(1)
    ours, theirs = u.clone().requires_grad_(), u.clone().requires_grad_()
    value = assignment_cross_entropy(ours, targets, row_weights, member_weights, temperature)
    dense = dense_assignment(theirs, members, weights, temperature)
    if float(dense.detach().min()) > 1e-250:  # else the dense formula itself has lost P
        oracle = -(row_weights[:, None] * targets * dense.log()).sum()
        torch.testing.assert_close(value, oracle, rtol=1e-10, atol=1e-10)
        value.backward()
        oracle.backward()
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_and_bf16_inputs(kind):
    members, weights = random_task(16, 3, 8, kind, 0.1, seed=3)
    u = unit(5, 8, seed=4)
    exact = dense_assignment(u, members, weights, 0.1)
    member_weights = MemberWeights.of(members.float(), weights.float())
    torch.testing.assert_close(
        log_assignment(u.float(), member_weights, 0.1).exp().double(), exact, rtol=1e-5, atol=1e-7
    )
    half = log_assignment(u.bfloat16(), member_weights, 0.1)
    assert half.dtype == torch.float32
    reference = dense_assignment(u.bfloat16().double(), members.float().double(), weights, 0.1)
    torch.testing.assert_close(half.exp().double(), reference, rtol=1e-4, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(2, 12),
    supports=st.integers(0, 4),
    kind=st.sampled_from(KINDS),
    eps=st.sampled_from([0.0, 0.1]),
    temperature=st.sampled_from([0.005, 0.01, 0.04]),
    duplicates=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_float32_at_low_temperatures(count, supports, kind, eps, temperature, duplicates, seed):
    """log P down to -400, where one exponential per prototype underflows: what is lost must never matter."""
    members, weights = random_task(count, supports, 4, kind, eps, seed)
    if duplicates:
        members[1], weights[1] = members[0], weights[0]
    members, u, weights = members.float(), unit(5, 4, seed=seed + 1).float(), weights.float()
    targets = torch.softmax(20 * unit(5, count, seed=seed + 2), dim=1)
    ours, theirs = u.clone().requires_grad_(), u.double().requires_grad_()
    exact = dense_assignment(theirs, members.double(), weights.double(), temperature)
    member_weights = MemberWeights.of(members, weights)
    rounding = 2e-7 / temperature  # of a similarity, over the temperature
    assigned = log_assignment(u, member_weights, temperature)
    torch.testing.assert_close(assigned.double(), exact.detach().log(), rtol=1e-5, atol=4 * rounding)
    value = assignment_cross_entropy(ours, targets, torch.ones(5), member_weights, temperature)
    oracle = -(targets * exact.log()).sum()
    torch.testing.assert_close(value.detach().double(), oracle.detach(), rtol=1e-5, atol=20 * rounding)
    value.backward()
    oracle.backward()
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=10 * rounding / temperature)


def test_finite_where_the_dense_formula_underflows():
    members = torch.stack([unit(4, seed=1), -unit(4, seed=1)]).unsqueeze(1).float()
    member_weights = MemberWeights.of(members, torch.ones(2, 1))
    u = members[0].clone().requires_grad_()
    assigned = log_assignment(u, member_weights, 0.005)
    assert torch.isfinite(assigned).all()
    assert assigned[0, 1].item() == pytest.approx(-400.0, rel=1e-4)
    value = assignment_cross_entropy(u, torch.tensor([[0.0, 1.0]]), torch.ones(1), member_weights, 0.005)
    value.backward()
    assert value.item() == pytest.approx(400.0, rel=1e-4)
    assert torch.isfinite(u.grad).all()


def test_permuting_members_and_prototypes_changes_nothing():
    members, weights = random_task(9, 3, 6, "similarity", 0.1, seed=5)
    u = unit(4, 6, seed=6)
    base = log_assignment(u, MemberWeights.of(members, weights), 0.05)
    generator = torch.Generator().manual_seed(0)
    by_prototype, by_member = torch.randperm(9, generator=generator), torch.randperm(4, generator=generator)
    moved = log_assignment(
        u, MemberWeights.of(members[by_prototype][:, by_member], weights[by_prototype][:, by_member]), 0.05
    )
    torch.testing.assert_close(moved, base[:, by_prototype], rtol=1e-10, atol=1e-12)


def test_blocks_do_not_change_the_result():
    """Of 2^20 logits: 682 rows of this task at a time; a hundred rows at a time give the same."""
    members, weights = random_task(512, 2, 5, "similarity", 0.1, seed=7)
    member_weights = MemberWeights.of(members, weights)
    targets = torch.softmax(unit(1500, 512, seed=8), dim=1)
    factors = torch.rand(1500, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    together, apart = (unit(1500, 5, seed=9).requires_grad_() for _ in range(2))
    value = assignment_cross_entropy(together, targets, factors, member_weights, 0.1)
    value.backward()
    parts = [
        assignment_cross_entropy(u, target, factor, member_weights, 0.1)
        for u, target, factor in zip(apart.split(100), targets.split(100), factors.split(100), strict=True)
    ]
    torch.stack(parts).sum().backward()
    torch.testing.assert_close(value, torch.stack(parts).sum(), rtol=1e-12, atol=0)
    torch.testing.assert_close(together.grad, apart.grad, rtol=1e-10, atol=1e-14)


def make_prototypes(tasks: int, supports: int, kind: str = "similarity", dim: int = 6):
    memory = Memory(40, dim, torch.Generator().manual_seed(1))
    maker = PrototypeMaker(
        memory,
        TermConfig(num_anchors=10, num_supports=supports, tasks=tasks),
        contributions=kind,
        eps=0.1,
        anchors="random",
        exclude_same_image=False,
        generator=torch.Generator().manual_seed(2),
    )
    return maker.draw()


@pytest.mark.parametrize(("global_views", "local_views"), [(2, 0), (2, 3), (3, 2), (1, 2)])
@pytest.mark.parametrize("tasks", [1, 3])
def test_cls_loss_equals_loops_over_pairs(global_views, local_views, tasks):
    prototypes = make_prototypes(tasks, supports=2)
    student = unit(global_views + local_views, 4, 6, seed=3, dtype=torch.float32)
    teacher = unit(global_views, 4, 6, seed=4, dtype=torch.float32)
    ours, theirs = student.clone().requires_grad_(), student.double().requires_grad_()
    result = cls_loss(ours, teacher, prototypes, 0.1, 0.05)
    parts = [(prototypes.members(t).double(), prototypes.contributions[t].double()) for t in range(tasks)]
    oracle = loop_cls_loss(theirs, teacher.double(), parts, 0.1, 0.05)
    result.loss.backward()
    oracle.backward()
    torch.testing.assert_close(result.loss.double(), oracle, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-6)
    assert 0 < float(result.entropies / result.rows) < math.log(10)


def test_patch_loss_equals_loops_and_ignores_unmasked_views():
    prototypes = make_prototypes(2, supports=0, kind="one_hot")
    masks = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0]], dtype=torch.bool)
    student = unit(3, 4, 6, seed=5, dtype=torch.float32)
    teacher = unit(3, 4, 6, seed=6, dtype=torch.float32)
    rows = student[masks].clone().requires_grad_()
    result = patch_loss(rows, teacher[masks], masked_row_weights(masks), prototypes, 0.1, 0.07)
    parts = [(prototypes.members(t).double(), prototypes.contributions[t].double()) for t in range(2)]
    full = student.double().requires_grad_()
    oracle = loop_patch_loss(full, teacher.double(), masks, parts, 0.1, 0.07)
    result.loss.backward()
    oracle.backward()
    torch.testing.assert_close(result.loss.double(), oracle, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rows.grad.double(), full.grad[masks], rtol=1e-4, atol=1e-6)


def test_losses_of_float64_have_its_digits():
    """Contributions are float32, and exact numbers; their logs are not."""
    prototypes = make_prototypes(tasks=2, supports=2)
    parts = [(prototypes.members(t).double(), prototypes.contributions[t].double()) for t in range(2)]
    student, teacher = unit(3, 4, 6, seed=3), unit(2, 4, 6, seed=4)
    ours, theirs = student.clone().requires_grad_(), student.clone().requires_grad_()
    value, oracle = (
        cls_loss(ours, teacher, prototypes, 0.1, 0.05).loss,
        loop_cls_loss(theirs, teacher, parts, 0.1, 0.05),
    )
    value.backward()
    oracle.backward()
    torch.testing.assert_close(value, oracle, rtol=1e-13, atol=0)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-11, atol=1e-13)
    masks = torch.ones(1, 4, dtype=torch.bool)
    value = patch_loss(student[0], teacher[0], masked_row_weights(masks), prototypes, 0.1, 0.07).loss
    oracle = loop_patch_loss(student[:1], teacher[:1], masks, parts, 0.1, 0.07)
    torch.testing.assert_close(value, oracle, rtol=1e-13, atol=0)


@pytest.mark.parametrize("wrong", [0.249, 0.0, -0.1, 1.001, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_contributions_that_are_no_shares_are_refused(wrong, dtype):
    members, weights = unit(4, 2, 6, seed=1).to(dtype), torch.full((4, 2), 0.9, dtype=dtype)
    weights[2, 1] = wrong
    with pytest.raises(ConfigError, match="1/K"):
        MemberWeights.of(members, weights)
    prototypes = make_prototypes(tasks=2, supports=1)
    prototypes.contributions[1, 2, 1] = min(wrong, 0.05)  # 1/K is 1/10
    with pytest.raises(ConfigError, match="1/K"):
        cls_loss(unit(2, 3, 6), unit(2, 3, 6, seed=1), prototypes, 0.1, 0.07)


@pytest.mark.parametrize("count", [2, 3, 7, 4096])
def test_contributions_clamped_in_float32_are_taken(count):
    weights = contributions(torch.full((1, count, 1), -1.0), "similarity", 0.0)[0]
    for dtype in (torch.float32, torch.float64):
        member_weights = MemberWeights.of(torch.ones(count, 2, 1, dtype=dtype), weights.to(dtype))
        assert bool((member_weights.log_own[1] < -10).all())  # w = 1/K is the same for each prototype


def mean_kl(level) -> float:
    return float((level.loss - level.target_entropy) / level.weight)


def test_kl_is_the_loss_beyond_the_teachers_entropy():
    """Exactly as the loss weights its rows: 0 where student and teacher agree, though views have unequal masks."""
    prototypes = make_prototypes(tasks=2, supports=2)
    same = unit(1, 4, 6, seed=3, dtype=torch.float32).expand(3, 4, 6)
    assert mean_kl(cls_loss(same, same[:2], prototypes, 0.05, 0.05)) == pytest.approx(0, abs=2e-6)
    for first, last in ((0, 2), (2, 3)):  # and in parts
        level = cls_loss(same[first:last], same[:2], prototypes, 0.05, 0.05, first, 3)
        assert mean_kl(level) == pytest.approx(0, abs=2e-6)
    masks = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0]], dtype=torch.bool)
    rows = unit(4, 6, seed=6, dtype=torch.float32)
    agreeing = patch_loss(rows, rows, masked_row_weights(masks), prototypes, 0.07, 0.07)
    assert mean_kl(agreeing) == pytest.approx(0, abs=2e-6)

    teacher, student = unit(2, 4, 6, seed=4, dtype=torch.float32), unit(3, 4, 6, seed=5, dtype=torch.float32)
    terms = []
    for task in range(2):
        members, weights = prototypes.members(task).double(), prototypes.contributions[task].double()
        for image in range(4):
            for i, j in ((0, 1), (1, 0), (2, 0), (2, 1)):
                p = dense_assignment(teacher[j, image, None].double(), members, weights, 0.05)
                q = dense_assignment(student[i, image, None].double(), members, weights, 0.1)
                terms.append(float((p * (p / q).log()).sum()))
    assert mean_kl(cls_loss(student, teacher, prototypes, 0.1, 0.05)) == pytest.approx(
        sum(terms) / len(terms), rel=1e-4
    )


@pytest.mark.parametrize("supports", [0, 3])
def test_parts_of_a_batch_and_of_its_views_add_up_to_the_whole(supports):
    """4 x 2 images, local and global views apart: values and gradients of 1 x 8 images, to 1e-10 in float64."""
    prototypes = make_prototypes(tasks=2, supports=supports)
    student, teacher = unit(5, 8, 6, seed=7), unit(2, 8, 6, seed=8)
    masks = torch.rand(16, 9, generator=torch.Generator().manual_seed(9)) < 0.4
    patches, targets = unit(int(masks.sum()), 6, seed=10), unit(int(masks.sum()), 6, seed=11)
    whole, parts = ([x.clone().requires_grad_() for x in (student, patches)] for _ in range(2))
    loss = cls_loss(whole[0], teacher, prototypes, 0.1, 0.04).loss
    loss = loss + patch_loss(whole[1], targets, masked_row_weights(masks), prototypes, 0.1, 0.04).loss
    loss.backward()
    by_parts = torch.zeros((), dtype=torch.float64)
    masked_images = masks.unflatten(0, (2, 8)).nonzero()[:, 1]  # of which image each masked patch is
    for start in range(0, 8, 2):
        images = slice(start, start + 2)
        for first, last in ((2, 5), (0, 2)):
            level = cls_loss(parts[0][first:last, images], teacher[:, images], prototypes, 0.1, 0.04, first, 5)
            (level.loss / 4).backward()
            by_parts += level.loss.detach() / 4
        here = (masked_images >= start) & (masked_images < start + 2)
        weights = masked_row_weights(masks.unflatten(0, (2, 8))[:, images].flatten(0, 1))
        level = patch_loss(parts[1][here], targets[here], weights, prototypes, 0.1, 0.04)
        (level.loss / 4).backward()
        by_parts += level.loss.detach() / 4
    torch.testing.assert_close(by_parts, loss.detach(), rtol=1e-10, atol=0)
    for one, two in zip(whole, parts, strict=True):
        torch.testing.assert_close(two.grad, one.grad, rtol=1e-10, atol=1e-10)


def test_uniform_assignment_costs_ln_k():
    members = unit(1, 1, 6, seed=1).expand(10, 1, 6)  # ten equal prototypes
    member_weights = MemberWeights.of(members, torch.ones(10, 1, dtype=torch.float64))
    u = unit(3, 6, seed=2)
    targets = torch.softmax(unit(3, 10, seed=3), dim=1)
    value = assignment_cross_entropy(u, targets, torch.full((3,), 1 / 3, dtype=torch.float64), member_weights, 0.1)
    assert value.item() == pytest.approx(math.log(10), rel=1e-9)


def test_autocast_does_not_round_the_logits():
    members, weights = random_task(16, 3, 8, "similarity", 0.1, seed=3)
    member_weights, u = MemberWeights.of(members.float(), weights.float()), unit(5, 8, seed=4).float()
    targets, rows = torch.softmax(unit(5, 16, seed=5).float(), dim=1), torch.ones(5)
    plain = (log_assignment(u, member_weights, 0.1), assignment_cross_entropy(u, targets, rows, member_weights, 0.1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = (log_assignment(u, member_weights, 0.1), assignment_cross_entropy(u, targets, rows, member_weights, 0.1))
    assert all(torch.equal(one, two) for one, two in zip(plain, cast, strict=True))


@pytest.mark.parametrize(("tasks", "supports"), [(1, 0), (1, 3), (4, 3)])
def test_a_task_keeps_its_gradient_and_nothing_else(tasks, supports):
    """What backward needs is as large as the embeddings, whatever K and S; logits would be 10 (S = 4: 40) a row."""
    prototypes, student = make_prototypes(tasks, supports), unit(5, 8, 6, seed=7).float().requires_grad_()
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        cls_loss(student, unit(2, 8, 6, seed=8).float(), prototypes, 0.1, 0.04)
    gradients = [size for size in kept if size == student.numel()]
    assert len(gradients) == tasks
    assert sum(kept) <= student.numel() * (tasks + 1)  # and the rows taken once from all views
