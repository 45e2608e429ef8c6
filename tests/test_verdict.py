"""What a run says of training: from its scores, with a caution where they need no labels."""

from __future__ import annotations

import pytest

from sop_faiss.train.verdict import Outcome, verdict_of

SCORES = {"best_by": "knn_top1_k20", "first_score": 40.0, "best_score": 45.0, "best_step": 300}


@pytest.mark.parametrize(
    ("difference", "outcome", "words"),
    [
        ([5.0, 2.0, 8.0], Outcome.BEAT, "training beat step 0: +5.00 points [+2.00, +8.00]"),
        ([5.0, -1.0, 11.0], Outcome.NOT_SHOWN, "no difference to step 0 is shown: +5.00 points [-1.00, +11.00]"),
        ([-5.0, -8.0, -2.0], Outcome.WORSE, "training is worse than step 0: -5.00 points [-8.00, -2.00]"),
    ],
)
def test_the_interval_decides(difference, outcome, words):
    verdict = verdict_of({**SCORES, "difference": difference})
    assert verdict == (
        outcome,
        f"{words}; knn_top1_k20 was 40.00 % at step 0 and 45.00 % at step 300, the best of the later scores",
    )


@pytest.mark.parametrize("missing", ["best_by", "first_score", "best_score", "difference"])
def test_nothing_is_said_where_nothing_was_compared(missing):
    scores = {**SCORES, "difference": [5.0, 2.0, 8.0]}
    assert verdict_of(scores) is not None
    assert verdict_of({**scores, missing: None}) is None


def test_a_gain_without_labels_comes_with_a_caution():
    scores = {**SCORES, "best_by": "view_recall_at_1", "difference": [5.0, 2.0, 8.0]}
    verdict = verdict_of(scores, lambda name: f"<{name}>")
    assert verdict is not None and "; <view_recall_at_1> was 40.00 %" in verdict.text
    assert verdict.text.endswith(
        "; without labels this says that images are distinguished better, not that those of one kind are found together"
    )
    unsure = verdict_of({**scores, "difference": [5.0, -1.0, 11.0]})
    assert unsure is not None and "without labels" not in unsure.text
