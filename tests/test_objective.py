"""The seam of objectives: another method in one class trains, resumes and is watched, and the loop knows none."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

from sop_faiss.errors import CheckpointError
from sop_faiss.objectives.choose import choose_objective
from sop_faiss.objectives.objective import Learned, Needs, Objective, Watched
from sop_faiss.objectives.sop import SopObjective
from sop_faiss.train import state as state_module
from sop_faiss.train.log.monitor import read_metrics
from sop_faiss.verbs.training.train import run_training
from tests.images import write_shards
from tests.runs import tiny_config

PACKAGE = Path(state_module.__file__).parent


class Agreement:
    """The student's global views point where the teacher's other view does; two heads, a counter as its state."""

    def __init__(self, config) -> None:
        self.config = config
        self.steps = torch.zeros((), dtype=torch.int64)
        self.newest = torch.eye(4)
        self.ids = torch.arange(4)

    def heads(self, feature_dim):
        return nn.ModuleDict({"cls": nn.Linear(feature_dim, 4), "patch": nn.Linear(feature_dim, 3)})

    def open(self, device, images):
        pass

    def begin_step(self, settings, images, patches):
        pass

    def learn(self, networks, part, settings, share):
        views = networks.normalized(part.global_views, part.global_colors)
        nothing = networks.normalized(part.local_views, part.local_colors)[:0]
        masked = part.masks.flatten().nonzero().squeeze(1)
        teacher = networks.teach(views.flatten(0, 1), None, True)
        student = networks.study(views, nothing, part.masks, masked, True)
        assert student.patches.shape == (len(masked), 3)
        targets = teacher.cls.view_as(student.cls).flip(0)
        loss = -nn.functional.cosine_similarity(student.cls, targets, dim=-1).mean() + 0.0 * student.patches.sum()
        (loss * share).backward()
        return Learned(
            {"cls": loss.detach().view(1)}, {"cls": nn.functional.normalize(teacher.cls[: len(part.image_ids)])}, None
        )

    def end_step(self, learned, image_ids):
        self.steps += 1
        self.newest, self.ids = torch.cat([part.to_store["cls"] for part in learned]), image_ids
        loss = torch.cat([part.sums["cls"] for part in learned]).mean()
        return {"loss": loss, "loss_cls": loss, "counted": self.steps.float()}

    def fill(self, networks, batches):
        pass

    def watched(self, count):
        rows = torch.arange(len(self.newest))[-count:]
        return {"cls": Watched(self.newest[rows], self.ids[rows], rows, self.newest, self.ids)}

    def prototypes(self, step):
        return None

    def floors(self):
        return {"cls": 0.0}

    def needs(self, device, images):
        return Needs(True, True, {"cls": 4}, {"memories_bytes": 0, "neighbor_lists_bytes": 0})

    def digests(self):
        return {"steps": str(int(self.steps))}

    def state_dict(self):
        return {"steps": self.steps.clone()}

    def load_state_dict(self, state):
        self.steps.copy_(state["steps"])


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    return write_shards(tmp_path_factory.mktemp("objective"), classes=2, per_class=12, size=20)


def test_the_papers_objective_is_the_default(tmp_path):
    objective = choose_objective(tiny_config(tmp_path))
    assert isinstance(objective, SopObjective) and isinstance(objective, Objective)


def test_another_method_trains_and_resumes_by_the_same_loop(tmp_path, shards, monkeypatch):
    monkeypatch.setattr(state_module, "choose_objective", Agreement)
    overrides = (f"data.train={shards}", "train.epochs=3", "train.accumulate=2", "optim.warmup_epochs=0")
    run_training(tiny_config(tmp_path, *overrides), tmp_path / "whole")
    run_training(tiny_config(tmp_path, *overrides, "train.stop_after_steps=5"), tmp_path / "parts")
    run_training(tiny_config(tmp_path, *overrides), tmp_path / "parts", resume=True)
    whole, parts = ([line["loss"] for line in read_metrics(tmp_path / name)] for name in ("whole", "parts"))
    assert whole == parts and len(whole) == 12
    assert read_metrics(tmp_path / "parts")[-1]["counted"] == 12
    assert whole[-1] < whole[0]


def test_a_state_of_other_terms_is_refused(tmp_path):
    alone, both = (SopObjective(tiny_config(tmp_path, *more)) for more in (("sop.patch.weight=0",), ()))
    for objective in (alone, both):
        objective.open(torch.device("cpu"), 100)
    with pytest.raises(CheckpointError, match="patch memory"):
        both.load_state_dict(alone.state_dict())


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.name)
def test_training_knows_no_method(path):
    """Nothing below `train/` imports the method's mathematics or names one of its sections."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            allowed = ("sop_faiss.sop.prototype_sample",)
            assert not node.module.startswith("sop_faiss.sop.") or node.module in allowed, (
                f"{path} imports {node.module}"
            )
        if isinstance(node, ast.Attribute):
            assert node.attr != "sop", f"{path}:{node.lineno} reads a section of one method"
