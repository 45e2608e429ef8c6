"""Tiny settings of every objective, for tests that hold for all of them."""

from __future__ import annotations

KINDS = {
    "sop": ("masks.probability=1",),
    "massl": ("objective.kind=massl", "massl.capacity=24", "massl.block_size=7", "massl.fill=teacher"),
    "dino": ("objective.kind=dino", "dino.prototypes=12", "dino.freeze_last_layer_epochs=0.5"),
    "ibot": ("objective.kind=ibot", "ibot.cls.prototypes=12", "ibot.patch.prototypes=12", "masks.probability=1"),
    "ibot apart": (
        "objective.kind=ibot",
        "ibot.cls.prototypes=12",
        "ibot.patch.prototypes=9",
        "ibot.shared_head=false",
        "ibot.norm_last_layer=false",
        "ibot.freeze_last_layer_epochs=0.5",
    ),
}
"""By a name for the test: overrides of `tests/runs.py`."""
for _name in ("massl", "dino"):
    KINDS[_name] += ("masks.kind=none",)
