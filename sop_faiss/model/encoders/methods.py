"""Files as their authors publish them: the method, what its authors feed and read, tensors under a model's names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from sop_faiss.model.encoders.preprocess import IMAGENET_MEAN, IMAGENET_STD
from sop_faiss.model.encoders.spec import EncoderSpec


class Method(NamedTuple):
    """What a method's files are recognized by, and how its authors use them."""

    name: str
    sign: re.Pattern[str]
    """Of a tensor's name behind that of its network, as `target_encoder/blocks.0.norm1.bias`."""
    poolings: tuple[str, ...]
    """Their feature: the first is named to the user, the others are the same of other models."""
    imagenet: bool
    """Images are normalized with ImageNet's mean and std. False: timm's record of the model's name is right."""
    learning: bool
    """They evaluate the learning network and not its moving average."""
    heads: Mapping[int, int] = MappingProxyType({})
    """Attention heads of their ViTs by width, where timm's have another number: tensors do not show it."""


METHODS = (
    # decoder: of the full pretraining files. [CLS] after the norm and normalization: main_linprobe.py of
    # facebookresearch/mae, whose fine-tuning pools patch tokens
    Method("MAE", re.compile(r"/decoder_(embed|blocks)\."), ("cls",), True, False),
    # vits.py and main_lincls.py of facebookresearch/moco-v3; its ViT-S has 12 heads, timm's 6
    Method("MoCo v3", re.compile(r"^base_encoder/"), ("cls", "pooled"), True, True, MappingProxyType({384: 12})),
    # timm's vit_*_gap_*_ijepa: no [CLS], the mean after the norm; the target encoder: arXiv 2301.08243, section 4
    Method("I-JEPA", re.compile(r"^target_encoder/"), ("pooled",), True, False),
    # pretraining files of BEiT and BEiT v2, whose images differ: 0.5 and ImageNet's in timm's records of beit_* and
    # beitv2_*. The mean of patch tokens: beit/run_class_finetuning.py of microsoft/unilm
    Method("BEiT", re.compile(r"/rel_pos_bias\.relative_position_bias_table$"), ("pooled", "mean"), False, False),
    # [CLS] after the norm: timm's note in models/eva.py; satellite weights have a mean of their own in its record
    Method("DINOv3", re.compile(r"/storage_tokens$"), ("cls",), False, False),
)
"""Methods whose files are recognized by the names of their tensors; docs/encoders.md has those that are not."""


def method_of(networks: Mapping[str, Mapping[str, Tensor]]) -> Method | None:
    """Return the method of a file from its networks, as of `networks_in`; None if it is not one of `METHODS`."""
    names = [f"{network}/{name}" for network, tensors in networks.items() for name in tensors]
    method = next((method for method in METHODS if any(method.sign.search(name) for name in names)), None)
    return method._replace(learning=False) if method is not None and len(networks) == 1 else method


def other_normalization(method: Method, mean: tuple[float, ...], std: tuple[float, ...]) -> bool:
    """Return whether a method's authors normalize images in another way."""
    return method.imagenet and (tuple(mean), tuple(std)) != (IMAGENET_MEAN, IMAGENET_STD)


def other_use(method: Method, spec: EncoderSpec, pooling: str, mean: tuple[float, ...], std: tuple[float, ...]) -> str:
    """Return the arguments with which an encoder would do as a method's authors do; empty if it does.

    Args:
        method: of the encoder's weights file.
        spec: what the user chose; that is not argued with.
        pooling: the encoder's.
        mean, std: with which it normalizes images.
    """
    wanted = []
    if spec.pooling is None and spec.last_blocks is None and pooling not in method.poolings:
        wanted.append(f"`pooling={method.poolings[0]}`")
    if spec.mean is None and spec.std is None and other_normalization(method, mean, std):
        wanted.append(f"`mean={_listed(IMAGENET_MEAN)}` `std={_listed(IMAGENET_STD)}`")
    if method.learning and not spec.student:
        wanted.append("`student`")
    return " ".join(wanted)


def _listed(values: tuple[float, ...]) -> str:
    return ",".join(map(str, values))


def names_of_model(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a file's tensors under a timm model's own names, where the authors' differ from them.

    What the model has under the authors' name stays; what it does not have at all keeps its name.

    Args:
        own: the model's tensors by its names.
        tensors: the file's.
    """
    result: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if name in own:
            result[name] = value
        elif name == "rel_pos_bias.relative_position_bias_table":  # BEiT's, which all blocks share
            tables = [each for each in own if each.endswith(".attn.relative_position_bias_table")]
            result |= dict.fromkeys(tables or [name], value)
        elif name.endswith(".attn.qkv.bias") and value.ndim == 1:
            result |= _bias_of_dinov3(own, name, value)
        else:
            result[next((other for other in _other_names(name) if other in own), name)] = value
    return result


def _other_names(name: str) -> list[str]:
    """Return what timm may call a tensor."""
    rules = (
        (r"^storage_tokens$", "reg_token"),  # DINOv3
        (r"\.ls([12])\.gamma$", r".gamma_\1"),  # DINOv3
        (r"\.gamma_([12])$", r".ls\1.gamma"),  # DeiT III
        (r"\.mlp\.w1\.", ".mlp.fc1_g."),  # gated layers of DINOv3
        (r"\.mlp\.w2\.", ".mlp.fc1_x."),
        (r"\.mlp\.w3\.", ".mlp.fc2."),
    )
    return [re.sub(pattern, other, name) for pattern, other in rules if re.search(pattern, name)]


def _bias_of_dinov3(own: Mapping[str, Tensor], name: str, value: Tensor) -> dict[str, Tensor]:
    """Biases of queries and values, which timm keeps apart, or none where the model has none and they are all 0.

    DINOv3 multiplies that of the keys by a mask of zeros, and timm has no tensor for it.
    """
    queries, _, values = value.tensor_split(3)
    prefix = name.removesuffix("qkv.bias")
    if f"{prefix}q_bias" in own:
        return {f"{prefix}q_bias": queries, f"{prefix}v_bias": values}
    if f"{prefix}qkv.weight" in own and not queries.any() and not values.any():
        return {}
    return {name: value}
