from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sop_faiss import load_encoder
from sop_faiss.errors import ConfigError
from sop_faiss.model.encoders.pooling import pool_tokens, pooling_name, split_pooling
from tests.encoders import random_images, timm_network, write_official, write_run

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "photos")


def slow_gem(patches: torch.Tensor) -> list[list[float]]:
    """One number at a time, in float64."""
    rows = []
    for image in patches.double().tolist():
        columns = zip(*image, strict=True)
        rows.append([(sum(max(x, 1e-6) ** 3 for x in column) / len(image)) ** (1 / 3) for column in columns])
    return rows


def test_poolings_of_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    cls, patches = torch.randn(2, 5, generator=generator), torch.randn(2, 7, 5, generator=generator)
    assert torch.equal(pool_tokens(cls, patches, (1, 7), "cls"), cls)
    assert torch.equal(pool_tokens(cls, patches, (1, 7), "mean"), patches.mean(1))
    assert torch.equal(pool_tokens(cls, patches, (1, 7), "cls_mean"), torch.cat([cls, patches.mean(1)], dim=1))
    torch.testing.assert_close(
        pool_tokens(cls, patches, (1, 7), "gem"), torch.tensor(slow_gem(patches)), atol=1e-6, rtol=1e-5
    )


def test_gem_lies_between_mean_and_maximum() -> None:
    patches = torch.rand(3, 9, 4, generator=torch.Generator().manual_seed(1))
    gem = pool_tokens(patches[:, 0], patches, (3, 3), "gem")
    assert (gem >= patches.mean(1) - 1e-6).all() and (gem <= patches.amax(1) + 1e-6).all()


@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (4, 6), (3, 5), (1, 4), (1, 1)])
def test_quadrants_are_four_means(rows: int, columns: int) -> None:
    patches = torch.rand(2, rows * columns, 3, generator=torch.Generator().manual_seed(2))
    found = pool_tokens(patches[:, 0], patches, (rows, columns), "quadrants").view(2, 4, 3)
    halves = [(range((size + 1) // 2), range(size // 2, size)) for size in (rows, columns)]
    for place, (ys, xs) in enumerate((ys, xs) for ys in halves[0] for xs in halves[1]):
        expected = torch.stack([patches[:, y * columns + x] for y in ys for x in xs]).mean(0)
        torch.testing.assert_close(found[:, place], expected)


def test_names_of_poolings() -> None:
    assert pooling_name("cls", None, 0) == "cls"
    assert pooling_name("cls", 1, 4) == "cls"
    assert pooling_name("cls_mean", 4, 4) == "cls_mean_last4"
    assert split_pooling("cls_mean_last4") == ("cls_mean", 4) and split_pooling("cls_mean") == ("cls_mean", 1)
    for pooling, blocks, available in (("cls", 2, 0), ("cls", 5, 4), ("cls", 0, 4), ("gem", 2, 4)):
        with pytest.raises(ConfigError):
            pooling_name(pooling, blocks, available)


def hooked_blocks(network: Any, images: torch.Tensor) -> list[torch.Tensor]:
    """The normed tokens after each block, caught on the way."""
    caught: list[torch.Tensor] = []
    hooks = [block.register_forward_hook(lambda *call: caught.append(call[2])) for block in network.blocks]
    with torch.no_grad():
        network(images)
        for hook in hooks:
            hook.remove()
        return [network.norm(tokens) for tokens in caught]


@pytest.mark.parametrize("pooling", ["cls", "cls_mean"])
def test_last_blocks_are_what_passes_through_the_network(vit_weights: Path, run: Path, pooling: str) -> None:
    for model, options in (("timm:test_vit", {"weights": vit_weights}), (str(run), {})):
        encoder = load_encoder(model, pooling=pooling, last_blocks=2, **options)  # type: ignore[arg-type]
        network: Any = encoder.model.backbone if model.startswith("timm") else encoder.model.backbone.trunk
        images = random_images(encoder.preprocess.crop)
        blocks = hooked_blocks(network, images)
        expected = [blocks[-2][:, 0], blocks[-1][:, 0]]
        if pooling == "cls_mean":
            expected.append(blocks[-1][:, 1:].mean(1))
        with torch.no_grad():
            torch.testing.assert_close(encoder(images), torch.cat(expected, 1), atol=TOLERANCE, rtol=TOLERANCE)
        assert encoder.pooling == f"{pooling}_last2"
        assert encoder.feature_dim == encoder(images).shape[1]


def test_one_last_block_is_the_plain_pooling(run: Path) -> None:
    encoder = load_encoder(str(run), last_blocks=1)
    assert encoder.pooling == "cls"


def test_convolutional_and_windowed_networks_have_gem_of_their_map(tmp_path: Path) -> None:
    for name, side in (("test_resnet", 64), ("test_efficientnet", 64)):
        network: Any = timm_network(name)
        save_file(network.state_dict(), tmp_path / f"{name}.safetensors")
        encoder = load_encoder(f"timm:{name}", weights=tmp_path / f"{name}.safetensors", pooling="gem")
        images = random_images(side)
        with torch.no_grad():
            found = encoder(images)
            expected = network.forward_features(images).clamp(min=1e-6).pow(3).mean((2, 3)).pow(1 / 3)
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.slow
def test_gem_of_a_channels_last_map() -> None:
    encoder = load_encoder("timm:swin_tiny_patch4_window7_224", random_weights=0, pooling="gem", size=64)
    network: Any = encoder.model.backbone
    with torch.no_grad():
        images = random_images(64)
        expected = network.forward_features(images).clamp(min=1e-6).pow(3).mean((1, 2)).pow(1 / 3)
        torch.testing.assert_close(encoder(images), expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("pooling", ["cls", "mean", "cls_mean", "gem", "quadrants"])
def test_official_dino_checkpoint_gives_timms_features(tmp_path: Path, pooling: str) -> None:
    """timm's weights under DINO's names, every pooling."""
    network: Any = timm_network("test_vit")
    path = write_official(tmp_path / "dino.pth", {"teacher": network, "student": timm_network("test_vit", seed=4)})
    encoder = load_encoder(f"dino:{path}", arch="test_vit", pooling=pooling)
    images = random_images(160)
    with torch.no_grad():
        tokens = network.forward_features(images)
        expected = pool_tokens(tokens[:, 0], tokens[:, 1:], (10, 10), pooling)
        torch.testing.assert_close(encoder(images), expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "timm:test_resnet", "last_blocks": 2}, "only ViTs"),
        ({"model": "timm:test_vit", "last_blocks": 99}, "blocks, wanted 1 to"),
        ({"model": "timm:test_vit", "last_blocks": 0}, "blocks, wanted 1 to"),
        ({"model": "timm:test_vit", "last_blocks": 2, "pooling": "gem"}, "wanted `pooling=cls` or cls_mean"),
        ({"model": "timm:test_resnet", "pooling": "cls_mean"}, "wanted one of pooled, gem"),
    ],
)
def test_mistakes_are_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_encoder(**options, random_weights=0)
    assert "\n" not in str(caught.value)
