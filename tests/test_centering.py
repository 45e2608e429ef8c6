"""Center, targets and losses of DINO and iBOT against loops over pairs, images and prototypes."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from sop_faiss.errors import CheckpointError
from sop_faiss.model.last_layer import LastLayer
from sop_faiss.objectives.centering import Center, patch_loss, targets_of, views_loss
from sop_faiss.sop.loss import masked_row_weights
from tests.oracle import loop_dino_loss, loop_ibot_patch_loss

CPU = torch.device("cpu")


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def center_of(count: int) -> Center:
    center = Center(count, 0.9, CPU)
    center.value = drawn(count, seed=9) / 3
    return center


@pytest.mark.parametrize(("global_views", "local_views"), [(2, 3), (2, 0), (1, 2), (3, 1)])
def test_the_loss_of_views_is_the_mean_over_pairs(global_views, local_views):
    views, images, count = global_views + local_views, 3, 5
    student, teacher = drawn(views, images, count).requires_grad_(), drawn(global_views, images, count, seed=1)
    center = center_of(count)
    oracle = loop_dino_loss(student, teacher, center.value, 0.1, 0.05)
    (wanted,) = torch.autograd.grad(oracle, student)
    targets = targets_of(teacher.flatten(0, 1), center, 0.05)
    whole = views_loss(student, targets, 0.1, 0, views)
    torch.testing.assert_close(whole.loss, oracle)
    torch.testing.assert_close(torch.autograd.grad(3 * whole.loss, student)[0], 3 * wanted)
    assert float(whole.weight) == pytest.approx(1)
    assert float((whole.loss - whole.target_entropy).detach()) > 0
    entropy = -sum((q * q.log()).sum() for q in F.softmax((teacher - center.value) / 0.05, -1).flatten(0, 1))
    torch.testing.assert_close(whole.entropies, entropy)
    # in two parts, the local views first
    parts = [views_loss(student[global_views:], targets, 0.1, global_views, views)] if local_views else []
    parts.append(views_loss(student[:global_views], targets, 0.1, 0, views))
    torch.testing.assert_close(sum(part.loss for part in parts), oracle)
    torch.testing.assert_close(torch.autograd.grad(sum(part.loss for part in parts), student)[0], wanted)
    assert float(sum(part.weight for part in parts)) == pytest.approx(1)


def test_the_loss_of_patches_is_the_mean_of_views_means():
    views, patches, count = 4, 6, 5
    student, teacher = drawn(views, patches, count).requires_grad_(), drawn(views, patches, count, seed=1)
    masks = drawn(views, patches, seed=2) > 0
    masks[1] = False
    center = center_of(count)
    oracle = loop_ibot_patch_loss(student, teacher, masks, center.value, 0.1, 0.05)
    (wanted,) = torch.autograd.grad(oracle, student)
    term = patch_loss(student[masks], targets_of(teacher[masks], center, 0.05), masked_row_weights(masks), 0.1)
    torch.testing.assert_close(term.loss, oracle)
    torch.testing.assert_close(torch.autograd.grad(term.loss, student)[0], wanted)
    assert float(term.weight) == pytest.approx(3 / 4)


def test_nothing_masked_is_a_loss_of_zero_with_gradients():
    student = drawn(0, 5).requires_grad_()
    masks = torch.zeros(4, 6, dtype=torch.bool)
    term = patch_loss(student, targets_of(drawn(0, 5), center_of(5), 0.05), masked_row_weights(masks), 0.1)
    assert float(term.loss) == 0 and torch.autograd.grad(term.loss, student)[0].shape == (0, 5)


def test_large_logits_give_finite_losses():
    student, teacher = 1e4 * drawn(2, 3, 5).requires_grad_(), 1e4 * drawn(2, 3, 5, seed=1)
    term = views_loss(student, targets_of(teacher.flatten(0, 1), center_of(5), 0.04), 0.1, 0, 2)
    assert term.loss.isfinite() and torch.autograd.grad(term.loss, student)[0].isfinite().all()


def test_a_center_follows_the_mean_of_all_parts():
    center = Center(4, 0.9, CPU)
    wanted = torch.zeros(4)
    for step in range(3):
        logits = drawn(6, 4, seed=step).float()
        center.follow(torch.stack([logits[:3].mean(0), logits[3:].mean(0)]))
        wanted = 0.9 * wanted + 0.1 * logits.mean(0)
    torch.testing.assert_close(center.value, wanted)
    with pytest.raises(CheckpointError, match="4"):
        center.load(torch.zeros(5))


@pytest.mark.parametrize("learns_norm", [True, False])
def test_a_last_layer_is_weight_normed(learns_norm):
    layer = LastLayer(6, 10, learns_norm)
    assert [name for name, _ in layer.named_parameters()] == ["direction", "norm"][: 1 + learns_norm]
    reference = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(6, 10, bias=False))
    with torch.no_grad():
        reference.parametrizations.weight.original0.fill_(1)
        reference.parametrizations.weight.original1.copy_(layer.direction)
    embeddings = F.normalize(drawn(4, 6).float(), dim=1)
    torch.testing.assert_close(layer(embeddings), reference(embeddings))
    grads = []
    for module in (layer, reference):
        module(embeddings).square().sum().backward()
        grads.append([parameter.grad for parameter in module.parameters()])
    torch.testing.assert_close(grads[0][0], grads[1][1], rtol=1e-5, atol=1e-6)
    if learns_norm:
        torch.testing.assert_close(grads[0][1], grads[1][0], rtol=1e-5, atol=1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(embeddings.bfloat16()).dtype == torch.float32
