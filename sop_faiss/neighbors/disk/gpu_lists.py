"""Lists learned and filled with GPUs, where FAISS finds any: most of a build compares vectors with the lists' centers.

What is written is an index of the CPU all the same. A GPU adds up in another order, so that a vector between two
centers may go to the other list.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import faiss
import numpy as np
from jaxtyping import Float32

_log = logging.getLogger(__name__)
_WORTH_IT = 2**26  # comparisons; fewer take less than the copying


def _gpus() -> int:
    return int(faiss.get_num_gpus()) if hasattr(faiss, "index_cpu_to_all_gpus") else 0


def _on_gpus(index: Any) -> Any:
    """Copy a flat index to every GPU; None where there is no GPU, or FAISS cannot use it."""
    if _gpus() == 0:
        return None
    try:
        return faiss.index_cpu_to_all_gpus(index)
    except Exception as error:  # what FAISS raises depends on its build and on the driver
        _log.warning(
            "FAISS cannot use the GPU, the CPU builds: %s",
            (str(error).strip().splitlines() or [type(error).__name__])[-1],
        )
        return None


@contextlib.contextmanager
def learning_on_gpus(ivf: Any, rows: int) -> Iterator[None]:
    """Let GPUs find the center of each vector while an IVF index is trained inside this context.

    Args:
        ivf: FAISS's IVF index; None: nothing is done.
        rows: how many are learned from.
    """
    is_large = ivf is not None and rows * ivf.nlist >= _WORTH_IT
    centers = _on_gpus(faiss.IndexFlat(ivf.d, ivf.metric_type)) if is_large else None
    if centers is None:
        yield
        return
    ivf.clustering_index = centers
    try:
        yield
    finally:
        ivf.clustering_index = None


class FilledByGpus:
    """Adds vectors to a trained index whose lists' centers are on GPUs.

    Args:
        index: FAISS's index.
        ivf: the IVF index that it is, or that is behind its rotation.
    """

    def __init__(self, index: Any, ivf: Any) -> None:
        self._index, self._ivf = index, ivf
        self._centers: Any = None
        self._has_looked = False

    def add(self, rows: Float32[np.ndarray, "m d"]) -> bool:
        """Append contiguous vectors; False, and nothing is done, where GPUs cannot help or it is not worth it."""
        if self._ivf is None or len(rows) * self._ivf.nlist < _WORTH_IT or not self._find_centers():
            return False
        if isinstance(self._index, faiss.IndexPreTransform):
            chain: Any = self._index.chain
            for number in range(chain.size()):
                rows = faiss.downcast_VectorTransform(chain.at(number)).apply(rows)
        lists = np.ascontiguousarray(self._centers.search(rows, 1)[1][:, 0])
        self._ivf.add_core(len(rows), faiss.swig_ptr(rows), None, faiss.swig_ptr(lists))
        self._index.ntotal = self._ivf.ntotal
        return True

    def _find_centers(self) -> bool:
        if not self._has_looked:
            self._has_looked = True
            quantizer = faiss.downcast_index(self._ivf.quantizer)
            lists = faiss.downcast_InvertedLists(self._ivf.invlists)
            is_plain = isinstance(self._index, faiss.IndexIVF | faiss.IndexPreTransform)
            if is_plain and isinstance(quantizer, faiss.IndexFlat) and isinstance(lists, faiss.ArrayInvertedLists):
                self._centers = _on_gpus(quantizer)
        return self._centers is not None
