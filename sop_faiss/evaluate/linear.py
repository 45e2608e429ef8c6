"""DINO's linear probe on frozen features: one linear layer, trained by SGD, at the best of several learning rates.

Source: Caron et al. 2021, "Emerging Properties in Self-Supervised Vision Transformers" (DINO), and its
`eval_linear.py`: weights from N(0, 0.01^2), bias 0, momentum 0.9, no weight decay, cosine to 0 by epoch, learning rate
scaled with batch/256.

Departs: the features are computed once, from whole images or central crops; DINO trains on random crops and flips,
at the cost of a pass of the encoder per epoch. They are unit vectors times sqrt(d), so that an entry is of size 1 as
after the encoder's last layer norm, and DINO's learning rates mean about the same. DINO asks the user to tune the
learning rate; here every rate trains at once on part of the training images, the rest choose, and the test images see
the chosen one alone.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor, nn
from torch.nn import functional

from sop_faiss.distributed import derive_seed
from sop_faiss.evaluate.classifier import ChosenScores, require_classes, top_metrics
from sop_faiss.evaluate.linear_choices import LinearChoices
from sop_faiss.evaluate.sets.labeled_part import held_out_rows
from sop_faiss.progress import ProgressCallback

_INITIAL_STD = 0.01
_EVALUATED_ROWS = 8192


def linear_probe(
    train_features: Float32[np.ndarray, "n d"],
    train_labels: Int64[np.ndarray, " n"],
    test_features: Float32[np.ndarray, "q d"],
    test_labels: Int64[np.ndarray, " q"],
    choices: LinearChoices | None = None,
    *,
    device: str = "cpu",
    progress: ProgressCallback | None = None,
) -> ChosenScores:
    """Train linear classifiers and test the one whose learning rate did best on held-out training images.

    The same numbers every time on the CPU: everything random comes from the seed.

    Args:
        train_features: unit rows.
        train_labels: class of each; any integers.
        test_features: unit rows.
        test_labels: a class that the training images lack is never right.
        choices: learning rates, epochs and the like.
        device: where to train.
        progress: called with epochs done, of both trainings.

    Raises:
        ConfigError: a choice is impossible.
        DataError: there are no images, fewer than two classes, or too few to hold some out.
        FeatureError: rows are not finite unit vectors.
    """
    choices = choices or LinearChoices()
    choices.check()
    classes, targets = require_classes("linear probe", train_features, train_labels, test_features)
    rows, labels = _scaled(train_features, device), torch.from_numpy(targets).to(device)
    rates, epochs = choices.learning_rates, choices.epochs
    count_epoch = _Epochs(progress, epochs * (1 if len(rates) == 1 else 2))
    held_out_top1: dict[float, float] = {}
    best, held_out = rates[0], np.zeros(0, dtype=np.int64)
    if len(rates) > 1:
        held_out = held_out_rows(targets, choices.held_out, choices.seed, "learning rate")
        kept = torch.from_numpy(np.setdiff1d(np.arange(len(targets)), held_out))
        tried = _train(rows[kept], labels[kept], len(classes), rates, choices, count_epoch)
        held_out_top1 = {
            rate: _test(layer, rows[held_out], train_labels[held_out], classes)[0]["top1"]
            for rate, layer in zip(rates, tried, strict=True)
        }
        best = max(rates, key=lambda rate: (held_out_top1[rate], -rate))
    (final,) = _train(rows, labels, len(classes), (best,), choices, count_epoch)
    metrics, predicted = _test(final, _scaled(test_features, device), test_labels, classes)
    return ChosenScores(metrics, predicted, best, held_out_top1, len(held_out))


def _scaled(features: Float32[np.ndarray, "n d"], device: str) -> Float32[Tensor, "n d"]:
    return torch.from_numpy(features * np.float32(np.sqrt(features.shape[1]))).to(device)


class _Epochs:
    """Counts epochs over several trainings."""

    def __init__(self, progress: ProgressCallback | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def __call__(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._total)


def _train(
    rows: Float32[Tensor, "n d"],
    labels: Int64[Tensor, " n"],
    class_count: int,
    rates: tuple[float, ...],
    choices: LinearChoices,
    count_epoch: _Epochs,
) -> list[nn.Linear]:
    """Train a layer for each learning rate, all from one start and on the same batches; none influences another."""
    generator = torch.Generator().manual_seed(derive_seed("linear", choices.seed))
    start = torch.randn(class_count, rows.shape[1], generator=generator) * _INITIAL_STD
    layers = [_layer(start, rows.device) for _ in rates]
    batch_size = min(choices.batch_size, len(rows))
    optimizer = torch.optim.SGD(
        [
            {"params": layer.parameters(), "lr": rate * batch_size / 256}
            for layer, rate in zip(layers, rates, strict=True)
        ],
        momentum=choices.momentum,
        weight_decay=choices.weight_decay,
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, choices.epochs, eta_min=0)
    for _ in range(choices.epochs):
        order = torch.randperm(len(rows), generator=generator).to(rows.device)
        for batch in order.split(batch_size):
            some, wanted = rows[batch], labels[batch]
            optimizer.zero_grad()
            torch.stack([functional.cross_entropy(layer(some), wanted) for layer in layers]).sum().backward()
            optimizer.step()
        schedule.step()
        count_epoch()
    return layers


def _layer(start: Float32[Tensor, "classes d"], device: torch.device) -> nn.Linear:
    layer = nn.Linear(start.shape[1], start.shape[0], device=device)
    with torch.no_grad():
        layer.weight.copy_(start)
        layer.bias.zero_()
    return layer


@torch.no_grad()
def _test(
    layer: nn.Linear,
    rows: Float32[Tensor, "q d"],
    truth: Int64[np.ndarray, " q"],
    classes: Int64[np.ndarray, " c"],
) -> tuple[dict[str, float], Int64[np.ndarray, " q"]]:
    """Metrics in percent, and the predicted class of each row."""
    shown = min(5, len(classes))
    ranked = torch.cat([layer(part).topk(shown, dim=1).indices for part in rows.split(_EVALUATED_ROWS)]).cpu().numpy()
    return top_metrics(classes[ranked], truth, len(classes)), classes[ranked[:, 0]]
