"""Segmentation: a made set is learned, a killed training ends as an uninterrupted one, windows are a plain loop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from sop_faiss.errors import DataError, RunStoppedError
from sop_faiss.evaluate.sets.segment_set import SegmentSet, open_segment_sets
from sop_faiss.evaluate.trained import segment
from sop_faiss.evaluate.trained.segment import find_classes, measure_areas, segmentation_rate_at, train_segmenter
from sop_faiss.evaluate.trained.segment_choices import SegmentChoices
from sop_faiss.evaluate.trained.segment_model import filled_segment_choices
from sop_faiss.evaluate.trained.segment_score import constant_areas, score_areas
from sop_faiss.evaluate.trained.training_state import open_state
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.encoders.load import load_encoder
from tests.messages import assert_one_line
from tests.segments import write_segments

LINEAR = SegmentChoices(
    size=32, steps=40, batch_size=4, learning_rate=0.05, warmup_steps=3, distort=0.0, min_scale=0.8, max_scale=1.2
)
SMALL_UPERNET = replace(LINEAR, head="upernet", steps=6, channels=8, learning_rate=1e-3, drop_path=0.3)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> tuple[SegmentSet, SegmentSet]:
    return open_segment_sets(write_segments(tmp_path_factory.mktemp("segments") / "s"))


def encoder_of(name: str) -> Encoder:
    return load_encoder(f"timm:{name}", random_weights=0).eval()


def train(encoder: Encoder, scenes: SegmentSet, choices: SegmentChoices, out: Path | None = None, **more: Any) -> Any:
    filled = filled_segment_choices(encoder, choices)
    with open_state(out, {"seed": choices.seed}, "segment") as state:
        return train_segmenter(encoder, scenes, filled, state, **more)


def test_a_made_set_is_learned(sets: tuple[SegmentSet, SegmentSet]) -> None:
    encoder = encoder_of("test_efficientnet")
    choices = filled_segment_choices(encoder, replace(LINEAR, stride=4))
    areas = measure_areas(train(encoder, sets[0], choices), encoder, sets[1], choices)
    assert (areas[:, 2] == sets[1].count_pixels()).all() and areas.shape == (4, 3, 3)
    scores, floor = score_areas(areas.sum(0)), score_areas(constant_areas(areas[:, 2], 0).sum(0))
    assert scores.aacc > 90 and scores.miou > floor.miou + 10, (scores, floor)


class Killed(Exception):
    pass


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("test_vit", replace(LINEAR, steps=5)),
        pytest.param("test_vit", SMALL_UPERNET, marks=pytest.mark.slow),
        ("test_efficientnet", SMALL_UPERNET),
    ],
)
def test_a_killed_training_ends_as_an_uninterrupted_one(
    name: str, choices: SegmentChoices, sets: tuple[SegmentSet, SegmentSet], tmp_path: Path
) -> None:
    encoder = encoder_of(name)
    before = {key: value.clone() for key, value in encoder.state_dict().items()}
    whole = train(encoder, sets[0], choices).state_dict()
    left, ended = [2, 4], None

    def report(done: int, total: int) -> None:
        if left and done >= left[0]:
            left.pop(0)
            raise Killed

    while ended is None:
        torch.manual_seed(len(left))  # what came before must not count
        try:
            ended = train(encoder, sets[0], choices, tmp_path, progress=report, workers=len(left) % 2)
        except Killed:
            continue
    again = train(encoder, sets[0], choices, tmp_path, progress=lambda done, total: pytest.fail("a step was left"))
    for key, value in whole.items():
        assert torch.equal(value, ended.state_dict()[key]) and torch.equal(value, again.state_dict()[key]), key
    for key, value in encoder.state_dict().items():
        assert torch.equal(value, before[key]), key
    changed = [key for key, value in whole.items() if key in before and not torch.equal(value, before[key])]
    assert not changed  # those of UPerNet have a prefix


class Positions(nn.Module):
    """Scores that depend on a window's own content alone, at a quarter of its size."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 5, 4, stride=4)

    def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
        scores: torch.Tensor = self.layer(images - images.mean((2, 3), keepdim=True))
        return [scores]


@pytest.mark.parametrize("shape", [(32, 32), (32, 75), (53, 40), (20, 70), (1, 9)])
def test_windows_are_averaged(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, image = Positions().eval(), torch.randn(1, 3, *shape)
    choices = replace(LINEAR, size=32)
    assert choices.window_stride == 21 and SegmentChoices().window_stride == 341
    height, width = shape
    total, often = torch.zeros(5, height, width), torch.zeros(height, width)
    rows = max(height - 32 + 21 - 1, 0) // 21 + 1  # mmsegmentation's count
    columns = max(width - 32 + 21 - 1, 0) // 21 + 1
    for row in range(rows):
        for column in range(columns):
            bottom, right = min(row * 21 + 32, height), min(column * 21 + 32, width)
            top, left = max(bottom - 32, 0), max(right - 32, 0)
            window = torch.zeros(1, 3, 32, 32)
            window[:, :, : bottom - top, : right - left] = image[:, :, top:bottom, left:right]
            with torch.no_grad():
                scores = functional.interpolate(model(window)[0], scale_factor=4, mode="bilinear")[0]
            total[:, top:bottom, left:right] += scores[:, : bottom - top, : right - left]
            often[top:bottom, left:right] += 1
    large = functional.interpolate((total / often)[None], size=(60, 90), mode="bilinear")[0]
    wanted = large.argmax(0).numpy()
    assert len(np.unique(wanted)) > 1
    for scores_at_a_time in (segment._SCORES, 60 * 90 * 2, 1):
        monkeypatch.setattr(segment, "_SCORES", scores_at_a_time)
        found = find_classes(model, image, (60, 90), choices)
        assert (found == wanted).mean() > 0.999


def test_the_learning_rate_rises_and_falls() -> None:
    choices = SegmentChoices(steps=100, warmup_steps=10, learning_rate=2.0)
    rates = [segmentation_rate_at(step, choices) for step in range(101)]
    assert rates[0] == pytest.approx(2e-6) and rates[5] == pytest.approx(2 * 0.95 / 2)
    assert rates[10] == pytest.approx(1.8) and rates[50] == pytest.approx(1.0) and rates[100] == 0.0


def test_what_cannot_be_trained(tmp_path: Path) -> None:
    encoder = encoder_of("test_vit")
    scenes, _ = open_segment_sets(write_segments(tmp_path / "s", count=(2, 1)))
    with torch.no_grad():
        next(encoder.model.backbone.parameters()).fill_(float("nan"))
    with pytest.raises(RunStoppedError) as stopped:
        train(encoder, scenes, LINEAR)
    assert_one_line(stopped, "learning_rate")
    single, _ = open_segment_sets(write_segments(tmp_path / "single", count=(1, 1)))
    with pytest.raises(DataError) as error:
        train(encoder, single, LINEAR)
    assert_one_line(error, "one image")
