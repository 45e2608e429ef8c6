"""The first layer filled with principal components of patches, against patches cut by loops."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sop_faiss.errors import ConfigError
from sop_faiss.model.backbones.first_layer import whiten_first_layer
from sop_faiss.model.checkpoint import read_tensors
from sop_faiss.verbs.training.train import run_training
from tests.images import write_shards
from tests.runs import tiny_config

SIZE = 3


def smooth_images(count: int = 40, side: int = 12) -> torch.Tensor:
    """Neighboring pixels and channels are alike, so that the components have very different variances."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(count, 3, side + 2, side + 2, generator=generator)
    smooth = nn.functional.avg_pool2d(noise, 3, stride=1) + noise.mean(1, keepdim=True)[:, :, 1:-1, 1:-1]
    return smooth + 0.3


def all_patches(images: torch.Tensor) -> torch.Tensor:
    side = images.shape[2] - SIZE + 1
    cut = [images[:, :, y : y + SIZE, x : x + SIZE].flatten(1) for y in range(side) for x in range(side)]
    return torch.cat(cut).double()


@pytest.mark.parametrize("bias", [False, True])
def test_outputs_are_uncorrelated_with_unit_variance_and_both_signs(bias: bool):
    layer, images = nn.Conv2d(3, 32, SIZE, bias=bias), smooth_images()
    assert whiten_first_layer(layer, images, seed=0) == 16
    found = layer(images).transpose(0, 1).flatten(1).double()
    negated = found - (layer.bias.double()[:, None] if bias else 0)
    torch.testing.assert_close(negated[16:], -negated[:16])
    assert ((found[:16].cov() - torch.eye(16)).abs() < 0.1).all()  # patches at random places stand for all
    if bias:
        assert found[:16].mean(1).abs().max() < 0.1


def test_components_are_those_of_most_variance():
    layer, images = nn.Conv2d(3, 8, SIZE, bias=False), smooth_images()
    whiten_first_layer(layer, images, seed=0)
    directions = torch.linalg.svd(all_patches(images) - all_patches(images).mean(0), full_matrices=False)[2]
    ours = nn.functional.normalize(layer.weight[:4].detach().flatten(1).double())
    assert ((ours @ directions[:4].T).norm(dim=1) > 0.95).all()


def test_filters_that_are_left_over_keep_their_weights():
    layer = nn.Conv2d(3, 60, SIZE, bias=False)
    before = layer.weight.detach().clone()
    assert whiten_first_layer(layer, smooth_images(), seed=0) == 27
    assert torch.equal(layer.weight[54:], before[54:])
    assert not torch.equal(layer.weight[:54], before[:54])


@pytest.mark.parametrize(
    ("network", "images"),
    [
        (nn.Linear(3, 4), smooth_images()),
        (nn.Conv2d(3, 6, SIZE, groups=3), smooth_images()),
        (nn.Conv2d(3, 8, 13), smooth_images()),
        (nn.Conv2d(3, 8, SIZE), smooth_images(count=0)),
    ],
)
def test_what_cannot_be_whitened_is_refused(network: nn.Module, images: torch.Tensor):
    with pytest.raises(ConfigError, match=r"model\.first_layer"):
        whiten_first_layer(network, images, seed=0)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("first_layer"), classes=2, per_class=12, size=20)


@pytest.mark.parametrize(("choice", "learns"), [("whitened", True), ("frozen", False)])
def test_a_run_starts_from_it_and_resumes_exactly(tmp_path, shards, choice: str, learns: bool):
    options = (f"model.first_layer={choice}", "train.checkpoint_every_steps=1")

    def run(steps: int, name: str, resume: bool = False):
        (tmp_path / name).mkdir(exist_ok=True)
        config = tiny_config(tmp_path, f"data.train={shards}", *options, f"train.stop_after_steps={steps}")
        run_training(config, tmp_path / name / "run", resume=resume)
        return read_tensors(tmp_path / name / "run" / "checkpoints" / f"step_{steps:08d}", "student")

    straight = run(3, "straight")
    first = run(1, "resumed")
    resumed = run(3, "resumed", resume=True)
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    name = next(name for name, value in first.items() if value.ndim == 4)
    assert torch.equal(first[name], straight[name]) is not learns
    kept = first[name].flatten(1)
    pairs = len(kept) // 2
    if not learns:
        torch.testing.assert_close(kept[pairs : 2 * pairs], -kept[:pairs])


def test_weights_that_would_be_replaced_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.first_layer.*model\.init"):
        tiny_config(tmp_path, "model.first_layer=whitened", "model.init=lite0")


def test_images_of_one_color_are_refused_and_leave_the_weights() -> None:
    layer = nn.Conv2d(3, 16, 3)
    before = layer.weight.detach().clone()
    with pytest.raises(ConfigError, match=r"model\.first_layer"):
        whiten_first_layer(layer, torch.full((8, 3, 16, 16), -0.7), seed=0)
    assert torch.equal(layer.weight, before)
