"""Cascade heads: one stage is torchvision's heads, boxes are refined from stage to stage, the loss is that of GIoU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchvision.ops import box_iou

from sop_faiss.evaluate.trained.cascade import CascadeHeads, box_loss

SHAPES = [(64, 96), (64, 80)]
BOXES = torch.tensor([[4.0, 4.0, 40.0, 40.0], [50.0, 10.0, 70.0, 60.0]])


def features() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {str(place): torch.randn(2, 8, 16 >> place, 24 >> place, generator=draw) for place in range(4)}


def heads(stages: int = 3) -> Any:
    torch.manual_seed(0)
    made = CascadeHeads(8, 4, 16, stages)
    for stage in made.stages:
        torch.nn.init.normal_(stage.box_predictor.cls_score.weight, std=3.0)
    return made


def proposals() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    moved = [BOXES.repeat(20, 1) + torch.randn(40, 4, generator=draw) * 4 for _ in range(2)]
    return [each.clamp(0, 64) for each in moved]


def targets() -> list[dict[str, torch.Tensor]]:
    masks = torch.zeros(2, 64, 96, dtype=torch.uint8)
    masks[0, 4:40, 4:40] = masks[1, 10:60, 50:70] = 1
    return [{"boxes": BOXES, "labels": torch.tensor([1, 3]), "masks": masks} for _ in range(2)]


def test_one_stage_finds_what_torchvisions_heads_find() -> None:
    made = heads(1).eval()
    with torch.no_grad():
        (found, losses), (known, _) = (each(features(), proposals(), SHAPES) for each in (made, made.stages[0]))
    assert losses == {} and sum(len(each["boxes"]) for each in known) > 5
    for own, other in zip(found, known, strict=True):
        assert set(own) == set(other)
        for name, value in other.items():
            assert torch.allclose(own[name], value, atol=1e-6), name


def test_three_stages_train_and_find() -> None:
    made = heads().train()
    torch.manual_seed(2)
    _, losses = made(features(), proposals(), SHAPES, targets())
    assert set(losses) == {f"loss_{name}_{number}" for name in ("class", "box", "mask") for number in range(3)}
    torch.stack(list(losses.values())).sum().backward()
    assert all(value.grad is not None for value in made.parameters())
    assert [stage.proposal_matcher.high_threshold for stage in made.stages] == [0.5, 0.6, 0.7]
    with torch.no_grad():
        found, _ = made.eval()(features(), proposals(), SHAPES)
    for each, (height, width) in zip(found, SHAPES, strict=True):
        assert len(each["boxes"]) == len(each["masks"]) == len(each["labels"]) and int(each["labels"].min()) > 0
        assert float(each["boxes"].min()) >= 0 and (each["boxes"].amax(0)[2:] <= torch.tensor([width, height])).all()


def test_nothing_is_found_and_nothing_is_to_be_found() -> None:
    made = heads()
    for stage in made.stages:
        stage.box_predictor.cls_score.bias.data[0] = 1000.0
    with torch.no_grad():
        found, _ = made.eval()(features(), proposals(), SHAPES)
    assert [tuple(each["masks"].shape) for each in found] == [(0, 1, 28, 28)] * 2
    empty = {"boxes": BOXES[:0], "labels": torch.zeros(0, dtype=torch.int64), "masks": torch.zeros(0, 64, 96)}
    _, losses = made.train()(features(), proposals(), SHAPES, [empty, empty])
    assert all(bool(torch.isfinite(value)) for value in losses.values()) and float(losses["loss_box_0"].detach()) == 0


def test_the_next_stage_starts_from_refined_boxes() -> None:
    made, seen = heads(), []
    for stage in made.stages:
        stage.box_predictor.bbox_pred.weight.data.zero_()
        stage.box_predictor.bbox_pred.bias.data = torch.tensor([0.0, 0.0, 0.5, 0.5]).repeat(4) * 10
        stage.box_roi_pool.register_forward_pre_hook(lambda module, given: seen.append(given[1][0]))
    with torch.no_grad():
        made.eval()(features(), [BOXES, BOXES], SHAPES)
    sides = [(each[:, 2:] - each[:, :2]).prod(1) for each in seen]
    assert torch.equal(seen[0], BOXES) and (sides[1] > sides[0]).all() and (sides[2] >= sides[1]).all()


def test_the_loss_of_boxes() -> None:
    stage, own = heads().stages[0], proposals()
    labels = torch.tensor([0, 1, 3, 0] * 20)
    near = BOXES.repeat(40, 1)
    wanted = torch.cat(stage.box_coder.encode([near[:40], near[40:]], own))
    right = wanted.repeat(1, 4)
    assert float(box_loss(stage, right, own, labels, wanted)) == pytest.approx(0, abs=1e-4)
    still = box_loss(stage, torch.zeros(80, 16), own, labels, wanted)
    at = torch.cat(own)[labels > 0], near[labels > 0]
    overlap = box_iou(*at).diagonal()
    low, high = torch.minimum(at[0][:, :2], at[1][:, :2]), torch.maximum(at[0][:, 2:], at[1][:, 2:])
    hull = (high - low).prod(1)
    areas = [(each[:, 2:] - each[:, :2]).prod(1) for each in at]
    union = (areas[0] + areas[1]) / (1 + overlap)
    assert float(still) == pytest.approx(float(10 * (1 - overlap + (hull - union) / hull).sum() / 80), rel=1e-3)
    assert float(box_loss(stage, right, own, labels * 0, wanted)) == 0
