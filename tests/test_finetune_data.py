"""Augmented images and batches: reproducible, of the right size, and never an error."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from sop_faiss.evaluate.trained.finetune_choices import FinetuneChoices
from sop_faiss.evaluate.trained.finetune_data import Augmentation, plan_epoch
from sop_faiss.evaluate.trained.training_batches import plan_in_order, seeded
from sop_faiss.model.encoders.preprocess import Preprocess
from tests.images import make_image

IMAGE = make_image(np.random.default_rng(0), (50, 60))


@pytest.mark.parametrize("size", [32, 40])
def test_an_augmented_image_depends_on_its_key_alone(size: int) -> None:
    augment = Augmentation(Preprocess.square(size), FinetuneChoices(randaugment=10, erasing=0.5))
    made = [augment(IMAGE, "image", 0, epoch) for epoch in range(300)]  # every operation of magnitude 10 is among them
    random.seed(5), torch.manual_seed(5), np.random.seed(5)
    assert torch.equal(augment(IMAGE, "image", 0, 7), made[7]) and not torch.equal(made[7], made[8])
    assert {each.shape for each in made} == {(3, size, size)} and all(each.isfinite().all() for each in made)
    after = random.random(), float(np.random.rand()), float(torch.rand(()))
    random.seed(5), torch.manual_seed(5), np.random.seed(5)
    assert after == (random.random(), float(np.random.rand()), float(torch.rand(())))


def test_no_augmentation_is_the_encoders_preprocessing() -> None:
    preprocess = Preprocess.square(40)
    none = FinetuneChoices(randaugment=0, erasing=0.0, min_crop=1.0, flip=0.0)
    wanted = preprocess.normalize(torch.from_numpy(preprocess.apply(IMAGE)).unsqueeze(0))[0]
    torch.testing.assert_close(Augmentation(preprocess, none)(IMAGE, 1), wanted)
    flipped = Augmentation(preprocess, replace(none, flip=1.0))(IMAGE, 1)
    torch.testing.assert_close(flipped, wanted.flip(2))


def test_batches_of_an_epoch() -> None:
    choices = FinetuneChoices(batch_size=4)
    rows = np.arange(10) + 5
    plan = plan_epoch(rows, choices, "order", 0, 1)
    seen = np.concatenate(plan)
    assert [len(each) for each in plan] == [4, 4] and len(set(seen.tolist())) == 8 and set(seen) <= set(rows)
    assert np.array_equal(np.concatenate(plan_epoch(rows, choices, "order", 0, 1)), seen)
    assert not np.array_equal(np.concatenate(plan_epoch(rows, choices, "order", 0, 2)), seen)
    assert [len(each) for each in plan_epoch(rows[:3], choices, 0)] == [2]  # mixed in pairs
    assert [len(each) for each in plan_epoch(rows[:3], replace(choices, mixup=0.0, cutmix=0.0), 0)] == [3]
    assert np.concatenate(plan_in_order(5, 2)).tolist() == [0, 1, 2, 3, 4]


def test_copies_of_an_image_are_in_its_batch() -> None:
    choices = FinetuneChoices(batch_size=6, repeats=3)
    plan = plan_epoch(np.arange(20), choices, "order", 0, images=100)
    assert [len(each) for each in plan] == [6, 6, 6]
    for batch in plan:
        assert [(batch % 100).tolist().count(row) for row in set((batch % 100).tolist())] == [3, 3]
        assert sorted(set((batch // 100).tolist())) == [0, 1, 2]


def test_generators_are_seeded_inside() -> None:
    draws = []
    for _ in range(2):
        with seeded("a", 1):
            draws.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
    with seeded("a", 2):
        draws.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
    assert draws[0] == draws[1] and draws[1] != draws[2]
