"""What can be chosen about transfer to smaller sets, apart from it: commands show these before torch is loaded.

iBOT's `run.sh` and README, which follow DeiT's recipe; learning rates there are at a batch of 512, here at 1,024.
"""

from __future__ import annotations

from typing import Any

from sop_faiss.evaluate.trained.finetune_choices import DEIT, QUICK

_INAT = {"epochs": 360, "erasing": 0.1}
SETS: dict[str, dict[str, Any]] = {
    "cifar10": {},
    "cifar100": {},
    "inat18": _INAT,
    "inat19": _INAT,
    "flowers": {},
    "cars": {"learning_rates": (1.5e-4,)},
}
"""By set, what differs from DeiT's recipe as iBOT runs it on CIFAR-10."""
_SMALL_RATES = {"inat18": (1e-4,), "inat19": (5e-5,)}
"""Of ViT-S and smaller networks."""
TRANSFER_QUICK: dict[str, Any] = {**QUICK, "warmup_epochs": None, "end_rate": 1e-6, "repeats": 1}
QUICK_IMAGES = 1000
"""Of the training set, an equal share of each class, and of the test set, evenly spaced."""


def recipe_of_set(name: str, size: str) -> dict[str, Any]:
    """Return the choices for a set of `SETS` and a ViT's size, `S`, `B` or `L`."""
    small = {"learning_rates": _SMALL_RATES[name]} if size == "S" and name in _SMALL_RATES else {}
    return {**DEIT, **SETS[name], **small}
