"""Published results on revisited Oxford and Paris, for a table next to one's own, and where the protocols differ.

Source: "Self-Organizing Visual Prototypes for Non-Parametric Representation Learning" (arXiv 2505.21533), which gives
mAP at medium and hard, in percent, of ViT-B/16 by four methods. The paper states neither the size of the images nor
whether queries are cropped; the script released with it, as DINO's, takes whole queries, 512 px and three scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["PUBLISHED", "Published", "protocol_differences"]

_SIZE_PIXELS = 512
_SCALES = 3
_POOLING = "cls"


class Published(NamedTuple):
    """mAP of one method, ViT-B/16, in percent."""

    method: str
    medium: float
    hard: float


PUBLISHED: dict[str, tuple[Published, ...]] = {
    "roxford5k": (
        Published("SOP", 42.7, 17.5),
        Published("iBOT", 36.8, 14.3),
        Published("DINO", 37.4, 13.7),
        Published("MaSSL", 39.3, 14.1),
    ),
    "rparis6k": (
        Published("SOP", 67.3, 41.3),
        Published("iBOT", 64.1, 36.6),
        Published("DINO", 63.5, 35.6),
        Published("MaSSL", 65.8, 38.1),
    ),
}
"""By data set; without distractors."""


def protocol_differences(protocol: Mapping[str, Any], encoder_name: str) -> list[str]:
    """List what of this measurement differs from the published ones, each in a few words.

    Args:
        protocol: of the result, as `sop-retrieve` writes it.
        encoder_name: the encoder's.
    """
    found = []
    preprocess = protocol["preprocess"]
    size, scales = preprocess.get("crop"), preprocess.get("scales", [1.0])
    if protocol["queries_cropped"]:
        found.append("queries are cropped to their boxes (published: whole)")
    if size != _SIZE_PIXELS:
        found.append(f"images of {size} px (published: {_SIZE_PIXELS})")
    if not preprocess.get("keep_aspect"):
        found.append("square images (published: whole)")
    if len(scales) != _SCALES:
        found.append(f"{len(scales)} scale{'s' if len(scales) > 1 else ''} (published: {_SCALES})")
    if preprocess.get("mirrored"):
        found.append("mirrored images added (published: not)")
    if protocol["pooling"] != _POOLING:
        found.append(f"pooling {protocol['pooling']} (published: {_POOLING})")
    if protocol.get("whitening", "none") not in ("none", None):
        found.append("whitened features (published: not)")
    for name in ("query_expansion", "database_augmentation"):
        if protocol.get(name):
            found.append(f"{name.replace('_', ' ')} (published: none)")
    if protocol.get("distractors"):
        found.append("with distractors (published: none)")
    if "vit_base" not in encoder_name:
        found.append(f"network {encoder_name} (published: ViT-B/16)")
    return found
