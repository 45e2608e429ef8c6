"""Assignment P(u) to the prototypes, and the two losses (paper section 3.3; docs/method.md, 3 and 4).

The members' soft labels Y, one row of K numbers for each member, are never built. A member m with contribution w_m
gives w_m to its own prototype and c_m = (1 - w_m)/(K - 1) to each other one. With p = softmax(<u, D>/temperature)
(equation 4),

    P_a = sum_{m in a} p_m (w_m - c_m) + sum_m p_m c_m

which is the row p Y in O(K S) instead of O(K S K); in log space

    log P_a = logaddexp( lse_{m in a}(log p_m + log(w_m - c_m)),  lse_m(log p_m + log c_m) ).

The cross-entropy and its gradient are computed together, a block of rows at a time, so that the logits of all rows
are never in memory together: of a task only its gradient stays, as large as the embeddings. On CUDA a Triton kernel
does the same (kernel.py); tests compare it with this file.

`Departs:` marks where this code differs from the paper or from its released code. Start at `cls_loss` and `patch_loss`,
at the end; each function uses the ones above it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from sop_faiss.sop import kernel
from sop_faiss.sop.member_weights import MemberWeights, check_contributions
from sop_faiss.sop.prototypes import Prototypes

__all__ = [
    "MemberWeights",
    "TermLoss",
    "assignment_cross_entropy",
    "cls_loss",
    "log_assignment",
    "paired_views",
    "patch_loss",
]

_BLOCK_ELEMENTS = 2**20  # logits in memory at a time: 4 MB in float32, which stay in a CPU's cache


def _block_rows(member_weights: MemberWeights) -> int:
    """Return how many rows have logits that fit the block."""
    return max(1, _BLOCK_ELEMENTS // member_weights.log_own.numel())


class _Assigned(NamedTuple):
    """The assignment of a block of rows, and what its gradient is made of; a prototype's members are along dim 1."""

    log_assigned: Float[Tensor, "n K"]
    """log P_a."""
    relative: Float[Tensor, "n S K"]
    """p_m / p_top, where top is the member of a with the largest logit."""
    log_top: Float[Tensor, "n K"]
    """log p_top."""
    shared: Float[Tensor, "n S K"]
    """c_m p_m of each member, divided by the largest."""
    total: Float[Tensor, "n 1 1"]
    """Sum of `shared`."""
    log_shared: Float[Tensor, "n 1"]
    """log sum_m c_m p_m: what every prototype gets from all members."""


def _assign_block(embeddings: Float[Tensor, "n d"], member_weights: MemberWeights, temperature: float) -> _Assigned:
    """Assign some rows, with two exponentials for each logit.

    `log_own` of the member weights is log(w - c), `log_other` is log c, a large negative number for c = 0. The sum of
    p_m (w_m - c_m) / p_top underflows only if w = c = 1/K for the top member; `log_shared`, which that member gives to
    every prototype, is then far greater than what was lost.
    """
    logits = ((embeddings / temperature) @ member_weights.members.flatten(0, 1).T).view(
        -1, *member_weights.log_own.shape
    )
    shared = logits + member_weights.log_other
    peak = shared.amax((1, 2), keepdim=True)
    shared = (shared - peak).exp()
    total = shared.sum((1, 2), keepdim=True)
    top = logits.amax(1)
    relative = (logits - top.unsqueeze(1)).exp()
    del logits  # as large as the block
    lse = (top + relative.sum(1).log()).logsumexp(1, keepdim=True)
    from_members = (relative * member_weights.log_own.exp()).sum(1).clamp_min(torch.finfo(top.dtype).tiny)
    log_from_members = top - lse + from_members.log()
    log_shared = (peak + total.log()).squeeze(2) - lse
    return _Assigned(torch.logaddexp(log_from_members, log_shared), relative, top - lse, shared, total, log_shared)


def _float32_or_more(embeddings: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    return embeddings if embeddings.dtype == torch.float64 else embeddings.float()


def _no_autocast(embeddings: Float[Tensor, "n d"]) -> torch.autocast:
    """Keep logits in float32 where a caller's autocast would round them."""
    return torch.autocast(embeddings.device.type, enabled=False)


def _kernel_serves(embeddings: Float[Tensor, "n d"]) -> bool:
    """Whether these rows go to the Triton kernel."""
    return embeddings.dtype == torch.float32 and len(embeddings) > 0 and kernel.kernel_available(embeddings.device)


def log_assignment(
    embeddings: Float[Tensor, "n d"], member_weights: MemberWeights, temperature: float
) -> Float[Tensor, "n K"]:
    """Return log P(u), the soft assignment of each embedding to the K prototypes of a task (equation 4).

    Differentiable by autograd, which keeps the logits of all rows: losses use `assignment_cross_entropy`.

    Args:
        embeddings: unit norm; half precision is computed in float32.
        member_weights: the task's members and what they give.
        temperature: student_temp or teacher_temp.
    """
    embeddings = _float32_or_more(embeddings)
    member_weights = member_weights.to(embeddings.dtype)
    if _kernel_serves(embeddings) and not (torch.is_grad_enabled() and embeddings.requires_grad):
        return kernel.log_assignment(embeddings, member_weights, temperature)
    blocks = embeddings.split(_block_rows(member_weights))
    with _no_autocast(embeddings):
        return torch.cat([_assign_block(block, member_weights, temperature).log_assigned for block in blocks])


def _cross_entropy_by_blocks(
    embeddings: Float[Tensor, "n d"],
    targets: Float[Tensor, "n K"],
    row_weights: Float[Tensor, " n"],
    member_weights: MemberWeights,
    temperature: float,
    needs_gradient: bool,
) -> tuple[Float[Tensor, ""], Float[Tensor, "n d"] | None]:
    """Return sum_i weight_i CE_i and its gradient, block by block.

    With q the target, g_m = dCE/dp_m = -(w_m - c_m) q_a/P_a - c_m sum_b q_b/P_b for a member m of a, and
    sum_m p_m g_m = -sum_a q_a, so that dCE/dlogit_m = p_m (g_m + sum_a q_a). Each product with 1/P is taken in log
    space: there it is small, since P_a contains the very term that it divides (p_top/P_a is at most K).
    """
    loss = embeddings.new_zeros(())
    gradient = torch.empty_like(embeddings) if needs_gradient else None
    members, own = member_weights.members.flatten(0, 1), member_weights.log_own.exp()
    rows_at_once = _block_rows(member_weights)
    for start in range(0, len(embeddings), rows_at_once):
        block = slice(start, start + rows_at_once)
        target, weight = targets[block], row_weights[block, None]
        assigned = _assign_block(embeddings[block], member_weights, temperature)
        log_assigned, relative, log_top, shared, total, log_shared = assigned
        loss -= (weight * target * log_assigned).sum()
        if gradient is not None:
            top = log_top.exp() * target.sum(1, keepdim=True)
            top_own = (log_top - log_assigned).exp() * target
            by_all = ((log_shared - log_assigned).exp() * target).sum(1).view(-1, 1, 1) / total
            slope = torch.addcmul(top.unsqueeze(1), own, top_own.unsqueeze(1), value=-1)
            slope = slope.mul_(relative).addcmul_(shared, by_all, value=-1)
            gradient[block] = (slope.flatten(1) @ members) * (weight / temperature)
    return loss, gradient


class _CrossEntropy(torch.autograd.Function):
    """sum_i weight_i CE_i, whose gradient the forward pass computes along with it."""

    @staticmethod
    def forward(
        ctx: Any,
        embeddings: Float[Tensor, "n d"],
        targets: Float[Tensor, "n K"],
        row_weights: Float[Tensor, " n"],
        member_weights: MemberWeights,
        temperature: float,
    ) -> Float[Tensor, ""]:
        compute = kernel.cross_entropy if _kernel_serves(embeddings) else _cross_entropy_by_blocks
        with _no_autocast(embeddings):
            total, gradient = compute(
                embeddings, targets, row_weights, member_weights, temperature, needs_gradient=ctx.needs_input_grad[0]
            )
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Any) -> tuple[Tensor | None, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0], None, None, None, None


def assignment_cross_entropy(
    embeddings: Float[Tensor, "n d"],
    targets: Float[Tensor, "n K"],
    row_weights: Float[Tensor, " n"],
    member_weights: MemberWeights,
    temperature: float,
) -> Float[Tensor, ""]:
    """Return sum_i weight_i * ( - sum_a target_ia log P_a(u_i) ), differentiable (once) in the embeddings.

    Args:
        embeddings: the student's, unit norm.
        targets: the teacher's assignments; constants.
        row_weights: weight of each row; constants.
        member_weights: the task's members and what they give; constants.
        temperature: student_temp.
    """
    embeddings = _float32_or_more(embeddings)
    dtype = embeddings.dtype
    result: Tensor = _CrossEntropy.apply(
        embeddings, targets.detach().to(dtype), row_weights.detach().to(dtype), member_weights.to(dtype), temperature
    )
    return result


@dataclass(frozen=True)
class TermLoss:
    """The loss of one term, and how sure the teacher is of its assignments."""

    loss: Float[Tensor, ""]
    weight: Float[Tensor, ""]
    """Sum of the weights of the rows compared: 1, or less where views have no masked patch, or where the student embeds
    some of the views in another pass (`train.views_apart`)."""
    entropies: Float[Tensor, ""]
    """Sum of the entropies of the teacher's assignments, in nats, without gradient; a row at ln K is uniform."""
    rows: int
    """Number of the teacher's assignments."""
    target_entropy: Float[Tensor, ""]
    """The same entropies weighted as the loss weights its rows: (loss - target_entropy) / weight is a mean KL."""

    def sums(self) -> Float[Tensor, " sums"]:
        """Return loss, weight, entropies, rows and target_entropy, which are added up over the parts of a batch."""
        rows = torch.full_like(self.entropies, self.rows)
        numbers = (self.loss.detach(), self.weight, self.entropies, rows, self.target_entropy)
        return torch.stack([number.float() for number in numbers])


def _member_weights(prototypes: Prototypes, student: Float[Tensor, "*rows d"]) -> Iterator[MemberWeights]:
    """Yield the members of each task and what they give, in float64 for float64 embeddings, else in float32.

    D is large: each task's overwrites the one before.
    """
    dtype = torch.float64 if student.dtype == torch.float64 else torch.float32
    check_contributions(prototypes.contributions)
    members = prototypes.empty_members()
    for task in range(prototypes.tasks):
        of_task = prototypes.members(task, out=members).to(dtype)
        yield MemberWeights.of_checked(of_task, prototypes.contributions[task].to(dtype))


def _entropy(log_assigned: Float[Tensor, "n K"]) -> Float[Tensor, " n"]:
    return -(log_assigned.exp() * log_assigned).sum(1)


def paired_views(
    views: int, global_views: int, first_view: int, all_views: int, same_view: bool
) -> tuple[list[list[int]], int]:
    """Return which of the teacher's views each of some student views is compared with, and the pairs of all views.

    Arguments are those of `cls_loss`. Local views are compared with all global ones.
    """
    partners = [
        [j for j in range(global_views) if (i >= global_views) or (j == i) == same_view]
        for i in range(first_view, first_view + views)
    ]
    of_globals = global_views * (1 if same_view else global_views - 1)
    return partners, of_globals + global_views * (all_views - global_views)


def cls_loss(
    student: Float[Tensor, "v B d"],
    teacher: Float[Tensor, "G B d"],
    prototypes: Prototypes,
    student_temp: float,
    teacher_temp: float,
    first_view: int = 0,
    all_views: int | None = None,
    *,
    same_view: bool = False,
) -> TermLoss:
    """Return the [CLS] loss: views of an image agree in their assignment (equation 6; docs/method.md, 4).

    It is the mean over all pairs of a student view i and a teacher view j != i of the cross-entropy between their
    assignments, then over images and tasks. The cross-entropy is linear in its target, so each student view is compared
    once, with the mean of the teacher views it is paired with.
    Departs: the released code takes a bfloat16 softmax and log(p**-q), infinite at p = 0; here float32, in log space.

    Args:
        student: embeddings of the V views, the G global ones first; or of some consecutive views.
        teacher: embeddings of the G global views.
        prototypes: of the step, the same for student and teacher.
        student_temp: temperature of the student's softmax over members.
        teacher_temp: temperature of the teacher's.
        first_view: number of the first view in `student` among all views.
        all_views: V, if `student` holds only some of the views; their losses add up to the loss of all.
        same_view: compare a global view with the same one instead of the others (distillation).
    """
    views, images, _ = student.shape
    global_views = len(teacher)
    partners, pairs = paired_views(views, global_views, first_view, all_views or views, same_view)
    counts = torch.tensor([len(others) for others in partners], dtype=torch.float64, device=student.device)
    weights = counts / (pairs * images)
    compared = [i for i in range(views) if partners[i]]
    rows = student[compared].flatten(0, 1)
    row_weights = weights[compared].repeat_interleave(images)

    losses, entropies = [], []
    for member_weights in _member_weights(prototypes, student):
        with torch.no_grad():
            log_targets = log_assignment(teacher.flatten(0, 1), member_weights, teacher_temp)
            entropies.append(_entropy(log_targets).sum())
            by_view = log_targets.exp().view(global_views, images, -1)
            # The empty slice gives the shape where no view has a partner.
            targets = torch.cat([by_view[0, :0], *(by_view[partners[i]].mean(0) for i in compared)])
        losses.append(assignment_cross_entropy(rows, targets, row_weights, member_weights, student_temp))
    weight, summed, count = weights.sum() * images, torch.stack(entropies).mean(), global_views * images
    # Over all views of an image each teacher view is in as many pairs as any other, so that the mean entropy over pairs
    # is that over teacher views; losses of some views add up to it.
    return TermLoss(torch.stack(losses).mean(), weight, summed, count, weight * summed / count)


def masked_row_weights(masks: Bool[Tensor, "views patches"]) -> Float[Tensor, " masked"]:
    """Return the weight of each masked patch: 1 / (masked patches of its view) / views, over all views of all images.

    A view without masked patches has no row, and so counts as 0, as in the released code (docs/method.md, 4).
    """
    per_view = masks.sum(1, dtype=torch.float64).clamp_min(1).reciprocal() / len(masks)
    return per_view.unsqueeze(1).expand(masks.shape)[masks]


def patch_loss(
    student: Float[Tensor, "masked d"],
    teacher: Float[Tensor, "masked d"],
    row_weights: Float[Tensor, " masked"],
    prototypes: Prototypes,
    student_temp: float,
    teacher_temp: float,
) -> TermLoss:
    """Return the patch loss: a masked patch agrees with what the teacher sees there (equation 7; docs/method.md, 4).

    Args:
        student: embeddings of the masked patches of the student's global views.
        teacher: the teacher's embeddings of the same patches of the same views, unmasked.
        row_weights: see `masked_row_weights`.
        prototypes: of the patch memory.
        student_temp: temperature of the student's softmax over members.
        teacher_temp: temperature of the teacher's.
    """
    losses, entropies = [], []
    for member_weights in _member_weights(prototypes, student):
        with torch.no_grad():
            log_targets = log_assignment(teacher, member_weights, teacher_temp)
            entropies.append(_entropy(log_targets))
        losses.append(assignment_cross_entropy(student, log_targets.exp(), row_weights, member_weights, student_temp))
    entropy = torch.stack(entropies).mean(0)
    weighted = (row_weights * entropy).sum()
    return TermLoss(torch.stack(losses).mean(), row_weights.sum(), entropy.sum(), len(teacher), weighted)
