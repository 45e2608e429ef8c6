"""What the choices of trainings have in common: bounds, and what is left to a recipe. It loads without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from sop_faiss.errors import ConfigError

C = TypeVar("C")
Bounds = Mapping[str, tuple[int | float, int | float]]
"""The least and the largest value of each choice; None is always allowed."""
BELOW_ONE = math.nextafter(1, 0)
_PRECISIONS = ("fp32", "bf16")
_OF_ALL: Bounds = {
    "layer_decay": (0.001, 1),
    "drop_path": (0, BELOW_ONE),
    "weight_decay": (0, 100),
    "flip": (0, 1),
    "seed": (0, 2**63 - 1),
}


def check_choices(choices: Any, bounds: Bounds, **names: tuple[str, ...]) -> None:
    """Check a training's choices.

    Args:
        choices: a dataclass with `precision` and the choices that all trainings have.
        bounds: of its own choices.
        names: the values that a choice of a name has.

    Raises:
        ConfigError: one is impossible.
    """
    for name, (low, high) in {**bounds, **_OF_ALL}.items():
        value = getattr(choices, name)
        if value is not None and not low <= value <= high:
            raise ConfigError(f"`{name}={value}`: wanted {low:g} to {'below 1' if high == BELOW_ONE else f'{high:g}'}")
    for name, known in {"precision": _PRECISIONS, **names}.items():
        if getattr(choices, name) not in known:
            raise ConfigError(f"`{name}={getattr(choices, name)}`: wanted {' or '.join(known)}")


def fill_choices(choices: C, has_layers: bool, has_drop_path: bool, **recipe: Any) -> C:
    """Return the choices with those of a recipe where they are None.

    Args:
        choices: a dataclass.
        has_layers: whether the network's layers are known; else all have one learning rate by default.
        has_drop_path: whether stochastic depth can be set; else it is 0 by default.
        recipe: a value for each choice that may be None.
    """
    unavailable = {"layer_decay": 1.0} if not has_layers else {}
    unavailable |= {"drop_path": 0.0} if not has_drop_path else {}
    recipe |= {name: value for name, value in unavailable.items() if name in recipe}
    left = {name: value for name, value in recipe.items() if getattr(choices, name) is None}
    return replace(choices, **left)  # type: ignore[type-var]
