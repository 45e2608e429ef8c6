"""A ViT's last block for the tokens that are read; the others serve as keys and values alone (docs/method.md, 6).

Nobody reads the last block's output at most positions: of a local view only [CLS], of a global one [CLS] and some
patches. For the others queries, projection and MLP, five sixths of the block, are left out. What is computed is what
the whole block computes, but for the order of sums.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int64
from timm.layers import Attention
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["block_on_rows", "works_on_rows"]


def works_on_rows(block: nn.Module) -> bool:
    """Whether `block_on_rows` knows this build of a block: timm's own with plain attention, no gate and no dropout."""
    if type(block) is not Block or type(block.attn) is not Attention:
        return False
    drops = any(module.p > 0 for module in block.modules() if isinstance(module, nn.Dropout))
    return not drops and getattr(block.attn, "gate", None) is None


def block_on_rows(block: Any, tokens: Float[Tensor, "b n d"], rows: Int64[Tensor, " m"]) -> Float[Tensor, "m d"]:
    """`block(tokens).flatten(0, 1)[rows]`, without the work for other rows.

    Args:
        block: one that `works_on_rows`.
        tokens: what comes into the block; b views of n tokens.
        rows: which tokens are read, counted over all views; in any order, also twice.
    """
    views, count, _ = tokens.shape
    view_of = rows // count
    read = tokens.flatten(0, 1).index_select(0, rows)
    attended = _attend(block.attn, block.norm1(tokens), rows, view_of)
    read = read + _drop_path(block.drop_path1, block.ls1(attended), view_of, views)
    return read + _drop_path(block.drop_path2, block.ls2(block.mlp(block.norm2(read))), view_of, views)


def _attend(
    attention: Any, tokens: Float[Tensor, "b n d"], rows: Int64[Tensor, " m"], view_of: Int64[Tensor, " m"]
) -> Float[Tensor, "m d"]:
    """Attention of the read tokens to all tokens of their view."""
    views, count, _ = tokens.shape
    heads, width = attention.num_heads, attention.proj.in_features
    of_a_head = width // heads
    weight_q, weight_kv = attention.qkv.weight.split([width, 2 * width])
    bias_q, bias_kv = (None, None) if attention.qkv.bias is None else attention.qkv.bias.split([width, 2 * width])
    keys, values = F.linear(tokens, weight_kv, bias_kv).view(views, count, 2, heads, of_a_head).permute(2, 0, 3, 1, 4)
    queries = F.linear(tokens.flatten(0, 1).index_select(0, rows), weight_q, bias_q).view(-1, heads, of_a_head)
    queries, keys = attention.q_norm(queries), attention.k_norm(keys)

    # Views are read at different numbers of places: queries are padded to the largest, and the padding is not read.
    slots, most = _slots(view_of, views)
    padded = queries.new_zeros(views * most, *queries.shape[1:]).index_copy(0, slots, queries)
    padded = padded.view(views, most, heads, of_a_head).transpose(1, 2)
    attended = F.scaled_dot_product_attention(padded, keys, values).transpose(1, 2).flatten(0, 1)
    attended = attended.index_select(0, slots).flatten(1)
    norm = getattr(attention, "norm", None)  # older versions of timm have none
    return attention.proj(attended if norm is None else norm(attended))


@torch.compiler.disable  # its second answer is a number that the device has to be waited for
def _slots(view_of: Int64[Tensor, " m"], views: int) -> tuple[Int64[Tensor, " m"], int]:
    """A place for each row among those of its view, counted over all views, and how many places each view gets."""
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
