"""Each file of examples/ does what it says, on a few tiny images."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sop_faiss.data.images.source import ImageSource
from sop_faiss.evaluate.task import EvaluationTask
from sop_faiss.index.build import build_index_of_images
from sop_faiss.index.search import FeatureIndex
from sop_faiss.model.encoders.encoder import encoder_of_backbone
from sop_faiss.model.encoders.load import load_encoder
from sop_faiss.objectives.objective import Objective
from tests.images import write_folder

FOLDER = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    return import_module


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short(path: Path) -> None:
    assert sum(bool(line.strip()) for line in path.read_text().splitlines()) < 40


def test_own_data_are_trained_on_and_indexed(example: Any, tmp_path: Path) -> None:
    source = example("own_data").random_images(16)
    assert isinstance(source, ImageSource)
    training = example("training")
    state, losses = training.train(source)
    assert len(losses) == 3 and np.isfinite(losses).all()
    assert set(state.objective.terms["cls"].memory.image_ids.tolist()) <= set(range(16))
    encoder = encoder_of_backbone(state.teacher.backbone, training.TINY, "mine")
    build_index_of_images(encoder, source, tmp_path / "index")
    index = FeatureIndex.open(tmp_path / "index")
    assert index.search(source.images[3], 1, encoder=encoder).keys[0][0] == "00000003"


def test_an_own_backbone_is_trained(example: Any) -> None:
    own, data, training = example("own_backbone"), example("own_data"), example("training")
    state, losses = training.train(data.random_images(16), own.CONFIG)
    assert type(state.student.backbone.trunk).__name__ == "TwoConvolutions" and np.isfinite(losses).all()
    assert state.student.backbone.patch_size == 8


def test_an_own_view_is_in_the_batch_and_is_drawn_again_alike(example: Any) -> None:
    own, data, training = example("own_view"), example("own_data"), example("training")
    source = data.random_images(16)

    def views(maker: Any) -> torch.Tensor:
        batches = training.Batches(source, np.arange(16), training.TINY, 8)
        batches.writer = training.BatchWriter(source, np.arange(16), maker(training.TINY, 1))
        return batches[0].global_views

    plain, squared = views(training.MultiCrop), views(own.WithGraySquares)
    changed = (plain != squared).any(-1).flatten(2).sum(2)
    assert (changed > 90).all() and (changed <= 100).all()  # 10 x 10 pixels of 32 x 32
    assert torch.equal(squared, views(own.WithGraySquares))


def test_an_own_objective_learns(example: Any) -> None:
    own, data, training = example("own_objective"), example("own_data"), example("training")
    objective = own.NearestRow(training.TINY)
    assert isinstance(objective, Objective)
    state, losses = training.train(data.random_images(16), steps=6, objective=objective)
    assert losses[-1] < losses[0] and state.objective is objective
    memory = objective.terms["cls"].memory
    assert (memory.image_ids >= 0).all()


def test_an_own_task_measures(example: Any, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "photos", classes=2, per_class=3, size=(48, 64))
    task = example("own_task").FoundWithoutColors(sorted(folder.rglob("*.jpg")))
    assert isinstance(task, EvaluationTask)
    scores = task.measure(load_encoder("config:digits_demo", random_weights=0))
    assert tuple(scores) == task.names and 0 <= scores["gray_recall_at_1"] <= 100
