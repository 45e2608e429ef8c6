"""torch.compile, if `train.compile` asks for it and it works."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from sop_faiss import distributed
from sop_faiss.errors import one_line
from sop_faiss.model.networks import Network

_log = logging.getLogger(__name__)


def compile_networks(kind: str, networks: Sequence[Network], device: torch.device, phases: int = 1) -> bool:
    """Have the networks compiled in place at their first call; if that cannot work, log why and continue without.

    Args:
        kind: `none`; `backbone`: each block by itself; `step`: each complete network, projector included.
        networks: student and teacher, before ranks share the student.
        device: where they are.
        phases: of the run, each with views of its own sizes.

    Returns:
        Whether they will be compiled: on all ranks or on none.
    """
    if kind == "none":
        return False
    reasons = [reason for reason in distributed.gather_objects(_why_not(device)) if reason]
    if reasons:
        if distributed.is_main():
            _log.warning("train.compile = %s cannot work here, so training continues without it: %s", kind, reasons[0])
        return False
    blocks = [block for network in networks for block in network.backbone.blocks()]
    if kind == "backbone" and not blocks:
        if distributed.is_main():
            _log.warning(
                "train.compile = backbone finds no blocks to compile, so training continues without: set it to step"
            )
        return False
    # All blocks share their code except for drop path: each rate, view size and pass is compiled once.
    limit = phases * (8 * len(blocks) + torch._dynamo.config.recompile_limit)
    torch._dynamo.config.recompile_limit = limit
    torch._dynamo.config.accumulated_recompile_limit = max(limit, torch._dynamo.config.accumulated_recompile_limit)
    torch._dynamo.config.skip_nnmodule_hook_guards = False  # health watches only some steps by hooks
    for module in networks if kind == "step" else blocks:
        module.compile()
    return True


def _why_not(device: torch.device) -> str | None:
    """Return in one line why torch.compile fails on this machine (no C++ compiler, no Triton); None if it works."""
    try:
        torch.compile(lambda values: values.sin() + 1)(torch.ones(8, device=device))
    except Exception as error:  # the compilers of each platform raise their own errors
        return one_line(str(error))[:200] or type(error).__name__
    return None
