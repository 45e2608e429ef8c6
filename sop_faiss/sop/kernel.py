"""Assignment and cross-entropy on CUDA by a Triton kernel, whose logits are never in device memory.

`loss.py` takes these functions for float32 embeddings on a device where `kernel_available`, and its own blocks
everywhere else. The blocks are the reference: same mathematics, same names. `kernel_passes.py` has the kernel itself
and explains its three passes; this module cuts the work into programs, launches the passes, and adds up the results of
the splits. Device memory beyond inputs and results: log P, the gradient once per split, some numbers per row.
"""

from __future__ import annotations

import functools
import logging
import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Float32
from torch import Tensor
from torch.nn import functional as F

from sop_faiss.sop.member_weights import MemberWeights

_log = logging.getLogger(__name__)

# Sizes of the tiles: powers of two, and 16 or more, as tensor cores need.
_BLOCK_N = 32  # rows
_BLOCK_K = 32  # prototypes
_BLOCK_D = 32  # dimensions of an inner product at once
_BLOCK_A = 1024  # prototypes of one row at once, in pass 2
_BLOCK_OUT = 256  # dimensions of the gradient at once; beyond these, the logits are computed again for each 256
_PROGRAMS_PER_PROCESSOR = 2  # so that one computes while the other waits for memory
_PROGRAMS_OF_THE_INTERPRETER = 4  # more than one, so that tests on a CPU see splits

_OLDEST_CAPABILITY = (8, 0)  # the first with TF32 tensor cores
_SELF_TEST_TOLERANCE = 1e-3  # far above float32 rounding, far below what a wrong formula gives


class _Cut(NamedTuple):
    """How a problem is cut: tiles of rows, and splits of the tiles of prototypes."""

    block_n: int
    row_tiles: int
    splits: int
    tiles: int
    """Tiles of prototypes per split."""


class _Assigned(NamedTuple):
    """Results of pass 2; see `kernel_passes`."""

    log_assigned: Float32[Tensor, "n K"]
    lse: Float32[Tensor, " n"]
    shared: Float32[Tensor, " n"]
    cross_entropy: Float32[Tensor, " n"]
    by_all: Float32[Tensor, " n"]
    target_sum: Float32[Tensor, " n"]


def _ceil_divide(number: int, by: int) -> int:
    return -(-number // by)


def _power_of_two(at_least: int) -> int:
    return 1 << (at_least - 1).bit_length()


def _cut(rows: int, count: int, device: torch.device) -> _Cut:
    """Cut a problem; with few rows, split the prototypes until the device has enough programs."""
    block_n = min(_BLOCK_N, max(16, _power_of_two(rows)))
    row_tiles, tiles = _ceil_divide(rows, block_n), _ceil_divide(count, _BLOCK_K)
    programs = _PROGRAMS_OF_THE_INTERPRETER
    if device.type == "cuda":
        programs = _PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
    tiles_per_split = _ceil_divide(tiles, min(tiles, _ceil_divide(programs, row_tiles)))
    return _Cut(block_n, row_tiles, _ceil_divide(tiles, tiles_per_split), tiles_per_split)


def _arguments(
    embeddings: Float32[Tensor, "n d"], member_weights: MemberWeights, temperature: float, cut: _Cut
) -> dict[str, Any]:
    """Return the arguments that passes 1 and 3 share."""
    size, count, dim = member_weights.members.shape
    return {
        "embeddings": embeddings.contiguous(),
        "members": member_weights.members,
        "log_own": member_weights.log_own,
        "log_other": member_weights.log_other,
        "n": len(embeddings),
        "count": count,
        "size": size,
        "dim": dim,
        "temperature": temperature,
        "tiles": cut.tiles,
        "BLOCK_N": cut.block_n,
        "BLOCK_K": _BLOCK_K,
        "BLOCK_D": _BLOCK_D,
    }


def _assign(arguments: dict[str, Any], cut: _Cut, targets: Float32[Tensor, "n K"] | None) -> _Assigned:
    """Launch passes 1 and 2."""
    from sop_faiss.sop import kernel_passes  # needs Triton

    n, count = arguments["n"], arguments["count"]
    embeddings: Tensor = arguments["embeddings"]
    log_assigned = embeddings.new_empty(n, count)
    split_lse, split_shared = embeddings.new_empty(cut.splits, n), embeddings.new_empty(cut.splits, n)
    assigned = _Assigned(log_assigned, *(embeddings.new_empty(n) for _ in range(5)))
    kernel_passes.lse_pass[(cut.row_tiles, cut.splits)](
        **arguments, own=log_assigned, split_lse=split_lse, split_shared=split_shared, num_warps=4, num_stages=2
    )
    kernel_passes.assignment_pass[(n,)](
        **assigned._asdict(),
        split_lse=split_lse,
        split_shared=split_shared,
        targets=targets,
        n=n,
        count=count,
        splits=cut.splits,
        BLOCK_SPLITS=_power_of_two(cut.splits),
        BLOCK_A=min(_BLOCK_A, _power_of_two(count)),
        num_warps=4,
    )
    return assigned


def log_assignment(
    embeddings: Float32[Tensor, "n d"], member_weights: MemberWeights, temperature: float
) -> Float32[Tensor, "n K"]:
    """Return log P(u) of each embedding, without gradient. See `loss.log_assignment`; n is 1 or more."""
    cut = _cut(len(embeddings), member_weights.count, embeddings.device)
    with torch.cuda.device_of(embeddings):
        return _assign(_arguments(embeddings, member_weights, temperature, cut), cut, None).log_assigned


def cross_entropy(
    embeddings: Float32[Tensor, "n d"],
    targets: Float32[Tensor, "n K"],
    row_weights: Float32[Tensor, " n"],
    member_weights: MemberWeights,
    temperature: float,
    needs_gradient: bool,
) -> tuple[Float32[Tensor, ""], Float32[Tensor, "n d"] | None]:
    """Return sum_i weight_i CE_i, and its gradient in the embeddings if wanted. See `loss.assignment_cross_entropy`.

    Args:
        embeddings: n rows, 1 or more.
        targets: the teacher's assignments.
        row_weights: weight of each row.
        member_weights: the task's members and what they give.
        temperature: student_temp.
        needs_gradient: whether to make the third pass.
    """
    from sop_faiss.sop import kernel_passes  # needs Triton

    n, dim = embeddings.shape
    cut = _cut(n, member_weights.count, embeddings.device)
    targets = targets.contiguous()
    arguments = _arguments(embeddings, member_weights, temperature, cut)
    with torch.cuda.device_of(embeddings):
        assigned = _assign(arguments, cut, targets)
        total = (row_weights * assigned.cross_entropy).sum()
        if not needs_gradient:
            return total, None
        split_gradient = embeddings.new_empty(cut.splits, n, dim)
        block_out = min(_BLOCK_OUT, max(16, _power_of_two(dim)))
        kernel_passes.gradient_pass[(cut.row_tiles, cut.splits, _ceil_divide(dim, block_out))](
            **arguments,
            log_assigned=assigned.log_assigned,
            targets=targets,
            row_weights=row_weights.contiguous(),
            lse=assigned.lse,
            shared=assigned.shared,
            by_all=assigned.by_all,
            target_sum=assigned.target_sum,
            split_gradient=split_gradient,
            BLOCK_OUT=block_out,
            num_warps=8,
            num_stages=2,
        )
        return total, split_gradient.sum(0)


@functools.cache
def kernel_available(device: torch.device) -> bool:
    """Return whether the kernel runs on this device and is right; tried once. On CUDA, a log line says why not."""
    if device.type != "cuda":
        return False
    reason = why_unavailable(device)
    if reason is not None:
        _log.warning("the Triton kernel of the loss is not used on %s (%s): using PyTorch blocks", device, reason)
    return reason is None


def why_unavailable(device: torch.device) -> str | None:
    """Return why the kernel cannot be used on this CUDA device; None if it can."""
    if torch.version.cuda is None:
        return "it is written for NVIDIA devices"
    capability = torch.cuda.get_device_capability(device)
    if capability < _OLDEST_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]}, wanted {_OLDEST_CAPABILITY[0]}.0 or newer"
    try:
        error = self_test_error(device)
    except Exception as problem:  # no Triton, no compiler, too little shared memory, ...
        return (str(problem).strip().splitlines() or [type(problem).__name__])[0]
    if not error <= _SELF_TEST_TOLERANCE:  # NaN fails every comparison
        return f"its self-test is off by {error:.2g}, wanted {_SELF_TEST_TOLERANCE:g}"
    return None


@torch.enable_grad()  # the first call may come under no_grad, from the teacher's assignment
def self_test_error(device: torch.device) -> float:
    """Return how far P and the gradient are from the dense formula in float64, on a small problem."""
    generator = torch.Generator().manual_seed(0)
    members = F.normalize(torch.randn(48, 2, 256, generator=generator), dim=2)
    embeddings = F.normalize(torch.randn(40, 256, generator=generator), dim=1)
    contributions = torch.rand(48, 2, generator=generator) * 0.5 + 0.5
    targets = torch.softmax(torch.randn(40, 48, generator=generator), dim=1)

    exact = embeddings.double().requires_grad_()
    p = torch.softmax(exact @ members.flatten(0, 1).double().T / 0.1, dim=1).unflatten(1, (48, 2))
    w = contributions.double()
    c = (1 - w) / 47
    assigned = (p * (w - c)).sum(2) + (p * c).sum((1, 2)).unsqueeze(1)
    (exact_gradient,) = torch.autograd.grad(-(targets * assigned.log()).sum(), exact)

    member_weights = MemberWeights.of(members.to(device), contributions.to(device))
    with torch.no_grad():
        ours = log_assignment(embeddings.to(device), member_weights, 0.1).exp()
        ones = torch.ones(40, device=device)
        _, gradient = cross_entropy(embeddings.to(device), targets.to(device), ones, member_weights, 0.1, True)
    if gradient is None:
        return math.nan
    off_p = (ours.cpu().double() - assigned.detach()).abs().max() / assigned.detach().max()
    off_gradient = (gradient.cpu().double() - exact_gradient).abs().max() / exact_gradient.abs().max()
    return float(torch.maximum(off_p, off_gradient))
