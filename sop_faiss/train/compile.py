"""torch.compile by a switch (`train.compile`), where it works."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from sop_faiss import distributed
from sop_faiss.errors import one_line
from sop_faiss.model.networks import Network

__all__ = ["compile_networks"]

_log = logging.getLogger(__name__)


def compile_networks(kind: str, networks: Sequence[Network], device: torch.device) -> bool:
    """Have the networks compiled at their first call, in place; where that cannot work, say so and go on without.

    Args:
        kind: `none`; `backbone`: each block by itself; `step`: each network whole, projector included.
        networks: student and teacher, before ranks share the student.
        device: where they are.

    Returns:
        Whether they will be compiled: on all ranks or on none.
    """
    if kind == "none":
        return False
    reasons = [reason for reason in distributed.gather_objects(_why_not(device)) if reason]
    if reasons:
        if distributed.is_main():
            _log.warning("train.compile = %s cannot work here, going on without it: %s", kind, reasons[0])
        return False
    blocks = [block for network in networks for block in network.backbone.blocks()]
    if kind == "backbone" and not blocks:
        if distributed.is_main():
            _log.warning("train.compile = backbone has no blocks to compile here, going on without: set it to step")
        return False
    # One code for all blocks, but for their drop path: each rate, view size and pass is compiled once.
    limit = 8 * len(blocks) + torch._dynamo.config.recompile_limit
    torch._dynamo.config.recompile_limit = limit
    torch._dynamo.config.accumulated_recompile_limit = max(limit, torch._dynamo.config.accumulated_recompile_limit)
    torch._dynamo.config.skip_nnmodule_hook_guards = False  # health watches some steps by hooks, and others not
    for module in networks if kind == "step" else blocks:
        module.compile()
    return True


def _why_not(device: torch.device) -> str | None:
    """Why torch.compile fails on this machine (no C++ compiler, no Triton), in one line; None: it does not."""
    try:
        torch.compile(lambda values: values.sin() + 1)(torch.ones(8, device=device))
    except Exception as error:  # whatever the compilers of each platform raise
        return one_line(str(error))[:200] or type(error).__name__
    return None
