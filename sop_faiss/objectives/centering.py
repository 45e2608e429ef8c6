"""What DINO and iBOT share: the center, the teacher's distributions, and the cross-entropy with them.

DINO (arXiv 2104.14294) calls the two halves of a target centering and sharpening: q = softmax((t - c)/temperature) of
the teacher's logits t, where the center c is the moving average of their mean. The student's is p = softmax(s/temp).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Float32
from torch import Tensor
from torch.autograd.function import once_differentiable

from sop_faiss import distributed
from sop_faiss.errors import CheckpointError
from sop_faiss.model.networks import Network
from sop_faiss.sop.loss import TermLoss


class Center:
    """The moving average of the mean of the teacher's logits (DINO, equation 4).

    Args:
        count: K, logits.
        momentum: what it keeps of itself in a step.
        device: where it is.
    """

    def __init__(self, count: int, momentum: float, device: torch.device) -> None:
        self.value: Float32[Tensor, " K"] = torch.zeros(count, device=device)
        self.momentum = momentum

    def follow(self, means: Float32[Tensor, "parts K"]) -> None:
        """Move by the mean logits of the parts of a step, on all ranks; the parts are equally large."""
        mean = distributed.average(means.mean(0))
        self.value = self.value * self.momentum + mean * (1 - self.momentum)

    def load(self, value: Float32[Tensor, " K"]) -> None:
        """Continue from a saved value.

        Raises:
            CheckpointError: it has another length.
        """
        if value.shape != self.value.shape:
            raise CheckpointError(
                f"the checkpoint's center has {value.numel()} prototypes, this run's {self.value.numel()}: resume with "
                "the same settings"
            )
        self.value.copy_(value)


class Targets(NamedTuple):
    """The teacher's distributions of some rows."""

    probabilities: Float[Tensor, "n K"]
    entropies: Float[Tensor, " n"]


@torch.no_grad()
def targets_of(logits: Float[Tensor, "n K"], center: Center, temperature: float) -> Targets:
    """Return what the student must predict: the teacher's logits, centered and sharpened."""
    log_targets = ((logits - center.value) / temperature).log_softmax(1)
    probabilities = log_targets.exp()
    return Targets(probabilities, -torch.linalg.vecdot(probabilities, log_targets))


class _CrossEntropy(torch.autograd.Function):
    """sum over views v and rows i of weight_vi CE(target_vi, softmax(logits_vi / temperature)).

    Autograd would keep the logarithm of every view's softmax; here the backward pass makes its gradient, (p - q) /
    temperature, from the logits. Views may share one tensor of targets.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Float[Tensor, "v n K"],
        row_weights: Float[Tensor, "v n"],
        temperature: float,
        *targets: Float[Tensor, "n K"],
    ) -> Float[Tensor, ""]:
        loss = logits.new_zeros(())
        normalizers = torch.empty_like(row_weights)
        for view, target in enumerate(targets):
            scaled = logits[view] / temperature
            normalizers[view] = scaled.logsumexp(1)
            loss += row_weights[view] @ (normalizers[view] - torch.linalg.vecdot(target, scaled))
        ctx.save_for_backward(logits, row_weights, normalizers, *targets)
        ctx.temperature = temperature
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Any) -> tuple[Tensor | None, ...]:
        logits, row_weights, normalizers, *targets = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for view, target in enumerate(targets):
            torch.div(logits[view], ctx.temperature, out=gradient[view])
            scale = outer[0] * row_weights[view, :, None] / ctx.temperature
            gradient[view].sub_(normalizers[view, :, None]).exp_().sub_(target).mul_(scale)
        return gradient, None, None, *[None] * len(targets)


def views_loss(
    student: Float[Tensor, "v b K"], teacher: Targets, student_temp: float, first_view: int, all_views: int
) -> TermLoss:
    """Return the [CLS] loss: the mean over pairs of a student view i and a teacher view j != i, and over images.

    The cross-entropy is linear in its target, so each student view is compared once, with the mean of the teacher's
    distributions that it is paired with; all local views have the same.

    Args:
        student: logits of the V views, the G global ones first; or of some consecutive views.
        teacher: of the G global views, one after the other.
        student_temp: temperature of the student's softmax.
        first_view: number of the first view in `student` among all views.
        all_views: V.
    """
    images = student.shape[1]
    by_view = teacher.probabilities.unflatten(0, (-1, images))
    count = len(by_view)
    pairs = count * (all_views - 1)
    others = [tuple(j for j in range(count) if j != first_view + i) for i in range(len(student))]
    means = {
        partners: by_view[partners[0]] if len(partners) == 1 else by_view[list(partners)].mean(0)
        for partners in dict.fromkeys(others)
        if partners
    }
    seen = [i for i, partners in enumerate(others) if partners]
    weights = student.new_tensor([len(others[i]) / (pairs * images) for i in seen])
    loss: Tensor = _CrossEntropy.apply(
        student if len(seen) == len(student) else student[seen],
        weights.unsqueeze(1).expand(-1, images).contiguous(),
        student_temp,
        *(means[others[i]] for i in seen),
    )
    weight, entropies = weights.sum() * images, teacher.entropies.sum()
    # Each teacher view is in as many pairs as any other, so the mean entropy over pairs is that over views.
    return TermLoss(loss, weight, entropies, len(teacher.entropies), weight * entropies / len(teacher.entropies))


def patch_loss(
    student: Float[Tensor, "masked K"], teacher: Targets, row_weights: Float[Tensor, " masked"], student_temp: float
) -> TermLoss:
    """Return the patch loss: a masked patch predicts what the teacher sees there.

    Args:
        student: logits of the masked patches.
        teacher: of the same patches, unmasked.
        row_weights: see `sop.loss.masked_row_weights`.
        student_temp: temperature of the student's softmax.
    """
    weights = row_weights.to(student.dtype)
    loss: Tensor = _CrossEntropy.apply(student.unsqueeze(0), weights.unsqueeze(0), student_temp, teacher.probabilities)
    entropies = teacher.entropies
    return TermLoss(loss, row_weights.sum(), entropies.sum(), len(entropies), weights @ entropies)


def drop_last_gradients(student: Network) -> None:
    """Drop the gradients of the last layers, so that the optimizer leaves them, and their decay, out of its step."""
    for name, head in student.heads.items():
        for parameter in head.parameters() if name != "shared" else ():
            parameter.grad = None
