from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sop_faiss import load_encoder
from sop_faiss.config import load_config
from sop_faiss.errors import CheckpointError, ConfigError
from sop_faiss.model.backbones.build import seeded_backbone
from sop_faiss.model.device import choose_device
from sop_faiss.model.encoders.encoder import encoder_of_backbone
from sop_faiss.model.initial_weights import resolve_init
from tests.encoders import random_images, timm_network, tiny_config, write_official, write_run
from tests.messages import assert_one_line
from tests.runs import networks_of

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "photos")


# runs


@pytest.mark.parametrize(("student", "seed"), [(True, 1), (False, 2)])
def test_run_gives_the_teacher_unless_the_student_is_asked_for(run: Path, student: bool, seed: int) -> None:
    encoder = load_encoder(str(run), student=student)
    config = tiny_config()
    expected = seeded_backbone(config.model, 32, seed=seed).eval()
    with torch.no_grad():
        assert torch.equal(encoder(random_images()), expected(random_images()).cls)
    assert encoder.feature_dim == 32 and encoder.pooling == "cls"
    assert encoder.preprocess.crop == 32 and encoder.preprocess.multiple == 8
    assert encoder.preprocess.mean == config.views.mean and encoder.preprocess.std == config.views.std
    assert ("student" if student else "teacher") in encoder.name
    assert not encoder.training and not any(parameter.requires_grad for parameter in encoder.parameters())


def test_checkpoint_of_a_run_is_a_model_too(run: Path) -> None:
    (checkpoint,) = (run / "checkpoints").iterdir()
    assert load_encoder(str(checkpoint)).fingerprint == load_encoder(str(run)).fingerprint


def test_mean_pooling_is_the_mean_patch_token(run: Path) -> None:
    encoder = load_encoder(str(run), pooling="mean")
    with torch.no_grad():
        assert torch.equal(encoder(random_images()), encoder.model.backbone(random_images()).patches.mean(1))


# tokens


@pytest.mark.parametrize("pooling", ["cls", "mean", "gem", "cls_mean"])
@pytest.mark.parametrize("last_blocks", [None, 2])
def test_tokens_of_a_run_are_its_backbones(run: Path, pooling: str, last_blocks: int | None) -> None:
    if last_blocks and pooling in ("mean", "gem"):
        return  # refused
    encoder = load_encoder(str(run), pooling=pooling, last_blocks=last_blocks)
    with torch.no_grad():
        images = random_images(16, width=40)
        feature, tokens = encoder.tokens(images)
        assert torch.equal(feature, encoder(images))
        expected: Any = encoder.model.backbone.trunk.forward_features(images)
    assert torch.equal(tokens.cls, expected[:, 0]) and torch.equal(tokens.patches, expected[:, 1:])
    assert tokens.grid == (2, 5)


TIMM_TOKENS = {
    "test_vit": (64, (4, 4)),
    "test_vit2": (64, (4, 4)),  # a register and no [CLS]
    "vit_small_patch16_dinov3": (64, (4, 4)),
    "swin_tiny_patch4_window7_224": (64, (2, 2)),
    "test_resnet": (80, (3, 3)),
    "test_efficientnet": (80, (3, 3)),
}


@pytest.mark.parametrize(("name", "side", "grid"), [(name, *made) for name, made in TIMM_TOKENS.items()])
def test_tokens_of_timms_models_are_their_own(name: str, side: int, grid: tuple[int, int]) -> None:
    encoder = load_encoder(f"timm:{name}", random_weights=0)
    model: Any = encoder.model.backbone
    with torch.no_grad():
        images = random_images(side, count=2)
        feature, tokens = encoder.tokens(images)
        last = model.forward_features(images)
        assert torch.equal(feature, encoder(images))
    prefix = getattr(model, "num_prefix_tokens", 0)
    if last.ndim == 3:
        patches = last[:, prefix:]
    else:
        patches = (last if "swin" in name else last.permute(0, 2, 3, 1)).flatten(1, 2)
    assert torch.equal(tokens.patches, patches)
    has_cls = getattr(model, "cls_token", None) is not None
    assert torch.equal(tokens.cls, last[:, 0] if has_cls else feature)
    assert tokens.grid == grid


def test_tokens_of_an_official_checkpoint(tmp_path: Path) -> None:
    model = timm_network("test_vit", num_classes=0)
    file = write_official(tmp_path / "dino.pth", {"teacher": model, "student": timm_network("test_vit", 4)})
    encoder = load_encoder(f"dino:{file}", arch="test_vit", pooling="mean")
    with torch.no_grad():
        feature, tokens = encoder.tokens(random_images(160))
        expected: Any = model.forward_features(random_images(160))  # type: ignore[operator]
    torch.testing.assert_close(tokens.patches, expected[:, 1:])
    torch.testing.assert_close(feature, expected[:, 1:].mean(1))
    assert tokens.grid == (10, 10)


def test_tokens_of_a_convolutional_backbone_are_the_positions_of_its_last_map() -> None:
    config = tiny_config(backbone="test_resnet", patch_size=None, embed_dim=None, depth=None, num_heads=None)
    encoder = encoder_of_backbone(seeded_backbone(config.model, 64, 0), config, "live").eval()
    with torch.no_grad():
        feature, tokens = encoder.tokens(random_images(80, width=64))
        last = encoder.model.backbone.trunk.forward_features(random_images(80, width=64))
    assert tokens.grid == tuple(last.shape[2:]) == (3, 2)
    torch.testing.assert_close(tokens.patches, last.flatten(2).transpose(1, 2))
    assert torch.equal(feature, tokens.cls)


def test_a_model_without_a_grid_of_tokens_says_so() -> None:
    encoder = load_encoder("timm:levit_128s", random_weights=0)
    with pytest.raises(ConfigError) as error:
        encoder.tokens(random_images(224, count=1))
    assert_one_line(error, "levit_128s")


# poolings


def test_default_pooling_is_the_runs_global_token(tmp_path: Path) -> None:
    assert load_encoder(str(write_run(tmp_path / "run", tiny_config(global_token="mean")))).pooling == "mean"


def test_backbone_takes_other_sizes_and_shapes(run: Path) -> None:
    encoder = load_encoder(str(run), size=48)
    assert encoder.preprocess.crop == 48
    with torch.no_grad():
        assert encoder(random_images(48)).shape == encoder(random_images(40, width=64)).shape == (3, 32)


@pytest.mark.parametrize("file", ["config.yaml", "checkpoints/step_00000010/state.json"])
def test_run_with_a_file_missing_is_refused(tmp_path: Path, file: str) -> None:
    run = write_run(tmp_path / "run")
    (run / file).unlink()
    with pytest.raises(CheckpointError):
        load_encoder(str(run))


def test_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    other = (run / "config.yaml").read_text().replace("depth: 2", "depth: 3")
    (run / "config.yaml").write_text(other)
    with pytest.raises(CheckpointError, match=r"does not fit .* missing \(trunk\.blocks\.2\."):
        load_encoder(str(run))


# random weights


def test_random_weights_are_those_training_starts_from() -> None:
    config = tiny_config()
    student, _ = networks_of(config)
    baseline = encoder_of_backbone(seeded_backbone(config.model, 32, seed=config.train.seed), config, "baseline")
    ours = baseline.model.backbone.state_dict()
    assert all(torch.equal(value, ours[key]) for key, value in student.backbone.state_dict().items())


def test_config_with_random_weights(tmp_path: Path, run: Path) -> None:
    config = str(run / "config.yaml")
    zero, again, one = (load_encoder(f"config:{config}", random_weights=seed) for seed in (0, 0, 1))
    assert zero.fingerprint == again.fingerprint != one.fingerprint
    expected = seeded_backbone(tiny_config().model, 32, seed=0).state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in zero.model.backbone.state_dict().items())
    assert "random weights, seed 0" in zero.name


def test_timm_with_random_weights_is_seeded_and_leaves_the_generator_alone() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first, again, other = (load_encoder("timm:test_vit", random_weights=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert first.fingerprint == again.fingerprint != other.fingerprint


# the model's name and its options


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": "no/such/run"}, CheckpointError, "does not exist; wanted "),
        ({"model": "tim:resnet50"}, CheckpointError, "did you mean timm:"),
        ({"model": ""}, CheckpointError, "neither a checkpoint nor a run"),
        ({"model": __file__}, CheckpointError, "is a file"),
        ({"model": "timm:test_vit"}, CheckpointError, "comes without weights"),
        ({"model": "config:digits_demo"}, CheckpointError, "comes without weights"),
        ({"model": "config:no_such_config", "random_weights": 0}, ConfigError, "no_such_config"),
        ({"model": "timm:test_vit", "random_weights": -1}, ConfigError, "wanted a seed"),
        ({"model": "timm:test_vit", "weights": Path("no.pth")}, CheckpointError, "does not exist"),
        ({"model": "timm:test_vit", "weights": Path()}, CheckpointError, "is a directory: name a file in it"),
        ({"model": "dino:.", "arch": "test_vit"}, CheckpointError, "is a directory: name a file in it"),
        ({"model": "dino:no.pth", "arch": "test_vit"}, CheckpointError, "does not exist"),
        ({"model": "dino:no.pth"}, ConfigError, "needs `arch`"),
        ({"model": "timm:test_vit", "random_weights": 0, "size": 50}, ConfigError, "take 48 or 64"),
        ({"model": "timm:test_vit", "random_weights": 0, "size": 0}, ConfigError, "image size 0: wanted 1 to 7168"),
        ({"model": "timm:test_vit", "random_weights": 0, "size": 10**30}, ConfigError, f"image size {10**30}: "),
        ({"model": "timm:test_vit", "random_weights": 0, "pooling": "max"}, ConfigError, "wanted one of cls, mean"),
        ({"model": "timm:test_vit", "random_weights": 0, "weights": Path("w")}, ConfigError, "exclude each other"),
        ({"model": "timm:test_vit", "random_weights": 0, "by_position": True}, ConfigError, "give a weights file"),
        ({"model": "timm:test_vit", "arch": "test_vit"}, ConfigError, "`arch` does not apply"),
        ({"model": "timm:test_vit", "student": True}, ConfigError, "`student` does not apply"),
        ({"model": "runs/x", "weights": Path("w")}, ConfigError, "`weights` does not apply"),
        ({"model": "runs/x", "random_weights": 0}, ConfigError, "it is for timm: and config:"),
        ({"model": "timm:test_vit", "random_weights": 0, "device": "tpu"}, ConfigError, "device 'tpu'"),
        ({"model": "timm:test_vit", "random_weights": 0, "device": "cuda:99"}, ConfigError, "CUDA devices"),
    ],
)
def test_mistakes_are_one_line(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        load_encoder(**options)
    assert "\n" not in str(caught.value)


def started_from(model: str) -> None:
    resolve_init(load_config("digits_demo", [f"model.init={model}"]))


@pytest.mark.parametrize("take", [load_encoder, started_from])
def test_best_of_a_run_without_scores_says_what_to_name(tmp_path: Path, take: Callable[[str], Any]) -> None:
    (tmp_path / "checkpoints" / "step_00000007").mkdir(parents=True)
    with pytest.raises(CheckpointError) as caught:
        take(str(tmp_path / "best"))
    assert_one_line(caught, f"name {tmp_path}, whose newest teacher is taken", "trained without scores")


def test_automatic_device() -> None:
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert choose_device("cpu") == torch.device("cpu")


# fingerprint


def slow_fingerprint(architecture: str, tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(architecture.encode())
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"\n{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.numpy().tobytes(order="C"))
    return digest.hexdigest()


def test_fingerprint_is_of_architecture_and_tensors(vit_weights: Path) -> None:
    encoder = load_encoder("timm:test_vit", weights=vit_weights)
    tensors = {key: value for key, value in load_file(vit_weights).items() if not key.startswith("head.")}
    assert encoder.fingerprint == slow_fingerprint('{"timm": "test_vit"}', tensors)


def test_fingerprint_ignores_preprocessing_pooling_and_where_weights_came_from(
    tmp_path: Path, vit_weights: Path
) -> None:
    base = load_encoder("timm:test_vit", weights=vit_weights)
    torch.save(
        {"teacher": {f"backbone.{key}": value for key, value in load_file(vit_weights).items()}}, tmp_path / "t.pth"
    )
    dino = f"dino:{tmp_path / 't.pth'}"
    same = load_encoder(dino, arch="test_vit", pooling="mean", size=64, position_resize="timm")
    assert same.fingerprint == base.fingerprint
    changed = load_file(vit_weights)
    changed["norm.bias"][0] += 1e-6
    save_file(changed, tmp_path / "c.safetensors")
    assert load_encoder("timm:test_vit", weights=tmp_path / "c.safetensors").fingerprint != base.fingerprint
