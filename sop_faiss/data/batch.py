"""Batches of the data stream: one rank's part of a global batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int64, UInt8
from torch import Tensor

from sop_faiss.data.workers import this_worker


@dataclass(frozen=True)
class BadSample:
    """An image that could not be read; another took its place."""

    position: int  # in the source
    key: str
    shard: str  # relative to the source's root; "" for an image that is a file
    member: str  # of the shard, or the file relative to the root
    offset: int  # of the image in its shard, bytes
    reason: str  # one word, to count by
    message: str
    replacement: str  # key of the image that took its place


class Buffers(NamedTuple):
    """Arrays that share the memory of a batch, to write its images into."""

    global_views: UInt8[np.ndarray, "G b s s 3"]
    local_views: UInt8[np.ndarray, "L b t t 3"]
    global_colors: Float32[np.ndarray, "G b c"]
    local_colors: Float32[np.ndarray, "L b c"]
    masks: Bool[np.ndarray, "G b n"]

    @property
    def sides(self) -> list[int]:
        """Return the side of each view of an image in pixels, global ones first."""
        return [array.shape[2] for array in (self.global_views, self.local_views) for _ in array]


@dataclass
class Batch:
    """One rank's part of a global batch, in uint8; an image has the same place in every view."""

    global_views: UInt8[Tensor, "G b s s 3"]
    local_views: UInt8[Tensor, "L b t t 3"]
    global_colors: Float32[Tensor, "G b c"]
    """A row of `Colors` for each view where colors are left to the device; else no columns."""
    local_colors: Float32[Tensor, "L b c"]
    masks: Bool[Tensor, "G b n"]
    image_ids: Int64[Tensor, " b"]
    bad: list[BadSample]

    def buffers(self) -> Buffers:
        """Return numpy arrays that share the batch's memory; for a batch on the CPU."""
        tensors = (self.global_views, self.local_views, self.global_colors, self.local_colors, self.masks)
        return Buffers(*(tensor.numpy() for tensor in tensors))

    def split(self, parts: int) -> list[Batch]:
        """Split into `parts` batches of equal size, in order; the bad samples stay with the first."""
        pieces = zip(
            self.global_views.chunk(parts, 1),
            self.local_views.chunk(parts, 1),
            self.global_colors.chunk(parts, 1),
            self.local_colors.chunk(parts, 1),
            self.masks.chunk(parts, 1),
            self.image_ids.chunk(parts),
            [self.bad, *([] for _ in range(parts - 1))],
            strict=True,
        )
        return [Batch(*piece) for piece in pieces]

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device, without waiting for the copy; the drawn colors stay on the CPU."""
        return Batch(
            self.global_views.to(device, non_blocking=True),
            self.local_views.to(device, non_blocking=True),
            self.global_colors,
            self.local_colors,
            self.masks.to(device, non_blocking=True),
            self.image_ids.to(device, non_blocking=True),
            self.bad,
        )

    def pin_memory(self) -> Batch:
        """Lock the batch's memory, so that copies to a GPU run during the computation."""
        self.global_views, self.local_views = self.global_views.pin_memory(), self.local_views.pin_memory()
        self.masks, self.image_ids = self.masks.pin_memory(), self.image_ids.pin_memory()
        return self


def empty_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialized tensor to build a batch in.

    In a worker process it is in shared memory, which is passed on without a copy; private memory would be copied there.
    """
    elements = torch.Size(shape).numel()
    if this_worker() is None or elements == 0:
        return torch.empty(shape, dtype=dtype)
    storage = torch.UntypedStorage._new_shared(elements * dtype.itemsize, device="cpu")
    return torch.empty(0, dtype=dtype).set_(storage).view(shape)
