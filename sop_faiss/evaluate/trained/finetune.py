"""Fine-tune a network on labeled images: learning rates are tried on held-out images, the best trains on all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn import functional

from sop_faiss.data.images.source import ImageSource
from sop_faiss.data.images.subset import Subset
from sop_faiss.errors import DataError, RunStoppedError
from sop_faiss.evaluate.sets.labeled_part import held_out_rows
from sop_faiss.evaluate.trained.finetune_choices import FinetuneChoices
from sop_faiss.evaluate.trained.finetune_data import Augmentation, plan_epoch
from sop_faiss.evaluate.trained.finetune_model import Classifier, make_classifier, make_optimizer
from sop_faiss.evaluate.trained.training import Training, train
from sop_faiss.evaluate.trained.training_batches import Plan, load_batches, plan_in_order, seeded
from sop_faiss.evaluate.trained.training_ranks import score_together
from sop_faiss.evaluate.trained.training_state import TrainingState
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.progress import ProgressCallback
from sop_faiss.train.schedules import cosine

_REFERENCE_BATCH = 1024
"""Of the learning rates."""
_FIRST_RATE = 1e-6
"""Where warm-up starts, for the classifier; layers scale it."""


@dataclass(frozen=True)
class FineTuned:
    """A trained network.

    Attributes:
        model: the classifier, or its moving average.
        learning_rate: the chosen one.
        held_out_top1: of each that was tried, on the held-out training images, percent.
        held_out_images: how many those are.
        steps: of the last training.
    """

    model: nn.Module
    learning_rate: float
    held_out_top1: dict[float, float]
    held_out_images: int
    steps: int


def fine_tune(
    encoder: Encoder,
    images: ImageSource,
    targets: Int64[np.ndarray, " n"],
    choices: FinetuneChoices,
    state: TrainingState,
    *,
    first_layer: nn.Sequential | None = None,
    workers: int = 0,
    progress: ProgressCallback | None = None,
) -> FineTuned:
    """Train a copy of an encoder and a classifier on top of it.

    Args:
        encoder: where training starts; it stays as it is.
        images: training images.
        targets: class of each, from 0, without gaps.
        choices: as of `filled_choices`.
        state: what is already done, and where it is kept.
        first_layer: of a projection head, between the features and the classifier; it stays as it is.
        workers: processes that decode and augment; the result does not depend on them.
        progress: called with steps done.

    Raises:
        DataError: there are too few images or classes, or an image cannot be used.
        RunStoppedError: the loss is not finite.
    """
    run = _Run(encoder, images, targets, choices, workers, progress or (lambda done, total: None), first_layer)
    rates = sorted(choices.learning_rates)
    rows, held_out = np.arange(len(targets)), np.zeros(0, dtype=np.int64)
    if run.classes < 2:
        raise DataError("all training images are of one class: a classifier needs two or more")
    if len(rates) > 1:
        held_out = held_out_rows(targets, choices.held_out, choices.seed, "learning rate")
    kept = np.setdiff1d(rows, held_out)
    tried = replace(choices, epochs=choices.sweep_epochs, warmup_epochs=_warmup_of_sweep(choices))
    trials = [_Trial(rate, kept, tried) for rate in rates] if len(rates) > 1 else []
    run.total = sum(each.steps for each in trials) + _Trial(rates[0], rows, choices).steps
    for trial in trials:
        if trial.learning_rate not in state.held_out_top1:
            state.finish_trial(trial.learning_rate, _score(run, trial, held_out, state))
        run.done += trial.steps
    top1 = state.held_out_top1
    best = max(rates, key=lambda rate: (top1.get(rate, 0.0), -rate))
    final = _Trial(best, rows, choices)
    return FineTuned(run.train(final, state), best, top1, len(held_out), final.steps)


def _warmup_of_sweep(choices: FinetuneChoices) -> float:
    assert choices.epochs and choices.sweep_epochs and choices.warmup_epochs is not None  # they are filled
    return choices.warmup_epochs * choices.sweep_epochs / choices.epochs


def _score(run: _Run, trial: _Trial, held_out: Int64[np.ndarray, " h"], state: TrainingState) -> float:
    """Return the top-1 of a learning rate on the held-out images; of one that diverges 0."""
    try:
        model = run.train(trial, state)
    except RunStoppedError:
        return 0.0
    ranked = rank_classes(model, run.encoder, run.images, held_out, workers=run.workers)
    return 100.0 * float((ranked[:, 0] == run.targets[held_out]).mean())


class _Trial:
    """One training: a peak learning rate, the images, and the choices."""

    def __init__(self, learning_rate: float, rows: Int64[np.ndarray, " m"], choices: FinetuneChoices) -> None:
        assert choices.epochs is not None and choices.warmup_epochs is not None  # they are filled
        if len(rows) < 2:
            raise DataError(f"{len(rows)} training images to train on: wanted two or more")
        self.learning_rate, self.rows, self.choices, self.epochs = learning_rate, rows, choices, choices.epochs
        per_epoch = len(plan_epoch(rows, choices, 0))
        self.steps = self.epochs * per_epoch
        self.warmup_steps = round(choices.warmup_epochs * per_epoch)


def learning_rate_at(step: int, steps: int, warmup_steps: int, peak: float, end: float = 1e-6) -> float:
    """Return the classifier's learning rate at a step: a linear rise to `peak`, then half a cosine to `end`."""
    if step < warmup_steps:
        return _FIRST_RATE + (peak - _FIRST_RATE) * step / warmup_steps
    return cosine(peak, end, (step - warmup_steps) / max(1, steps - warmup_steps))


@dataclass
class _Run:
    encoder: Encoder
    images: ImageSource
    targets: Int64[np.ndarray, " n"]
    choices: FinetuneChoices
    workers: int
    report: ProgressCallback
    first_layer: nn.Sequential | None
    done: int = 0
    total: int = 0

    @property
    def classes(self) -> int:
        return len(np.unique(self.targets))

    def train(self, trial: _Trial, state: TrainingState) -> nn.Module:
        """Train to the end, from the last kept state; return what is tested."""
        choices = trial.choices
        model = make_classifier(self.encoder, self.classes, choices, self.first_layer)
        augment = Augmentation(self.encoder.preprocess, choices)
        loss_of = _loss(choices, self.classes)
        peak = trial.learning_rate * choices.batch_size / _REFERENCE_BATCH
        end = min(choices.end_rate, peak)
        copies = np.arange(len(self.images) * choices.repeats) % len(self.images)
        images = Subset(self.images, copies) if choices.repeats > 1 else self.images

        def load(plan: Plan, epoch: int) -> Iterator[tuple[Any, Int64[np.ndarray, " _"]]]:
            return load_batches(
                images,
                plan,
                lambda pixels, row: augment(pixels, "image", choices.seed, epoch, row),
                top_value=self.encoder.preprocess.top_value,
                workers=self.workers,
            )

        def loss(pixels: Tensor, rows: Int64[np.ndarray, " b"], epoch: int, number: int) -> Tensor:
            device = next(model.parameters()).device
            target = torch.from_numpy(self.targets[copies[rows]]).to(device)
            with seeded("step", choices.seed, epoch, number):  # what mixes, and stochastic depth
                return loss_of(pixels.to(device, memory_format=torch.channels_last), target, model)

        training = Training(
            f"{trial.learning_rate}, {trial.epochs} epochs of {len(trial.rows)}",
            model,
            make_optimizer(model, choices),
            trial.steps,
            lambda epoch: plan_epoch(trial.rows, choices, "order", choices.seed, epoch, images=len(self.images)),
            load,
            loss,
            lambda step: learning_rate_at(step, trial.steps, trial.warmup_steps, peak, end),
            f"learning_rates={trial.learning_rate:g}",
            ModelEmaV3(model, decay=choices.ema) if choices.ema else None,
        )
        return train(training, state, lambda done, _: self.report(self.done + done, self.total))


def _loss(choices: FinetuneChoices, classes: int) -> Callable[[Tensor, Tensor, Classifier], Tensor]:
    """Return the loss of a batch's images and classes; `pixels` may be changed."""
    mix = None
    if choices.mixes:
        mix = Mixup(choices.mixup, choices.cutmix, label_smoothing=choices.smoothing, num_classes=classes)
    soft = SoftTargetCrossEntropy()

    def loss_of(pixels: Tensor, target: Tensor, model: Classifier) -> Tensor:
        if mix is not None:
            pixels, target = mix(pixels, target)
        with torch.autocast(pixels.device.type, torch.bfloat16, enabled=choices.precision == "bf16"):
            scores = model(pixels).float()
        if mix is None:
            return functional.cross_entropy(scores, target, label_smoothing=choices.smoothing)
        mixed: Tensor = soft(scores, target)
        return mixed

    return loss_of


def rank_classes(
    model: nn.Module,
    encoder: Encoder,
    images: ImageSource,
    rows: Int64[np.ndarray, " q"],
    *,
    workers: int = 0,
    batch_size: int = 64,
    progress: ProgressCallback | None = None,
) -> Int64[np.ndarray, "q five"]:
    """Return the five most likely classes of images, or as many as there are, best first; ranks share the images.

    Args:
        model: images to scores.
        encoder: whose preprocessing the images go through.
        images: where they are.
        rows: which of them.
        workers: as of `fine_tune`.
        batch_size: images of a forward pass.
        progress: called with images done, of this rank.
    """
    model.eval()
    device, preprocess = next(model.parameters()).device, encoder.preprocess

    @torch.inference_mode()
    def ranked(own: Int64[np.ndarray, " m"]) -> list[Int64[np.ndarray, " five"]]:
        found: list[Int64[np.ndarray, " five"]] = []
        batches = load_batches(
            images,
            [rows[own[batch]] for batch in plan_in_order(len(own), batch_size)],
            lambda pixels, row: preprocess.normalize(torch.from_numpy(preprocess.apply(pixels)).unsqueeze(0))[0],
            top_value=preprocess.top_value,
            workers=workers,
        )
        for pixels, _ in batches:
            scores = model(pixels.to(device, memory_format=torch.channels_last)).float()
            found += list(scores.argsort(dim=1, descending=True, stable=True)[:, :5].cpu().numpy())
            if progress is not None:
                progress(len(found), len(own))
        return found

    return np.stack(score_together(len(rows), ranked))
