"""Logistic regression on frozen features, by L-BFGS, at the best of several penalties.

Source: iBOT's `eval_logistic_regression.py` (by DINO's authors), on unit vectors.

Departs: iBOT uses cyanure, without an intercept, and the user names the penalty. Here scikit-learn's L-BFGS fits, with
an intercept, and held-out training images choose the penalty; the test images see the chosen one alone.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64

from sop_faiss.evaluate.classifier import ChosenScores, require_classes, top_metrics
from sop_faiss.evaluate.logistic_choices import LogisticChoices
from sop_faiss.evaluate.sets.labeled_part import held_out_rows
from sop_faiss.progress import ProgressCallback


def logistic_regression(
    train_features: Float32[np.ndarray, "n d"],
    train_labels: Int64[np.ndarray, " n"],
    test_features: Float32[np.ndarray, "q d"],
    test_labels: Int64[np.ndarray, " q"],
    choices: LogisticChoices | None = None,
    *,
    progress: ProgressCallback | None = None,
) -> ChosenScores:
    """Fit by each penalty on part of the training images, and test the one that did best on the others.

    Args:
        train_features: unit rows.
        train_labels: class of each; any integers.
        test_features: unit rows.
        test_labels: a class that the training images lack is never right.
        choices: penalties and the like.
        progress: called with fits done.

    Raises:
        ConfigError: a choice is impossible.
        DataError: there are no images, fewer than two classes, or too few to hold some out.
        FeatureError: rows are not finite unit vectors.
    """
    choices = choices or LogisticChoices()
    choices.check()
    classes, targets = require_classes("logistic regression", train_features, train_labels, test_features)
    report = progress or (lambda done, total: None)
    mean = train_features.mean(axis=0)
    rows, queries = train_features - mean, test_features - mean  # the same minimum, which L-BFGS finds sooner
    penalties = sorted(choices.penalties, reverse=True)
    held_out_top1: dict[float, float] = {}
    best, held_out = penalties[0], np.zeros(0, dtype=np.int64)
    if len(penalties) > 1:
        held_out = held_out_rows(targets, choices.held_out, choices.seed, "penalty")
        kept = np.setdiff1d(np.arange(len(targets)), held_out)
        for number, penalty in enumerate(penalties):
            model = _fit(rows[kept], targets[kept], penalty, choices.iterations)
            right = model.predict(rows[held_out]) == targets[held_out]
            held_out_top1[penalty] = 100.0 * float(right.mean())
            report(number + 1, len(penalties) + 1)
        best = max(penalties, key=lambda penalty: (held_out_top1[penalty], penalty))
    final = _fit(rows, targets, best, choices.iterations)
    report(len(held_out_top1) + 1, len(held_out_top1) + 1)
    scores = final.decision_function(queries)
    scores = np.stack([-scores, scores], axis=1) if scores.ndim == 1 else scores  # two classes: one column
    ranked = classes[np.argsort(-scores, axis=1, kind="stable")[:, :5]]
    metrics = top_metrics(ranked, test_labels, len(classes))
    return ChosenScores(metrics, ranked[:, 0], best, held_out_top1, len(held_out))


def _fit(rows: Float32[np.ndarray, "n d"], targets: Int64[np.ndarray, " n"], penalty: float, iterations: int) -> Any:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    # scikit-learn minimizes |W|^2 / 2 + C sum of losses.
    model = LogisticRegression(C=1.0 / (penalty * len(rows)), max_iter=iterations)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # held-out images judge such fits, too
        return model.fit(rows, targets)
