"""Muon for the matrices of a network and AdamW for all else, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class MuonWithAdamW(torch.optim.Optimizer):
    """torch's Muon for the groups with `is_matrix`, and AdamW for the others.

    The state of both is in `state`, under the network's own parameters. Muon gets the update's size of AdamW
    (arXiv 2502.16982), so that one learning rate suits both.

    Args:
        groups: of parameters; a parameter of a group with `is_matrix` has two dimensions or more, of which those after
            the first are taken together.
        betas: AdamW's.
        momentum: Muon's.
    """

    def __init__(self, groups: list[dict[str, Any]], betas: tuple[float, float], momentum: float) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})
        matrices = [group["params"] for group in self.param_groups if group["is_matrix"]]
        others = [group["params"] for group in self.param_groups if not group["is_matrix"]]
        # torch's Muon takes nothing but matrices, so it is given views of the parameters.
        views = [{"params": [nn.Parameter(_as_matrix(p.detach(), p)) for p in group]} for group in matrices]
        self._muon = torch.optim.Muon(views, lr=0.0, momentum=momentum, adjust_lr_fn="match_rms_adamw")
        self._adamw = torch.optim.AdamW([{"params": group} for group in others], lr=0.0, betas=betas, fused=True)
        self._adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; `closure` is not used."""
        of_muon, of_adamw = iter(self._muon.param_groups), iter(self._adamw.param_groups)
        for group in self.param_groups:
            inner = next(of_muon if group["is_matrix"] else of_adamw)
            inner["lr"], inner["weight_decay"] = group["lr"], group["weight_decay"]
            if group["is_matrix"]:
                for parameter, matrix in zip(group["params"], inner["params"], strict=True):
                    self._show_muon(parameter, matrix)
        self._adamw.step()
        self._muon.step()

    def _show_muon(self, parameter: Tensor, matrix: Tensor) -> None:
        """Give a matrix the gradient and the momentum of its parameter."""
        matrix.grad = None if parameter.grad is None else _rows(parameter.grad, parameter).flatten(1)
        if matrix.grad is not None:
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            self._muon.state[matrix]["momentum_buffer"] = _as_matrix(state["momentum_buffer"], parameter)


def _rows(values: Tensor, parameter: Tensor) -> Tensor:
    """Turn values of a parameter's shape so that what follows the first dimension is together in its memory.

    Which order the columns of a matrix have does not matter to Muon.
    """
    is_channels_last = parameter.ndim == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
    return values.permute(0, 2, 3, 1) if is_channels_last else values


def _as_matrix(values: Tensor, parameter: Tensor) -> Tensor:
    """Return a matrix that shares the memory of values, which are laid out as the parameter."""
    return _rows(values, parameter).view(len(parameter), -1)
