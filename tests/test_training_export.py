from __future__ import annotations

import dataclasses
import errno
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from click.testing import CliRunner
from PIL import Image
from safetensors import SafetensorError

from sop_faiss import FeatureIndex, load_encoder
from sop_faiss.cli.export import main  # type: ignore[import-not-found]
from sop_faiss.config import Config, EvaluateConfig, MasksConfig, ModelConfig, ObjectiveConfig, ViewsConfig
from sop_faiss.data.images.source import open_source
from sop_faiss.errors import CheckpointError, ConfigError, SopError
from sop_faiss.features.extract import extract_features
from sop_faiss.index.build import build_index
from sop_faiss.model.encoders.preprocess import Preprocess
from sop_faiss.model.export import is_export, timm_config
from sop_faiss.model.graphs import read_torch_export
from sop_faiss.report.model_card import ModelFacts, write_card
from sop_faiss.verbs.training.export import ExportOptions, export_run
from tests.encoders import random_images, tiny_config, write_run
from tests.images import make_image, write_folder
from tests.messages import assert_one_line, command_fails

TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = write_run(tmp_path_factory.mktemp("runs") / "photos")
    lines = [
        {"step": 1, "loss": 3.0},
        {"step": 5, "epoch": 0.5, "images": 20, "knn_top1_k20": 12.5, "mAP": None},
        {"step": 10, "knn_top1_k20": 37.5},
        {"step": 20, "knn_top1_k20": 99.0},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exports") / "photos"
    export_run(run, out)
    return out


def timms(directory: Path, images: torch.Tensor) -> torch.Tensor:
    """Features of timm's network, made of the directory alone."""
    network = timm.create_model(f"local-dir:{directory}", pretrained=True).eval()
    with torch.no_grad():
        features: torch.Tensor = network(images)
    return features


def ours(model: Path, images: torch.Tensor, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return load_encoder(str(model), **options)(images)


# through timm


def test_timm_loads_the_directory_with_equal_features(run: Path, exported: Path) -> None:
    for images in (random_images(32), random_images(48), random_images(40, width=64)):
        torch.testing.assert_close(timms(exported, images), ours(run, images), atol=TOLERANCE, rtol=TOLERANCE)


def test_timm_loads_by_pretrained_cfg_and_file(run: Path, exported: Path) -> None:
    content = json.loads((exported / "config.json").read_text())
    network = timm.create_model(
        content["architecture"],
        pretrained=True,
        pretrained_cfg=content["pretrained_cfg"],
        pretrained_cfg_overlay={"file": str(exported / "model.safetensors")},
        **content["model_args"],
    ).eval()
    with torch.no_grad():
        torch.testing.assert_close(network(random_images()), ours(run, random_images()), atol=TOLERANCE, rtol=TOLERANCE)


def test_timm_gives_it_a_classifier_where_one_is_asked_for(exported: Path) -> None:
    network = timm.create_model(f"local-dir:{exported}", pretrained=True, num_classes=7)
    assert network(random_images()).shape == (3, 7)
    own = timm.create_model(f"local-dir:{exported}", pretrained=True)
    assert torch.equal(network.blocks[0].attn.qkv.weight, own.blocks[0].attn.qkv.weight)


SWIN = ModelConfig(backbone="swin_tiny_patch4_window7_224", window_size=2)


@pytest.mark.parametrize(
    "config",
    [
        tiny_config(global_token="mean"),
        tiny_config(backbone="vit_small_patch16_224", patch_size=None, embed_dim=24, num_heads=3),
        pytest.param(Config(model=SWIN, views=ViewsConfig(global_size=64, local_count=0)), marks=pytest.mark.slow),
    ],
    ids=["mean", "patch16", "swin"],
)
def test_other_backbones_and_poolings(tmp_path: Path, config: Config) -> None:
    run = write_run(tmp_path / "run", config)
    result = export_run(run, tmp_path / "out")
    assert result.cosine > 0.9999
    images = random_images(config.views.global_size)
    torch.testing.assert_close(timms(tmp_path / "out", images), ours(run, images), atol=1e-5, rtol=1e-5)
    assert load_encoder(str(tmp_path / "out")).fingerprint == load_encoder(str(run)).fingerprint


def test_student_on_demand(run: Path, tmp_path: Path) -> None:
    result = export_run(run, tmp_path / "out", ExportOptions(student=True))
    assert result.name == "student of step_00000010"
    torch.testing.assert_close(timms(tmp_path / "out", random_images()), ours(run, random_images(), student=True))


def test_timm_prepares_images_alike(exported: Path) -> None:
    encoder = load_encoder(str(exported))
    network = timm.create_model(f"local-dir:{exported}", pretrained=True)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(network))
    image = make_image(np.random.default_rng(0), (50, 70))
    theirs = transform(Image.fromarray(image))
    images = encoder.preprocess.normalize(torch.from_numpy(encoder.preprocess.apply(image)).unsqueeze(0))
    assert theirs.shape == images.shape[1:]
    assert float((theirs - images[0]).abs().max()) < 0.05  # 2 of 255 levels in units of std


@pytest.mark.parametrize("size", [32, 96, 100, 224, 384, 518])
def test_timms_crop_share_means_the_same_resize(size: int) -> None:
    config = tiny_config()
    preprocess = Preprocess.square(size)
    content = timm_config(torch.nn.Identity(), config, preprocess, "0")
    assert int(size / content["pretrained_cfg"]["crop_pct"]) == preprocess.resize  # as timm computes it: floor


# as a model of this package


def test_export_is_the_same_encoder(run: Path, exported: Path) -> None:
    one, other = load_encoder(str(run)), load_encoder(str(exported))
    assert one.fingerprint == other.fingerprint
    assert one.preprocess == other.preprocess and one.pooling == other.pooling
    assert torch.equal(ours(run, random_images()), ours(exported, random_images()))
    assert is_export(exported) and not is_export(run)


def test_index_of_the_run_is_searched_with_the_export(run: Path, exported: Path, tmp_path: Path) -> None:
    store = extract_features(load_encoder(str(run)), open_source(write_folder(tmp_path / "photos")))
    build_index(store, tmp_path / "index")
    FeatureIndex.open(tmp_path / "index").check_encoder(load_encoder(str(exported)))
    with pytest.raises(SopError, match="fingerprint"):
        FeatureIndex.open(tmp_path / "index").check_encoder(load_encoder(str(run), student=True))


def copy_of(exported: Path, target: Path) -> Path:
    target.mkdir()
    for name in ("config.json", "model.safetensors"):
        (target / name).write_bytes((exported / name).read_bytes())
    return target


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config: config.pop("sop_faiss"), "not of sop-export"),
        (lambda config: config["sop_faiss"].update(format="1"), "not of sop-export"),
        (lambda config: config["sop_faiss"].update(model=None), "no model or no views"),
        (lambda config: config["sop_faiss"]["model"].update(depth="deep"), "model.depth"),
        (lambda config: config["sop_faiss"]["model"].update(evil=1), "unknown configuration key"),
        (lambda config: config["sop_faiss"]["model"].update(depth=3), "does not fit"),
        (lambda config: config["sop_faiss"]["model"].update(backbone="no_such"), "timm has no model"),
        (lambda config: config["sop_faiss"]["views"].update(std=[0, 0, 0]), "std"),
        (lambda config: config["sop_faiss"].update(weights_sha256="0"), "damaged or was changed"),
    ],
)
def test_changed_config_is_refused(exported: Path, tmp_path: Path, change: Any, message: str) -> None:
    copy = copy_of(exported, tmp_path / "copy")
    content = json.loads((copy / "config.json").read_text())
    change(content)
    (copy / "config.json").write_text(json.dumps(content))
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        load_encoder(str(copy))
    assert_one_line(caught, message)


def test_damaged_export_is_refused(exported: Path, tmp_path: Path) -> None:
    copy = copy_of(exported, tmp_path / "copy")
    (copy / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks model\.safetensors"):
        load_encoder(str(copy))
    (copy / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        load_encoder(str(copy))


def test_export_has_no_student(exported: Path) -> None:
    with pytest.raises(ConfigError, match="an export holds one network"):
        load_encoder(str(exported), student=True)


# what is written


def test_nothing_but_the_backbone_is_in_it(exported: Path) -> None:
    from safetensors.torch import load_file

    names = set(load_file(exported / "model.safetensors"))
    assert "cls_token" in names and not [name for name in names if "mask" in name or "projector" in name]
    assert {file.name for file in exported.iterdir()} == {"README.md", "config.json", "model.safetensors"}


def test_card_tells_how_to_load_it_and_what_was_measured(run: Path, exported: Path) -> None:
    card = (exported / "README.md").read_text()
    assert 'timm.create_model("local-dir:photos", pretrained=True)' in card
    assert "AutoModel.from_pretrained" in card and "sop-index build --model photos" in card
    scores = re.findall(r"^\| (\d+) \| (\w+) \| ([\d.]+) \|$", card, re.MULTILINE)
    # what the run measured up to the exported checkpoint's step, 10; it went on to 20
    assert scores == [("5", "knn_top1_k20", "12.5"), ("10", "knn_top1_k20", "37.5")]
    assert "memory of at most" in card and "1 tasks" not in card and "Image.open" in card
    assert "mask token and the projector" in card
    assert str(run.parent) not in card and "None" not in card


def test_card_names_the_feature_that_was_scored(run: Path, exported: Path) -> None:
    assert "--mirrored" not in (exported / "README.md").read_text()
    config = Config(evaluate=EvaluateConfig(pooling="quadrants", mirrored=True))
    facts = ModelFacts("photos", "teacher", "best", 10, "0" * 64, 64, "cls", 1000, "0.3")
    card = write_card(facts, config, Preprocess.square(64).to_dict(), [{"step": 10, "knn_top1_k20": 37.5}])
    assert "`--pooling quadrants --mirrored`" in card


def test_card_without_scores(tmp_path: Path) -> None:
    export_run(write_run(tmp_path / "run"), tmp_path / "out")
    assert "The run measured none" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("kind", "method", "terms"),
    [
        ("massl", "MaSSL", ["memory of at most 131,072 rows, compared in blocks of 16,384"]),
        ("dino", "DINO", ["65,536 learned prototypes"]),
        ("ibot", "iBOT", ["weight 1, 8,192 learned prototypes"] * 2),
    ],
)
def test_card_names_the_objective(tmp_path: Path, kind: str, method: str, terms: list[str]) -> None:
    masks = MasksConfig(kind="block" if kind == "ibot" else "none")
    config = dataclasses.replace(tiny_config(), objective=ObjectiveConfig(kind), masks=masks)
    export_run(write_run(tmp_path / "run", config), tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"*{method}*" in card and "Self-Organizing" not in card
    assert re.findall(r"^\| .* loss \| (.*) \|$", card, re.MULTILINE) == terms


def test_a_full_disk_is_told_and_leaves_nothing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(tensors: object, file: Path, metadata: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("sop_faiss.verbs.training.export.save_file", no_room)
    with pytest.raises(OSError) as caught:
        export_run(run, tmp_path / "out")
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(tmp_path / "out" / "model.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_others_may_read_the_files(exported: Path) -> None:
    plain = exported.parent / "plain"
    plain.touch()
    assert {path.stat().st_mode for path in exported.iterdir()} == {plain.stat().st_mode}


def test_network_that_timm_rebuilds_otherwise_is_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sop_faiss.model.export as export

    original = export.model_arguments
    monkeypatch.setattr(export, "model_arguments", lambda *a: {**original(*a), "global_pool": "avg", "fc_norm": False})
    with pytest.raises(CheckpointError, match="gives other features"):
        export_run(run, tmp_path / "out")
    monkeypatch.setattr(export, "model_arguments", lambda *a: {**original(*a), "depth": 1})
    with pytest.raises(CheckpointError, match="does not rebuild"):
        export_run(run, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# graphs


@pytest.mark.slow
def test_torch_export(run: Path, tmp_path: Path) -> None:
    export_run(run, tmp_path / "out", ExportOptions(torch_export=True))
    for count in (1, 2, 5):
        features = read_torch_export(tmp_path / "out" / "model.pt2", random_images(32, count))
        torch.testing.assert_close(features, ours(run, random_images(32, count)), atol=1e-5, rtol=1e-5)
    assert "`model.pt2` (torch.export)" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_onnx(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    reference = pytest.importorskip("onnx.reference")
    export_run(run, tmp_path / "out", ExportOptions(onnx=True))
    evaluator = reference.ReferenceEvaluator(str(tmp_path / "out" / "model.onnx"))
    for count in (1, 3):
        images = random_images(32, count)
        (features,) = evaluator.run(None, {"images": images.numpy()})
        np.testing.assert_allclose(features, ours(run, images).numpy(), atol=1e-5)


def test_onnx_without_its_packages_is_one_line(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'sop-faiss[onnx]'" in command_fails(main, run, tmp_path / "out", "--onnx")
    assert not (tmp_path / "out").exists()


# the command


def test_command(run: Path, tmp_path: Path) -> None:
    (checkpoint,) = (run / "checkpoints").iterdir()
    result = CliRunner().invoke(main, [str(checkpoint), str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("README.md, config.json, model.safetensors in ") and result.stdout.count("\n") == 1
    assert load_encoder(str(run)).fingerprint[:12] in result.stdout and "cosine 1.000000" in result.stdout


def test_mistakes_are_one_line(run: Path, exported: Path, tmp_path: Path) -> None:
    assert "does not exist" in command_fails(main, tmp_path / "none", tmp_path / "out")
    assert f"name {run}, whose newest" in command_fails(main, run / "best", tmp_path / "out")
    assert f"name {run}, whose newest" in command_fails(main, run / "best", tmp_path / "out", "--adapter")
    assert "is a file" in command_fails(main, run / "config.yaml", tmp_path / "out")
    assert str(exported) in command_fails(main, exported, tmp_path / "out")
    assert "neither a checkpoint nor a run" in command_fails(main, tmp_path, tmp_path / "out")
    assert "not empty" in command_fails(main, run, run)
    assert not (tmp_path / "out").exists()
