"""Published results, for a table next to one's own, and where the protocols differ.

Source of revisited Oxford and Paris: "Self-Organizing Visual Prototypes for Non-Parametric Representation Learning"
(arXiv 2505.21533), which gives mAP at medium and hard, in percent, of ViT-B/16 by four methods. The paper states
neither the size of the images nor whether queries are cropped; the script released with it, as DINO's, takes whole
queries, 512 px and three scales. The results on other sets each name their source.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

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


class PublishedScores(NamedTuple):
    """What one method scores, by metric, in percent, and where that is written."""

    method: str
    scores: Mapping[str, float]
    source: str


def _recalls(ks: tuple[int, ...], *values: float) -> dict[str, float]:
    return {f"R@{k}": value for k, value in zip(ks, values, strict=True)}


_PROXY_ANCHOR = "README of tjddus9597/Proxy-Anchor-CVPR2020"
_REID = "README of layumi/Person_reID_baseline_pytorch"
_AMSTERTIME = "README of seyrankhademi/AmsterTime"
_VPR = "README of gmberton/VPR-methods-evaluation"
_ILIAS = "ilias-1k.netlify.app, no linear adaptation"

PUBLISHED_OF_LAYOUTS: dict[tuple[str, int, int], tuple[PublishedScores, ...]] = {
    ("cub", 5924, 5924): (
        PublishedScores("Proxy-Anchor, BN-Inception", _recalls((1, 2, 4, 8), 69.1, 78.9, 86.1, 91.2), _PROXY_ANCHOR),
        PublishedScores("Proxy-Anchor, ResNet-50", _recalls((1, 2, 4, 8), 69.9, 79.6, 86.6, 91.4), _PROXY_ANCHOR),
    ),
    ("sop", 60502, 60502): (
        PublishedScores(
            "Proxy-Anchor, BN-Inception", _recalls((1, 10, 100, 1000), 79.2, 90.7, 96.2, 98.6), _PROXY_ANCHOR
        ),
    ),
    ("inshop", 14218, 12612): (
        PublishedScores("Proxy-Anchor", _recalls((1, 10, 20, 30), 91.9, 98.1, 98.7, 99.0), _PROXY_ANCHOR),
    ),
    ("reid", 3368, 15913): (
        PublishedScores("ResNet-50 trained on Market-1501", {"mAP": 71.59, "R@1": 88.84}, _REID),
        PublishedScores("PCB trained on Market-1501", {"mAP": 77.47, "R@1": 92.64}, _REID),
    ),
    ("place", 1464, 1549): (PublishedScores("CosPlace, ResNet-18", _recalls((1, 5, 10), 98.8, 99.7, 99.9), _VPR),),
    ("gldv2", 1129, 761757): (
        PublishedScores(
            "smlyaka, winner of 2019 with re-ranking",
            {"mAP@100_public": 35.63, "mAP@100_private": 37.14},
            "README of cvdfoundation/google-landmark, version 2.1",
        ),
    ),
    ("ilias", 1232, 4715): (
        PublishedScores("ResNet-50 of ImageNet, 5M distractors", {"mAP@1k": 2.5}, _ILIAS),
        PublishedScores("ResNet-50 of ImageNet, 100M distractors", {"mAP@1k": 1.8}, _ILIAS),
    ),
    ("amstertime", 2462, 2462): (
        PublishedScores("AP-GeM, ResNet-101", {"mAP@128": 35, "R@1": 24, "R@5": 48}, _AMSTERTIME),
        PublishedScores("NetVLAD, VGG-16", {"mAP@128": 26, "R@1": 17, "R@5": 33}, _AMSTERTIME),
    ),
}
"""By protocol, queries and images searched, from which a published set is recognized (`place`: St Lucia)."""


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
