"""Ranks share a training: each has its images of a step, and together they compute what one process would.

Batch norms take the statistics of the complete batch, and stochastic depth and dropout are drawn for all of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float, Int64
from timm.layers import DropPath
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sop_faiss.distributed import gather_objects, on_all_ranks, rank, world_size
from sop_faiss.errors import ConfigError
from sop_faiss.features.ranks import share_of_rank

T = TypeVar("T")
Forward = Callable[[Tensor], Tensor]


def own_places(count: int) -> Int64[np.ndarray, " m"]:
    """Return which images of a step are this rank's, in rising order.

    They are from both ends, so that the first and the last image, the second and the last but one and so on are one
    rank's: such pairs are mixed.

    Raises:
        ConfigError: not all ranks would have the same number.
    """
    ranks, own = world_size(), rank()
    if count % ranks:
        raise ConfigError(f"{count} images of a step for {ranks} ranks: wanted a multiple (`batch_size`)")
    half = count // ranks // 2
    first = np.arange(own * half, (own + 1) * half)
    middle = [ranks * half + own] if count // ranks % 2 else []
    return np.concatenate([first, middle, count - 1 - first[::-1]]).astype(np.int64)


def score_together(count: int, score: Callable[[Int64[np.ndarray, " m"]], Sequence[T]]) -> list[T]:
    """Return what is found of each of `count` images, in order: each rank finds it of its share.

    Raises:
        SopError: `score` raised it on a rank.
    """
    own = np.array(share_of_rank(count), dtype=np.int64)
    found = on_all_ranks(lambda: list(score(own)) if len(own) else [])
    together: list[Any] = [None] * count
    for number, of_rank in enumerate(gather_objects(found)):
        together[number :: world_size()] = of_rank
    return together


def join_batches(model: nn.Module, drops: bool = True) -> None:
    """Make a network that is trained treat the ranks' images as one batch; in one process it stays as it is.

    Args:
        model: not copied afterwards.
        drops: whether all ranks draw from generators of one state, for the places of the complete batch.
    """
    for module in model.modules() if world_size() > 1 else ():
        joined: Any = None
        if isinstance(module, _BatchNorm):
            joined = _normalize
        elif drops and isinstance(module, DropPath | nn.Dropout2d):
            joined = _drop
        if joined is not None:
            module.forward = functools.partial(joined, module, module.forward)  # type: ignore[method-assign]


class _Sum(torch.autograd.Function):
    """The sum over all ranks; a rank's gradient is the sum of those of all ranks' sums."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        """Add up; called by torch."""
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        """Add up gradients; called by torch."""
        return _Sum.forward(ctx, gradient.contiguous())


def _normalize(norm: Any, of_one: Forward, x: Float[Tensor, "b c *more"]) -> Float[Tensor, "b c *more"]:
    """Compute a batch norm, timm's with activation too, by mean and variance over all ranks, in two passes."""
    if not norm.training:
        return of_one(x)
    places = [place for place in range(x.ndim) if place != 1]
    shape = [1, -1, *[1] * (x.ndim - 2)]
    values = x.float()
    sums = _Sum.apply(torch.cat([values.sum(places), values.new_tensor([x.numel() / x.shape[1]])]))
    mean, count = sums[:-1] / sums[-1], sums[-1].detach()
    centered = values - mean.view(shape)
    variance = _Sum.apply(centered.square().sum(places)) / count
    with torch.no_grad():
        norm.num_batches_tracked += 1
        norm.running_mean.lerp_(mean, norm.momentum)
        norm.running_var.lerp_(variance * count / (count - 1).clamp(min=1), norm.momentum)
    made = centered * (variance + norm.eps).rsqrt().view(shape) * norm.weight.view(shape) + norm.bias.view(shape)
    made = made.to(x.dtype)
    return norm.act(norm.drop(made)) if hasattr(norm, "act") else made


def _drop(module: nn.Module, of_one: Forward, x: Float[Tensor, b * more]) -> Float[Tensor, b * more]:
    """Draw what is dropped for the images of all ranks, and drop this rank's."""
    if not module.training:
        return of_one(x)
    count = len(x) * world_size()
    channels = x.shape[1] if isinstance(module, nn.Dropout2d) else 1
    kept = of_one(x.new_ones(count, channels, *[1] * (x.ndim - 2)))
    return x * kept[torch.from_numpy(own_places(count)).to(x.device)]
