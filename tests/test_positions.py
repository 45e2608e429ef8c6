"""Position embeddings resized by DINO's rule: against an oracle, in encoders, runs, exports and indices."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import Tensor

from sop_faiss import FeatureIndex, load_encoder
from sop_faiss.cli.export import main as export_command  # type: ignore[import-not-found]
from sop_faiss.config import load_config
from sop_faiss.data.images.source import open_source
from sop_faiss.errors import ConfigError, SopError
from sop_faiss.features.extract import extract_features
from sop_faiss.index.build import build_index
from sop_faiss.model.backbones.build import seeded_backbone
from sop_faiss.model.backbones.positions import resample_positions, rule_of_official
from sop_faiss.model.encoders.encoder import encoder_of_backbone
from sop_faiss.model.initial_weights import load_initial_weights, resolve_init
from sop_faiss.verbs.training.export import export_run
from sop_faiss.verbs.training.train import run_training
from tests.encoders import random_images, timm_features, timm_network, tiny_config, write_official, write_run
from tests.images import write_folder, write_shards
from tests.messages import assert_one_line
from tests.oracle import dino_resized
from tests.runs import networks_of
from tests.runs import tiny_config as tiny_training

TOLERANCE = 1e-5


def positions_of(seed: int, rows: int, cols: int, prefix: int = 1) -> Tensor:
    return torch.randn(1, prefix + rows * cols, 5, generator=torch.Generator().manual_seed(seed))


def loud(name: str, **options: Any) -> Any:
    """A timm network whose positions weigh as much as its patches."""
    network = timm_network(name, **options)
    with torch.no_grad():
        network.pos_embed.normal_(generator=torch.Generator().manual_seed(1))
    return network


def oracle_network(network: Any, rows: int, cols: int, patch: int = 16) -> Any:
    """The same network made for images of that grid, whose positions the oracle has resized."""
    prefix = 0 if network.no_embed_class else network.num_prefix_tokens
    held = network.patch_embed.grid_size
    grid = dino_resized(network.pos_embed[0, prefix:].detach().unflatten(0, held), rows, cols).float()
    tensors = network.state_dict()
    tensors["pos_embed"] = torch.cat([network.pos_embed[:, :prefix], grid.flatten(0, 1)[None]], dim=1)
    fixed = timm_network("test_vit", img_size=(rows * patch, cols * patch))
    fixed.load_state_dict(tensors)
    return fixed


@pytest.fixture(scope="module")
def network() -> Any:
    return loud("test_vit")


@pytest.fixture(scope="module")
def official(network: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_official(tmp_path_factory.mktemp("dino") / "dino.pth", {"teacher": network})


# the rule


@pytest.mark.parametrize("prefix", [0, 1, 5])
@pytest.mark.parametrize(("old", "new"), [((14, 14), (6, 6)), ((4, 4), (11, 11)), ((7, 7), (3, 9)), ((3, 5), (2, 2))])
def test_dinos_rule_is_plain_bicubic_with_a_tenth_added_to_the_size(old, new, prefix):
    positions = positions_of(0, *old, prefix)
    ours = resample_positions(positions, new, old, prefix=prefix, rule="dino")
    wanted = dino_resized(positions[0, prefix:].unflatten(0, old), *new).float().flatten(0, 1)
    torch.testing.assert_close(ours[0, prefix:], wanted, atol=TOLERANCE, rtol=0)
    assert torch.equal(ours[:, :prefix], positions[:, :prefix])
    timms = resample_positions(positions, new, old, prefix=prefix, rule="timm")
    assert (timms - ours).abs().max() > 0.1
    assert resample_positions(positions, old, old, prefix=prefix, rule="dino") is positions


def test_which_rule_official_checkpoints_have():
    for arch in ("vit_small_patch16_224", "vit_base_patch16_224.dino", "deit_small_patch16_224", "test_vit"):
        assert rule_of_official(arch) == "dino"
    others = ("vit_small_patch14_reg4_dinov2", "deit_small_distilled_patch16_224", "swin_tiny_patch4_window7_224")
    for arch in (*others, "resnet50", "vit_small_patch16_dinov3", "vit_smal"):
        assert rule_of_official(arch) == "timm"


# encoders


@pytest.mark.parametrize(("rows", "cols"), [(10, 10), (6, 6), (14, 14), (6, 10), (32, 3)])
def test_an_official_checkpoints_features_are_those_of_its_authors_network(network, official, rows, cols):
    images = random_images(16 * rows, width=16 * cols)
    fixed = oracle_network(network, rows, cols)
    encoder = load_encoder(f"dino:{official}", arch="test_vit")
    joined = load_encoder(f"dino:{official}", arch="test_vit", last_blocks=1, pooling="cls_mean")
    with torch.no_grad():
        tokens = fixed.forward_features(images)
        torch.testing.assert_close(encoder(images), tokens[:, 0], atol=TOLERANCE, rtol=TOLERANCE)
        both = torch.cat([tokens[:, 0], tokens[:, 1:].mean(1)], dim=1)
        torch.testing.assert_close(joined(images), both, atol=TOLERANCE, rtol=TOLERANCE)
        timms = load_encoder(f"dino:{official}", arch="test_vit", position_resize="timm")(images)
        assert torch.allclose(timms, tokens[:, 0], atol=TOLERANCE) == ((rows, cols) == (10, 10))


def test_timms_weights_keep_timms_rule_unless_the_other_is_asked_for(network, tmp_path):
    path = tmp_path / "vit.safetensors"
    save_file(network.state_dict(), path)
    plain, dino = (load_encoder("timm:test_vit", weights=path, position_resize=rule) for rule in (None, "dino"))
    dynamic = loud("test_vit", dynamic_img_size=True)
    for encoder, expected in ((plain, dynamic), (dino, oracle_network(network, 6, 6))):
        with torch.no_grad():
            wanted = timm_features(expected, random_images(96))
            torch.testing.assert_close(encoder(random_images(96)), wanted, atol=TOLERANCE, rtol=TOLERANCE)
    assert plain.model.architecture == {"timm": "test_vit"}  # as ever: features and indices made before are its own
    assert plain.fingerprint != dino.fingerprint and plain.name != dino.name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "timm:test_resnet", "random_weights": 0, "position_resize": "dino"}, "`position_resize`"),
        ({"model": "timm:test_vit", "random_weights": 0, "position_resize": "bilinear"}, "wanted timm or dino"),
        ({"model": "config:digits_demo", "random_weights": 0, "position_resize": "dino"}, "`position_resize`"),
        ({"model": "runs/x", "position_resize": "timm"}, "`position_resize` does not apply to runs/x"),
    ],
)
def test_rules_that_do_not_apply_are_one_line(options, message):
    with pytest.raises(ConfigError) as caught:
        load_encoder(**options)
    assert_one_line(caught, message)


# runs


def test_views_of_training_are_resized_by_the_rule_of_the_run():
    config = tiny_config(position_resize="dino")
    backbone = seeded_backbone(config.model, 32, seed=0).eval()
    with torch.no_grad():
        backbone.trunk.pos_embed.normal_(generator=torch.Generator().manual_seed(1))
        wanted = dino_resized(backbone.trunk.pos_embed[0, 1:].detach().unflatten(0, (4, 4)), 2, 3).float()
        for each in (backbone, copy.deepcopy(backbone)):
            tokens, _ = each._embed(random_images(16, width=24), None)
            patches = each.trunk.patch_embed(random_images(16, width=24)).flatten(1, 2)
            torch.testing.assert_close(tokens[:, 1:], patches + wanted.flatten(0, 1), atol=TOLERANCE, rtol=0)
            read = each.read(random_images(16, width=24))
            torch.testing.assert_close(read, each(random_images(16, width=24)).cls, atol=TOLERANCE, rtol=TOLERANCE)
    for network in networks_of(config):
        assert type(network.backbone.trunk) is type(backbone.trunk)


def test_gradients_reach_the_positions_of_the_run():
    backbone = seeded_backbone(tiny_config(position_resize="dino").model, 32, seed=0)
    backbone.read(random_images(16)).square().sum().backward()
    assert all(torch.count_nonzero(row) for row in backbone.trunk.pos_embed.grad[0])


@pytest.mark.parametrize("backbone", ["swin_tiny_patch4_window7_224", "test_resnet"])
def test_networks_without_positions_refuse_the_rule(backbone):
    sizes = dict.fromkeys(("patch_size", "embed_dim", "depth", "num_heads"))
    with pytest.raises(ConfigError) as caught:
        seeded_backbone(tiny_config(backbone=backbone, position_resize="dino", **sizes).model, 224, seed=0)
    assert_one_line(caught, "model.position_resize")
    with pytest.raises(ConfigError, match=r"model\.position_resize = 'dina'.*'dino'"):
        tiny_config(position_resize="dina")


@pytest.mark.parametrize("name", ["vits16", "vitb16", "vitl16", "ablation_vits16_300ep"])
def test_the_papers_recipes_have_dinos_rule(name):
    assert load_config(name).model.position_resize == "dino"


def test_a_run_takes_the_rule_of_what_it_starts_from(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    name = "vit_tiny_patch16_224"
    file = write_official(tmp_path / "dino.pth", {"teacher": loud(name)})
    plain = [f"model.{each}=null" for each in ("patch_size", "embed_dim", "depth", "num_heads")]
    plain += [f"model.backbone={name}", "model.drop_path=0", "views.global_size=224", "views.local_size=96"]
    dino = [*plain, f"model.init=dino:{file}"]
    config = resolve_init(tiny_training(tmp_path, *dino))
    assert config.model.position_resize == "dino" and resolve_init(config) == config
    assert resolve_init(tiny_training(tmp_path, *dino, "model.position_resize=timm")).model.position_resize == "timm"
    assert "model.position_resize stays timm" in caplog.text
    timms = resolve_init(tiny_training(tmp_path, *plain, f"model.init=timm:{name}", "model.weights=x.pth"))
    assert timms.model.position_resize == "timm"
    encoder = load_encoder(f"dino:{file}", arch=name, size=96)
    for side in (224, 96):  # at 96 the file's positions are resized once, when they are loaded
        sized = resolve_init(tiny_training(tmp_path, *dino, f"views.global_size={side}"))
        backbone = seeded_backbone(sized.model, side, seed=0)
        load_initial_weights(backbone, sized.model)
        ours = encoder_of_backbone(backbone.eval(), sized, "teacher")
        with torch.no_grad():
            torch.testing.assert_close(ours(random_images(96)), encoder(random_images(96)), atol=1e-5, rtol=1e-4)
    before = write_run(tmp_path / "before", tiny_config(position_resize="dino"))
    shape = [each for each in plain if each.endswith("=null")]
    assert resolve_init(tiny_training(tmp_path, *shape, f"model.init={before}")).model.position_resize == "dino"


def without_the_setting(run: Path) -> None:
    """As a version without it has written the configuration."""
    lines = (run / "config.yaml").read_text().splitlines(keepends=True)
    (run / "config.yaml").write_text("".join(line for line in lines if "position_resize" not in line))


def test_runs_from_before_the_setting_open_as_before(tmp_path):
    run, now, dino = (
        load_encoder(str(write_run(tmp_path / name, tiny_config(position_resize=rule))))
        for name, rule in (("old", "auto"), ("timm", "timm"), ("dino", "dino"))
    )
    without_the_setting(tmp_path / "old")
    old = load_encoder(str(tmp_path / "old"))
    assert old.fingerprint == run.fingerprint == now.fingerprint != dino.fingerprint
    assert "position_resize" not in old.model.architecture["sop_faiss"]
    with torch.no_grad():
        assert torch.equal(old(random_images(48)), now(random_images(48)))
        assert torch.equal(old(random_images(32)), dino(random_images(32)))
        assert not torch.allclose(old(random_images(48)), dino(random_images(48)), atol=1e-4)


def test_a_run_from_before_the_setting_goes_on_with_timms_rule(tmp_path, caplog):
    shards, output = write_shards(tmp_path / "shards"), tmp_path / "run"
    settings = (f"data.train={shards}", "train.epochs=1")
    run_training(tiny_training(tmp_path, *settings, "train.stop_after_steps=1"), output)
    without_the_setting(output)
    caplog.set_level(logging.INFO)
    recipe_of_now = tiny_training(tmp_path, *settings, "model.position_resize=dino", "train.stop_after_steps=2")
    assert run_training(recipe_of_now, output, resume=True).step == 2
    assert load_config(output / "config.yaml").model.position_resize == "auto"
    assert "model.position_resize stays auto" in caplog.text


# exports, features, indices


def test_exports_keep_the_rule_and_say_what_timm_does_otherwise(tmp_path):
    run, out = write_run(tmp_path / "run", tiny_config(position_resize="dino")), tmp_path / "out"
    told = CliRunner().invoke(export_command, [str(run), str(out)])
    assert told.exit_code == 0 and "32 x 32 pixels only" in told.stdout and told.stdout.count("\n") == 1
    assert "32 x 32 pixels only" in (out / "README.md").read_text()
    one, other = load_encoder(str(run)), load_encoder(str(out))
    assert one.fingerprint == other.fingerprint
    with torch.no_grad():
        assert torch.equal(one(random_images(48)), other(random_images(48)))
    plain = write_run(tmp_path / "plain")
    assert export_run(plain, tmp_path / "plain_out").caveat == ""
    assert "timm resizes" not in (tmp_path / "plain_out" / "README.md").read_text()
    content = json.loads((tmp_path / "plain_out" / "config.json").read_text())
    assert "position_resize" not in content["sop_faiss"]["model"]  # older versions read it


def test_an_index_is_not_searched_under_the_other_rule(tmp_path, network):
    path = tmp_path / "vit.safetensors"
    save_file(network.state_dict(), path)
    dino = load_encoder("timm:test_vit", weights=path, position_resize="dino", size=48)
    store = extract_features(dino, open_source(write_folder(tmp_path / "photos")))
    assert store.manifest["encoder"]["fingerprint"] == dino.fingerprint
    build_index(store, tmp_path / "index")
    FeatureIndex.open(tmp_path / "index").check_encoder(dino)
    with pytest.raises(SopError, match=r"positions resized as by DINO.*fingerprint"):
        FeatureIndex.open(tmp_path / "index").check_encoder(load_encoder("timm:test_vit", weights=path, size=48))
    assert load_file(path).keys() == network.state_dict().keys()
    assert np.isfinite(store.features).all()
