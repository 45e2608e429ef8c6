"""Cosine similarities of every query to a whole gallery, with the same bits in any block, on any device.

A similarity is the inner product of two float32 rows, computed in float64 and rounded to float32. The last bits of a
float64 product depend on the shape of its block, so one that is close to a float32 boundary could be rounded up in one
block and down in another. Such a product (one in a million or fewer) is computed again, in one fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from jaxtyping import Float32, Float64, Int64

_PAIR_ELEMENTS = 2**22
"""Numbers of paired rows in memory at a time: 32 MiB."""


def product_slack(dimension: int, in_float64: bool = True) -> float:
    """Return how far apart two products of the same unit rows can be, whatever the order of their sums.

    Each is within d u sum |a_i b_i| of the exact product (Higham, "Accuracy and Stability of Numerical Algorithms",
    section 3.1), u = 2^-53 in float64 and 2^-24 in float32, and rows of unit norm make the sum at most 1.

    Args:
        dimension: of the rows.
        in_float64: both are float64: twice the bound, and as much again for norms that are not quite 1. Else one is
            float32: its bound, a tenth for norms, and the rounding of what it is compared with.
    """
    return 4 * dimension * 2.0**-53 if in_float64 else (1.1 * dimension + 2) * 2.0**-24


def fixed_order_products(
    queries: Float32[np.ndarray, "q d"],
    rows: Float32[np.ndarray, "n d"],
    query: Int64[np.ndarray, " p"],
    row: Int64[np.ndarray, " p"],
) -> Float32[np.ndarray, " p"]:
    """Return inner products of chosen pairs, each summed in an order that depends only on the dimension.

    Args:
        queries: one query per row.
        rows: one gallery vector per row.
        query: position of each pair's query.
        row: position of each pair's row.
    """
    products = np.empty(len(query), np.float32)
    step = max(1, _PAIR_ELEMENTS // max(1, queries.shape[1]))
    for start in range(0, len(query), step):
        some = slice(start, start + step)
        products[some] = (queries[query[some]].astype(np.float64) * rows[row[some]]).sum(axis=1)
    return products


def round_products(
    products: Float64[np.ndarray, "q n"], queries: Float32[np.ndarray, "q d"], rows: Float32[np.ndarray, "n d"]
) -> Float32[np.ndarray, "q n"]:
    """Round float64 products to float32, and compute those near a rounding boundary again in the fixed order."""
    slack = product_slack(queries.shape[1])
    rounded = products.astype(np.float32)
    doubtful = (products - slack).astype(np.float32) != (products + slack).astype(np.float32)
    if doubtful.any():
        rounded[doubtful] = fixed_order_products(queries, rows, *np.nonzero(doubtful))
    return rounded


def similarity_rows(
    queries: Float32[np.ndarray, "q d"],
    gallery: Float32[np.ndarray, "n d"],
    gallery_block: int = 16384,
    matrix_elements: int = 2**26,
) -> Iterator[Float32[np.ndarray, " n"]]:
    """Yield each query's inner products with the whole gallery.

    Args:
        queries: one query per row, of unit norm (`require_unit_rows`).
        gallery: one image per row, of unit norm.
        gallery_block: gallery rows in float64 at a time.
        matrix_elements: similarities in memory at a time, which limits the queries of a block.
    """
    query_block = max(1, matrix_elements // max(1, len(gallery)))
    for start in range(0, len(queries), query_block):
        block = queries[start : start + query_block]
        exact = block.astype(np.float64)
        similarities = np.empty((len(block), len(gallery)), dtype=np.float32)
        for left in range(0, len(gallery), gallery_block):
            part = gallery[left : left + gallery_block]
            products = exact @ part.astype(np.float64).T
            similarities[:, left : left + gallery_block] = round_products(products, block, part)
        yield from similarities
