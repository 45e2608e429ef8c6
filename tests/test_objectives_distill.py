"""Distillation: a step against loops, a teacher that is another or elsewhere on resume, and its settings."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch.nn import functional as F

from sop_faiss import load_encoder
from sop_faiss.cli.train import main
from sop_faiss.data.views.device_color import normalize
from sop_faiss.errors import CheckpointError, ConfigError, SopError
from sop_faiss.model.checkpoint import find_checkpoint, read_tensors
from sop_faiss.model.encoders.choice import write_choice
from sop_faiss.objectives.distill import direction_loss
from sop_faiss.progress import silent_stage
from sop_faiss.train.log.monitor import read_metrics
from sop_faiss.train.loop import train_step
from sop_faiss.verbs.run_page.prototypes import sample_of_checkpoint
from sop_faiss.verbs.run_page.report import report_run
from sop_faiss.verbs.training.dry_run import describe_run
from sop_faiss.verbs.training.export import export_run
from sop_faiss.verbs.training.train import run_training
from tests.encoders import timm_network
from tests.images import write_shards
from tests.messages import assert_one_line, command_fails
from tests.oracle import dense_assignment
from tests.rivals import KINDS, opened, see
from tests.runs import tiny_config, tiny_config_file

DISTILL = KINDS["distill"]


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    return write_shards(tmp_path_factory.mktemp("distill"), classes=2, per_class=12, size=20)


def loop_losses(student, teacher, tasks, temperatures: tuple[float, float], same_view: bool) -> tuple[float, float]:
    """Cross-entropy of assignments, and 1 - cosine: means over images and pairs, one by one."""
    student_temp, teacher_temp = temperatures
    entropies, angles = [], []
    for i, image in ((i, image) for i in range(len(student)) for image in range(student.shape[1])):
        for j in range(len(teacher)):
            if i < len(teacher) and (i == j) != same_view:
                continue
            one, two = student[i, image : image + 1], teacher[j, image : image + 1]
            angles.append(1 - float(F.cosine_similarity(one, two)))
            for members, contributions in tasks:
                target = dense_assignment(two, members, contributions, teacher_temp)
                said = dense_assignment(one, members, contributions, student_temp)
                entropies.append(-float((target * said.log()).sum()))
    return sum(entropies) / len(entropies), sum(angles) / len(angles)


@pytest.mark.parametrize("views", ["same", "others"])
def test_steps_do_what_they_say(tmp_path, shards, views):
    centers = views == "same"
    state, batches = opened(tmp_path, shards, *DISTILL, f"distill.views={views}", f"distill.center={centers}")
    objective, memory = state.objective, state.objective.term.memory
    encoder = load_encoder("lite0", size=16)
    assert memory.fill == 1 and memory.embeddings.shape == (24, 1280)
    assert bool(objective.center.any()) == centers

    def features(pixels, colors):
        own = dataclasses.replace(state.config.views, mean=encoder.preprocess.mean, std=encoder.preprocess.std)
        with torch.no_grad():
            raw = [F.normalize(encoder(view), dim=1) for view in normalize(pixels, colors, own, state.device)]
        return torch.stack([F.normalize(each - objective.center, dim=1) for each in raw])

    for step in range(2):
        batch, first = batches[step], memory.pointer
        seen, taught = see(state, batch), features(batch.global_views, batch.global_colors)
        generator = objective.term.maker.generator.get_state()
        drawn = objective.term.maker.draw()
        objective.term.maker.generator.set_state(generator)
        tasks = [(drawn.members(task).clone(), drawn.contributions[task]) for task in range(drawn.tasks)]
        temperatures = 0.1, state.schedules.at(step).teacher_temp
        metrics = train_step(state, batch).metrics
        assigned, direction = loop_losses(seen.student, taught, tasks, temperatures, views == "same")
        assert float(metrics["loss_cls"]) == pytest.approx(assigned, rel=1e-3)
        assert float(metrics["loss_direction"]) == pytest.approx(direction, rel=1e-3)
        assert float(metrics["loss"]) == pytest.approx(assigned + 0.5 * direction, rel=1e-3)
        stored = (first + torch.arange(6)) % 24
        torch.testing.assert_close(memory.embeddings[stored], taught[1], rtol=1e-3, atol=1e-4)
        assert torch.equal(memory.image_ids[stored], batch.image_ids)
        assert objective.watched(6)["cls"].embeddings.shape == (6, 1280)


def test_the_center_is_the_mean_feature(tmp_path, shards):
    plain, _ = opened(tmp_path, shards, *DISTILL, "distill.center=false")
    state, _ = opened(tmp_path, shards, *DISTILL)
    rows = plain.objective.term.memory.embeddings
    torch.testing.assert_close(state.objective.center, rows.mean(0))
    centered = F.normalize(rows - rows.mean(0), dim=1)
    torch.testing.assert_close(state.objective.term.memory.embeddings, centered, rtol=1e-3, atol=1e-5)


def test_losses_of_some_views_add_up():
    student, teacher = (F.normalize(torch.randn(n, 3, 5), dim=-1) for n in (4, 2))
    for same_view in (False, True):
        parts = [direction_loss(student[a:b], teacher, a, 4, same_view=same_view) for a, b in ((0, 2), (2, 4))]
        torch.testing.assert_close(sum(parts), direction_loss(student, teacher, 0, 4, same_view=same_view))


def test_the_teacher_is_not_saved_and_another_is_refused(tmp_path, shards):
    for number in (1, 2):
        save_file(timm_network("test_resnet", seed=number).state_dict(), tmp_path / f"{number}.safetensors")
    shutil.copy(tmp_path / "1.safetensors", tmp_path / "moved.safetensors")

    def train(name: str, *overrides: str, resume: bool = False):
        kept = [each for each in DISTILL if not each.startswith("distill.teacher")]
        named = ("distill.teacher=timm:test_resnet", f"distill.weights={tmp_path / name}", "train.epochs=1")
        overrides = (f"data.train={shards}", *kept, *named, *overrides)
        config = tiny_config(tmp_path, *overrides)
        run_training(config, tmp_path / "run", resume=resume)
        return config

    train("1.safetensors", "train.stop_after_steps=1")
    (tmp_path / "1.safetensors").rename(tmp_path / "gone.safetensors")
    report_run(tmp_path / "run", tmp_path / "page.html", silent_stage)  # without the teacher
    files = [read_tensors(find_checkpoint(tmp_path / "run"), name) for name in ("student", "teacher", "objective")]
    assert not [key for file in files for key in file if "layer1" in key or "conv1" in key]
    with pytest.raises(CheckpointError, match=r"distill\.teacher") as caught:
        train("2.safetensors", resume=True)
    assert_one_line(caught, "fingerprint")
    config = train("moved.safetensors", resume=True)
    assert [line["step"] for line in read_metrics(tmp_path / "run") if "loss" in line] == [1, 2, 3, 4]
    sample = sample_of_checkpoint(config, find_checkpoint(tmp_path / "run"), 24)
    assert sample.step == 5 and all(each.image >= 0 for each in sample.prototypes)
    export_run(tmp_path / "run", tmp_path / "exported")
    assert load_encoder(str(tmp_path / "exported")).feature_dim == 24
    assert "direction loss | weight 0.5" in (tmp_path / "exported" / "README.md").read_text()


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (("distill.teacher=''",), "distill.teacher"),
        (("distill.teacher=no/such/run",), "distill.teacher"),
        (("distill.teacher=lite9",), "distill.teacher"),
        (("distill.teacher=timm:resnet18",), "distill.weights"),
        (("distill.teacher=timm:resnet81", "distill.weights=x.pth"), "resnet81"),
        (("distill.teacher=timm:resnet18", "distill.weights=/no/such.pth"), "/no/such.pth"),
        (("distill.weights=x.pth",), "distill.weights"),
        (("distill.teacher=dino:x.pth",), "distill.arch"),
        (("distill.arch=resnet18",), "distill.arch"),
        (("distill.teacher=config:digits_demo",), "random weights"),
        (("distill.pooling=cls",), "pooling"),
        (("distill.views=all",), "distill.views"),
        (("distill.direction_weight=-1",), "distill.direction_weight"),
        (("distill.direction_weight=nan",), "distill"),
        (("sop.fill=random",), "sop.fill"),
        (("sop.patch.weight=1", "masks.kind=block"), "sop.patch.weight"),
        (("masks.kind=block",), "masks.kind"),
        (("objective.kind=sop", "sop.patch.weight=0"), "distill.teacher"),
    ],
)
def test_bad_settings_are_refused(tmp_path, shards, overrides, field):
    with pytest.raises(SopError, match=re.escape(field)) as caught:
        describe_run(tiny_config(tmp_path, f"data.train={shards}", *DISTILL, *overrides))
    assert_one_line(caught)
    assert "`" not in str(caught.value)


def test_the_option_names_the_teacher_and_its_weights(tmp_path, shards):
    rest = ("sop.patch.weight=0", "sop.fill=teacher", "masks.kind=none", f"data.train={shards}", "train.device=cpu")
    arguments = (tiny_config_file(tmp_path), *rest, "--dry-run", "--json", "-")
    file = tmp_path / "own.safetensors"
    save_file(timm_network("test_resnet").state_dict(), file)
    said = settings_of(*arguments, "--teacher", "timm:test_resnet", "--weights", file)
    assert (said["objective.kind"], said["distill.teacher"]) == ("distill", "timm:test_resnet")
    assert (said["distill.weights"], said["model.weights"]) == (str(file), "")
    assert said["memory_rows"] == {"cls": 24}
    own = settings_of(
        *arguments, "--weights", file, "model.init=timm:test_resnet", "model.backbone=vit_small_patch16_224",
        "views.global_size=32", "views.local_size=32", "model.drop_path=0",
        *(f"model.{name}=null" for name in ("patch_size", "embed_dim", "depth", "num_heads")),
    )  # fmt: skip
    assert (own["distill.weights"], own["model.weights"]) == ("", str(file))
    assert "distill.teacher" in command_fails(main, *arguments, "--teacher", "")
    assert "no/such" in command_fails(main, *arguments, "--teacher", "no/such")
    for override in ("objective.kind=sop", "distill.teacher=lite0", "distill.weights=x.pth"):
        named = command_fails(main, *arguments, override, "--teacher", "timm:test_resnet", "--weights", file)
        assert override in named and ("--weights" if "weights" in override else "--teacher") in named
    assert "regularizer.kind" in command_fails(main, *arguments, "--teacher", "lite0", "regularizer.kind=koleo")
    assert "model.weights=x.pth" in command_fails(main, *arguments, "--weights", file, "model.weights=x.pth")


def test_the_teacher_takes_views_of_every_phase(tmp_path, shards):
    file = tmp_path / "vit.safetensors"
    save_file(timm_network("test_vit").state_dict(), file)
    overrides = ("distill.teacher=timm:test_vit", f"distill.weights={file}", "views.global_size=32")
    phases = "train.phases=[{until: 0.5, global_size: 24}]"
    with pytest.raises(ConfigError, match=r"train\.phases\[0\]\.global_size") as caught:
        describe_run(tiny_config(tmp_path, f"data.train={shards}", *DISTILL, *overrides, phases))
    assert_one_line(caught)
    describe_run(tiny_config(tmp_path, f"data.train={shards}", *DISTILL, *overrides, phases.replace("24", "16")))


@pytest.mark.parametrize("options", [{"scales": (1.0, 0.5)}, {"mirrored": True}])
def test_a_choice_of_settings_that_views_do_not_get_is_refused(tmp_path, shards, options):
    encoder = load_encoder("lite0", **options, size=32)
    write_choice(tmp_path / "c.json", encoder.spec, encoder.fingerprint, {})
    with pytest.raises(ConfigError, match=r"distill\.teacher"):
        describe_run(tiny_config(tmp_path, f"data.train={shards}", *DISTILL, f"distill.teacher={tmp_path}/c.json"))


def settings_of(*arguments: object) -> dict[str, object]:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.stderr
    said = json.loads(result.stdout)
    return {**said["settings"], **said}
