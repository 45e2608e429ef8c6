"""Starting from any encoder: what is filled in, what is loaded, and that step 0 is that encoder."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sop_faiss import load_encoder
from sop_faiss.config import Config
from sop_faiss.errors import CheckpointError, ConfigError
from sop_faiss.files import sha256_file
from sop_faiss.model.checkpoint import find_checkpoint, read_tensors
from sop_faiss.model.encoders.encoder import encoder_of_backbone
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.model.initial_weights import load_initial_weights, resolve_init
from sop_faiss.model.networks import Network
from sop_faiss.train.log.monitor import read_metrics
from sop_faiss.train.parallel import copy_weights
from sop_faiss.verbs.scoring.knn import KnnOptions, evaluate_knn
from sop_faiss.verbs.training.train import run_training
from sop_faiss.verbs.training.training_images import mask_unit
from tests.encoders import random_images, timm_network, write_official, write_run
from tests.encoders import tiny_config as tiny_run
from tests.images import write_shards
from tests.messages import assert_one_line
from tests.runs import conv_config, networks_of, tiny_config

CONV, VIT = "test_efficientnet", "vit_tiny_patch16_224"
HALF = ("views.mean=[0.5,0.5,0.5]", "views.std=[0.5,0.5,0.5]")


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> dict[str, Path]:
    """Weights files of timm networks, and one whose names are not timm's."""
    folder = tmp_path_factory.mktemp("weights")
    files = {name: folder / f"{name}.safetensors" for name in (CONV, VIT)}
    for name, file in files.items():
        save_file({key: value.contiguous() for key, value in timm_network(name).state_dict().items()}, file)
    renamed = {
        f"layer{i}.{key.rpartition('.')[2]}": value
        for i, (key, value) in enumerate(timm_network(CONV).state_dict().items())
    }
    torch.save(renamed, folder / "renamed.pth")
    return {**files, "renamed": folder / "renamed.pth"}


def vit_config(folder: Path, *overrides: str) -> Config:
    plain = [f"model.{name}=null" for name in ("patch_size", "embed_dim", "depth", "num_heads")]
    return tiny_config(folder, "model.drop_path=0", *plain, "views.global_size=96", "views.local_size=32", *overrides)


def started(config: Config) -> tuple[Config, Network, Network]:
    config = resolve_init(config)
    student, teacher = networks_of(config)
    load_initial_weights(teacher.backbone, config.model)
    copy_weights(student, teacher.state_dict())
    return config, student.eval(), teacher.eval()


@pytest.mark.parametrize("by_position", [False, True])
def test_a_convolutional_networks_features_are_the_encoders(tmp_path, weights, by_position):
    file = weights["renamed" if by_position else CONV]
    config, student, teacher = started(
        conv_config(
            tmp_path, "model.backbone=vit_small_patch16_224", f"model.init=timm:{CONV}", f"model.weights={file}",
            f"model.by_position={str(by_position).lower()}", "views.global_size=96",
        )
    )  # fmt: skip
    assert config.model.backbone == CONV
    encoder = load_encoder(f"timm:{CONV}", weights=file, by_position=by_position, size=96)
    ours = encoder_of_backbone(teacher.backbone, config, "teacher")
    assert ours.preprocess == encoder.preprocess
    assert ours.pooling == encoder.pooling == "pooled" and ours.feature_dim == encoder.feature_dim
    with torch.no_grad():
        for images in (random_images(96), random_images(72, width=100)):
            torch.testing.assert_close(ours(images), encoder(images), rtol=1e-5, atol=1e-6)
    for (name, one), two in zip(student.state_dict().items(), teacher.state_dict().values(), strict=True):
        assert torch.equal(one, two), name


@pytest.mark.parametrize("side", [96, 224])
def test_a_vits_features_are_the_encoders_whatever_the_size_of_views(tmp_path, weights, side, caplog):
    caplog.set_level(logging.INFO)
    init = (f"model.init=timm:{VIT}", f"model.weights={weights[VIT]}", f"views.global_size={side}")
    config, _, teacher = started(vit_config(tmp_path, *init))
    encoder = load_encoder(f"timm:{VIT}", weights=weights[VIT], size=side)
    ours = encoder_of_backbone(teacher.backbone, config, "teacher")
    with torch.no_grad():
        torch.testing.assert_close(ours(random_images(side, 2)), encoder(random_images(side, 2)), rtol=1e-4, atol=1e-5)
    assert ("position embeddings are resampled from 14 x 14 to 6 x 6" in caplog.text) == (side == 96)
    assert "without 2 tensors (head.bias, head.weight)" in caplog.text


def test_official_checkpoints_start_runs_with_the_mean_that_their_authors_used(tmp_path):
    network = timm_network(VIT)
    file = write_official(tmp_path / "dino.pth", {"teacher": network})
    config, student, _ = started(vit_config(tmp_path, f"model.backbone={VIT}", f"model.init=dino:{file}"))
    assert config.views.mean == (0.485, 0.456, 0.406)
    own = student.backbone.trunk.state_dict()
    assert all(torch.equal(own[key], network.state_dict()[key]) for key in own if key != "pos_embed")
    encoder = load_encoder(f"dino:{file}", arch=VIT, size=96)
    ours = encoder_of_backbone(student.backbone, config, "student")
    assert (encoder.preprocess.mean, encoder.preprocess.std) == (ours.preprocess.mean, ours.preprocess.std)
    with torch.no_grad():
        torch.testing.assert_close(ours(random_images(96)), encoder(random_images(96)), rtol=1e-4, atol=1e-5)


def test_a_run_starts_from_another_runs_teacher_and_takes_its_shape(tmp_path):
    run = write_run(tmp_path / "before")
    for place in (run, run / "checkpoints" / "step_00000010"):
        config, student, teacher = started(vit_config(tmp_path, f"model.init={place}", "views.global_size=48"))
        assert (config.model.embed_dim, config.model.depth, config.model.patch_size) == (32, 2, 8)
        assert config.views.mean == tiny_run().views.mean
        theirs = read_tensors(run / "checkpoints" / "step_00000010", "teacher")
        for network in (student, teacher):
            own = network.backbone.state_dict()
            for key in own.keys() - {"trunk.pos_embed"}:
                assert torch.equal(own[key], theirs[f"backbone.{key}"])
        assert own["trunk.pos_embed"].shape == (1, 37, 32)
        assert student.heads["shared"].mlp[0].weight.shape == (16, 32)
    assert mask_unit(config) == 8


def test_resolving_twice_changes_nothing_and_explicit_values_stand(tmp_path, weights, caplog):
    caplog.set_level(logging.INFO)
    lite = ("model.backbone=vit_small_patch16_224", "model.init=timm:tf_efficientnet_lite0", "model.weights=x.pth")
    config = conv_config(tmp_path, *lite)
    resolved = resolve_init(config)
    assert resolved.model.backbone == "tf_efficientnet_lite0" and resolved.views.mean == (0.5, 0.5, 0.5)
    assert "views.mean and views.std follow timm:tf_efficientnet_lite0: (0.5, 0.5, 0.5)" in caplog.text
    assert resolve_init(resolved) == resolved
    mine = conv_config(tmp_path, *lite, "views.mean=[0.4,0.4,0.4]")
    assert resolve_init(mine).views == mine.views
    assert "views.mean and views.std stay (0.4, 0.4, 0.4)" in caplog.text
    plain = conv_config(tmp_path)
    assert resolve_init(plain) is plain


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (("model.init=timm:resnet18",), ConfigError, "comes without weights: give `weights=FILE`"),
        (("model.init=timm:resnet81", "model.weights=x"), ConfigError, "timm has no model 'resnet81'; did you mean"),
        (("model.init=timm:resnet18", "model.weights=no.pth"), ConfigError, "model.backbone = test_resnet, but"),
        (("model.init=timm:test_resnet", "model.weights=no.pth"), CheckpointError, "no.pth does not exist"),
        (("model.init=config:digits_demo",), ConfigError, "model.init = config:digits_demo"),
        (("model.init=no/such/run",), CheckpointError, "model.init = no/such/run does not exist: wanted lite0"),
        (("model.init=no/such/run", "model.weights=x"), ConfigError, "`weights` does not apply to no/such/run"),
        (("model.init=lite0", "model.weights=x"), ConfigError, "model.init=timm:resnet50"),
        (("model.init=.",), CheckpointError, "neither a checkpoint nor a run"),
        (("model.init=dino:no.pth",), CheckpointError, "no.pth does not exist"),
        (("model.init=timm:test_resnet", "model.weights={conv}"), CheckpointError, "does not fit model.backbone"),
        (
            ("model.init=timm:test_resnet", "model.weights={conv}", "model.by_position=true"),
            CheckpointError,
            "keeps no order",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(tmp_path, weights, overrides, error, message):
    filled = [override.format(conv=weights[CONV]) for override in overrides]
    with pytest.raises(error) as caught:
        started(conv_config(tmp_path, *filled))
    assert_one_line(caught, message)


@pytest.mark.parametrize("override", ["model.weights=x.pth", "model.by_position=true"])
def test_weights_without_init_are_refused(tmp_path, override):
    with pytest.raises(ConfigError) as caught:
        conv_config(tmp_path, override)
    assert_one_line(caught, "how model.init is read, which is empty")


def test_step_0_is_scored_as_the_encoder_and_a_resume_needs_no_file(tmp_path, weights):
    shards, test = (write_shards(tmp_path / name, classes=3, per_class=8, size=40) for name in ("train", "test"))
    file = tmp_path / "moved.safetensors"
    file.write_bytes(weights[CONV].read_bytes())
    overrides = (
        "model.backbone=vit_small_patch16_224", f"model.init=timm:{CONV}", f"model.weights={file}", *HALF,
        f"data.train={shards}", f"evaluate.train={shards}", f"evaluate.test={test}", "evaluate.every_steps=4",
        "evaluate.k=5", "train.epochs=2", "optim.base_lr=0.001",
    )  # fmt: skip
    run_training(conv_config(tmp_path, *overrides, "train.stop_after_steps=3"), tmp_path / "run")
    spec = EncoderSpec(f"timm:{CONV}", weights[CONV], size=64, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), device="cpu")
    expected = evaluate_knn(str(shards), str(test), spec, KnnOptions(ks=(5,))).metrics["top1_k5"]
    assert read_metrics(tmp_path / "run")[0]["knn_top1_k5"] == pytest.approx(expected)
    state = json.loads((find_checkpoint(tmp_path / "run") / "state.json").read_text())
    assert state["init_sha256"] == sha256_file(weights[CONV])
    file.unlink()
    assert run_training(conv_config(tmp_path, *overrides), tmp_path / "run", resume=True).step == 8
    later = json.loads((find_checkpoint(tmp_path / "run") / "state.json").read_text())
    assert later["init_sha256"] == state["init_sha256"] and later["step"] == 8


def test_a_resume_does_without_the_run_it_started_from(tmp_path):
    run = write_run(tmp_path / "before")
    shards = write_shards(tmp_path / "shards", classes=2, per_class=12, size=20)
    overrides = (
        f"model.init={run}", f"data.train={shards}", "views.global_size=32", "views.local_size=16", "train.epochs=2",
    )  # fmt: skip
    run_training(vit_config(tmp_path, *overrides, "train.stop_after_steps=2"), tmp_path / "run")
    run.rename(tmp_path / "gone")
    with pytest.raises(CheckpointError, match="does not exist"):
        run_training(vit_config(tmp_path, *overrides), tmp_path / "other")
    assert run_training(vit_config(tmp_path, *overrides), tmp_path / "run", resume=True).step == 8
    assert load_encoder(str(tmp_path / "run")).feature_dim == 32
