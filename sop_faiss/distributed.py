"""Ranks: this process's rank, rows gathered in rank order, averages. Everything works without a process group."""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor

from sop_faiss.errors import ConfigError, SopError

T = TypeVar("T")
_PATIENCE = datetime.timedelta(hours=4)
"""How long ranks wait for each other: the main rank may score or save for a long time while the others wait."""


def derive_seed(*key: int | str) -> int:
    """Return a seed of 63 bits for one purpose; different keys give unrelated seeds."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "big") >> 1


def _environment_number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise ConfigError(f"{name} = {text!r} in the environment: wanted a number, as torchrun sets it")
    return int(text)


def _active() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Return this process's number, from 0."""
    return dist.get_rank() if _active() else 0


def world_size() -> int:
    """Return how many processes work together."""
    return dist.get_world_size() if _active() else 1


def announced_world_size() -> int:
    """Return how many processes `torchrun` has announced, before they have joined; 1 without it."""
    return max(1, _environment_number("WORLD_SIZE", 1))


def local_world_size() -> int:
    """Return how many ranks share this machine, as `torchrun` announces it; 1 without it."""
    return max(1, _environment_number("LOCAL_WORLD_SIZE", 1))


def is_main() -> bool:
    """Return whether this process writes the files and the log."""
    return rank() == 0


def join_process_group(device: str) -> torch.device:
    """Join the group that `torchrun` announces in the environment, if any, and return this rank's device.

    Args:
        device: `cpu`, `cuda`, or `auto` (CUDA if available).

    Raises:
        ConfigError: CUDA was asked for and is not available, or the device is unknown.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"train.device = {device!r}: wanted cpu, cuda or auto")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "train.device = cuda, but torch sees no CUDA device: set train.device=cpu or repair the driver"
        )
    use_cuda = device != "cpu" and torch.cuda.is_available()
    chosen = torch.device("cpu")
    if use_cuda:
        local_rank = _environment_number("LOCAL_RANK", 0)
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"rank {local_rank} of this machine has no GPU: torch sees {torch.cuda.device_count()}; "
                "lower --nproc-per-node, or set train.device=cpu"
            )
        chosen = torch.device("cuda", local_rank)
        torch.cuda.set_device(chosen)
    if announced_world_size() > 1 and not _active():
        # Its functions take the group of the moment of import as a default: imported later, as torch does by itself,
        # they keep the group and its threads until the interpreter ends, where a thread can abort the process.
        importlib.import_module("torch.distributed.nn.functional")
        try:
            dist.init_process_group("nccl" if use_cuda else "gloo", timeout=_PATIENCE)
        except (ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"cannot join the other ranks ({reason}): start them with torchrun") from None
    return chosen


def leave_process_group() -> None:
    """Leave the group, if one was joined."""
    if _active():
        dist.destroy_process_group()


def gather_rows(rows: Shaped[Tensor, "n ..."]) -> Shaped[Tensor, "m ..."]:
    """Return all ranks' rows in rank order; ranks may have different numbers of rows, including zero."""
    if not _active():
        return rows
    counts = [torch.zeros(1, dtype=torch.int64, device=rows.device) for _ in range(world_size())]
    dist.all_gather(counts, torch.tensor([len(rows)], dtype=torch.int64, device=rows.device))
    lengths: list[int] = torch.cat(counts).tolist()  # one wait for the device, not one for each rank
    padded = rows.new_zeros((max(lengths), *rows.shape[1:]))
    padded[: len(rows)] = rows
    parts = gather_equal_rows(padded).view(len(lengths), *padded.shape)
    return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])


def gather_equal_rows(rows: Shaped[Tensor, "n ..."]) -> Shaped[Tensor, "m ..."]:
    """Return all ranks' rows in rank order, in one collective and without a wait; each rank has equally many rows."""
    if not _active():
        return rows
    parts = [torch.empty_like(rows) for _ in range(world_size())]
    dist.all_gather(parts, rows.contiguous())
    return torch.cat(parts)


def average(values: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
    """Return the mean of floating-point values over all ranks, element by element."""
    if not _active():
        return values
    mean = values.clone()
    average_(mean)
    return mean


def average_(values: Shaped[Tensor, "*shape"]) -> None:
    """Replace each rank's values by their mean over all ranks."""
    if _active():
        dist.all_reduce(values)
        values.div_(world_size())


def average_in_rank_order(gradients: Shaped[Tensor, " n"]) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients for DistributedDataParallel, summed in rank order, so that resuming is exact.

    An all-reduce starts each part of a bucket at another rank, and DistributedDataParallel rearranges its buckets after
    the first step of a process: a resumed run would add up three or more ranks in another order, and round differently.
    """
    parts = [torch.empty_like(gradients) for _ in range(world_size())]
    dist.all_gather(parts, gradients)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(functools.reduce(torch.add, parts) / world_size())
    return done


def gather_objects(value: T) -> list[T]:
    """Return every rank's value, in rank order, on every rank; for small Python objects."""
    if not _active():
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def decide(question: Callable[[], T]) -> T:
    """Call a function on the main rank only, and return its answer, or raise its error, on all ranks.

    Args:
        question: reads or writes files; its answer must be picklable.

    Raises:
        SopError: `question` raised it on the main rank.
        OSError: `question` raised it on the main rank: the disk is full, or cannot be written.
    """
    if not _active():
        return question()
    outcome: list[Any] = [None, None]
    if is_main():
        try:
            outcome[0] = question()
        except (SopError, OSError) as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    answer: T = outcome[0]
    return answer


def on_all_ranks(work: Callable[[], T]) -> T:
    """Call a function on every rank and return this rank's answer; what it raises on one rank is raised on all.

    Raises:
        SopError: `work` raised it on a rank.
        OSError: `work` raised it on a rank.
    """
    if world_size() == 1:
        return work()
    answer: Any = None
    failure: SopError | OSError | None = None
    try:
        answer = work()
    except (SopError, OSError) as error:
        failure = error
    for raised in gather_objects(failure):
        if raised is not None:
            raise raised
    made: T = answer
    return made


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = 2**20  # words summed at a time: 8 MiB of products
_ODD = 0x1E3779B97F4A7C15  # any large odd number: a changed word changes the sum


def checksum(values: Shaped[Tensor, "*shape"]) -> int:
    """Return 64 bits that identify the bits of a tensor: the sum of its words, each times its own odd number."""
    words = values.detach().contiguous().flatten()
    words = words.view(_WORDS[words.element_size()])
    weights = (2 * torch.arange(min(_BLOCK, len(words)), device=words.device) + 1) * _ODD
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for number, block in enumerate(words.split(_BLOCK)):
        total += (block * weights[: len(block)]).sum() * (2 * number + 1)
    return int(total)


def generator_digest(generator: torch.Generator) -> str:
    """Return a text that is the same for two generators that will draw the same numbers."""
    return hashlib.sha256(generator.get_state().numpy().tobytes()).hexdigest()
