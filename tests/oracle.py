"""Slow and plain versions of the method, written from the paper's formulas: what the fast paths are held against."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def dense_labels(contributions: Tensor) -> Tensor:
    """Y, (K*S, K): a member gives w to its own prototype and (1 - w)/(K - 1) to each other one."""
    count, size = contributions.shape
    labels = torch.empty(count * size, count, dtype=contributions.dtype)
    for prototype in range(count):
        for member in range(size):
            w = contributions[prototype, member]
            row = torch.full((count,), 1.0, dtype=contributions.dtype) * (1 - w) / (count - 1)
            row[prototype] = w
            labels[prototype * size + member] = row
    return labels


def dense_assignment(u: Tensor, members: Tensor, contributions: Tensor, temperature: float) -> Tensor:
    """P(u) = softmax(<u, D>/temperature) Y, with Y built."""
    similarities = u @ members.flatten(0, 1).T
    return torch.softmax(similarities / temperature, dim=1) @ dense_labels(contributions)


def loop_cls_loss(student, teacher, tasks, student_temp: float, teacher_temp: float) -> Tensor:
    """Mean over tasks, images and ordered pairs i != j, one by one. `tasks` is a list of (members, contributions)."""
    terms = []
    for members, contributions in tasks:
        for image in range(student.shape[1]):
            for j in range(len(teacher)):
                target = dense_assignment(teacher[j, image : image + 1], members, contributions, teacher_temp).detach()
                for i in range(len(student)):
                    if i != j:
                        p = dense_assignment(student[i, image : image + 1], members, contributions, student_temp)
                        terms.append(-(target * p.log()).sum())
    return torch.stack(terms).mean()


def loop_patch_loss(student, teacher, masks, tasks, student_temp: float, teacher_temp: float) -> Tensor:
    """`student`, `teacher`: (views, patches, d); `masks`: (views, patches). Mean per view, then over views, tasks."""
    per_task = []
    for members, contributions in tasks:
        per_view = []
        for view in range(len(masks)):
            total = student.new_zeros(())
            for patch in range(masks.shape[1]):
                if masks[view, patch]:
                    target = dense_assignment(teacher[view, patch][None], members, contributions, teacher_temp)
                    p = dense_assignment(student[view, patch][None], members, contributions, student_temp)
                    total = total - (target.detach() * p.log()).sum()
            per_view.append(total / max(1, int(masks[view].sum())))
        per_task.append(torch.stack(per_view).mean())
    return torch.stack(per_task).mean()


def _cross_entropy(student: Tensor, teacher: Tensor, center: Tensor, student_temp: float, teacher_temp: float):
    """CE between softmax((teacher - center)/temperature) and softmax(student/temperature), for one row each."""
    target = torch.softmax((teacher - center) / teacher_temp, dim=0)
    return -sum(q * torch.log(p) for q, p in zip(target, torch.softmax(student / student_temp, dim=0), strict=True))


def loop_dino_loss(student, teacher, center, student_temp: float, teacher_temp: float) -> Tensor:
    """DINO's loss of logits (V, images, K) and (G, images, K): mean over images and pairs i != j, one by one."""
    terms = [
        _cross_entropy(student[i, image], teacher[j, image], center, student_temp, teacher_temp)
        for image in range(student.shape[1])
        for i in range(len(student))
        for j in range(len(teacher))
        if i != j
    ]
    return torch.stack(terms).mean()


def loop_ibot_patch_loss(student, teacher, masks, center, student_temp: float, teacher_temp: float) -> Tensor:
    """iBOT's patch loss of logits (views, patches, K): mean over masked patches of a view, then over views."""
    per_view = []
    for view, mask in enumerate(masks):
        terms = [
            _cross_entropy(student[view, i], teacher[view, i], center, student_temp, teacher_temp)
            for i in range(len(mask))
            if mask[i]
        ]
        per_view.append(sum(terms) / len(terms) if terms else student.new_zeros(()))
    return torch.stack(per_view).mean()


def loop_massl_loss(student, teacher, memory, blocks, student_temp: float, teacher_temp: float) -> Tensor:
    """MaSSL's loss of embeddings: DINO's without center, of similarities to the rows of each block, mean over them."""
    losses = []
    for rows in blocks:
        logits = student @ memory[rows].T, teacher @ memory[rows].T
        losses.append(loop_dino_loss(*logits, torch.zeros(len(rows)), student_temp, teacher_temp))
    return torch.stack(losses).mean()


def brute_force_supports(rows: Tensor, ids: Tensor, anchor: int, k: int, exclude_same_image: bool) -> list[int]:
    """The k nearest other rows by inner product, ties by rising row."""
    candidates = []
    for row in range(len(rows)):
        same = exclude_same_image and ids[anchor] >= 0 and ids[row] == ids[anchor]
        if row != anchor and not same:
            candidates.append((-float(rows[anchor].double() @ rows[row].double()), row))
    return [row for _, row in sorted(candidates)[:k]]


def product_and_topk(queries: Tensor, rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Similarities and rows of the k nearest in the type given: the whole product, and its k greatest, in any order."""
    best = (queries @ rows.T).topk(k, dim=1)
    return best.values, best.indices


def dino_resized(grid: Tensor, rows: int, cols: int) -> Tensor:
    """Position embeddings (h, w, d) on another grid as DINO's networks have them, one number after the other.

    Cubic convolution with a = -0.75 over 4 x 4 neighbors, borders repeated, never antialiased. The source of row i is
    (i + 0.5) / scale - 0.5 with scale = (rows + 0.1) / h; columns alike. An equal grid is left alone.
    """
    height, width, _ = grid.shape
    if (height, width) == (rows, cols):
        return grid
    resized = torch.empty(rows, cols, grid.shape[2], dtype=torch.float64)
    for row in range(rows):
        for col in range(cols):
            total = torch.zeros(grid.shape[2], dtype=torch.float64)
            for y, wy in _cubic_taps(row, (rows + 0.1) / height):
                for x, wx in _cubic_taps(col, (cols + 0.1) / width):
                    total += wy * wx * grid[min(max(y, 0), height - 1), min(max(x, 0), width - 1)].double()
            resized[row, col] = total
    return resized


def _cubic_taps(index: int, scale: float) -> list[tuple[int, float]]:
    source, a = (index + 0.5) / scale - 0.5, -0.75
    taps = []
    for place in range(math.floor(source) - 1, math.floor(source) + 3):
        t = abs(source - place)
        near, far = (a + 2) * t**3 - (a + 3) * t**2 + 1, a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a
        taps.append((place, near if t <= 1 else far))
    return taps


def loop_koleo(embeddings: torch.Tensor) -> torch.Tensor:
    count = range(len(embeddings))
    nearest = [min((embeddings[i] - embeddings[j]).norm() for j in count if j != i) for i in count]
    return -torch.stack(nearest).log().mean()
