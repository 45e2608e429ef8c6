"""One of two ranks that train every objective as one rank does; run by test_objective.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from sop_faiss import distributed
from sop_faiss.errors import ConfigError
from sop_faiss.train.loop import train_step
from sop_faiss.train.rank_agreement import check_ranks_agree
from sop_faiss.train.state import RunState
from tests.rivals import KINDS, opened


def train(folder: Path, shards: Path, *overrides: str) -> tuple[list[dict[str, float]], RunState]:
    """Three steps: their metrics, and the state."""
    state, batches = opened(folder, shards, "train.check_ranks_every_steps=1", *overrides)
    said = []
    for step in range(3):
        said.append({key: float(value) for key, value in train_step(state, batches[step]).metrics.items()})
        check_ranks_agree(state)
    return said, state


def main(folder: Path, shards: Path) -> None:
    cases = [
        *(KINDS[kind] for kind in ("massl", "dino", "distill")),
        (*KINDS["ibot"], "train.parallel=fsdp"),
        (*KINDS["sop"], "regularizer.kind=sigreg", "regularizer.directions=5", "optim.kind=muon"),
        (*KINDS["sop"], "regularizer.kind=koleo", "train.accumulate=3", "train.parallel=fsdp"),
        (*KINDS["ibot apart"], "train.accumulate=3", "train.views_apart=true"),
    ]
    muon_in_shards = (*KINDS["sop"], "optim.kind=muon", "train.parallel=fsdp")
    alone = [train(folder, shards, *overrides) for overrides in cases]
    distributed.join_process_group("cpu")
    with pytest.raises(ConfigError, match=r"optim\.kind = muon"):
        train(folder, shards, *muon_in_shards)
    for overrides, (said, state) in zip(cases, alone, strict=True):
        together, shared = train(folder, shards, *overrides)
        for one, two in zip(said, together, strict=True):
            assert two == pytest.approx(one, rel=1e-4, abs=1e-5, nan_ok=True), overrides
        for (name, one), two in zip(
            state.objective.state_dict().items(), shared.objective.state_dict().values(), strict=True
        ):
            torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4, msg=f"{name} of {overrides}")
    distributed.leave_process_group()


if __name__ == "__main__":
    folder = Path(sys.argv[1]) / os.environ["RANK"]
    folder.mkdir()
    main(folder, Path(sys.argv[2]))
