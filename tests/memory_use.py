"""What torch computes inside a block of code: how large its largest tensor is, and which operations ran."""

from __future__ import annotations

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """Sees every operation of torch in its block."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        """Of the largest floating-point tensor that was computed."""
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        self.calls[function.overloadpacket.__name__] += 1
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                self.elements = max(self.elements, value.numel())
        return result
