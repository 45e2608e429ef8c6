"""Attention against timm's own softmax, and colors against principal components computed otherwise."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sop_faiss.evaluate.attention import Attention, components_as_colors, look
from sop_faiss.model.encoders.load import load_encoder


@pytest.mark.parametrize("model", ["timm:test_vit", "config:cifar10_vit_micro"])
def test_attention_is_the_softmax_of_timms_own_forward(model: str) -> None:
    encoder = load_encoder(model, random_weights=0)
    side = encoder.preprocess.crop
    image = torch.randn(3, side, side, generator=torch.Generator().manual_seed(0))
    looked = look(encoder, image)
    last = [module for module in encoder.model.modules() if isinstance(module, Attention)][-1]
    last.fused_attn = False  # timm computes the softmax itself, and hands it to the dropout
    seen: list[torch.Tensor] = []
    hook = last.attn_drop.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    with torch.no_grad():
        _, tokens = encoder.tokens(image[None])
    hook.remove()
    assert looked.heads is not None
    rows, columns = tokens.grid
    expected = seen[-1][0, :, 0, -rows * columns :].reshape(-1, rows, columns)
    np.testing.assert_allclose(looked.heads, expected.numpy(), atol=1e-6)
    np.testing.assert_allclose(looked.patches.reshape(rows * columns, -1), tokens.patches[0].numpy(), atol=1e-4)


@pytest.mark.parametrize("model", ["timm:test_resnet", "timm:eva02_tiny_patch14_224"])
def test_networks_without_such_attention_have_patches(model: str) -> None:
    encoder = load_encoder(model, random_weights=0)
    side = encoder.preprocess.crop
    looked = look(encoder, torch.zeros(3, side, side))
    assert looked.heads is None and looked.patches.ndim == 3


def test_colors_are_components_of_all_patches_together() -> None:
    generator = np.random.default_rng(0)
    scales = np.array([9.0, 5.0, 3.0, 0.1, 0.1])
    images = [(generator.normal(size=(rows, 4, 5)) * scales).astype(np.float32) for rows in (3, 6)]
    colors = components_as_colors(images)
    assert [each.shape for each in colors] == [(3, 4, 3), (6, 4, 3)]
    rows = np.concatenate([each.reshape(-1, 5) for each in images]).astype(np.float64)
    _, _, axes = np.linalg.svd(rows - rows.mean(0), full_matrices=False)
    found = np.concatenate([each.reshape(-1, 3) for each in colors])
    assert found.min() == 0.0 and found.max() == 1.0
    for place in range(3):
        inside = (found[:, place] > 0) & (found[:, place] < 1)
        expected = (rows - rows.mean(0)) @ axes[place]
        assert abs(np.corrcoef(found[inside, place], expected[inside])[0, 1]) > 1 - 1e-6
    again = components_as_colors([np.flip(each, 0) for each in images])
    np.testing.assert_allclose(again[1], np.flip(colors[1], 0), atol=1e-5)


def test_flat_tokens_have_a_color() -> None:
    (flat,) = components_as_colors([np.zeros((2, 2, 2), dtype=np.float32)])
    assert flat.shape == (2, 2, 3) and np.isfinite(flat).all()
