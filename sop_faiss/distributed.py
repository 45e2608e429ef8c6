"""Ranks: who am I, gather rows in rank order, average. Everything works without a process group."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor

from sop_faiss.errors import ConfigError

__all__ = ["average", "gather_rows", "is_main", "join_process_group", "leave_process_group", "rank", "world_size"]


def _active() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """This process's number, from 0."""
    return dist.get_rank() if _active() else 0


def world_size() -> int:
    """How many processes train together."""
    return dist.get_world_size() if _active() else 1


def is_main() -> bool:
    """Whether this process writes the files and the log."""
    return rank() == 0


def join_process_group(device: str) -> torch.device:
    """Join the group that `torchrun` announces in the environment, if any, and name this rank's device.

    Args:
        device: `cpu`, `cuda`, or `auto` (CUDA where there is one).

    Raises:
        ConfigError: CUDA was asked for and is not there, or the device is unknown.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"train.device = {device!r}: wanted cpu, cuda or auto")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("train.device = cuda, but torch sees no CUDA device: set train.device=cpu or mend the driver")
    use_cuda = device != "cpu" and torch.cuda.is_available()
    chosen = torch.device("cpu")
    if use_cuda:
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(chosen)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not _active():
        dist.init_process_group("nccl" if use_cuda else "gloo")
    return chosen


def leave_process_group() -> None:
    """Leave the group, if one was joined."""
    if _active():
        dist.destroy_process_group()


def gather_rows(rows: Shaped[Tensor, "n ..."]) -> Shaped[Tensor, "m ..."]:
    """All ranks' rows, one rank after the other; ranks may bring different numbers of rows, also none."""
    if not _active():
        return rows
    counts = [torch.zeros(1, dtype=torch.int64, device=rows.device) for _ in range(world_size())]
    dist.all_gather(counts, torch.tensor([len(rows)], dtype=torch.int64, device=rows.device))
    lengths = [int(count) for count in counts]
    padded = rows.new_zeros((max(lengths), *rows.shape[1:]))
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded)
    return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])


def average(values: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
    """The mean over all ranks, element by element."""
    if not _active():
        return values
    total = values.clone()
    dist.all_reduce(total)
    return total / world_size()
