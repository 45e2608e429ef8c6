"""Regularizers against loops over images and directions; in parts of a step and over ranks as in one."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from sop_faiss.config import RegularizerConfig
from sop_faiss.data.views.device_color import normalize
from sop_faiss.errors import CheckpointError, ConfigError
from sop_faiss.objectives.regularizers import Regularizer, sigreg, variance_covariance
from sop_faiss.objectives.sop import SopObjective
from sop_faiss.train.loop import train_step
from tests.images import write_shards
from tests.oracle import loop_koleo
from tests.rivals import KINDS, opened
from tests.runs import tiny_config

REGULARIZERS = {
    "koleo": ("regularizer.kind=koleo",),
    "koleo of embeddings": ("regularizer.kind=koleo", "regularizer.on=embeddings"),
    "variance_covariance": ("regularizer.kind=variance_covariance", "regularizer.weight=0.7"),
    "sigreg": ("regularizer.kind=sigreg", "regularizer.directions=5"),
    "sigreg of features": ("regularizer.kind=sigreg", "regularizer.on=features", "regularizer.directions=5"),
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    return write_shards(tmp_path_factory.mktemp("regularizers"), classes=2, per_class=12, size=20)


def embeddings_of(count: int = 7, dim: int = 5, scale: float = 0.6) -> torch.Tensor:
    drawn = torch.randn(count, dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (drawn * scale).requires_grad_()


def loop_variance_covariance(embeddings: torch.Tensor, covariance_weight: float) -> torch.Tensor:
    dims = range(embeddings.shape[1])
    variance = sum(torch.relu(1 - (embeddings[:, i].var() + 1e-4).sqrt()) for i in dims) / len(dims)
    pairs = [torch.stack([embeddings[:, i], embeddings[:, j]]).cov()[0, 1] ** 2 for i in dims for j in dims if i != j]
    return variance + covariance_weight * sum(pairs) / len(dims)


def loop_sigreg(embeddings: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
    statistics = []
    for direction in directions:
        places, distances = [-5 + 0.625 * knot for knot in range(17)], []
        for t in places:
            empirical = sum(torch.exp(1j * t * (embedding @ direction)) for embedding in embeddings) / len(embeddings)
            distances.append(abs(empirical - math.exp(-t * t / 2)) ** 2 * math.exp(-t * t / 2))
        statistics.append(sum((a + b) / 2 * 0.625 for a, b in itertools.pairwise(distances)))
    return len(embeddings) * sum(statistics) / len(statistics)


def test_variance_and_covariance_are_vicregs():
    embeddings = embeddings_of()
    same_value_and_gradient(variance_covariance(embeddings, 0.3), loop_variance_covariance(embeddings, 0.3), embeddings)
    assert float(variance_covariance(embeddings[:1].detach(), 0.3)) == 0
    equal = embeddings[[0, 0, 0]].detach().requires_grad_()
    (gradient,) = torch.autograd.grad(variance_covariance(equal, 1.0), equal)
    assert gradient.isfinite().all()


def test_sigreg_is_the_distance_of_characteristic_functions():
    embeddings = embeddings_of()
    directions = F.normalize(torch.randn(3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64), dim=1)
    same_value_and_gradient(sigreg(embeddings, directions), loop_sigreg(embeddings, directions), embeddings)
    normal, narrow = (embeddings_of(4000, 5, scale).detach() for scale in (1.0, 0.5))
    assert float(sigreg(normal, directions)) < 2 < 20 < float(sigreg(narrow, directions))


def same_value_and_gradient(fast: torch.Tensor, slow: torch.Tensor, embeddings: torch.Tensor) -> None:
    torch.testing.assert_close(fast, slow)
    one, two = (torch.autograd.grad(value, embeddings)[0] for value in (fast, slow))
    torch.testing.assert_close(one, two)


@pytest.mark.parametrize("name", REGULARIZERS)
def test_a_step_has_the_gradient_of_the_regularized_loss(tmp_path, shards, name):
    plain, batches = opened(tmp_path, shards, *KINDS["sop"], "optim.clip_norm=0")
    state, _ = opened(tmp_path, shards, *KINDS["sop"], "optim.clip_norm=0", *REGULARIZERS[name])
    settings, student = state.config.regularizer, state.student
    batch = batches[0]
    slow, gradients = naive(state, batch)
    without = train_step(plain, batch).metrics
    metrics = train_step(state, batch).metrics
    torch.testing.assert_close(metrics["regularizer"], slow)
    torch.testing.assert_close(metrics["loss"], without["loss"] + settings.weight * slow)
    for (key, parameter), other in zip(student.named_parameters(), plain.student.parameters(), strict=True):
        expected = other.grad + settings.weight * gradients[key]
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-3, atol=1e-5, msg=key)


def naive(state, batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The regularizer and its gradients, by autograd through everything, image by image."""
    settings, student = state.config.regularizer, state.student
    directions = torch.Generator()
    directions.set_state(state.objective.regularizer.generator.get_state())
    values = []
    for view, mask in zip(
        normalize(batch.global_views, batch.global_colors, state.config.views, state.device), batch.masks, strict=True
    ):
        rows = torch.cat([student.backbone(view[i : i + 1], mask[i : i + 1]).cls for i in range(len(view))])
        rows = rows if settings.of_features() else student.heads["shared"](rows)
        scale = 1.0 if settings.of_features() else rows.shape[1] ** 0.5
        if settings.kind == "koleo":
            values.append(loop_koleo(rows / rows.norm(dim=1, keepdim=True)))
        elif settings.kind == "variance_covariance":
            values.append(loop_variance_covariance(rows * scale, settings.covariance_weight))
        else:
            if not values:
                drawn = F.normalize(torch.randn(5, rows.shape[1], generator=directions), dim=1)
            values.append(loop_sigreg(rows * scale, drawn))
    value = sum(values) / len(values)
    names, parameters = zip(*student.named_parameters(), strict=True)
    gradients = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
    return value.detach(), dict(zip(names, gradients, strict=True))


@pytest.mark.parametrize("name", ["koleo", "sigreg"])
def test_parts_of_a_step_are_the_step(tmp_path, shards, name):
    overrides = (*KINDS["sop"], *REGULARIZERS[name], "optim.momentum=0.9")
    whole, batches = opened(tmp_path, shards, *overrides)
    parts, _ = opened(tmp_path, shards, *overrides, "train.accumulate=3", "train.views_apart=true")
    for step in range(2):
        one, two = (train_step(state, batches[step]).metrics for state in (whole, parts))
        for key in ("regularizer", "loss", "gradient_norm"):
            torch.testing.assert_close(one[key], two[key], rtol=1e-3, atol=1e-4, msg=key)
    for one, two in zip(whole.student.parameters(), parts.student.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-2, atol=1e-3)


def test_parts_are_regularized_with_the_draws_of_drop_path_that_they_learn_with(tmp_path, shards, monkeypatch):
    overrides = (*KINDS["sop"], *REGULARIZERS["sigreg"], "train.accumulate=2", "model.drop_path=0.7")
    state, batches = opened(tmp_path, shards, *overrides)
    seen, learned = [], []
    pull, loss = Regularizer.pull, Regularizer.loss
    monkeypatch.setattr(Regularizer, "pull", lambda self, own: seen.append(own) or pull(self, own))
    monkeypatch.setattr(
        Regularizer, "loss", lambda self, part, *where: learned.append(part.cls[: where[0]]) or loss(self, part, *where)
    )
    train_step(state, batches[0])
    assert len(seen) == 1 and len(learned) == 2
    assert torch.equal(seen[0], torch.cat(learned, dim=1).detach())


def test_directions_are_drawn_again_in_each_step_and_survive_a_resume():
    config = RegularizerConfig("sigreg", directions=4)
    embeddings = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(0))
    regularizer, other = Regularizer(config, 3), Regularizer(config, 4)
    first, second = (float(regularizer.pull(embeddings)[0]) for _ in range(2))
    assert first != second
    other.generator.set_state(Regularizer(config, 3).generator.get_state())
    assert [float(other.pull(embeddings)[0]) for _ in range(2)] == [first, second]


def test_a_state_without_a_regularizer_is_refused(tmp_path):
    plain, regularized = (SopObjective(tiny_config(tmp_path, *more)) for more in ((), REGULARIZERS["sigreg"]))
    for objective in (plain, regularized):
        objective.open(torch.device("cpu"), 100)
    assert regularized.state_dict().keys() - plain.state_dict().keys() == {"regularizer_generator"}
    with pytest.raises(CheckpointError, match=r"regularizer\.kind"):
        regularized.load_state_dict(plain.state_dict())


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (("regularizer.kind=koleo", "regularizer.weight=0"), r"regularizer\.weight"),
        (("regularizer.kind=kleo",), r"regularizer\.kind"),
        (("regularizer.weight=0.5",), r"regularizer\.weight"),
        (("regularizer.on=features",), r"regularizer\.on"),
        (("regularizer.on=patches",), r"regularizer\.on"),
        (("regularizer.directions=0",), r"regularizer\.directions"),
        (("regularizer.covariance_weight=-1",), r"regularizer\.covariance_weight"),
        (("regularizer.kind=koleo", "sop.cls.weight=0"), r"sop\.cls\.weight"),
        (("regularizer.kind=koleo", *KINDS["massl"]), r"regularizer\.kind"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path, overrides, names):
    with pytest.raises(ConfigError, match=names):
        tiny_config(tmp_path, *overrides)
