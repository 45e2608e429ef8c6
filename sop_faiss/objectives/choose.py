"""The objective of a configuration."""

from __future__ import annotations

from collections.abc import Callable

from sop_faiss.config import Config
from sop_faiss.objectives.dino import DinoObjective
from sop_faiss.objectives.distill import DistillObjective
from sop_faiss.objectives.ibot import IbotObjective
from sop_faiss.objectives.massl import MasslObjective
from sop_faiss.objectives.objective import Objective
from sop_faiss.objectives.sop import SopObjective

_OBJECTIVES: dict[str, Callable[[Config], Objective]] = {
    "sop": SopObjective,
    "massl": MasslObjective,
    "dino": DinoObjective,
    "ibot": IbotObjective,
    "distill": DistillObjective,
}


def choose_objective(config: Config) -> Objective:
    """Return the objective that a run learns, by `objective.kind`; nothing is allocated before `Objective.open`."""
    return _OBJECTIVES[config.objective.kind](config)
