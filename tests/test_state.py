"""Which neighbors a run keeps from step to step, and what it says about that."""

from __future__ import annotations

import logging

import pytest
import torch

from sop_faiss.errors import ConfigError
from sop_faiss.objectives.sop_terms import keeps_neighbors
from sop_faiss.train.state import RunState
from tests.messages import assert_one_line
from tests.runs import tiny_config

CPU = torch.device("cpu")
LARGE = ("sop.cls.num_anchors=4096", "sop.cls.capacity=65536", "model.embedding_dim=256")


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        ((), False),  # too small to pay
        (("neighbors.refresh=incremental",), True),
        (LARGE, True),
        ((*LARGE, "neighbors.refresh=full"), False),
        ((*LARGE, "sop.anchors=fixed_rows"), True),
        ((*LARGE, "sop.anchors=fixed_vectors"), False),
        (("neighbors.refresh=incremental", "sop.cls.num_supports=0"), False),
    ],
)
def test_neighbors_are_kept_where_asked_or_cheaper(tmp_path, overrides, kept):
    config = tiny_config(tmp_path, *overrides)
    assert keeps_neighbors(config, "cls", config.sop.cls.capacity, CPU) == kept


def test_neighbors_of_fixed_vectors_cannot_be_kept(tmp_path):
    config = tiny_config(tmp_path, "neighbors.refresh=incremental", "sop.anchors=fixed_vectors")
    with pytest.raises(ConfigError) as error:
        RunState(config, CPU, 24)
    assert_one_line(
        error, "neighbors.refresh = incremental", "sop.anchors = fixed_vectors", "set neighbors.refresh=full"
    )


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ((), "cls neighbors are searched for every step (neighbors.refresh=auto, neighbors.index=exact)"),
        (
            ("neighbors.refresh=incremental",),
            "cls neighbors are kept from step to step (neighbors.refresh=incremental, neighbors.index=exact)",
        ),
        (
            ("sop.anchors=fixed_vectors",),
            "cls neighbors are searched for every step "
            "(neighbors.refresh=auto, neighbors.index=exact, sop.anchors=fixed_vectors are not rows of the memory)",
        ),
    ],
)
def test_the_log_says_how_neighbors_are_found_and_why(tmp_path, caplog, overrides, line):
    caplog.set_level(logging.INFO)
    RunState(tiny_config(tmp_path, *overrides), CPU, 80)
    assert [record.getMessage() for record in caplog.records] == [line]
