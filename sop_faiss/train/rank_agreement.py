"""All ranks hold the same memories, draws and teacher: looked at every `train.check_ranks_every_steps`."""

from __future__ import annotations

import hashlib

import torch
from jaxtyping import Shaped
from torch import Tensor

from sop_faiss import distributed
from sop_faiss.errors import RunStoppedError
from sop_faiss.train.state import RunState

__all__ = ["check_ranks_agree", "checksum"]

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = 2**20
_ODD = 0x1E3779B97F4A7C15  # any large odd number: a changed word changes the sum


def checksum(values: Shaped[Tensor, "*shape"]) -> int:
    """64 bits that tell tensors of one shape apart by their bits: a sum of words, each times its own odd number."""
    words = values.detach().contiguous().flatten()
    words = words.view(_WORDS[words.element_size()])
    weights = (2 * torch.arange(min(_BLOCK, len(words)), device=words.device) + 1) * _ODD
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for number, block in enumerate(words.split(_BLOCK)):
        total += (block * weights[: len(block)]).sum() * (2 * number + 1)
    return int(total)


def check_ranks_agree(state: RunState) -> None:
    """Stop the run where a rank's memories, generators or teacher differ from the main rank's.

    Raises:
        RunStoppedError: they do; the step and what differs are named.
    """
    every = state.config.train.check_ranks_every_steps
    if distributed.world_size() == 1 or not every or state.step % every:
        return
    ours = {"draws of stored patches": _digest(state.patch_generator)}
    for name, level in state.levels.items():
        memory = level.memory
        ours[f"{name} memory"] = f"{checksum(memory.embeddings)} {checksum(memory.image_ids)} {memory.stored}"
        ours[f"draws of {name} anchors"] = _digest(level.maker.generator)
    ours["teacher"] = " ".join(str(checksum(parameter)) for parameter in state.teacher.parameters())
    main, *others = distributed.gather_objects(ours)
    for number, theirs in enumerate(others, 1):
        different = [what for what in main if theirs[what] != main[what]]
        if different:
            raise RunStoppedError(
                f"ranks 0 and {number} disagree at step {state.step} ({', '.join(different)}): resume from the last "
                "checkpoint; if it happens again, the machines differ in hardware or versions"
            )


def _digest(generator: torch.Generator) -> str:
    return hashlib.sha256(generator.get_state().numpy().tobytes()).hexdigest()
