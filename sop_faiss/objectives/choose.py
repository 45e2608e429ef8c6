"""The objective of a configuration."""

from __future__ import annotations

from sop_faiss.config import Config
from sop_faiss.objectives.dino import DinoObjective
from sop_faiss.objectives.ibot import IbotObjective
from sop_faiss.objectives.massl import MasslObjective
from sop_faiss.objectives.objective import Objective
from sop_faiss.objectives.sop import SopObjective

__all__ = ["choose_objective"]


def choose_objective(config: Config) -> Objective:
    """Return the objective that a run learns, by `objective.kind`; nothing is allocated before `Objective.open`."""
    match config.objective.kind:
        case "massl":
            return MasslObjective(config)
        case "dino":
            return DinoObjective(config)
        case "ibot":
            return IbotObjective(config)
    return SopObjective(config)
