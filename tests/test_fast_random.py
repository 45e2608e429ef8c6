"""The short ways of drawing give numpy's own numbers."""

from __future__ import annotations

import numpy as np

from sop_faiss.data.views.fast_random import philox, uniform


def test_philox_is_numpys_with_key_and_counter():
    for key, counter in (((0, 0), (0, 0, 0, 0)), ((7, 3), (0, 0, 2**63 + 1, 12345)), ((2**64 - 1, 1), (5, 6, 7, 8))):
        words = {"key": np.array(key, dtype=np.uint64), "counter": np.array(counter, dtype=np.uint64)}
        theirs, ours = np.random.Generator(np.random.Philox(**words)), philox(key, counter)
        assert np.array_equal(ours.permutation(20), theirs.permutation(20))
        assert ours.random() == theirs.random()
        assert ours.integers(99) == theirs.integers(99)


def test_uniform_is_numpys():
    theirs, ours = (philox((1, 2), (0, 0, 3, 4)) for _ in range(2))
    for low, high in ((0.6, 1.4), (-0.1, 0.1), (0.0, 0.0), (1e-4, 1.0), (-1.204, 1.204)) * 100:
        assert uniform(ours, low, high) == theirs.uniform(low, high)
