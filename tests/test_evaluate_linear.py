"""The linear probe: what it can learn, that it is the same every time, and that no learning rate touches another."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sop_faiss.errors import ConfigError, DataError, FeatureError
from sop_faiss.evaluate import linear
from sop_faiss.evaluate.linear import linear_probe
from sop_faiss.evaluate.linear_choices import LinearChoices
from tests.unit_vectors import unit

QUICK = LinearChoices(learning_rates=(0.01, 0.1, 1.0), epochs=8, batch_size=64)


def clusters(seed: int, count: int, classes: int = 6, noise: float = 0.8) -> tuple[np.ndarray, np.ndarray]:
    centers = np.random.default_rng(99).standard_normal((classes, 16))
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, count)
    return unit(centers[labels] + noise * rng.standard_normal((count, 16))), labels * 10 - 20


def test_learns_what_is_linear_and_nothing_where_there_is_nothing() -> None:
    train, labels = clusters(0, 300)
    test, truth = clusters(1, 200)
    scores = linear_probe(train, labels, test, truth, QUICK)
    assert set(scores.metrics) == {"top1", "top5"}
    assert scores.metrics["top1"] > 95 and scores.metrics["top5"] >= scores.metrics["top1"]
    assert 100 * (scores.predicted == truth).mean() == pytest.approx(scores.metrics["top1"])
    shuffled = np.random.default_rng(2).permutation(labels)
    assert linear_probe(train, shuffled, test, truth, QUICK).metrics["top1"] < 45


def test_the_same_every_time_and_another_with_another_seed() -> None:
    train, labels = clusters(0, 120, noise=2.0)
    test, truth = clusters(1, 100, noise=2.0)
    first = linear_probe(train, labels, test, truth, QUICK)
    again = linear_probe(train, labels, test, truth, QUICK)
    assert again.metrics == first.metrics and again.held_out_top1 == first.held_out_top1
    assert np.array_equal(again.predicted, first.predicted)
    other = linear_probe(train, labels, test, truth, LinearChoices((0.01, 0.1, 1.0), 8, 64, seed=5))
    assert not np.array_equal(other.predicted, first.predicted)


def loop_train(
    rows: torch.Tensor, labels: torch.Tensor, classes: int, rate: float, choices: LinearChoices
) -> torch.Tensor:
    """DINO's training of one layer written out: SGD with momentum, cosine by epoch; the same start and order."""
    generator = torch.Generator().manual_seed(linear.derive_seed("linear", choices.seed))
    weight = torch.randn(classes, rows.shape[1], generator=generator) * 0.01
    bias, velocity = torch.zeros(classes), [torch.zeros_like(weight), torch.zeros(classes)]
    size = min(choices.batch_size, len(rows))
    for epoch in range(choices.epochs):
        step = rate * size / 256 * (1 + math.cos(math.pi * epoch / choices.epochs)) / 2
        for batch in torch.randperm(len(rows), generator=generator).split(size):
            error = torch.softmax(rows[batch] @ weight.T + bias, 1)
            error[torch.arange(len(batch)), labels[batch]] -= 1
            error /= len(batch)
            velocity[0] = 0.9 * velocity[0] + error.T @ rows[batch]
            velocity[1] = 0.9 * velocity[1] + error.sum(0)
            weight, bias = weight - step * velocity[0], bias - step * velocity[1]
    return weight


def test_layers_are_trained_as_if_alone_by_dinos_rule() -> None:
    features, names = clusters(0, 150)
    rows, labels = torch.from_numpy(features) * 4, torch.from_numpy(np.unique(names, return_inverse=True)[1])
    together = linear._train(rows, labels, 6, (0.01, 0.3), QUICK, linear._Epochs(None, 1))
    for rate, layer in zip((0.01, 0.3), together, strict=True):
        assert torch.allclose(layer.weight, loop_train(rows, labels, 6, rate, QUICK), atol=2e-5)
        (alone,) = linear._train(rows, labels, 6, (rate,), QUICK, linear._Epochs(None, 1))
        assert torch.allclose(alone.weight, layer.weight, atol=1e-6)


def test_held_out_images_choose_and_the_test_images_do_not() -> None:
    train, labels = clusters(0, 200)
    test, truth = clusters(1, 50)
    scores = linear_probe(train, labels, test, truth, LinearChoices((1e-7, 0.3), 8, 64))
    assert scores.chosen == 0.3 and scores.held_out_top1[0.3] > scores.held_out_top1[1e-7]
    assert 15 <= scores.held_out_images <= 25
    wrong = linear_probe(train, labels, test, np.roll(truth, 1), LinearChoices((1e-7, 0.3), 8, 64))
    assert wrong.chosen == 0.3 and wrong.held_out_top1 == scores.held_out_top1
    one = linear_probe(train, labels, test, truth, LinearChoices((0.3,), 8, 64))
    assert (one.held_out_top1, one.held_out_images, one.metrics) == ({}, 0, scores.metrics)


def test_two_classes_one_test_image_and_a_class_never_seen() -> None:
    train, labels = clusters(0, 60, classes=2)
    scores = linear_probe(train, labels, train[:1], labels[:1], QUICK)
    assert scores.metrics == {"top1": 100.0}
    assert linear_probe(train, labels, train[:1], np.array([77]), QUICK).metrics == {"top1": 0.0}


def test_impossible_choices_and_data() -> None:
    train, labels = clusters(0, 60)
    for name, values in (
        ("learning_rates", ((), (0.1, -1.0), (0.1, 0.1), (1e7,))),
        ("epochs", (0, 10**7)),
        ("momentum", (1.0,)),
        ("held_out", (1.0,)),
        ("seed", (-1, 2**63)),
    ):
        for value in values:
            with pytest.raises(ConfigError) as raised:
                linear_probe(train, labels, train, labels, LinearChoices(**{name: value}))  # type: ignore[arg-type]
            assert name in raised.value.arguments
    with pytest.raises(ConfigError, match="training batches of 0"):
        linear_probe(train, labels, train, labels, LinearChoices(batch_size=0))
    with pytest.raises(DataError, match="of one class"):
        linear_probe(train, labels * 0, train, labels, QUICK)
    with pytest.raises(DataError, match="learning rate"):
        linear_probe(train[:2], np.array([0, 1]), train, labels, QUICK)
    with pytest.raises(FeatureError, match="not unit vectors"):
        linear_probe(train * 2, labels, train, labels, QUICK)
