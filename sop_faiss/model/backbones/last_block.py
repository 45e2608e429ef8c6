"""A ViT's last block for the tokens that are read; the others serve as keys and values alone (docs/method.md, 6).

The last block's output is not read at most positions: of a local view only [CLS] is, of a global one [CLS] and some
patches. For the others queries, projection and MLP, five sixths of the block, are left out. The results are those
of the whole block, except for the order of sums.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int64
from timm.layers import Attention, AttentionRope, apply_rot_embed_cat
from timm.models.eva import EvaAttention, EvaBlock
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.nn import functional as F

_KNOWN = {Block: (Attention,), EvaBlock: (EvaAttention, AttentionRope)}
"""The blocks that are known, and their kinds of attention."""


def works_on_rows(block: nn.Module) -> bool:
    """Return whether `block_on_rows` knows this build of a block: timm's own, without gate, dropout or shared keys."""
    attention: Any = getattr(block, "attn", None)
    if type(attention) not in _KNOWN.get(type(block), ()):
        return False
    drops = any(module.p > 0 for module in block.modules() if isinstance(module, nn.Dropout))
    return not drops and getattr(attention, "gate", None) is None and getattr(attention, "num_kv_groups", 1) == 1


def block_on_rows(
    block: Any, tokens: Float[Tensor, "b n d"], rows: Int64[Tensor, " m"], rope: Float[Tensor, "*rope"] | None = None
) -> Float[Tensor, "m d"]:
    """Compute `block(tokens).flatten(0, 1)[rows]` without the work for other rows.

    Args:
        block: one that `works_on_rows`.
        tokens: what comes into the block; b views of n tokens.
        rows: which tokens are read, counted over all views; in any order, also twice.
        rope: sines and cosines of rotary positions, one row for each patch; for each head, where they differ.
    """
    views, count, _ = tokens.shape
    view_of = rows // count
    read = tokens.flatten(0, 1).index_select(0, rows)
    attended = _scaled(block, 1, _attend(block.attn, block.norm1(tokens), rows, view_of, rope))
    read = read + _drop_path(block.drop_path1, attended, view_of, views)
    return read + _drop_path(block.drop_path2, _scaled(block, 2, block.mlp(block.norm2(read))), view_of, views)


def _scaled(block: Any, number: int, branch: Float[Tensor, "m d"]) -> Float[Tensor, "m d"]:
    """Apply the layer scale of a branch: a module of `Block`, a parameter or nothing of `EvaBlock`."""
    if isinstance(block, Block):
        scaled: Tensor = getattr(block, f"ls{number}")(branch)
        return scaled
    gamma = getattr(block, f"gamma_{number}")
    return branch if gamma is None else gamma * branch


def _attend(
    attention: Any,
    tokens: Float[Tensor, "b n d"],
    rows: Int64[Tensor, " m"],
    view_of: Int64[Tensor, " m"],
    rope: Float[Tensor, "*rope"] | None,
) -> Float[Tensor, "m d"]:
    """Return attention of the read tokens to all tokens of their view."""
    views, count, _ = tokens.shape
    queries, keys, values = _project(attention, tokens, rows)
    queries, keys = attention.q_norm(queries), attention.k_norm(keys)
    if rope is not None:
        queries, keys = _rotate(attention, queries, keys, rope, rows % count)

    # Views are read at different numbers of places: queries are padded to the largest, and the padding is not read.
    slots, most = _slots(view_of, views)
    padded = queries.new_zeros(views * most, *queries.shape[1:]).index_copy(0, slots, queries)
    padded = padded.view(views, most, *queries.shape[1:]).transpose(1, 2)
    attended = F.scaled_dot_product_attention(padded, keys, values).transpose(1, 2).flatten(0, 1)
    attended = attended.index_select(0, slots).flatten(1)
    norm = getattr(attention, "norm", None)  # older versions of timm have none
    return attention.proj(attended if norm is None else norm(attended))


def _project(
    attention: Any, tokens: Float[Tensor, "b n d"], rows: Int64[Tensor, " m"]
) -> tuple[Float[Tensor, "m heads e"], Float[Tensor, "b heads n e"], Float[Tensor, "b heads n e"]]:
    """Return queries of the read tokens, keys and values of all."""
    views, count, _ = tokens.shape
    heads, width = attention.num_heads, attention.proj.in_features
    of_a_head = width // heads
    read = tokens.flatten(0, 1).index_select(0, rows)
    if attention.qkv is None:
        keys, values = (
            project(tokens).view(views, count, heads, of_a_head).transpose(1, 2)
            for project in (attention.k_proj, attention.v_proj)
        )
        return attention.q_proj(read).view(-1, heads, of_a_head), keys, values
    bias = attention.qkv.bias
    if getattr(attention, "q_bias", None) is not None:
        bias = torch.cat([attention.q_bias, attention.k_bias, attention.v_bias])
    weight_q, weight_kv = attention.qkv.weight.split([width, 2 * width])
    bias_q, bias_kv = (None, None) if bias is None else bias.split([width, 2 * width])
    keys, values = F.linear(tokens, weight_kv, bias_kv).view(views, count, 2, heads, of_a_head).permute(2, 0, 3, 1, 4)
    return F.linear(read, weight_q, bias_q).view(-1, heads, of_a_head), keys, values


def _rotate(
    attention: Any,
    queries: Float[Tensor, "m heads e"],
    keys: Float[Tensor, "b heads n e"],
    rope: Float[Tensor, "*rope"],
    places: Int64[Tensor, " m"],
) -> tuple[Float[Tensor, "m heads e"], Float[Tensor, "b heads n e"]]:
    """Rotate queries, which are at these places of their views, and keys by position; [CLS] and registers have none."""
    prefix, half = attention.num_prefix_tokens, getattr(attention, "rotate_half", False)
    keys = torch.cat([keys[:, :, :prefix], apply_rot_embed_cat(keys[:, :, prefix:], rope, half=half)], dim=2)
    of_rows = rope.index_select(-2, (places - prefix).clamp(min=0))
    rotated = apply_rot_embed_cat(queries.transpose(0, 1), of_rows, half=half).transpose(0, 1)
    return torch.where((places < prefix)[:, None, None], queries, rotated), keys


@torch.compiler.disable  # its second answer is a number that the device has to be waited for
def _slots(view_of: Int64[Tensor, " m"], views: int) -> tuple[Int64[Tensor, " m"], int]:
    """Return a place for each row among those of its view, counted over all views, and how many places a view gets."""
    counts = torch.bincount(view_of, minlength=views)
    most = max(1, int(counts.max()))
    order = view_of.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[view_of[order]]
    return view_of * most + place, most


def _drop_path(
    path: nn.Module, branch: Float[Tensor, "m d"], view_of: Int64[Tensor, " m"], views: int
) -> Float[Tensor, "m d"]:
    """Stochastic depth as `path` draws it for whole views: one draw a view."""
    if isinstance(path, nn.Identity) or not path.training:
        return branch
    return branch * path(branch.new_ones(views, 1)).index_select(0, view_of)
