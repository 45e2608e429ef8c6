"""The loop of all trainings: a signal ends it after a step, and what the ranks share of a step."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sop_faiss.data.images.source import open_source
from sop_faiss.errors import ConfigError, SavedError
from sop_faiss.evaluate.trained import training_ranks
from sop_faiss.evaluate.trained.training_ranks import own_places
from tests.images import write_folder
from tests.messages import assert_one_line
from tests.test_finetune import PLAIN, encoder_of, tune


@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, SavedError), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_ends_it_within_an_epoch(
    number: signal.Signals, error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = open_source(write_folder(tmp_path / "images", classes=3, per_class=5, size=40))
    encoder, choices = encoder_of("test_resnet"), replace(PLAIN, batch_size=4, randaugment=9)
    whole = tune(encoder, images, choices).model.state_dict()
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.default_int_handler)  # also as a background job
    steps = []

    def report(done: int, total: int) -> None:
        steps.append(done)
        if done == 2:  # of 3 in an epoch
            os.kill(os.getpid(), number)

    with pytest.raises(error) as raised:
        tune(encoder, images, choices, tmp_path / "out", progress=report)
    assert steps == [1, 2]
    assert_one_line(raised, "step 2")
    model = tune(encoder, images, choices, tmp_path / "out", progress=lambda done, total: steps.append(done)).model
    assert steps == [1, 2, 3, 4, 5, 6]
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in whole.items())


@pytest.mark.parametrize(("count", "ranks"), [(8, 1), (8, 2), (12, 3), (6, 2), (9, 3)])
def test_pairs_that_are_mixed_stay_together(count: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_ranks, "world_size", lambda: ranks)
    places = []
    for number in range(ranks):
        monkeypatch.setattr(training_ranks, "rank", lambda number=number: number)
        own = own_places(count)
        assert len(own) == count // ranks and (np.diff(own) > 0).all()
        if count // ranks % 2 == 0:
            assert (own + own[::-1] == count - 1).all()
        places += own.tolist()
    assert sorted(places) == list(range(count))
    if ranks > 1:
        with pytest.raises(ConfigError) as error:
            own_places(count + 1)
        assert "batch_size" in error.value.arguments
