"""A ViT's last block for the read tokens alone, against the whole block: outputs, gradients, and what is left out."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
from timm.models.vision_transformer import Block
from torch import nn

from sop_faiss.model.backbones.backbone import VitBackbone
from sop_faiss.model.backbones.last_block import block_on_rows, works_on_rows

VIEWS, TOKENS, WIDTH = 5, 17, 24
ROWS = {
    "cls": torch.arange(0, VIEWS * TOKENS, TOKENS),
    "some of each view": torch.tensor([0, 17, 34, 51, 68, 3, 5, 7, 20, 60, 61, 84]),
    "none of some views, in any order": torch.tensor([40, 16, 2, 41, 15]),
    "twice": torch.tensor([3, 70, 3, 71]),
    "all": torch.arange(VIEWS * TOKENS),
    "none": torch.empty(0, dtype=torch.int64),
}
BUILDS = {
    "plain": {"qkv_bias": True},
    "no bias": {},
    "drop path": {"qkv_bias": True, "drop_path": 0.4},
    "layer scale": {"qkv_bias": True, "init_values": 0.3},
    "normed queries": {"qkv_bias": True, "qk_norm": True},
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_outputs_and_gradients_are_the_whole_blocks(build, rows):
    torch.manual_seed(0)
    block = Block(WIDTH, 3, **build)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.3)
    twin = copy.deepcopy(block)
    assert works_on_rows(block)
    ours = torch.randn(VIEWS, TOKENS, WIDTH, requires_grad=True)
    theirs = ours.detach().clone().requires_grad_()
    torch.manual_seed(1)
    read = block_on_rows(block, ours, rows)
    torch.manual_seed(1)
    expected = twin(theirs).flatten(0, 1)[rows]
    torch.testing.assert_close(read, expected, rtol=1e-5, atol=1e-5)
    slopes = torch.randn(read.shape)
    read.backward(slopes)
    expected.backward(slopes)
    for one, two in zip((ours, *block.parameters()), (theirs, *twin.parameters()), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-5, atol=1e-5 * max(1.0, float(two.grad.abs().max())))


def test_queries_projection_and_mlp_are_left_out():
    block = Block(WIDTH, 3, qkv_bias=True)
    sizes = {}
    for name in ("attn.proj", "mlp.fc1"):
        layer = block.get_submodule(name)
        layer.register_forward_pre_hook(lambda _, inputs, name=name: sizes.update({name: len(inputs[0])}))
    block_on_rows(block, torch.randn(VIEWS, TOKENS, WIDTH), ROWS["cls"])
    assert sizes == {"attn.proj": VIEWS, "mlp.fc1": VIEWS}


class Unknown(Block):
    """A block of another build, though it looks the same."""

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("block", "known"),
    [
        (Block(WIDTH, 3), True),
        (Unknown(WIDTH, 3), False),
        (Block(WIDTH, 3, proj_drop=0.1), False),
        (nn.Identity(), False),
    ],
)
def test_blocks_of_another_build_are_known_by_type(block, known):
    assert works_on_rows(block) == known


@pytest.mark.parametrize("unknown", [False, True])
@pytest.mark.parametrize("wants_cls", [True, False])
@pytest.mark.parametrize("patches", [None, torch.tensor([0, 15, 16, 30])])
def test_what_a_backbone_reads_is_what_it_makes(unknown, wants_cls, patches):
    if not wants_cls and patches is None:
        return
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=3, num_classes=0,
        reg_tokens=2, class_token=True, dynamic_img_size=True,
    )  # fmt: skip
    if unknown:
        model.blocks[-1].__class__ = Unknown
    backbone = VitBackbone(model)
    images, masks = torch.randn(2, 3, 16, 16), torch.rand(2, 16) < 0.3
    tokens = backbone(images, masks)
    expected = [tokens.cls] if wants_cls else []
    if patches is not None:
        expected.append(tokens.patches.flatten(0, 1)[patches])
    read = backbone.read(images, masks, patches, wants_cls)
    torch.testing.assert_close(read, torch.cat(expected), rtol=1e-5, atol=1e-5)


def test_bf16_stays_near():
    torch.manual_seed(0)
    block, tokens, rows = Block(WIDTH, 3, qkv_bias=True), torch.randn(VIEWS, TOKENS, WIDTH), ROWS["some of each view"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        read, expected = block_on_rows(block, tokens, rows), block(tokens).flatten(0, 1)[rows]
    assert read.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(read, expected, rtol=0.02, atol=0.02)
