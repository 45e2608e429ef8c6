"""Numbers without labels against slow and literal forms of their formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.linalg
import scipy.stats

from sop_faiss.evaluate.label_free import LABEL_FREE, UNITS, alpha_req, assignment_entropies, label_free_numbers, lidar


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=-1, keepdims=True)).astype(np.float32)


@pytest.fixture
def views() -> np.ndarray:
    """Three views of each of 60 images in 24 dimensions; the first directions are of images, the last of views."""
    rng = np.random.default_rng(0)
    images = rng.standard_normal((60, 1, 24)) * np.linspace(1.0, 0.05, 24)
    return unit(images + rng.standard_normal((60, 3, 24)) * np.linspace(0.01, 0.3, 24))


def test_lidar_is_the_effective_rank_of_the_discriminant_analysis(views: np.ndarray) -> None:
    rows = views.astype(np.float64)
    between, within = np.zeros((24, 24)), np.zeros((24, 24))
    overall = np.mean([row for image in rows for row in image], axis=0)
    for image in rows:
        mean = image.mean(axis=0)
        between += np.outer(mean - overall, mean - overall)
        for row in image:
            within += np.outer(row - mean, row - mean) / 2
    within = within / len(rows) + 1e-4 * np.trace(within / len(rows)) / 24 * np.eye(24)
    eigenvalues = scipy.linalg.eigh(between, within, eigvals_only=True).clip(0)
    assert lidar(views) == pytest.approx(math.exp(scipy.stats.entropy(eigenvalues)), rel=1e-9)


def test_lidar_ignores_directions_in_which_views_differ_as_images_do() -> None:
    rng = np.random.default_rng(1)
    images, noise = np.zeros((500, 1, 8)), np.zeros((500, 2, 8))
    images[..., :3] = rng.standard_normal((500, 1, 3))
    noise[...] = 0.01 * rng.standard_normal((500, 2, 8))
    assert lidar((images + noise).astype(np.float32)) == pytest.approx(3, abs=0.1)


def test_alpha_req_is_the_exponent_of_a_spectrum_that_is_a_power_law() -> None:
    rng = np.random.default_rng(2)
    rows, _ = np.linalg.qr(rng.standard_normal((400, 61)) - rng.standard_normal(61))
    rows -= rows.mean(axis=0)
    rows, _ = np.linalg.qr(rows)  # orthogonal columns of mean 0
    for alpha in (0.5, 1.0, 2.0):
        spectrum = rows[:, :60] * np.arange(1, 61) ** (-alpha / 2)
        assert alpha_req(spectrum.astype(np.float32)) == pytest.approx(alpha, abs=0.01)


def test_alpha_req_fits_the_eigenvalues_of_the_covariance(views: np.ndarray) -> None:
    first = views[:, 0]
    eigenvalues = np.sort(np.linalg.eigvalsh(np.cov(first.T.astype(np.float64))))[::-1]
    slope = scipy.stats.linregress(np.log(np.arange(5, 25)), np.log(eigenvalues[4:])).slope
    assert alpha_req(first) == pytest.approx(-slope, rel=1e-6)


def test_assignment_entropy_is_that_of_the_softmax_over_the_other_views(views: np.ndarray) -> None:
    first, second = views[:, 0], views[:, 1]
    for image, found in enumerate(assignment_entropies(first, second)):
        p = [math.exp(float(np.dot(first[image].astype(np.float64), other)) / 0.07) for other in second]
        assert found == pytest.approx(100 * scipy.stats.entropy(p) / math.log(60), rel=1e-6)


def test_a_constant_output_has_the_worst_value_of_each_number() -> None:
    same = unit(np.ones((50, 24)) + 1e-8 * np.random.default_rng(3).standard_normal((50, 24)))
    found = {name: score.percent for name, score in label_free_numbers(same, same).items()}
    assert tuple(found) == LABEL_FREE
    assert found["rankme"] == pytest.approx(1, abs=1e-3) and found["lidar"] == 1
    assert math.isnan(found["alpha_req"]) and found["assignment_entropy"] == pytest.approx(100)


def test_numbers_do_not_depend_on_a_rotation(views: np.ndarray) -> None:
    turn, _ = np.linalg.qr(np.random.default_rng(4).standard_normal((24, 24)))
    one = label_free_numbers(views[:, 0], views[:, 1])
    other = label_free_numbers(unit(views[:, 0] @ turn), unit(views[:, 1] @ turn))
    for name in LABEL_FREE:
        assert other[name].percent == pytest.approx(one[name].percent, rel=1e-4)
        assert one[name].unit == UNITS.get(name, "%") and (one[name].each.size == 60) == (name not in UNITS)
