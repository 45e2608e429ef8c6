"""FAISS's indices inside each other: rotations and refinements around one with lists, a graph or plain codes."""

from __future__ import annotations

from typing import Any

import faiss


def layers_of(index: Any) -> list[tuple[str, int]]:
    """List the kinds of an index and of those inside it, each with its bytes per row or number of lists."""
    layers, layer = [], index  # the outermost owns the others, which are gone with it
    while layer is not None:
        kind = "IndexFlat" if isinstance(layer, faiss.IndexFlat) else type(layer).__name__  # IndexFlatIP until written
        size = next((int(getattr(layer, name)) for name in ("nlist", "code_size") if hasattr(layer, name)), 0)
        if isinstance(layer, faiss.IndexRefine):  # Refine(Flat) is an IndexRefineFlat from its file on
            kind, size = "IndexRefine", int(layer.refine_index.sa_code_size())
        layers.append((kind, size))
        layer = inside(layer)
    return layers


def inside(index: Any) -> Any:
    """Return the index inside a rotation or a refinement, or that keeps the rows of a graph; else None."""
    if isinstance(index, faiss.IndexPreTransform):
        return faiss.downcast_index(index.index)
    if isinstance(index, faiss.IndexRefine):
        return faiss.downcast_index(index.base_index)
    return faiss.downcast_index(index.storage) if isinstance(index, faiss.IndexHNSW) else None


def innermost(index: Any) -> Any:
    """Return the index inside rotations and refinements."""
    while isinstance(index, faiss.IndexPreTransform | faiss.IndexRefine):
        index = inside(index)
    return index
