"""The objective of a configuration."""

from __future__ import annotations

from sop_faiss.config import Config
from sop_faiss.objectives.objective import Objective
from sop_faiss.objectives.sop import SopObjective

__all__ = ["choose_objective"]


def choose_objective(config: Config) -> Objective:
    """Return the objective that a run learns; nothing is allocated before `Objective.open`."""
    return SopObjective(config)
