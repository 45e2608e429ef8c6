"""Files in their authors' layouts, with random weights, give the features of timm's network with these weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from timm.models import register_model
from timm.models.beit import _create_beit
from timm.models.deit import _create_deit
from timm.models.eva import _create_eva
from timm.models.eva import checkpoint_filter_fn as timm_names_of_dinov3
from timm.models.swin_transformer import _create_swin_transformer
from timm.models.vision_transformer import _create_vision_transformer
from torch import Tensor, nn

from sop_faiss import load_encoder
from sop_faiss.config import ModelConfig, ViewsConfig
from sop_faiss.errors import CheckpointError, ConfigError
from sop_faiss.model.backbones.build import seeded_backbone
from sop_faiss.model.encoders.layouts import networks_in
from sop_faiss.model.encoders.methods import METHODS, method_of, names_of_model
from sop_faiss.model.initial_weights import load_initial_weights, resolve_init
from tests.encoders import random_images, timm_features, timm_network
from tests.messages import assert_one_line
from tests.runs import conv_config

Tensors = dict[str, Tensor]
Options = dict[str, Any]
TOLERANCE = 1e-5
TINY: Options = {"embed_dim": 32, "depth": 2, "num_heads": 2}
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def register(name: str, create: Callable[..., nn.Module], variant: str, **own: Any) -> None:
    """Register a model with timm that is `variant` in everything but its sizes."""

    def make(pretrained: bool = False, **options: Any) -> nn.Module:
        return create(variant, pretrained=pretrained, **{**own, **options})

    make.__name__ = name
    register_model(make)


VIT: Options = {**TINY, "patch_size": 56}
REL: Options = {"use_abs_pos_emb": False, "use_rel_pos_bias": True, "init_values": 0.1}
ROPE: Options = {"rope_type": "dinov3", "rope_temperature": 100, "rope_rotate_half": True, "use_rot_pos_emb": True}
ROPE |= {**TINY, "patch_size": 16, "dynamic_img_size": True, "init_values": 1e-5, "use_abs_pos_emb": False}
ROPE |= {"num_reg_tokens": 4, "use_fc_norm": False, "qkv_bias": False}
GATED: Options = {"swiglu_mlp": True, "swiglu_align_to": 8}
GAP: Options = {"class_token": False, "global_pool": "avg", "fc_norm": False}
STAGES: Options = {"patch_size": 4, "window_size": 7, "embed_dim": 8, "depths": (1,) * 4, "num_heads": (1,) * 4}
register("tiny_beit", _create_beit, "beit_base_patch16_224", **VIT, **REL)
register("tiny_dinov3", _create_eva, "vit_small_patch16_dinov3", **ROPE)
register("tiny_dinov3_qkvb", _create_eva, "vit_small_patch16_dinov3", **{**ROPE, "qkv_bias": True})
register("tiny_dinov3_gated", _create_eva, "vit_small_patch16_dinov3", **ROPE, **GATED)
register("tiny_ijepa", _create_vision_transformer, "vit_huge_patch14_gap_224", **VIT, **GAP)
register("tiny_deit3", _create_deit, "deit3_small_patch16_224", **VIT, no_embed_class=True, init_values=1e-6)
register("tiny_distilled", _create_deit, "deit_small_distilled_patch16_224", **VIT, distilled=True)
register(
    "small_of_moco",
    _create_vision_transformer,
    "vit_small_patch16_224",
    depth=1,
    patch_size=16,
    embed_dim=384,
    num_heads=6,
)
register("tiny_swin", _create_swin_transformer, "swin_tiny_patch4_window7_224", **STAGES)


def random_network(name: str, seed: int = 3, **options: Any) -> Any:
    """As `timm_network`, without zeros and ones, so that a tensor in the wrong place shows."""
    network = timm_network(name, seed, num_classes=0, **options)
    with torch.no_grad():
        for value in network.parameters():
            value.add_(torch.randn_like(value) * 0.1)
    return network


def renamed(tensors: Tensors, *rules: tuple[str, str]) -> Tensors:
    for pattern, other in rules:
        tensors = {re.sub(pattern, other, key): value for key, value in tensors.items()}
    return tensors


def under(prefix: str, tensors: Tensors) -> Tensors:
    return {prefix + key: value for key, value in tensors.items()}


def mae(network: nn.Module) -> Tensors:
    more = ("mask_token", "decoder_pos_embed", "decoder_embed.weight", "decoder_blocks.0.attn.qkv.weight")
    more += ("decoder_norm.bias", "decoder_pred.weight")
    return network.state_dict() | dict.fromkeys(more, torch.zeros(1, 1, 8))


def beit_pretrained(network: Any) -> Tensors:
    """BEiT's pretraining network: one table for all blocks, and a norm before what is now a head."""
    shared = network.blocks[0].attn.relative_position_bias_table
    for block in network.blocks:
        block.attn.relative_position_bias_table = shared
    tensors = {key: value for key, value in network.state_dict().items() if "relative_position" not in key}
    tensors["rel_pos_bias.relative_position_bias_table"] = shared.detach()
    tensors["rel_pos_bias.relative_position_index"] = network.blocks[0].attn.relative_position_index
    return tensors | dict.fromkeys(("mask_token", "lm_head.weight", "cls_pt_layers.0.norm1.weight"), torch.zeros(1, 8))


def dinov3(network: nn.Module) -> Tensors:
    """DINOv3's names, with the attention's biases in one tensor; that of the keys is multiplied by 0 there."""
    tensors = dict(network.state_dict())
    for key in [key for key in tensors if key.endswith("attn.qkv.weight")]:
        start, width = key.removesuffix("qkv.weight"), tensors[key].shape[1]
        none = torch.zeros(width)
        biases = [tensors.pop(f"{start}q_bias", none), torch.ones(width), tensors.pop(f"{start}v_bias", none)]
        tensors[f"{start}qkv.bias"] = torch.cat(biases)
        tensors[f"{start}qkv.bias_mask"] = torch.ones(3 * width)
    of_gates = ((r"fc1_g", "w1"), (r"fc1_x", "w2"), (r"fc2", "w3")) if any("fc1_g" in key for key in tensors) else ()
    tensors = renamed(tensors, (r"gamma_(\d)", r"ls\1.gamma"), (r"^reg_token$", "storage_tokens"), *of_gates)
    return tensors | {
        "mask_token": torch.zeros(1, 32),
        "rope_embed.periods": torch.ones(4),
        "local_cls_norm.bias": none,
    }


def moco_v3(network: nn.Module) -> dict[str, Any]:
    head = {"head.0.weight": torch.zeros(8, 8), "head.1.running_mean": torch.zeros(8)}
    base, averaged = network.state_dict() | head, timm_network("test_vit", 7, num_classes=0).state_dict() | head
    tensors = under("module.base_encoder.", base) | under("module.momentum_encoder.", averaged)
    more = {"epoch": 300, "arch": "vit_base", "optimizer": {"state": {}}}
    return {"state_dict": tensors | {"module.predictor.0.weight": torch.zeros(8, 8)}, **more}


def ijepa(network: nn.Module) -> dict[str, Any]:
    target = under("module.", network.state_dict())
    predictor = {"module.predictor_pos_embed": torch.zeros(1, 16, 8)}
    entries = {"encoder": {key: value + 1 for key, value in target.items()}, "predictor": predictor}
    return {**entries, "opt": {"state": {}}, "target_encoder": target, "epoch": 300}


def swin(network: nn.Module) -> Tensors:
    tensors = {key: value for key, value in network.state_dict().items() if "downsample" not in key}
    for key, value in network.state_dict().items():
        if "downsample" in key:
            tensors[re.sub(r"layers\.(\d)", lambda m: f"layers.{int(m[1]) - 1}", key)] = value
    tensors["layers.0.blocks.0.attn.relative_position_index"] = torch.zeros(49, 49, dtype=torch.long)
    return tensors | {"head.mlp.0.weight": torch.zeros(8, 8), "head_dense.mlp.0.weight": torch.zeros(8, 8)}


def nnclr(network: nn.Module) -> dict[str, Any]:
    heads = ("projector.0.weight", "predictor.0.weight", "classifier.weight", "queue", "queue_y")
    return {"state_dict": under("backbone.", network.state_dict()) | dict.fromkeys(heads, torch.zeros(3, 3))}


def nnclr_of_lightly(network: nn.Module) -> dict[str, Any]:
    """Of `nn.Sequential(*list(resnet.children())[:-1])`."""
    places = {name: str(place) for place, (name, _) in enumerate(network.named_children())}
    backbone = {re.sub(r"^\w+", lambda m: places[m[0]], key): value for key, value in network.state_dict().items()}
    heads = ("projection_head.layers.0.weight", "prediction_head.layers.0.weight", "memory_bank.bank")
    return {"state_dict": under("backbone.", backbone) | dict.fromkeys(heads, torch.zeros(3, 3))}


def plain(network: nn.Module) -> dict[str, Any]:
    return {"model": network.state_dict()}


def deit3(network: nn.Module) -> dict[str, Any]:
    return {"model": renamed(network.state_dict(), (r"ls(\d)\.gamma", r"gamma_\1"))}


NORM_FIRST: Options = {"use_fc_norm": False}
POOLED: Options = {"pooling": "pooled"}
CASES: dict[str, tuple[str, Options, Callable[[Any], Any], Options, str]] = {
    # name, options of the network that is saved, its layout, options to open it, what is said without these
    "MAE, full": ("test_vit", {}, lambda net: {"model": mae(net)}, {}, ""),
    "MAE, fine-tuned": ("test_vit", {"global_pool": "avg"}, plain, {}, ""),
    "MoCo v3": ("test_vit", {}, moco_v3, {"student": True}, "`student`"),
    "I-JEPA": ("tiny_ijepa", {}, ijepa, {}, ""),
    "BEiT": ("tiny_beit", NORM_FIRST, lambda net: {"model": beit_pretrained(net)}, {}, ""),
    "BEiT v2": ("tiny_beit", NORM_FIRST, lambda net: {"module": beit_pretrained(net)}, {}, ""),
    "BEiT, fine-tuned": ("tiny_beit", {}, plain, {}, ""),
    "DINOv3": ("tiny_dinov3", {}, dinov3, POOLED, "`pooling=cls`"),
    "DINOv3, biases": ("tiny_dinov3_qkvb", {}, dinov3, POOLED, "`pooling=cls`"),
    "DINOv3, gated": ("tiny_dinov3_gated", {}, dinov3, POOLED, "`pooling=cls`"),
    "DeiT": ("test_vit", {}, plain, {}, ""),
    "DeiT, distilled": ("tiny_distilled", {}, plain, {}, ""),
    "DeiT III": ("tiny_deit3", {}, deit3, {}, ""),
    "NNCLR, solo-learn": ("test_resnet", {}, nnclr, {}, ""),
    "NNCLR, lightly": ("test_resnet", {}, nnclr_of_lightly, {"by_position": True}, ""),
}


@pytest.mark.parametrize("case", CASES)
def test_a_file_gives_the_features_of_timms_network(tmp_path, caplog, case):
    name, made, layout, options, said = CASES[case]
    network = random_network(name, **made)
    content = layout(network)
    torch.save(content, tmp_path / "w.pth")
    given: Options = {"weights": tmp_path / "w.pth", "mean": IMAGENET[0], "std": IMAGENET[1]}
    encoder = load_encoder(f"timm:{name}", **given, **options)
    images = random_images(encoder.preprocess.crop)
    with torch.no_grad():
        expected = timm_features(network, images)
        torch.testing.assert_close(encoder(images), expected, atol=TOLERANCE, rtol=TOLERANCE)
    method = method_of(networks_in(content))
    recognized = "" if method is None else method.name
    known = next((each.name for each in METHODS if case.split(",")[0].startswith(each.name)), "")
    assert recognized == ("" if "fine-tuned" in case else known)
    assert not any("authors" in message for message in caplog.messages)
    if said:
        load_encoder(f"timm:{name}", **given)
        assert any(f"{recognized}, whose authors use {said}" in message for message in caplog.messages)


@pytest.mark.parametrize("name", ["tiny_dinov3", "tiny_dinov3_qkvb", "tiny_dinov3_gated"])
def test_dinov3s_names_become_what_timms_own_loader_makes_of_them(name):
    network = random_network(name)
    content = dinov3(network)
    ours = names_of_model(network.state_dict(), content)
    theirs = timm_names_of_dinov3(dict(content), network)
    assert all(torch.equal(ours[key], theirs[key]) for key in network.state_dict())


def test_biases_that_a_model_lacks_are_not_dropped_unless_they_are_zero(tmp_path):
    torch.save(dinov3(random_network("tiny_dinov3_qkvb")), tmp_path / "w.pth")
    with pytest.raises(CheckpointError) as caught:
        load_encoder("timm:tiny_dinov3", weights=tmp_path / "w.pth")
    assert_one_line(caught, "_qkvb")


@pytest.mark.parametrize("prefix", ["", "backbone."])
def test_esvits_teacher_is_read(tmp_path, prefix):
    network = random_network("tiny_swin")
    student = under(f"module.{prefix}", swin(random_network("tiny_swin", 8)))
    torch.save({"student": student, "teacher": under(prefix, swin(network)), "epoch": 3}, tmp_path / "w.pth")
    encoder = load_encoder(f"dino:{tmp_path / 'w.pth'}", arch="tiny_swin")
    with torch.no_grad():
        images = random_images(224, 2)
        torch.testing.assert_close(encoder(images), timm_features(network, images), atol=TOLERANCE, rtol=TOLERANCE)


def test_normalization_that_differs_is_named_and_what_the_user_chose_is_not(tmp_path, caplog):
    torch.save({"model": mae(random_network("test_vit"))}, tmp_path / "w.pth")  # timm's record has a mean of 0.5
    kwargs: Options = {"weights": tmp_path / "w.pth"}
    encoder = load_encoder("timm:test_vit", **kwargs)
    assert encoder.preprocess.mean == (0.5, 0.5, 0.5)  # as before the file was recognized
    assert "MAE" in caplog.text and "`mean=0.485,0.456,0.406` `std=0.229,0.224,0.225`" in caplog.text
    assert "`pooling" not in caplog.text
    caplog.clear()
    load_encoder("timm:test_vit", **kwargs, mean=IMAGENET[0], std=IMAGENET[1], pooling="mean")
    load_encoder(f"dino:{tmp_path / 'w.pth'}", arch="test_vit")
    assert "authors" not in caplog.text
    assert "decoder_pos_embed" in caplog.text  # the usual line on what is left out


def test_a_run_starts_from_an_official_file_and_names_its_normalization(tmp_path, caplog):
    caplog.set_level("INFO")
    name, sizes = "vit_tiny_patch16_224", {**TINY, "patch_size": 16}
    torch.save({"model": mae(random_network(name, img_size=64, **sizes))}, tmp_path / "w.pth")
    init = (f"model.backbone={name}", f"model.init=timm:{name}", f"model.weights={tmp_path / 'w.pth'}")
    init += tuple(f"model.{key}={value}" for key, value in sizes.items())
    config = resolve_init(conv_config(tmp_path, *init))
    backbone = seeded_backbone(config.model, 64, seed=0)
    load_initial_weights(backbone, config.model, config.views)
    assert "MAE normalize images by views.mean=[0.485, 0.456, 0.406]" in caplog.text
    caplog.clear()
    load_initial_weights(backbone, config.model, ViewsConfig())
    assert "normalize" not in caplog.text


@pytest.mark.parametrize("form", ["timm", "dino"])
def test_the_small_vit_of_moco_v3_has_twelve_heads(tmp_path, form):
    name, small = "vit_small_patch16_224", {"depth": 1, "img_size": 32}
    network = random_network(name, num_heads=12, **small)
    base = under("module.base_encoder.", network.state_dict())
    torch.save({"state_dict": base | under("module.momentum_encoder.", network.state_dict())}, tmp_path / "w.pth")
    options: Options = {"timm": {"weights": tmp_path / "w.pth"}, "dino": {"arch": "small_of_moco"}}[form]
    model = "timm:small_of_moco" if form == "timm" else f"dino:{tmp_path / 'w.pth'}"
    encoder = load_encoder(model, **options, size=32)
    images = random_images(32)
    with torch.no_grad():
        torch.testing.assert_close(encoder(images), timm_features(network, images), atol=TOLERANCE, rtol=TOLERANCE)
    assert encoder.model.architecture["num_heads"] == 12
    backbone = seeded_backbone(ModelConfig(name, depth=1), 32, seed=0)
    with pytest.raises(ConfigError, match=r"model\.num_heads=12"):
        load_initial_weights(backbone, ModelConfig(name, f"timm:{name}", str(tmp_path / "w.pth"), depth=1))


def test_a_run_starts_from_dinov3s_names(tmp_path):
    name, sizes = "vit_small_patch16_dinov3", {**TINY, "patch_size": 16}
    network = random_network(name, **sizes)
    torch.save(dinov3(network), tmp_path / "w.pth")
    model = ModelConfig(name, f"timm:{name}", str(tmp_path / "w.pth"), **sizes)
    backbone = seeded_backbone(model, 64, seed=0)
    load_initial_weights(backbone, model)
    own = backbone.trunk.state_dict()
    assert all(torch.equal(own[key], value) for key, value in network.state_dict().items())


@pytest.mark.parametrize(
    ("content", "arch", "message"),
    [
        (lambda: {"model": beit_pretrained(random_network("tiny_beit", **NORM_FIRST))}, "test_vit", "BEiT"),
        (lambda: dinov3(random_network("tiny_dinov3")), "test_vit", "DINOv3"),
        (lambda: ijepa(random_network("tiny_ijepa")), "test_vit", "[CLS]"),
        (lambda: random_network("tiny_distilled").state_dict(), "test_vit", "distilled"),
        (lambda: random_network("test_vit").state_dict(), "tiny_dinov3", "register"),
        (lambda: random_network("test_vit").state_dict(), "tiny_beit", "unexpected"),
        (lambda: nnclr(random_network("test_resnet")), "test_vit", "missing"),
        (lambda: {"model": dict(list(mae(random_network("test_vit")).items())[9:])}, "test_vit", "missing"),
        (lambda: {"model": under("decoder_", random_network("test_vit").state_dict())}, "test_vit", "missing"),
        (
            lambda: {"encoder": {"module.x": torch.zeros(2)}, "target_encoder": {"module.x": torch.zeros(())}},
            "tiny_ijepa",
            "missing",
        ),
        (lambda: {"module": {"storage_tokens": torch.zeros(()), "a.attn.qkv.bias": torch.zeros(0)}}, "tiny_dinov3", ""),
    ],
)
def test_files_of_another_method_or_with_missing_parts_are_one_line(tmp_path, content, arch, message):
    torch.save(content(), tmp_path / "w.pth")
    for model, options in (
        (f"timm:{arch}", {"weights": tmp_path / "w.pth"}),
        (f"dino:{tmp_path / 'w.pth'}", {"arch": arch}),
    ):
        with pytest.raises(CheckpointError) as caught:
            load_encoder(model, **options)
        assert_one_line(caught, message)


def test_a_truncated_file_is_one_line(tmp_path):
    torch.save({"model": mae(random_network("test_vit"))}, tmp_path / "w.pth")
    whole = (tmp_path / "w.pth").read_bytes()
    (tmp_path / "w.pth").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError) as caught:
        load_encoder("timm:test_vit", weights=tmp_path / "w.pth")
    assert_one_line(caught, "w.pth")


def test_timms_records_normalize_as_docs_encoders_says():
    imagenet = ("vit_base_patch16_224.mae", "vit_huge_patch14_gap_224.in1k_ijepa", "beitv2_base_patch16_224")
    imagenet += ("deit_small_distilled_patch16_224", "vit_large_patch16_dinov3", "resnet50")
    others = {"beit_base_patch16_224": 0.5, "vit_large_patch16_dinov3.sat493m": 0.43}
    for name, mean in (dict.fromkeys(imagenet, 0.485) | others).items():
        assert timm.models.get_pretrained_cfg(name).mean[0] == mean
