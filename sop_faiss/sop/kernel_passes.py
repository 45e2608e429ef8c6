"""The three passes of the loss's Triton kernel; `kernel.py` launches them, `loss.py` is the same in PyTorch.

A logit is only ever in registers; device memory gets one number for each row and prototype, own_a and then log P_a in
its place, as large as the targets. A program takes BLOCK_N rows and goes through its split of the K prototypes, BLOCK_K
of them at a time; for each of the S members it computes one tile (BLOCK_N, BLOCK_K) of logits. So S need not be a power
of two, and a sum over the members of a prototype is a loop.

    1. `lse_pass`         for each prototype own_a = lse_{m in a}(logit_m + log(w_m - c_m)), and over all members
                          lse = lse_m logit_m and shared = lse_m(logit_m + log c_m)
    2. `assignment_pass`  with lse taken off own and shared, log P_a = logaddexp(own_a, shared); and with a target q
                          CE = -sum_a q_a log P_a, by_all = sum_a q_a exp(shared - log P_a), target_sum = sum_a q_a
    3. `gradient_pass`    the logits again, slope_m = p_m target_sum - own - other as in loss.py, and the gradient of a
                          row, weight/temperature sum_m slope_m D_m

Passes 1 and 3 are a grid of (tiles of rows, splits of the prototypes), so that a few rows against many members fill a
GPU too. Each split has its own result, and the next pass, or PyTorch, adds them up in a fixed order: without atomics,
the bits are the same every time. Pass 2 is one program for each row.

Everything is float32. Tensor cores compute each product as three TF32 products (`tf32x3`), about as exact as float32:
similarities of unit vectors are off by some 1e-7. This module needs Triton and is imported only where that is
installed; with TRITON_INTERPRET=1 it runs on the CPU. `no_type_check` keeps jaxtyping's import hook from wrapping what
Triton compiles.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from sop_faiss.sop import member_weights

LOG_OF_ZERO = tl.constexpr(member_weights.LOG_OF_ZERO)
PRECISION = tl.constexpr("tf32x3")


@triton.jit
@no_type_check
def _logits(
    embeddings,
    members,
    rows,
    is_row,
    slots,
    is_slot,
    dim,
    temperature,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Return <u, D>/temperature of some rows and one member of some prototypes; log of zero past the last one."""
    similarity = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in range(0, dim, BLOCK_D):
        dims = start + tl.arange(0, BLOCK_D)
        is_dim = dims < dim
        u = tl.load(embeddings + rows[:, None] * dim + dims[None, :], mask=is_row[:, None] & is_dim[None, :], other=0.0)
        e = tl.load(members + slots[None, :] * dim + dims[:, None], mask=is_slot[None, :] & is_dim[:, None], other=0.0)
        similarity = tl.dot(u, e, similarity, input_precision=PRECISION)
    return tl.where(is_slot[None, :], similarity / temperature, LOG_OF_ZERO)


@triton.jit
@no_type_check
def _add_to_lse(top, total, values):
    """Add values to a running lse, which is the largest value so far and the sum of exp(value - largest)."""
    new_top = tl.maximum(top, values)
    return new_top, total * tl.exp(top - new_top) + tl.exp(values - new_top)


@triton.jit
@no_type_check
def _lse_of_columns(top, total):
    """Return one lse for each row from the running ones of its columns."""
    row_top = tl.max(top, 1)
    return row_top + tl.log(tl.sum(total * tl.exp(top - row_top[:, None]), 1))


@triton.jit(do_not_specialize=["n", "tiles"])
@no_type_check
def lse_pass(
    embeddings,  # (n, d)
    members,  # (S, K, d)
    log_own,  # (S, K)
    log_other,  # (S, K)
    own,  # (n, K), out
    split_lse,  # (splits, n), out
    split_shared,  # (splits, n), out
    n,
    count,  # K
    size,  # S
    dim,  # d
    temperature,
    tiles,  # tiles of prototypes per split
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Compute pass 1: lse of the logits, by prototype and over this split's members."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = rows < n
    all_top = tl.full((BLOCK_N, BLOCK_K), LOG_OF_ZERO, tl.float32)
    all_total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    shared_top = tl.full((BLOCK_N, BLOCK_K), LOG_OF_ZERO, tl.float32)
    shared_total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for tile in range(tiles):
        prototypes = (tl.program_id(1) * tiles + tile) * BLOCK_K + tl.arange(0, BLOCK_K)
        is_prototype = prototypes < count
        own_top = tl.full((BLOCK_N, BLOCK_K), LOG_OF_ZERO, tl.float32)
        own_total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        for s in range(size):
            slots = s * count + prototypes
            logits = _logits(
                embeddings, members, rows, is_row, slots, is_prototype, dim, temperature, BLOCK_N, BLOCK_K, BLOCK_D
            )
            gives_own = tl.load(log_own + slots, mask=is_prototype, other=0.0)
            gives_other = tl.load(log_other + slots, mask=is_prototype, other=0.0)
            all_top, all_total = _add_to_lse(all_top, all_total, logits)
            own_top, own_total = _add_to_lse(own_top, own_total, logits + gives_own[None, :])
            shared_top, shared_total = _add_to_lse(shared_top, shared_total, logits + gives_other[None, :])
        cells = rows[:, None] * count + prototypes[None, :]
        tl.store(own + cells, own_top + tl.log(own_total), mask=is_row[:, None] & is_prototype[None, :])
    slot = tl.program_id(1) * n + rows
    tl.store(split_lse + slot, _lse_of_columns(all_top, all_total), mask=is_row)
    tl.store(split_shared + slot, _lse_of_columns(shared_top, shared_total), mask=is_row)


@triton.jit
@no_type_check
def _lse_of_splits(split_values, row, n, splits, BLOCK_SPLITS: tl.constexpr):
    """Return the lse of a row from those of its splits."""
    split = tl.arange(0, BLOCK_SPLITS)
    values = tl.load(split_values + split * n + row, mask=split < splits, other=LOG_OF_ZERO)
    top = tl.max(values, 0)
    return top + tl.log(tl.sum(tl.exp(values - top), 0))


@triton.jit(do_not_specialize=["n", "splits"])
@no_type_check
def assignment_pass(
    log_assigned,  # (n, K), in: `own` of pass 1; out: log P
    split_lse,  # (splits, n)
    split_shared,  # (splits, n)
    targets,  # (n, K), or None where only the assignment is wanted
    lse,  # (n,), out
    shared,  # (n,), out, less lse
    cross_entropy,  # (n,), out
    by_all,  # (n,), out
    target_sum,  # (n,), out
    n,
    count,
    splits,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_A: tl.constexpr,
):
    """Compute pass 2: log P of one row, and what the cross-entropy and its gradient need of it."""
    row = tl.program_id(0).to(tl.int64)
    row_lse = _lse_of_splits(split_lse, row, n, splits, BLOCK_SPLITS)
    row_shared = _lse_of_splits(split_shared, row, n, splits, BLOCK_SPLITS) - row_lse
    row_cross_entropy = tl.zeros((BLOCK_A,), tl.float32)
    row_by_all = tl.zeros((BLOCK_A,), tl.float32)
    row_target_sum = tl.zeros((BLOCK_A,), tl.float32)
    for start in range(0, count, BLOCK_A):
        prototypes = start + tl.arange(0, BLOCK_A)
        is_prototype = prototypes < count
        cells = row * count + prototypes
        row_own = tl.load(log_assigned + cells, mask=is_prototype, other=0.0) - row_lse
        top = tl.maximum(row_own, row_shared)
        assigned = top + tl.log(1.0 + tl.exp(tl.minimum(row_own, row_shared) - top))
        tl.store(log_assigned + cells, assigned, mask=is_prototype)
        if targets is not None:
            target = tl.load(targets + cells, mask=is_prototype, other=0.0)
            row_cross_entropy -= target * assigned
            row_by_all += target * tl.exp(row_shared - assigned)
            row_target_sum += target
    if targets is not None:
        tl.store(lse + row, row_lse)
        tl.store(shared + row, row_shared)
        tl.store(cross_entropy + row, tl.sum(row_cross_entropy, 0))
        tl.store(by_all + row, tl.sum(row_by_all, 0))
        tl.store(target_sum + row, tl.sum(row_target_sum, 0))


@triton.jit(do_not_specialize=["n", "tiles"])
@no_type_check
def gradient_pass(
    embeddings,  # (n, d)
    members,  # (S, K, d)
    log_own,  # (S, K)
    log_other,  # (S, K)
    log_assigned,  # (n, K)
    targets,  # (n, K)
    row_weights,  # (n,)
    lse,  # (n,)
    shared,  # (n,), less lse
    by_all,  # (n,)
    target_sum,  # (n,)
    split_gradient,  # (splits, n, d), out
    n,
    count,
    size,
    dim,
    temperature,
    tiles,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """Compute pass 3: what this split's members add to weight_i dCE_i/du_i, in BLOCK_OUT dimensions."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = rows < n
    dims = tl.program_id(2) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_dim = dims < dim
    row_lse = tl.load(lse + rows, mask=is_row, other=0.0)
    row_shared = tl.load(shared + rows, mask=is_row, other=0.0)
    row_by_all = tl.load(by_all + rows, mask=is_row, other=0.0)
    row_target_sum = tl.load(target_sum + rows, mask=is_row, other=0.0)
    gradient = tl.zeros((BLOCK_N, BLOCK_OUT), tl.float32)
    for tile in range(tiles):
        prototypes = (tl.program_id(1) * tiles + tile) * BLOCK_K + tl.arange(0, BLOCK_K)
        is_prototype = prototypes < count
        cells = rows[:, None] * count + prototypes[None, :]
        is_cell = is_row[:, None] & is_prototype[None, :]
        assigned = tl.load(log_assigned + cells, mask=is_cell, other=0.0)
        target = tl.load(targets + cells, mask=is_cell, other=0.0)
        for s in range(size):
            slots = s * count + prototypes
            logits = _logits(
                embeddings, members, rows, is_row, slots, is_prototype, dim, temperature, BLOCK_N, BLOCK_K, BLOCK_D
            )
            gives_own = tl.load(log_own + slots, mask=is_prototype, other=0.0)
            gives_other = tl.load(log_other + slots, mask=is_prototype, other=0.0)
            log_p = logits - row_lse[:, None]
            # q_a p_m (w_m - c_m) / P_a, then c_m p_m sum_b q_b / P_b, then p_m sum_a q_a
            own = tl.exp(log_p + gives_own[None, :] - assigned) * target
            other = tl.exp(log_p + (gives_other[None, :] - row_shared[:, None])) * row_by_all[:, None]
            slope = tl.exp(log_p) * row_target_sum[:, None] - own - other
            is_read = is_prototype[:, None] & is_dim[None, :]
            e = tl.load(members + slots[:, None] * dim + dims[None, :], mask=is_read, other=0.0)
            gradient = tl.dot(slope, e, gradient, input_precision=PRECISION)
    scale = tl.load(row_weights + rows, mask=is_row, other=0.0) / temperature
    slot = (tl.program_id(1) * n + rows)[:, None] * dim + dims[None, :]
    tl.store(split_gradient + slot, gradient * scale[:, None], mask=is_row[:, None] & is_dim[None, :])
