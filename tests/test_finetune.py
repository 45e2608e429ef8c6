"""Fine-tuning: a resumed training is the uninterrupted one, and without augmentation it is a plain loop."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from sop_faiss.data.images.source import ImageSource, open_source
from sop_faiss.errors import DataError, RunStoppedError
from sop_faiss.evaluate.trained.finetune import FineTuned, fine_tune, learning_rate_at, rank_classes
from sop_faiss.evaluate.trained.finetune_choices import FinetuneChoices
from sop_faiss.evaluate.trained.finetune_data import plan_epoch
from sop_faiss.evaluate.trained.finetune_model import filled_choices, make_classifier
from sop_faiss.evaluate.trained.training_state import open_state
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.encoders.load import load_encoder
from tests.images import write_folder
from tests.messages import assert_one_line

PLAIN = FinetuneChoices(
    learning_rates=(0.5,),
    epochs=2,
    batch_size=6,
    layer_decay=1.0,
    drop_path=0.0,
    mixup=0.0,
    cutmix=0.0,
    smoothing=0.0,
    randaugment=0,
    erasing=0.0,
    min_crop=1.0,
    flip=0.0,
)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> ImageSource:
    return open_source(write_folder(tmp_path_factory.mktemp("images"), classes=3, per_class=5, size=40))


def encoder_of(name: str) -> Encoder:
    return load_encoder(f"timm:{name}", random_weights=0, size=32)


def tune(encoder: Encoder, images: ImageSource, choices: FinetuneChoices, out: Path | None = None, **more: Any) -> Any:
    choices = filled_choices(encoder, choices)
    assert images.labels is not None
    with open_state(out, {"seed": choices.seed}) as state:
        return fine_tune(encoder, images, images.labels, choices, state, **more)


class Killed(Exception):
    pass


def killed_at(*steps: int) -> Any:
    left = list(steps)

    def report(done: int, total: int) -> None:
        if left and done >= left[0]:
            left.pop(0)
            raise Killed

    return report


@pytest.mark.parametrize("name", ["test_vit", "test_resnet"])
def test_a_killed_training_ends_as_an_uninterrupted_one(name: str, images: ImageSource, tmp_path: Path) -> None:
    encoder = encoder_of(name)
    choices = FinetuneChoices(
        (0.2, 1.0), epochs=3, sweep_epochs=2, batch_size=6, layer_decay=0.8, ema=0.5, held_out=0.2, drop_path=0.3
    )
    before = {key: value.clone() for key, value in encoder.state_dict().items()}
    whole: FineTuned = tune(encoder, images, choices)
    report, ended = killed_at(2, 4, 11), None  # 2 x 4 steps of trials, then 6
    while ended is None:
        random.seed(3)  # what came before must not count
        torch.manual_seed(np.random.randint(100))
        try:
            ended = tune(encoder, images, choices, tmp_path, progress=report)
        except Killed:
            continue
    again = tune(encoder, images, choices, tmp_path, progress=killed_at(0))  # no step is left
    for other in (ended, again):
        assert other.held_out_top1 == whole.held_out_top1 and other.learning_rate == whole.learning_rate
        for key, value in whole.model.state_dict().items():
            assert torch.equal(value, other.model.state_dict()[key]), key
    for key, value in encoder.state_dict().items():
        assert torch.equal(value, before[key]), key


@pytest.mark.parametrize("name", ["test_vit", "test_resnet"])
def test_without_augmentation_it_is_a_plain_loop(name: str, images: ImageSource) -> None:
    encoder = encoder_of(name)
    choices = filled_choices(encoder, PLAIN)
    tuned = tune(encoder, images, choices)
    model = make_classifier(encoder, 3, choices)
    pixels = torch.stack([encoder.transform(images.read(row)) for row in range(len(images))])
    undecayed = {"pos_embed", "cls_token", "reg_token"}
    named = [(key, value) for key, value in model.named_parameters() if value.requires_grad]
    decays = [value for key, value in named if value.ndim > 1 and key.rpartition(".")[2] not in undecayed]
    others = [value for _, value in named if not any(value is each for each in decays)]
    optimizer = torch.optim.AdamW([{"params": decays, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}])
    step = 0
    model.train()
    for epoch in range(2):
        for rows in plan_epoch(np.arange(15), choices, "order", 0, epoch):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate_at(step, 4, round(0.2 * 2), 0.5 * 6 / 1024)
            loss = functional.cross_entropy(model(pixels[rows]), torch.from_numpy(images.labels[rows]))  # type: ignore[index]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
    assert tuned.steps == step == 4
    model.eval(), tuned.model.eval()
    with torch.no_grad():
        torch.testing.assert_close(tuned.model(pixels), model(pixels), rtol=1e-3, atol=1e-4)
        untrained = make_classifier(encoder, 3, choices).eval()(pixels)
        assert (tuned.model(pixels) - untrained).abs().max() > 1e-2
    ranked = rank_classes(tuned.model, encoder, images, np.arange(15), batch_size=4)
    assert ranked.tolist() == tuned.model(pixels).argsort(dim=1, descending=True).tolist()


def test_processes_make_the_same_batches(images: ImageSource) -> None:
    choices = replace(PLAIN, epochs=1, randaugment=9, mixup=0.8, cutmix=1.0, erasing=1.0, min_crop=0.3, flip=0.5)
    one, two = (tune(encoder_of("test_resnet"), images, choices, workers=workers).model for workers in (0, 2))
    assert all(torch.equal(value, two.state_dict()[key]) for key, value in one.state_dict().items())


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [learning_rate_at(step, 10, 4, 1.0) for step in range(11)]
    assert rates[0] == 1e-6 and rates[2] == pytest.approx(0.5, abs=1e-5) and rates[4] == 1.0
    assert rates[7] == pytest.approx(0.5, abs=1e-5) and rates[10] == pytest.approx(1e-6)


def test_what_cannot_be_trained(images: ImageSource, tmp_path: Path) -> None:
    encoder = encoder_of("test_resnet")
    broken = copy.deepcopy(encoder)
    with torch.no_grad():
        next(broken.model.backbone.parameters()).fill_(float("nan"))
    with pytest.raises(RunStoppedError) as stopped:
        tune(broken, images, PLAIN)
    assert_one_line(stopped, "learning_rates")
    single = open_source(write_folder(tmp_path / "single", classes=3, per_class=1))
    with pytest.raises(DataError) as error:
        tune(encoder, single, replace(PLAIN, learning_rates=(0.1, 0.2)))
    assert_one_line(error, "learning rate")
    with pytest.raises(DataError):
        tune(encoder, open_source(write_folder(tmp_path / "one", classes=1)), PLAIN)
