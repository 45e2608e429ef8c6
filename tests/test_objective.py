"""The seam of objectives: another method in one class trains, resumes and is watched, and the loop knows none."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from sop_faiss.data.images.source import open_source
from sop_faiss.data.stream import Batches
from sop_faiss.errors import CheckpointError
from sop_faiss.model.checkpoint import find_checkpoint, read_tensors
from sop_faiss.objectives.choose import choose_objective
from sop_faiss.objectives.objective import Learned, Needs, Objective, Watched
from sop_faiss.objectives.sop import SopObjective
from sop_faiss.train import state as state_module
from sop_faiss.train.log.monitor import read_metrics
from sop_faiss.train.loop import train_step
from sop_faiss.train.state import RunState
from sop_faiss.verbs.training.train import run_training
from tests.forked import launch
from tests.images import write_shards
from tests.rivals import KINDS, opened
from tests.runs import conv_config, tiny_config

RIVALS = [kind for kind in KINDS if kind != "sop"]
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

    def look_ahead(self, networks, parts):
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

    def fill(self, networks, batches, stage):
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


def steps_of(state: RunState, batches: Batches, count: int) -> tuple[list[dict[str, float]], RunState]:
    """Metrics of some steps, and the state after them."""
    metrics = [train_step(state, batches[step]).metrics for step in range(count)]
    return [{key: float(value) for key, value in each.items()} for each in metrics], state


@pytest.mark.parametrize("kind", RIVALS)
def test_parts_of_a_step_are_the_step(tmp_path, shards, kind):
    whole, state = steps_of(*opened(tmp_path, shards, *KINDS[kind]), 3)
    parts = ("train.accumulate=3", "train.views_apart=true")
    in_parts, other = steps_of(*opened(tmp_path, shards, *KINDS[kind], *parts), 3)
    for one, two in zip(whole, in_parts, strict=True):
        assert two == pytest.approx(one, rel=1e-3, abs=1e-4, nan_ok=True)
    assert isinstance(state.objective, Objective)
    assert state.objective.digests().keys() == other.objective.digests().keys()
    for (name, one), two in zip(
        state.objective.state_dict().items(), other.objective.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(one, two, rtol=1e-2, atol=1e-3, msg=name)
    for name, watched in state.objective.watched(4).items():
        assert watched.image_ids.tolist() == other.objective.watched(4)[name].image_ids.tolist()
        torch.testing.assert_close(watched.embeddings.norm(dim=1), torch.ones(4))
        assert torch.equal(watched.gallery[watched.rows], watched.embeddings)


@pytest.mark.parametrize("kind", ["massl", "dino", "ibot apart", "distill"])
def test_every_objective_resumes_exactly(tmp_path, shards, kind):
    overrides = (f"data.train={shards}", "train.epochs=1", *KINDS[kind])
    run_training(tiny_config(tmp_path, *overrides), tmp_path / "whole")
    run_training(tiny_config(tmp_path, *overrides, "train.stop_after_steps=1"), tmp_path / "parts")
    run_training(tiny_config(tmp_path, *overrides), tmp_path / "parts", resume=True)
    timings = ("images_per_second", "data_wait_share", "memory_peak_bytes")
    whole, parts = (
        [{key: value for key, value in line.items() if key not in timings} for line in read_metrics(tmp_path / name)]
        for name in ("whole", "parts")
    )
    assert whole == parts and len(whole) == 4
    for file in ("student", "teacher", "optimizer", "objective"):
        one, two = (read_tensors(find_checkpoint(tmp_path / name), file) for name in ("whole", "parts"))
        assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.distributed
def test_two_ranks_train_every_objective_as_one_does(tmp_path, shards):
    launch(tmp_path / "log", ["-m", "tests.rival_ranks"], tmp_path, shards)


@pytest.mark.parametrize("kind", ["massl", "dino", "ibot", "distill"])
def test_a_convolutional_network_learns_every_objective(tmp_path, shards, kind):
    overrides = [o for o in KINDS[kind] if not o.startswith("masks.")]
    overrides += ["ibot.patch.weight=0"] if kind == "ibot" else []
    config = conv_config(tmp_path, *overrides, "train.accumulate=2", "model.batchnorm=frozen")
    source = open_source(shards)
    state = RunState(config, torch.device("cpu"), len(source))
    batches = Batches(source, np.arange(len(source)), config, state.student.backbone.patch_size)
    metrics, _ = steps_of(state, batches, 2)
    assert all(np.isfinite(each["loss_cls"]) for each in metrics)
    assert not [key for each in metrics for key in each if "patch" in key]


@pytest.mark.parametrize("kind", RIVALS)
def test_a_state_of_another_objective_is_refused(tmp_path, kind):
    config = tiny_config(tmp_path, *KINDS[kind])
    objective, sop = choose_objective(config), SopObjective(tiny_config(tmp_path))
    for each in (objective, sop):
        each.open(torch.device("cpu"), 100)
    with pytest.raises(CheckpointError, match=r"objective\.kind"):
        objective.load_state_dict(sop.state_dict())


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
