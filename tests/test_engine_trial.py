"""The choice of the engine by a trial: the faster one, once, said, kept over a resume, the same on all ranks."""

from __future__ import annotations

import logging

import pytest
import torch

from sop_faiss.errors import CheckpointError
from sop_faiss.neighbors.engine_trial import ENGINES, EngineTrial
from tests.forked import launch

RANKS = """
from sop_faiss import distributed
from tests.test_engine_trial import Device

distributed.join_process_group("cpu")
rank = distributed.rank()
device = Device(faiss=1.0 + 2 * rank, torch=2.0)  # the ranks' own clocks disagree
trial = device.trial()
assert trial.choose(device.searches, "") == "faiss", rank
assert len(device.made) == (12 if rank == 0 else 0), device.made
resumed = device.trial()
resumed.load_state_dict(trial.state_dict())
assert resumed.choose(device.searches, "") == "faiss"
assert device.trial(has_faiss=rank == 0).choose(device.searches, "") == "torch", rank
resumed = device.trial(has_faiss=rank == 1)
resumed.load_state_dict(trial.state_dict())
assert resumed.choose(device.searches, "") == "torch"
assert len(device.made) == (12 if rank == 0 else 0), device.made
distributed.leave_process_group()
"""


class Device:
    """A clock that runs only while this device searches."""

    def __init__(self, **seconds: float) -> None:
        self.now = 0.0
        self.made: list[str] = []
        self._asked: list[float] = []
        self._seconds = seconds
        self.searches = {name: lambda name=name: self._search(name) for name in ENGINES}

    def _search(self, name: str) -> None:
        """Searches are asked for and take their time while they are waited for; the first of each takes long."""
        self._asked.append(self._seconds[name] if name in self.made else 100.0)
        self.made.append(name)

    def wait(self) -> None:
        self.now += sum(self._asked)
        self._asked.clear()

    def trial(self, has_faiss: bool = True) -> EngineTrial:
        return EngineTrial(has_faiss, self.wait, lambda: self.now)


@pytest.mark.parametrize(("faiss", "torch_", "winner"), [(0.004, 0.003, "torch"), (0.003, 0.004, "faiss")])
def test_the_faster_one_is_taken_once_and_said(caplog, faiss, torch_, winner):
    device = Device(faiss=faiss, torch=torch_)
    trial = device.trial()
    assert trial.engine == "auto" and trial.state_dict() == {}
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            assert trial.choose(device.searches, "7 queries in 9 x 2") == winner
    assert device.made == ["faiss", "torch"] * 6
    times = f"FAISS {1000 * faiss:g} ms, torch {1000 * torch_:g} ms"
    line = f"neighbors.engine=auto takes {winner}: {times} (7 queries in 9 x 2)"
    assert [record.getMessage() for record in caplog.records] == [line]
    assert trial.engine == winner


@pytest.mark.parametrize("winner", ENGINES)
def test_a_resumed_run_keeps_the_choice_and_says_so(winner, caplog):
    before = Device(**{name: 1.0 if name == winner else 2.0 for name in ENGINES})
    first = before.trial()
    first.choose(before.searches, "")
    now = Device(**{name: 2.0 if name == winner else 1.0 for name in ENGINES})
    resumed = now.trial()
    resumed.load_state_dict({"embeddings": torch.zeros(1), **first.state_dict()})
    assert resumed.state_dict() == first.state_dict()  # also before the first search
    caplog.clear()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert resumed.choose(now.searches, "") == winner
    assert now.made == []
    line = f"neighbors.engine=auto stays at {winner}, which the run has chosen earlier"
    assert [record.getMessage() for record in caplog.records] == [line]
    resumed.load_state_dict({})  # of a run on another kind of device
    assert resumed.choose(now.searches, "") != winner


@pytest.mark.parametrize("code", [2, -1, 7, 0.5, [0, 1]])
def test_a_choice_that_is_none_is_refused(code):
    trial = Device(faiss=1.0, torch=2.0).trial()
    with pytest.raises(CheckpointError, match="neighbor_engine names no engine"):
        trial.load_state_dict({"neighbor_engine": torch.tensor(code)})


def test_without_faiss_there_is_no_trial():
    device = Device(faiss=1.0, torch=2.0)
    trial = device.trial(has_faiss=False)
    assert trial.choose(device.searches, "") == "torch"
    assert device.made == [] and trial.state_dict() == {}


@pytest.mark.distributed
def test_all_ranks_choose_the_same(tmp_path):
    launch(tmp_path / "log", ["-c", RANKS])
