"""Detectors: a resumed training is the uninterrupted one; squares are found after a short one."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sop_faiss import load_encoder
from sop_faiss.errors import DataError, RunStoppedError
from sop_faiss.evaluate.sets.coco_set import CocoSet, open_coco
from sop_faiss.evaluate.trained.average_precision import average_precision
from sop_faiss.evaluate.trained.detect import find_instances, learning_rate_at, train_detector
from sop_faiss.evaluate.trained.detect_choices import QUICK, DetectChoices
from sop_faiss.evaluate.trained.detect_model import filled_detect_choices
from sop_faiss.evaluate.trained.training_state import open_state
from tests.cocos import write_coco
from tests.messages import assert_one_line
from tests.test_finetune import Killed, killed_at

TINY = DetectChoices(size=64, epochs=3, batch_size=2, learning_rate=1e-3, warmup_steps=2, width=8, rois=8, anchor=4.0)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> CocoSet:
    return open_coco(write_coco(tmp_path_factory.mktemp("coco")), "train")


def train(data: CocoSet, choices: DetectChoices, out: Path | None = None, **more: Any) -> Any:
    encoder = load_encoder("timm:test_efficientnet", random_weights=0)
    choices = filled_detect_choices(encoder, choices)
    with open_state(out, {"seed": choices.seed}, "detect") as state:
        return train_detector(encoder, data, choices, state, **more), encoder


def test_a_killed_training_ends_as_an_uninterrupted_one(data: CocoSet, tmp_path: Path) -> None:
    choices = DetectChoices(**{**vars(TINY), "batchnorm": "batch"})
    whole, encoder = train(data, choices)
    report, ended = killed_at(1, 4), None  # 2 steps an epoch
    while ended is None:
        random.seed(3)  # what came before must not count
        torch.manual_seed(int(np.random.randint(100)))
        try:
            ended, _ = train(data, choices, tmp_path, progress=report)
        except Killed:
            continue
    again, _ = train(data, choices, tmp_path, progress=killed_at(0))  # no step is left
    for key, value in whole.state_dict().items():
        assert torch.equal(value, ended.state_dict()[key]) and torch.equal(value, again.state_dict()[key]), key
    found = find_instances(whole, encoder, data)
    assert found == find_instances(again, encoder, data)
    assert {each["category_id"] for each in found} <= {3, 7}


def test_learning_rates() -> None:
    choices = DetectChoices(learning_rate=1.0, warmup_steps=10)
    rates = [learning_rate_at(step, 120, choices) for step in (0, 5, 10, 79, 80, 109, 110, 119)]
    assert rates == pytest.approx([0.001, 0.5005, 1, 1, 0.1, 0.1, 0.01, 0.01])
    assert learning_rate_at(1, 2, choices) == pytest.approx(1.0 * 0.5005)  # shorter than the warm-up


def test_what_stops_a_training(tmp_path: Path) -> None:
    data = open_coco(write_coco(tmp_path, 3), "train")
    with pytest.raises(RunStoppedError) as stopped:
        train(data, DetectChoices(**{**vars(TINY), "learning_rate": 10.0, "warmup_steps": 0, "epochs": 60}))
    assert "learning_rate" in stopped.value.arguments
    with pytest.raises(DataError, match="no instance"):
        train(open_coco(tmp_path, "train", 1), TINY)
    (tmp_path / "images" / "train" / "001.jpg").write_bytes(b"no image")
    with pytest.raises(DataError) as error:
        train(data, TINY)
    assert_one_line(error, "001")


@pytest.mark.slow
@pytest.mark.parametrize("cascade", [False, True])
def test_squares_are_learned(cascade: bool, tmp_path: Path) -> None:
    data = open_coco(write_coco(tmp_path, 12), "train")
    short = {"size": 64, "epochs": 30, "width": 32, "rois": 32, "batchnorm": "batch", "cascade": cascade}
    choices = DetectChoices(**{**QUICK, **short})
    model, encoder = train(data, choices)
    metrics, _ = average_precision(data, find_instances(model, encoder, data))
    assert metrics["box_ap50"] > 50 and metrics["mask_ap50"] > 50
