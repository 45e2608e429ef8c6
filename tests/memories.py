"""What memories take in, for tests."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F


def drifting_stores(
    images: int, dim: int, sizes: range, steps: int, generator: torch.Generator, drift: float = 0.02
) -> Iterator[tuple[Tensor, Tensor]]:
    """Embeddings of clustered images by a linear encoder that turns a little every step, with some exact copies."""
    centers = torch.randn(6, dim, generator=generator)
    inputs = centers[torch.arange(images) % 6] + 0.5 * torch.randn(images, dim, generator=generator)
    encoder = torch.randn(dim, dim, generator=generator)
    for step in range(steps):
        encoder = (1 - drift**2) ** 0.5 * encoder + drift * torch.randn(dim, dim, generator=generator)
        count = int(torch.randint(sizes.start, sizes.stop, (), generator=generator))
        ids = torch.randint(images, (count,), generator=generator)
        views = inputs[ids] + 0.1 * torch.randn(count, dim, generator=generator)
        if step % 5 == 0:
            views[count // 2 :] = views[0].clone()
        yield F.normalize(views @ encoder, dim=1), ids
