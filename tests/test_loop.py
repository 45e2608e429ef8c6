"""The loop: one step written out by hand, exact resume, kills, signals, and runs that stop themselves."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from sop_faiss.config import Config
from sop_faiss.data.batch import Batch
from sop_faiss.data.images.source import open_source
from sop_faiss.data.stream import Batches
from sop_faiss.data.views.device_color import normalize
from sop_faiss.errors import CheckpointError, ConfigError, DataError, RunStoppedError
from sop_faiss.model import networks
from sop_faiss.model.checkpoint import checkpoint_directories, find_checkpoint, read_tensors
from sop_faiss.model.projector import Projector
from sop_faiss.objectives.objective import Learned
from sop_faiss.objectives.sop_terms import fit_memory
from sop_faiss.sop.loss import cls_loss, masked_row_weights, patch_loss
from sop_faiss.sop.prototypes import Prototypes
from sop_faiss.train import loop
from sop_faiss.train.log.monitor import read_metrics
from sop_faiss.train.loop import train_step
from sop_faiss.train.state import RunState
from sop_faiss.verbs.training.dry_run import describe_run
from sop_faiss.verbs.training.train import run_training
from tests import forked
from tests.images import write_folder, write_shards
from tests.runs import conv_config, tiny_config, tiny_config_file

DROP_NOTHING = "model.drop_path=0"
DROPS = ("masks.kind=none", "sop.patch.weight=0", "masks.drop=0.5")
TIMINGS = ("images_per_second", "data_wait_share", "memory_peak_bytes")


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    return write_shards(tmp_path_factory.mktemp("train"), classes=2, per_class=12, size=20)


def records(run: Path) -> list[dict]:
    return [{key: value for key, value in line.items() if key not in TIMINGS} for line in read_metrics(run)]


def fresh(tmp_path, shards, *overrides) -> tuple[RunState, Batches]:
    config = tiny_config(tmp_path, *overrides)
    source = open_source(shards)
    return RunState(config, torch.device("cpu"), len(source)), Batches(source, np.arange(len(source)), config, 4)


@pytest.mark.parametrize("anchors", ["random", "fixed_rows"])
def test_a_step_does_what_the_paper_says(tmp_path, shards, anchors):
    overrides = ("model.drop_path=0", f"sop.anchors={anchors}", "optim.momentum=0.9", "optim.warmup_epochs=0")
    (state, batches), (twin, _) = fresh(tmp_path, shards, *overrides), fresh(tmp_path, shards, *overrides)
    batch = batches[0]
    metrics = train_step(state, batch).metrics

    # by hand, with the twin's parts
    views = normalize(batch.global_views, batch.global_colors, twin.config.views, twin.device)
    local = normalize(batch.local_views, batch.local_colors, twin.config.views, twin.device)
    stored = twin.objective._draw_stored_patches(6, 16)
    teacher = [twin.teacher.backbone(view) for view in views]
    teacher_cls = torch.stack([twin.teacher.heads["shared"](tokens.cls) for tokens in teacher])
    teacher_patches = torch.stack([twin.teacher.heads["shared"](tokens.patches) for tokens in teacher])
    student = [twin.student.backbone(view, mask) for view, mask in zip(views, batch.masks, strict=True)]
    student_cls = [twin.student.heads["shared"](tokens.cls) for tokens in student]
    student_cls.append(twin.student.heads["shared"](twin.student.backbone(local[0]).cls))
    student_patches = torch.stack([twin.student.heads["shared"](tokens.patches) for tokens in student])
    first = cls_loss(torch.stack(student_cls), teacher_cls, twin.objective.terms["cls"].maker.draw(), 0.1, 0.04)
    second = patch_loss(
        student_patches[batch.masks],
        teacher_patches[batch.masks],
        masked_row_weights(batch.masks.flatten(0, 1)),
        twin.objective.terms["patch"].maker.draw(),
        0.1,
        0.04,
    )
    loss = first.loss + second.loss
    assert float(metrics["loss"]) == pytest.approx(loss.item(), rel=1e-5)
    loss.backward()
    settings = twin.schedules.at(0)
    for group in twin.optimizer.param_groups:
        group["lr"], group["weight_decay"] = settings.learning_rate, settings.weight_decay * group["decays"]
    for p in twin.student.parameters():
        p.grad *= min(1.0, 3.0 / (p.grad.norm().item() + 1e-6))
    twin.optimizer.step()
    for ours, theirs in zip(state.student.parameters(), twin.student.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for ours, old, new in zip(
        state.teacher.parameters(), twin.teacher.parameters(), twin.student.parameters(), strict=True
    ):
        torch.testing.assert_close(ours, 0.9 * old + 0.1 * new, rtol=1e-4, atol=1e-5)
    # stored once, after the step: view 2 of the teacher before its update
    torch.testing.assert_close(state.objective.terms["cls"].memory.embeddings[:6], teacher_cls[1], rtol=1e-4, atol=1e-5)
    expected = teacher_patches[1][torch.arange(6), stored]
    torch.testing.assert_close(state.objective.terms["patch"].memory.embeddings[:6], expected, rtol=1e-4, atol=1e-5)
    assert state.objective.terms["cls"].memory.image_ids[:7].tolist() == [*batch.image_ids.tolist(), -1]
    assert state.objective.terms["cls"].memory.stored == 6


class Trained(NamedTuple):
    """A run of four steps, and what its fifth did."""

    lines: list[dict]
    """Metrics of the four steps."""
    state: RunState
    """As it was resumed, with the fifth step."""
    batch: Batch
    """The fifth step's."""
    parts: list[Learned]
    drawn: dict[str, Prototypes]
    """The fifth step's prototypes by loss term."""
    plain: list[dict]
    """Metrics of a run without the settings."""

    def losses(self, key: str = "loss") -> list[float]:
        return [line[key] for line in self.lines]

    def plain_losses(self, key: str = "loss") -> list[float]:
        return [line[key] for line in self.plain]


_plain_lines: dict[tuple[str, ...], list[dict]] = {}
"""Of runs that several tests compare theirs with, by overrides."""


def train_five(folder: Path, shards: Path, *overrides: str, plain: tuple[str, ...] = ()) -> Trained:
    def train(name: str, *more: str) -> list[dict]:
        stopped = ("train.epochs=2", "train.stop_after_steps=4", f"data.train={shards}", *more)
        result = run_training(tiny_config(folder, *stopped), folder / name)
        assert result.finished and result.step == 4
        return records(folder / name)

    lines = train("run", *overrides)
    if plain not in _plain_lines:
        _plain_lines[plain] = train("plain", *plain)
    state, batches = fresh(folder, shards, "train.epochs=2", f"data.train={shards}", *overrides)
    state.data_digest = batches.digest()
    state.resume(find_checkpoint(folder / "run"))
    drawn = {}
    for name, term in state.objective.terms.items():
        before = term.maker.generator.get_state()
        drawn[name] = term.maker.draw()
        term.maker.generator.set_state(before)
    return Trained(lines, state, batches[4], train_step(state, batches[4]).learned, drawn, _plain_lines[plain])


def only_cls(t: Trained) -> None:
    assert set(t.state.objective.terms) == {"cls"} and not [key for key in t.lines[0] if "patch" in key]
    assert t.losses() == t.losses("loss_cls")
    assert t.lines[0]["loss_cls"] == pytest.approx(t.plain[0]["loss_cls"], rel=1e-5)


def only_patches(t: Trained) -> None:
    assert set(t.state.objective.terms) == {"patch"} and not [key for key in t.lines[0] if "_cls" in key]
    assert t.losses() == t.losses("loss_patch")
    assert t.lines[0]["loss_patch"] == pytest.approx(t.plain[0]["loss_patch"], rel=1e-5)
    assert t.parts[0].features is None


def same_metrics(t: Trained) -> None:
    assert t.lines == t.plain


def same_metrics_to_rounding(t: Trained) -> None:
    for one, other in zip(t.lines, t.plain, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)


def masks_of_a_fixed_size(t: Trained) -> None:
    assert (t.batch.masks.sum(-1) == round(0.7 * 16)).all()


def nothing_hidden(t: Trained) -> None:
    assert not t.batch.masks.any()
    assert t.state.student.backbone.mask_token.grad is None
    assert t.losses("loss_cls") != t.plain_losses("loss_cls")  # the student of the other run sees less


def half_of_the_patches_dropped(t: Trained) -> None:
    assert (t.batch.masks.sum(-1) == 8).all() and len(t.batch.masks.flatten(0, 1).unique(dim=0)) == 12
    assert t.state.student.backbone.mask_token.grad is None
    assert t.losses("loss_cls") != t.plain_losses("loss_cls")
    assert t.lines[0]["teacher_entropy_cls_over_lnK"] == t.plain[0]["teacher_entropy_cls_over_lnK"]  # it sees all


def no_local_views(t: Trained) -> None:
    assert t.batch.local_views.shape[:2] == (0, 6)
    assert t.losses("loss_cls")[0] != t.plain_losses("loss_cls")[0]
    assert t.lines[0]["loss_patch"] == pytest.approx(t.plain[0]["loss_patch"], rel=1e-5)  # of global views alone


def global_views(count: int) -> Callable[[Trained], None]:
    def check(t: Trained) -> None:
        assert t.batch.global_views.shape[:2] == (count, 6)
        assert t.parts[0].features.shape == (count, 6, 24)
        assert (t.lines[0]["view_auc"] is None) == (count == 1)  # one view cannot be compared with another

    return check


def colors_parts_and_a_fill(t: Trained) -> None:
    assert t.batch.global_colors.shape[2] > 0  # drawn by the workers, applied on the device
    assert [len(part.to_store["cls"]) for part in t.parts] == [3, 3]
    assert t.losses("memory_fill_cls")[0] == t.losses("memory_fill_patch")[0] == 1
    assert t.plain_losses("memory_fill_cls")[0] == 0


def mean_tokens(t: Trained) -> None:
    state, views = t.state, t.batch.global_views[0]
    images = normalize(views[None], t.batch.global_colors[:1], state.config.views, state.device)[0]
    with torch.no_grad():
        embedded, tokens = state.teacher(images), state.teacher.backbone(images)
    torch.testing.assert_close(embedded.cls_features, tokens.patches.mean(1))
    assert not torch.allclose(embedded.cls_features, tokens.cls, atol=1e-3)


def anchors_of_the_fill(t: Trained) -> None:
    drawn, memory = t.drawn["cls"], t.state.objective.terms["cls"].memory
    assert t.losses("memory_fill_cls") == [1] * 4
    assert torch.equal(t.state.objective.terms["cls"].maker.draw().anchors, drawn.anchors)
    assert not drawn.holds_anchor.any()  # four steps have renewed all 24 rows
    assert not (memory.embeddings[drawn.anchor_rows] == drawn.anchors).all(-1).any()


def whole_members(t: Trained) -> None:
    assert t.drawn["cls"].contributions.shape == (2, 8, 4) and t.drawn["patch"].contributions.shape == (2, 6, 3)
    assert all((drawn.contributions == 1).all() for drawn in t.drawn.values())


def half_precision(t: Trained) -> None:
    products = []
    layer = next(part for part in t.state.teacher.backbone.modules() if isinstance(part, torch.nn.Linear))
    layer.register_forward_hook(lambda module, inputs, output: products.append(output.dtype))
    train_step(t.state, t.batch)
    assert set(products) == {torch.bfloat16}
    assert {parameter.dtype for parameter in t.state.student.parameters()} == {torch.float32}
    assert t.losses() == pytest.approx(t.plain_losses(), rel=0.02) and t.losses() != t.plain_losses()


def three_parts(t: Trained) -> None:
    assert [len(part.to_store["cls"]) for part in t.parts] == [2, 2, 2]
    assert t.losses()[0] == pytest.approx(t.plain_losses()[0], rel=1e-4)


def no_support_of_the_anchors_image(t: Trained) -> None:
    maker = t.state.objective.terms["cls"].maker
    assert maker.memory.engine == "torch" and maker.memory.fill == 1
    drawn, ids = maker.draw(), maker.memory.image_ids  # the sixth step's: the fifth has replaced rows of the fifth's
    assert not (ids[drawn.support_rows] == ids[drawn.anchor_rows].unsqueeze(2)).any()


def kept_neighbors(t: Trained) -> None:
    assert any(key.startswith("neighbor_") for key in t.state.objective.terms["cls"].memory.state_dict())
    same_metrics_to_rounding(t)


@pytest.mark.parametrize(
    ("overrides", "plain", "check"),
    [
        (("sop.patch.weight=0",), (), only_cls),
        (("sop.cls.weight=0",), (), only_patches),
        (("sop.cls.weight=0", "train.views_apart=true"), ("sop.cls.weight=0",), same_metrics),
        (("masks.kind=random",), (), masks_of_a_fixed_size),
        (("masks.kind=none", "sop.patch.weight=0"), ("sop.patch.weight=0",), nothing_hidden),
        ((*DROPS,), DROPS[:2], half_of_the_patches_dropped),
        (("views.local_count=0",), (), no_local_views),
        (("views.global_count=1",), (), global_views(1)),
        (("views.global_count=3",), (), global_views(3)),
        (("views.color=device", "train.accumulate=2", "sop.fill=teacher"), (), colors_parts_and_a_fill),
        (("model.global_token=mean",), (), mean_tokens),
        (("sop.anchors=fixed_vectors", "sop.fill=teacher"), (), anchors_of_the_fill),
        (("sop.contributions=one_hot", "sop.patch.num_supports=2", "sop.patch.tasks=2"), (), whole_members),
        (("train.precision=bf16", DROP_NOTHING), (DROP_NOTHING,), half_precision),
        (("train.accumulate=3", "train.views_apart=true", DROP_NOTHING), (DROP_NOTHING,), three_parts),
        (("views.global_count=1", "train.views_apart=true"), (), global_views(1)),
        (("neighbors.engine=torch", "neighbors.exclude_same_image=always"), (), no_support_of_the_anchors_image),
        # the candidates of bf16 are all 24 rows
        (("neighbors.precision=bf16",), (), same_metrics_to_rounding),
        (
            ("neighbors.refresh=incremental", "neighbors.exclude_same_image=never"),
            ("neighbors.refresh=full", "neighbors.exclude_same_image=never"),
            kept_neighbors,
        ),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, tuple) else getattr(value, "__name__", None),
)
def test_every_setting_changes_what_it_says(tmp_path, shards, overrides, plain, check):
    trained = train_five(tmp_path, shards, *overrides, plain=plain)
    check(trained)
    settings = trained.state.config.sop
    for line in trained.lines:
        assert line["loss"] is not None
        assert ("loss_patch" in line) == (settings.patch.weight > 0)
        assert ("loss_cls" in line) == (settings.cls.weight > 0)


@pytest.mark.parametrize(
    "overrides",
    [
        ("train.accumulate=3",),
        ("train.accumulate=6",),
        ("train.views_apart=true",),
        ("train.accumulate=2", "train.views_apart=true", "sop.cls.tasks=2"),
        ("train.views_apart=true", "masks.kind=none", "sop.patch.weight=0"),
        ("train.accumulate=2", "train.views_apart=true", *DROPS),
    ],
)
def test_a_step_taken_in_parts_is_the_same_step(tmp_path, shards, overrides):
    """Gradients of 3 x 2 images are those of 1 x 6, and the memories take in the same rows."""
    common = ("model.drop_path=0", "optim.clip_norm=0", "optim.warmup_epochs=0")
    kept = [override for override in overrides if not override.startswith("train.")]
    (whole, batches), (parts, _) = fresh(tmp_path, shards, *common, *kept), fresh(tmp_path, shards, *common, *overrides)
    for step in range(2):
        told = [train_step(state, batches[step]).metrics for state in (whole, parts)]
        for key in told[0]:
            assert float(told[1][key]) == pytest.approx(float(told[0][key]), rel=1e-4, nan_ok=True), key
        for (name, one), two in zip(whole.student.named_parameters(), parts.student.parameters(), strict=True):
            assert (one.grad is None) == (two.grad is None), name
            if one.grad is not None:
                torch.testing.assert_close(
                    two.grad, one.grad, rtol=1e-3, atol=1e-6 + 1e-4 * float(one.grad.abs().max())
                )
        for name, level in whole.objective.terms.items():
            memory = parts.objective.terms[name].memory
            torch.testing.assert_close(memory.embeddings, level.memory.embeddings, rtol=1e-4, atol=1e-5)
            assert torch.equal(memory.image_ids, level.memory.image_ids)


@pytest.mark.parametrize("kind", ["massl", "dino", "ibot"])
def test_rivals_drop_patches_too(tmp_path, shards, kind):
    weights = ("ibot.patch.weight=0",) if kind == "ibot" else ()
    common = (f"objective.kind={kind}", "masks.kind=none", DROP_NOTHING, *weights)
    if kind == "massl":
        common += ("massl.capacity=24", "massl.block_size=7")
    seen = []
    for drop in (0, 0.5):
        state, batches = fresh(tmp_path, shards, *common, f"masks.drop={drop}")
        seen.append(train_step(state, batches[0]).metrics)
    assert seen[0]["loss"] != seen[1]["loss"]
    assert seen[0]["teacher_entropy_cls_over_lnK"] == seen[1]["teacher_entropy_cls_over_lnK"]


def test_4_x_64_images_give_the_gradients_of_1_x_256(tmp_path, monkeypatch):
    """To 1e-10: all that is float32 but for the memories is made float64 here."""
    monkeypatch.setattr(networks, "normalize", lambda *arguments: normalize(*arguments).double())
    monkeypatch.setattr(Projector, "forward", lambda self, features: F.normalize(self.mlp(features), dim=-1))
    generator = torch.Generator().manual_seed(0)
    masks = torch.rand(2, 256, 16, generator=generator) < 0.3
    masks[:, ::3] = False
    views = [
        torch.randint(256, (count, 256, side, side, 3), dtype=torch.uint8, generator=generator)
        for count, side in ((2, 16), (1, 8))
    ]
    no_colors = [torch.empty(count, 256, 0) for count in (2, 1)]
    batch = Batch(*views, *no_colors, masks, torch.arange(256), [])
    common = ("model.drop_path=0", "optim.clip_norm=0", "train.batch_size=256")
    whole, parts = (
        RunState(tiny_config(tmp_path, *common, *more), torch.device("cpu"), 256)
        for more in ((), ("train.accumulate=4", "train.views_apart=true"))
    )
    losses = []
    for state in (whole, parts):
        state.student.double(), state.teacher.double()
        losses.append(float(train_step(state, batch).metrics["loss"]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)  # losses are told in float32
    for one, two in zip(whole.student.parameters(), parts.student.parameters(), strict=True):
        assert one.grad.dtype == torch.float64
        torch.testing.assert_close(two.grad, one.grad, rtol=0, atol=1e-10 * float(one.grad.abs().max()))


def test_parts_that_do_not_divide_the_batch_are_refused(tmp_path, shards):
    with pytest.raises(ConfigError, match=r"train\.accumulate = 4\b"):
        fresh(tmp_path, shards, "train.accumulate=4")


@pytest.mark.parametrize(
    ("images", "overrides", "expected"),
    [
        (24, (), (24, True)),  # capped
        (79, (), (40, True)),
        (80, (), (40, False)),
        (80, ("neighbors.exclude_same_image=always",), (40, True)),
        (30, ("neighbors.exclude_same_image=never",), (30, False)),
    ],
)
def test_a_memory_has_no_more_rows_than_there_are_images(tmp_path, images, overrides, expected):
    assert fit_memory(tiny_config(tmp_path, *overrides), "cls", images) == expected


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "sop.cls.num_anchors=9",
            r"sop\.cls\.num_anchors = 9 is too much for a memory of 8 rows \(8 training images.*num_anchors=2, ",
        ),
        ("sop.cls.num_supports=7", r"sop\.cls\.num_supports = 7 .* wanted at most 6"),
    ],
)
def test_anchors_and_supports_that_few_images_cannot_give_are_refused_at_the_start(tmp_path, override, message):
    with pytest.raises(ConfigError, match=message):
        fit_memory(tiny_config(tmp_path, override), "cls", 8)


@pytest.mark.parametrize("eps", [0.1, 0.6, 0.74])
def test_what_a_message_proposes_is_not_refused(tmp_path, eps):
    config = tiny_config(tmp_path, f"sop.eps={eps}", "sop.cls.num_supports=0", "sop.patch.weight=0")

    def with_anchors(count: int) -> Config:
        return replace(config, sop=replace(config.sop, cls=replace(config.sop.cls, num_anchors=count)))

    for images in range(1, 20):
        with pytest.raises(ConfigError, match=r"sop\.cls\.num_anchors = 40 ") as caught:
            fit_memory(with_anchors(40), "cls", images)
        proposed = re.search(r"at most (\d+); for few images set sop\.cls\.num_anchors=(\d+)", str(caught.value))
        if proposed is None:
            needed = int(re.search(r"use (\d+) images", str(caught.value))[1])
            assert images < needed
            proposed, images = [None, needed, needed], needed
        for anchors in (int(proposed[1]), int(proposed[2])):
            assert fit_memory(with_anchors(anchors), "cls", images)[0] >= anchors >= 2


def test_a_loss_switched_off_has_no_memory(tmp_path, shards):
    state, _ = fresh(tmp_path, shards, "sop.patch.weight=0")
    assert set(state.objective.terms) == {"cls"}


def test_a_student_comes_to_agree_with_a_teacher_that_stands_still(tmp_path, shards):
    still = (
        "optim.momentum=1.0", "model.drop_path=0", "sop.patch.weight=0", "loss.teacher_temp=0.04",
        "sop.fill=teacher", "optim.base_lr=0.2",
    )  # fmt: skip
    config = tiny_config(tmp_path, f"data.train={shards}", "train.epochs=15", *still)
    run_training(config, tmp_path / "run")
    lines = read_metrics(tmp_path / "run")
    gaps = [line["loss_cls_over_lnK"] - line["teacher_entropy_cls_over_lnK"] for line in lines]
    assert np.mean(gaps[-20:]) < 0.9 * np.mean(gaps[:10])


def test_metrics_have_the_contracts_keys(tmp_path, shards):
    config = tiny_config(
        tmp_path, f"data.train={shards}", "train.epochs=2", "data.holdout_share=0.25", "evaluate.test=holdout",
        "evaluate.every_steps=2", "evaluate.k=5",
    )  # fmt: skip
    run_training(config, tmp_path / "run")
    lines = read_metrics(tmp_path / "run")
    trained = [line for line in lines if "loss" in line]
    for key in (
        "step", "epoch", "images", "loss", "loss_cls", "loss_patch", "loss_cls_over_lnK", "loss_patch_over_lnK",
        "teacher_entropy_cls_over_lnK", "teacher_entropy_patch_over_lnK",
    ):  # fmt: skip
        assert all(key in line for line in trained)
    scored = [line for line in lines if "knn_top1_k5" in line]
    assert [line["step"] for line in scored] == [0, 2, 4, 6]
    assert all(0 <= line["knn_top1_k5"] <= 100 for line in scored)
    assert all(0 < line["teacher_entropy_cls_over_lnK"] <= 1.0001 for line in trained)


def test_a_run_that_is_to_stop_early_is_scored_where_it_stops(tmp_path, shards):
    config = tiny_config(
        tmp_path, f"data.train={shards}", "train.epochs=2", "data.holdout_share=0.25", "evaluate.test=holdout",
        "evaluate.every_steps=4", "evaluate.k=5", "train.stop_after_steps=3",
    )  # fmt: skip
    run_training(config, tmp_path / "run")
    assert [line["step"] for line in read_metrics(tmp_path / "run") if "knn_top1_k5" in line] == [0, 3]


@pytest.mark.parametrize(
    "setting",
    ["sop.anchors=random", "sop.anchors=fixed_vectors", "neighbors.refresh=incremental", "views.color=device"],
)
def test_resume_is_exact(tmp_path, shards, setting):
    overrides = (f"data.train={shards}", setting, "train.epochs=3")
    run_training(tiny_config(tmp_path, *overrides), tmp_path / "whole")
    run_training(tiny_config(tmp_path, *overrides, "train.stop_after_steps=5"), tmp_path / "parts")
    run_training(tiny_config(tmp_path, *overrides, "data.workers=1", "data.threads=2"), tmp_path / "parts", resume=True)
    assert records(tmp_path / "parts") == records(tmp_path / "whole")
    last = [find_checkpoint(tmp_path / name) for name in ("whole", "parts")]
    for file in ("student", "teacher", "optimizer", "objective"):
        one, two = (read_tensors(checkpoint, file) for checkpoint in last)
        assert one.keys() == two.keys()
        assert all(torch.equal(one[key], two[key]) for key in one), file


@pytest.mark.parametrize(("make", "stop"), [(tiny_config, 3), (tiny_config, 4), (tiny_config, 6), (conv_config, 4)])
def test_resume_is_exact_before_at_and_after_the_end_of_the_projectors_warm_up(tmp_path, shards, make, stop):
    warm = ("optim.projector_warmup_epochs=1", "optim.warmup_epochs=0.5", "optim.layer_decay=0.6")
    overrides = (f"data.train={shards}", "train.epochs=2", *warm)
    run_training(make(tmp_path, *overrides), tmp_path / "whole")
    run_training(make(tmp_path, *overrides, f"train.stop_after_steps={stop}"), tmp_path / "parts")
    run_training(make(tmp_path, *overrides), tmp_path / "parts", resume=True)
    assert records(tmp_path / "parts") == records(tmp_path / "whole")
    last = [find_checkpoint(tmp_path / name) for name in ("whole", "parts")]
    for file in ("student", "teacher", "optimizer", "objective"):
        one, two = (read_tensors(checkpoint, file) for checkpoint in last)
        assert one.keys() == two.keys()
        assert all(torch.equal(one[key], two[key]) for key in one), file


@pytest.mark.parametrize("make", [tiny_config, conv_config])
def test_a_projector_warms_up_before_a_backbone_that_stands_still(tmp_path, shards, make):
    config = make(tmp_path, "optim.projector_warmup_epochs=0.5", "optim.warmup_epochs=0", "optim.weight_decay=0.4")
    source = open_source(shards)
    state = RunState(config, torch.device("cpu"), len(source))
    batches = Batches(source, np.arange(len(source)), config, state.student.backbone.patch_size)
    before = {name: value.clone() for name, value in state.student.state_dict().items()}
    trunk_before = [parameter.detach().clone() for parameter in state.student.backbone.trunk.parameters()]
    for step in range(2):
        train_step(state, batches[step])
        for network in (state.student, state.teacher):
            for name, value in network.state_dict().items():
                assert torch.equal(value, before[name]) == name.startswith("backbone."), name
        assert all(parameter.grad is None for parameter in state.student.backbone.parameters())
        assert all(name.startswith("heads.") for name in state.tensors()["optimizer"])
    train_step(state, batches[2])
    assert not torch.equal(next(state.student.backbone.trunk.parameters()), trunk_before[0])
    without = {name for name, parameter in state.student.named_parameters() if parameter.grad is None}
    assert without == (set() if config.masks.kind != "none" else {"backbone.mask_token"})


def test_a_damaged_checkpoint_is_passed_over(tmp_path, shards, caplog):
    overrides = (f"data.train={shards}", "train.epochs=3", "train.keep_last=2")
    run_training(tiny_config(tmp_path, *overrides), tmp_path / "whole")
    run_training(tiny_config(tmp_path, *overrides, "train.stop_after_steps=8"), tmp_path / "run")
    assert [path.name for path in checkpoint_directories(tmp_path / "run")] == ["step_00000008", "step_00000006"]
    newest = checkpoint_directories(tmp_path / "run")[0] / "objective.safetensors"
    content = bytearray(newest.read_bytes())
    content[-3] ^= 1
    newest.write_bytes(content)
    run_training(tiny_config(tmp_path, *overrides), tmp_path / "run", resume=True)
    assert "is damaged" in caplog.text
    assert records(tmp_path / "run") == records(tmp_path / "whole")
    for checkpoint in checkpoint_directories(tmp_path / "run"):
        (checkpoint / "student.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="2 checkpoints"):
        run_training(tiny_config(tmp_path, *overrides), tmp_path / "run", resume=True)


def command(config: Path, run: Path, shards: Path, *overrides: str) -> list[str]:
    return [
        str(config), f"data.train={shards}", "train.epochs=10",
        "train.checkpoint_every_steps=2", *overrides, "--output", str(run), "--resume",
    ]  # fmt: skip


def wait_for_step(run: Path, step: int, process: BaseProcess) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.is_alive():
        if any(line["step"] >= step for line in read_metrics(run)):
            return
        time.sleep(0.02)
    pytest.fail(f"the run ended or hung before step {step}")


def test_killed_runs_go_on_as_if_nothing_had_happened(tmp_path, shards):
    config, log = tiny_config_file(tmp_path), tmp_path / "log"
    whole, again = (command(config, tmp_path / name, shards, "train.epochs=6") for name in ("whole", "killed"))
    assert forked.end(forked.start(whole, log)) == [0], log.read_text()
    for step in (3, 17):
        processes = forked.start(again, log)
        wait_for_step(tmp_path / "killed", step, processes[0])
        assert forked.kill(processes) == [-signal.SIGKILL]
    log.with_suffix(".out").unlink()
    assert forked.end(forked.start(again, log)) == [0], log.read_text()
    assert json.loads(log.with_suffix(".out").read_text())["finished"] is True
    assert records(tmp_path / "killed") == records(tmp_path / "whole")


def stopped_by(number: signal.Signals, folder: Path, shards: Path, step: int) -> tuple[int | None, str, str]:
    """Exit status, stdout and stderr of a run that gets a signal after a step."""
    (process,) = forked.start(
        command(tiny_config_file(folder), folder / "run", shards, "train.epochs=2000"), folder / "log"
    )
    wait_for_step(folder / "run", step, process)
    os.kill(process.pid, number)
    (status,) = forked.end([process])
    stopped_at = int(find_checkpoint(folder / "run").name.removeprefix("step_"))
    assert read_metrics(folder / "run")[-1]["step"] == stopped_at
    return status, (folder / "log.out").read_text(), (folder / "log").read_text()


def test_sigterm_saves_and_exits_75(tmp_path, shards):
    status, stdout, stderr = stopped_by(signal.SIGTERM, tmp_path, shards, 2)
    assert status == 75
    assert json.loads(stdout)["finished"] is False
    assert stderr.endswith("stopped by a signal: continue with the same command and --resume\n")


def test_ctrl_c_saves_and_exits_130(tmp_path, shards):
    status, stdout, stderr = stopped_by(signal.SIGINT, tmp_path, shards, 3)
    assert status == 130 and stdout == "" and "Traceback" not in stderr
    assert stderr.splitlines()[-1] == "interrupted: the run is saved, continue with --resume" and "error" not in stderr


def test_a_loss_that_is_not_finite_stops_the_run_and_leaves_a_dump(tmp_path, shards, monkeypatch):
    real = loop.train_step

    def broken(state, batch, log):
        step = real(state, batch, log)
        return step._replace(metrics={**step.metrics, "loss": torch.tensor(float("nan"))}) if state.step == 5 else step

    monkeypatch.setattr(loop, "train_step", broken)
    with pytest.raises(RunStoppedError, match="loss is nan at step 5"):
        run_training(tiny_config(tmp_path, f"data.train={shards}"), tmp_path / "run")
    dump = json.loads((tmp_path / "run" / "stopped.json").read_text())
    assert len(dump["image_ids"]) == 6
    assert find_checkpoint(tmp_path / "run").name == "step_00000003"


def test_bad_images_are_listed_and_too_many_stop_the_run(tmp_path):
    folder = write_folder(tmp_path / "photos", classes=0, per_class=12, size=20)
    (folder / "0003.jpg").write_bytes(b"not an image")
    config = tiny_config(tmp_path, f"data.train={folder}", "data.max_bad_fraction=0.2", "train.epochs=2")
    assert run_training(config, tmp_path / "some").finished
    listed = [json.loads(line) for line in (tmp_path / "some" / "bad_samples.jsonl").read_text().splitlines()]
    assert {entry["key"] for entry in listed} == {"0003"}
    with pytest.raises(DataError, match=r"data\.max_bad_fraction = 0\.01"):
        run_training(tiny_config(tmp_path, f"data.train={folder}", "data.max_bad_fraction=0.01"), tmp_path / "too_many")


def test_outputs_are_never_overwritten(tmp_path, shards):
    config = tiny_config(tmp_path, f"data.train={shards}", "train.epochs=1")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match="other"):
        run_training(config, tmp_path / "other")
    with pytest.raises(ConfigError, match="other"):
        run_training(config, tmp_path / "other", resume=True)
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["thesis.txt"]
    run_training(config, tmp_path / "run")
    with pytest.raises(ConfigError, match="`resume`"):
        run_training(config, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"optim\.base_lr = 0\.01\b.*\b0\.02"):
        run_training(
            tiny_config(tmp_path, f"data.train={shards}", "train.epochs=1", "optim.base_lr=0.02"),
            tmp_path / "run",
            resume=True,
        )


def test_a_dry_run_describes_and_writes_nothing(tmp_path, shards):
    described = describe_run(tiny_config(tmp_path, f"data.train={shards}"))
    assert described["training_images"] == 24
    assert described["steps"] == 24
    assert described["memory_rows"] == {"cls": 24, "patch": 24}  # no more than there are images
    assert described["memories_bytes"] == (24 + 24) * (8 * 4 + 8 + 8)
    assert described["neighbor_lists_bytes"] == 0
    assert described["gathered_members_bytes"] == 8 * 4 * 8 * 4  # [CLS]: K = 8, S = 4; patches: 6 x 1


@pytest.mark.parametrize("override", ["sop.cls.num_supports=3", "sop.cls.num_supports=12", "sop.patch.num_supports=2"])
def test_a_dry_run_tells_the_bytes_that_a_run_has(tmp_path, shards, override):
    common = ("neighbors.refresh=incremental", override)
    described = describe_run(tiny_config(tmp_path, f"data.train={shards}", *common))
    state, batches = fresh(tmp_path, shards, *common)
    sizes = {"memories": 0, "lists": 0}
    for level in state.objective.terms.values():
        for name, value in level.memory.state_dict().items():
            if name != "position":
                sizes["lists" if name.startswith("neighbor_") else "memories"] += value.nbytes
    assert described["memories_bytes"] == sizes["memories"]
    assert described["neighbor_lists_bytes"] == sizes["lists"] > 0
    train_step(state, batches[0])
    saved = sum(value.nbytes for content in state.tensors().values() for value in content.values())
    assert described["checkpoint_bytes"] == pytest.approx(saved, abs=20_000)  # generators and counts
    gathered = max(level.maker.draw().members(0).nbytes for level in state.objective.terms.values())
    assert described["gathered_members_bytes"] == gathered


def test_no_training_images(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.train"):
        describe_run(tiny_config(tmp_path))


def test_a_gradient_that_is_not_finite_is_never_saved(tmp_path, shards, monkeypatch):
    real = loop.clip_each_gradient

    def poisoned(network, limit):
        next(iter(network.parameters())).grad.fill_(float("inf"))
        return real(network, limit)

    config = tiny_config(tmp_path, f"data.train={shards}", "train.stop_after_steps=3")
    run_training(config, tmp_path / "run")
    monkeypatch.setattr(loop, "clip_each_gradient", poisoned)
    with pytest.raises(RunStoppedError, match="gradient_norm is inf at step 4"):
        run_training(tiny_config(tmp_path, f"data.train={shards}"), tmp_path / "run", resume=True)
    assert find_checkpoint(tmp_path / "run").name == "step_00000003"


def test_any_seed_trains(tmp_path, shards):
    seed = 2**63 - 1
    config = tiny_config(tmp_path, f"data.train={shards}", f"train.seed={seed}", "train.stop_after_steps=1")
    assert run_training(config, tmp_path / "run").finished


def test_resume_on_other_images_is_refused(tmp_path):
    folder = write_folder(tmp_path / "photos", classes=0, per_class=12, size=20)
    config = tiny_config(tmp_path, f"data.train={folder}", "train.epochs=2", "train.stop_after_steps=2")
    run_training(config, tmp_path / "run")
    (folder / "0004.jpg").rename(folder / "new.jpg")
    with pytest.raises(CheckpointError, match=r"data\.train"):
        run_training(tiny_config(tmp_path, f"data.train={folder}", "train.epochs=2"), tmp_path / "run", resume=True)


def test_the_best_teacher_is_kept_and_can_be_loaded(tmp_path, shards):
    from sop_faiss.model.encoders.load import load_encoder

    config = tiny_config(
        tmp_path, f"data.train={shards}", "train.epochs=2", "data.holdout_share=0.25", "evaluate.test=holdout",
        "evaluate.every_steps=1", "evaluate.k=5",
    )  # fmt: skip
    run_training(config, tmp_path / "run")
    scores = {line["step"]: line["knn_top1_k5"] for line in read_metrics(tmp_path / "run") if "knn_top1_k5" in line}
    best = json.loads((tmp_path / "run" / "best" / "state.json").read_text())
    newest = json.loads((find_checkpoint(tmp_path / "run") / "state.json").read_text())
    assert newest["best_score"] == max(value for step, value in scores.items() if step)
    assert best["step"] == (newest["best_step"] if newest["difference"][1] > 0 else 0)
    assert best["scores"]["knn_top1_k5"] == scores[best["step"]]
    assert load_encoder(str(tmp_path / "run" / "best")).feature_dim == 24


def test_leftovers_of_a_kill_are_cleared(tmp_path, shards):
    common = (f"data.train={shards}", "train.epochs=2")
    run_training(tiny_config(tmp_path, *common, "train.stop_after_steps=3"), tmp_path / "run")
    half = tmp_path / "run" / "checkpoints" / ".step_00000006.ab12cd34.tmp"
    half.mkdir()
    (half / "student.safetensors").write_bytes(b"half")
    run_training(tiny_config(tmp_path, *common), tmp_path / "run", resume=True)
    assert not half.exists()


def test_the_patch_loss_starts_with_the_masks(tmp_path, shards):
    config = tiny_config(tmp_path, f"data.train={shards}", "masks.start_epoch=2", "masks.probability=1")
    run_training(config, tmp_path / "run")
    lines = {line["step"]: line for line in read_metrics(tmp_path / "run")}
    assert len(lines) == 24
    for step, line in lines.items():
        starts = step > 8  # two epochs of four steps
        assert (line["loss_patch"] > 0) == starts
        assert (line["teacher_entropy_patch_over_lnK"] is not None) == starts
        assert line["loss"] == pytest.approx(line["loss_cls"] + line["loss_patch"], rel=1e-5)
    assert lines[8]["memory_fill_patch"] == 1
