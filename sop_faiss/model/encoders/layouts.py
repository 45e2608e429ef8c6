"""Checkpoints as other libraries lay them out: which of two networks is meant, and its tensors under timm's names."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from sop_faiss import distributed
from sop_faiss.errors import CheckpointError

_log = logging.getLogger(__name__)
_CONTAINERS = ("state_dict", "model", "model_state_dict", "module")  # the last: BEiT v2, as DeepSpeed saves
_ROLES = ("student", "teacher")
_ENTRY_PAIRS = (
    _ROLES,  # DINO, iBOT, MaSSL, SOP
    ("state_dict", "state_dict_ema"),  # timm
    ("model", "model_ema"),  # torchvision, DeiT
    ("model", "ema"),
    ("model_state_dict", "ema_state_dict"),
    ("encoder", "target_encoder"),  # I-JEPA
)
_PREFIX_PAIRS = (
    _ROLES,  # DINOv2
    ("backbone", "momentum_backbone"),  # solo-learn
    ("backbone", "backbone_momentum"),  # lightly
    ("student_backbone", "teacher_backbone"),
    ("encoder_q", "encoder_k"),  # MoCo
    ("base_encoder", "momentum_encoder"),  # MoCo v3
    ("online_network", "target_network"),  # BYOL
)
"""The learning network of a checkpoint and its moving average, by entry or by what starts the names of its tensors."""
_LAYOUTS = (
    ("Hugging Face transformers", re.compile(r"\.attention\.query\.|\.layernorm_before\.")),
    ("torchvision", re.compile(r"\.encoder_layer_\d+\.")),
    ("CLIP", re.compile(r"\.resblocks\.\d+\.")),
)
"""Libraries whose names are not read, and what they are recognized by."""
_FAMILIES = (
    (re.compile(r"^storage_tokens$"), "it is of DINOv3: name such a model, as vit_small_patch16_dinov3"),
    (re.compile(r"relative_position_bias_table$"), "it is of BEiT: name such a model, as beitv2_base_patch16_224"),
    (re.compile(r"^dist_token$"), "it is of a distilled DeiT: name such a model, as deit_small_distilled_patch16_224"),
)
"""Tensors that only some ViTs have."""


def _tensors_in(content: Any) -> dict[str, Tensor]:
    if not isinstance(content, Mapping):
        return {}
    return {str(name): value for name, value in content.items() if isinstance(value, Tensor)}


def _unwrapped(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {re.sub(r"^(module\.|_orig_mod\.)+", "", name): value for name, value in tensors.items()}


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _backbone_in(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names without what wrappers put before them; if some start with `backbone.`, only those, without it."""
    bare = _unwrapped(tensors)
    return _unwrapped(_under(bare, "backbone.")) or bare


def networks_in(content: Any) -> dict[str, dict[str, Tensor]]:
    """Return the networks in a file by what it calls them: one, or the learning one and then its moving average."""
    entries = content if isinstance(content, Mapping) else {}
    held = max((_held({name: _tensors_in(entries.get(name)) for name in pair}) for pair in _ENTRY_PAIRS), key=len)
    if len(held) == 2 or held.keys() & set(_ROLES):
        return {name: _backbone_in(tensors) for name, tensors in held.items()}
    in_entry = (_tensors_in(entries.get(name)) for name in _CONTAINERS)
    bare = _unwrapped(next((found for found in in_entry if found), _tensors_in(entries)))
    held = max((_held({name: _under(bare, f"{name}.") for name in pair}) for pair in _PREFIX_PAIRS), key=len)
    return {name: _backbone_in(tensors) for name, tensors in (held or {"": bare}).items()}


def _held(networks: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    return {name: tensors for name, tensors in networks.items() if tensors}


def chosen_network(
    networks: Mapping[str, dict[str, Tensor]], path: Path, *, student: bool, official: bool
) -> dict[str, Tensor]:
    """Choose the moving average, or with `student` the learning network; the log says which.

    Args:
        networks: as `networks_in` gives them.
        path: of the file, for messages.
        student: take the learning network.
        official: the file was named as a checkpoint of DINO's kind, which calls its networks teacher and student.

    Raises:
        CheckpointError: the network is not in the file, or the file must be named as one of DINO's kind.
    """
    names = list(networks)
    if not official and set(_ROLES) & set(names):
        raise CheckpointError(
            f"{path} holds a {' and a '.join(names)}, as checkpoints of DINO, iBOT, MaSSL and SOP do: name it "
            f"dino:{path} with `arch=NAME` (in a run model.init=dino:{path})"
        )
    wanted = _ROLES[0] if student else _ROLES[1]
    if len(names) == 1:
        if names[0] in _ROLES and names[0] != wanted:
            raise CheckpointError(f"{path} holds a {names[0]} but no {wanted}")
        if student and names[0] not in _ROLES:
            raise CheckpointError(f"{path} holds one network and no student; leave `student` out")
        return networks[names[0]]
    taken, left = names if student else reversed(names)
    if distributed.is_main():
        kind = "the learning network" if student else "the moving average"
        _log.warning("%s holds two networks: %s, %s, is taken, and %s is not", path, taken, kind, left)
    return networks[taken]


def timm_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a network's tensors under timm's names, in the same order.

    Official Swin ends a stage by downsampling, timm starts the next one with it. DINOv2 numbers blocks within chunks
    and has other names for registers and gated layers; with registers it gives [CLS] a position, which timm adds to the
    token.
    """
    if "layers.0.downsample.reduction.weight" in tensors:
        of_stage = re.compile(r"^layers\.(\d+)\.downsample\.")
        return {of_stage.sub(lambda m: f"layers.{int(m[1]) + 1}.downsample.", name): tensors[name] for name in tensors}
    if "cls_token" not in tensors:
        return tensors
    blocks = [name for name in tensors if name.startswith("blocks.")]
    chunked = bool(blocks) and all(re.match(r"blocks\.\d+\.\d+\.", name) for name in blocks)
    result = {}
    for name, value in tensors.items():
        plain = re.sub(r"^blocks\.\d+\.", "blocks.", name) if chunked else name
        plain = plain.replace(".mlp.w12.", ".mlp.fc1.").replace(".mlp.w3.", ".mlp.fc2.")
        result["reg_token" if name == "register_tokens" else plain] = value
    cls, positions = result["cls_token"], result.get("pos_embed")
    if "register_tokens" not in tensors or positions is None:
        return result
    if cls.ndim == positions.ndim == 3 and cls.shape[2] == positions.shape[2]:
        result |= {"cls_token": cls + positions[:, :1], "pos_embed": positions[:, 1:]}
    return result


def layout_of(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> str:
    """Say why tensors do not fit a model by name: how another library lays them out.

    Args:
        own: the model's tensors by its names.
        tensors: the file's.

    Returns:
        One clause, or an empty text where no such layout is known.
    """
    if _fits_by_position(own, tensors):
        return (
            "it has the same shapes in the same order under other names: read it as timm:NAME with `weights=FILE` and "
            "`by_position` (model.by_position=true in a run)"
        )
    if ("reg_token" in own) != ("reg_token" in tensors):
        has, lacks = ("file", "model") if "reg_token" in tensors else ("model", "file")
        return f"the {has} has register tokens and the {lacks} has none, so they are not of the same model"
    library = next((library for library, sign in _LAYOUTS if any(sign.search(name) for name in tensors)), None)
    if library is not None:
        return f"its names are those of {library}: convert it to timm's names first"
    if "cls_token" in tensors or "pos_embed" in tensors:
        for sign, clause in _FAMILIES:
            if any(map(sign.search, tensors)) and not any(map(sign.search, own)):
                return clause
        if any(name.endswith(".attn.qkv.bias") and name not in own for name in tensors):
            return "its attention has biases and the model's has none: name one with them, as ..._dinov3_qkvb"
        if "cls_token" in own and "cls_token" not in tensors:
            return "the file has no [CLS] token: name a model without one, as I-JEPA's vit_huge_patch14_gap_224"
    first = next(iter(own), "")
    prefixes = [name.removesuffix(first) for name in tensors if name.endswith(f".{first}")]
    complete = [prefix for prefix in prefixes if all(prefix + name in tensors for name in own)]
    if complete:
        listed = " or ".join(repr(prefix) for prefix in complete[:3])
        return f"the model's names begin with {listed} in it: save it without that"
    return ""


def _fits_by_position(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> bool:
    """Return whether tensors have the shapes of a model's in its order, with at most a classifier after them."""
    if not own or not len(own) <= len(tensors) <= len(own) + 2 or all(name in tensors for name in own):
        return False
    pairs = zip(own.items(), tensors.items(), strict=False)
    return all(same_kind(name, other) and value.shape == given.shape for (name, value), (other, given) in pairs)


def same_kind(name: str, other: str) -> bool:
    """Return whether two tensors are of the same kind by the ends of their names: weight, bias, running_mean, ..."""
    return name.rpartition(".")[2] == other.rpartition(".")[2]
