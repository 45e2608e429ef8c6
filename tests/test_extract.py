from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms

from sop_faiss.data.images.source import open_source
from sop_faiss.errors import ConfigError, DataError, FeatureError
from sop_faiss.features.extract import ExtractionOptions, extract_features
from sop_faiss.features.store import FeatureStore
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.encoders.load import load_encoder
from tests.encoders import tiny_config, write_run
from tests.images import encode, make_image, write_folder, write_shards

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    return load_encoder(str(write_run(tmp_path_factory.mktemp("runs") / "photos")))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty images of many shapes, lossless so that other decoders see the same pixels."""
    folder = tmp_path_factory.mktemp("mixed")
    rng = np.random.default_rng(0)
    for number in range(20):
        shape = (int(rng.integers(20, 90)), int(rng.integers(20, 90))) if number % 3 else (40, 60)
        (folder / f"{number:02d}.png").write_bytes(encode(make_image(rng, shape), "PNG"))
    return folder


def plain_features(encoder: Encoder, folder: Path) -> np.ndarray:
    """One image at a time: PIL, torchvision's transforms, unit norm."""
    prepare = transforms.Compose(
        [
            transforms.Resize(encoder.preprocess.resize, interpolation=transforms.InterpolationMode.BICUBIC),
            transforms.CenterCrop(encoder.preprocess.crop),
            transforms.ToTensor(),
            transforms.Normalize(list(encoder.preprocess.mean), list(encoder.preprocess.std)),
        ]
    )
    rows = []
    for path in sorted(folder.glob("*.png")):
        with Image.open(path) as image, torch.no_grad():
            rows.append(encoder(prepare(image.convert("RGB")).unsqueeze(0))[0].numpy())
    features = np.stack(rows)
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    return features


def test_features_are_those_of_plain_pillow(encoder: Encoder, mixed: Path) -> None:
    store = extract_features(encoder, open_source(mixed))
    plain = plain_features(encoder, mixed)
    assert store.features.dtype == np.float32 and store.features.shape == (20, 32)
    assert (store.features * plain).sum(1).min() > 1 - 1e-4  # cosine; resizing may differ by 2 of 255 in a pixel


def test_rows_follow_the_source(encoder: Encoder, tmp_path: Path) -> None:
    source = open_source(write_shards(tmp_path / "shards", classes=3, per_class=4))
    store = extract_features(encoder, source, ExtractionOptions(batch_size=5))
    assert source.labels is not None and store.labels is not None
    assert store.keys == source.keys
    assert np.array_equal(store.labels, source.labels)
    assert store.sources == [source.source_of(position) for position in range(12)]
    assert store.members == [source.member_of(position) for position in range(12)]
    store.check()


def test_folder_gives_files_relative_to_the_root(encoder: Encoder, tmp_path: Path) -> None:
    store = extract_features(encoder, open_source(write_folder(tmp_path / "photos", classes=2, per_class=2)))
    assert set(store.sources) == {""}
    root = Path(store.manifest["root"])
    assert all((root / member).is_file() for member in store.members)
    assert store.manifest["class_names"] == ["class_0", "class_1"]


def test_manifest_says_how_the_features_were_made(encoder: Encoder, mixed: Path) -> None:
    manifest = extract_features(encoder, open_source(mixed)).manifest
    assert manifest["encoder"] == {"name": encoder.name, "fingerprint": encoder.fingerprint}
    assert manifest["preprocess"] == encoder.preprocess.to_dict()
    assert (manifest["pooling"], manifest["dimension"], manifest["count"]) == ("cls", 32, 20)
    assert manifest["sources"] == [str(mixed)]
    assert manifest["dropped"] == {"count": 0, "reasons": {}, "images": []}


@pytest.mark.parametrize("keep_aspect", [False, True])
@pytest.mark.parametrize(("batch_size", "workers"), [(1, 1), (3, 2), (7, 1), (64, 4)])
def test_rows_do_not_depend_on_batches_or_workers(
    encoder: Encoder, mixed: Path, batch_size: int, workers: int, keep_aspect: bool
) -> None:
    preprocess = encoder.preprocess.keeping_aspect(48) if keep_aspect else None
    source = open_source(mixed)
    expected = extract_features(encoder, source, ExtractionOptions(4, 1), preprocess=preprocess)
    store = extract_features(encoder, source, ExtractionOptions(batch_size, workers), preprocess=preprocess)
    assert store.keys == expected.keys
    np.testing.assert_allclose(store.features, expected.features, atol=TOLERANCE, rtol=0)


def test_convnet_rows_do_not_depend_on_batches_either(mixed: Path) -> None:
    network = load_encoder("timm:test_resnet", random_weights=0, size=64)
    source = open_source(mixed)
    one, many = (extract_features(network, source, ExtractionOptions(batch_size=size)).features for size in (1, 20))
    np.testing.assert_allclose(one, many, atol=TOLERANCE, rtol=0)


def test_keeping_aspect_sees_the_whole_image(encoder: Encoder, mixed: Path) -> None:
    preprocess = encoder.preprocess.keeping_aspect(48)
    store = extract_features(encoder, open_source(mixed), preprocess=preprocess)
    assert store.manifest["preprocess"] == preprocess.to_dict()
    path = mixed / store.members[3]
    with Image.open(path) as image, torch.no_grad():
        image = np.asarray(image.convert("RGB"))
        raw = encoder(preprocess.normalize(torch.from_numpy(preprocess.apply(image)).unsqueeze(0)))[0].numpy()
    np.testing.assert_allclose(store.features[3], raw / np.linalg.norm(raw), atol=TOLERANCE)


def test_decoded_images_give_the_same_rows(encoder: Encoder, mixed: Path) -> None:
    images = []
    for path in sorted(mixed.glob("*.png")):
        with Image.open(path) as image:
            images.append(np.array(image.convert("RGB")))
    store = extract_features(encoder, open_source(mixed))
    np.testing.assert_allclose(encoder.encode(images, batch_size=6), store.features, atol=TOLERANCE)
    assert encoder.encode([]).shape == (0, 32)


def spoil(folder: Path, names: dict[str, bytes]) -> Path:
    for name, content in names.items():
        (folder / name).write_bytes(content)
    return folder


def test_bad_images_are_dropped_counted_and_listed(encoder: Encoder, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "photos", classes=0, per_class=8)
    whole = (folder / "0003.jpg").read_bytes()
    spoil(folder, {"0003.jpg": whole[: len(whole) // 2], "0005.jpg": b"", "0006.jpg": b"no image"})
    store = extract_features(encoder, open_source(folder), ExtractionOptions(3, max_bad_fraction=0.4))
    assert store.members == ["0000.jpg", "0001.jpg", "0002.jpg", "0004.jpg", "0007.jpg"]
    dropped = store.manifest["dropped"]
    assert dropped["count"] == 3 and store.manifest["count"] == 5
    assert dropped["reasons"] == {"truncated": 1, "empty": 1, "not-an-image": 1}
    assert [entry["member"] for entry in dropped["images"]] == ["0003.jpg", "0005.jpg", "0006.jpg"]
    assert [entry["reason"] for entry in dropped["images"]] == ["truncated", "empty", "not-an-image"]
    store.write(tmp_path / "store")
    assert FeatureStore.read(tmp_path / "store").manifest["dropped"] == dropped


def test_too_many_bad_images_are_one_line(encoder: Encoder, tmp_path: Path) -> None:
    folder = spoil(write_folder(tmp_path / "photos", classes=0, per_class=8), {"0003.jpg": b""})
    with pytest.raises(DataError, match=r"1 of 8 images are unusable so far \(empty 1; first .*0003") as caught:
        extract_features(encoder, open_source(folder))
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="every one is needed"):
        extract_features(encoder, open_source(folder), ExtractionOptions(max_bad_fraction=0.0))


def test_no_usable_image_is_an_error(encoder: Encoder, tmp_path: Path) -> None:
    folder = spoil(write_folder(tmp_path / "photos", classes=0, per_class=2), {"0000.jpg": b"", "0001.jpg": b"x"})
    with pytest.raises(DataError, match="no usable image"):
        extract_features(encoder, open_source(folder), ExtractionOptions(max_bad_fraction=1.0))


@pytest.mark.parametrize(("value", "message"), [(np.nan, "NaN or infinite"), (0.0, "is zero")])
def test_features_that_are_no_direction_are_refused(tmp_path: Path, mixed: Path, value: float, message: str) -> None:
    broken = load_encoder(str(write_run(tmp_path / "run")))
    with torch.no_grad():
        norm: Any = broken.model.backbone.get_submodule("trunk.norm")
        for parameter in norm.parameters():
            parameter.fill_(value)
    with pytest.raises(FeatureError, match=message):
        extract_features(broken, open_source(mixed))
    with pytest.raises(FeatureError, match=message):
        broken.encode(make_image(np.random.default_rng(0), 32))


def test_extraction_is_float32_without_gradients_and_restores_the_mode(encoder: Encoder, mixed: Path) -> None:
    source = open_source(mixed)
    expected = extract_features(encoder, source).features
    encoder.train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        features = extract_features(encoder, source).features
    assert encoder.training
    encoder.eval()
    np.testing.assert_allclose(features, expected, atol=TOLERANCE)
    assert torch.is_grad_enabled()


def test_progress_reaches_the_total(encoder: Encoder, mixed: Path) -> None:
    calls: list[tuple[int, int]] = []
    extract_features(encoder, open_source(mixed), progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (20, 20)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_threads_end_with_the_extraction(encoder: Encoder, mixed: Path, tmp_path: Path) -> None:
    bad = spoil(write_folder(tmp_path / "photos", classes=0, per_class=8), {"0003.jpg": b""})
    extract_features(encoder, open_source(mixed), ExtractionOptions(workers=3))
    with pytest.raises(DataError):
        extract_features(encoder, open_source(bad), ExtractionOptions(workers=3))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("decode")]


@pytest.mark.parametrize(
    "options",
    [{"batch_size": 0}, {"batch_size": 10**9}, {"workers": 0}, {"workers": 10**6}, {"max_bad_fraction": 1.5}],
)
def test_impossible_numbers_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError) as caught:
        ExtractionOptions(**options)  # type: ignore[arg-type]
    assert caught.value.arguments == tuple(options)


def test_live_backbone_is_an_encoder(mixed: Path) -> None:
    from sop_faiss.model.encoders.encoder import encoder_of_backbone
    from tests.runs import networks_of

    config = tiny_config()
    _, teacher = networks_of(config)
    live = encoder_of_backbone(teacher.backbone, config, "teacher at step 0")
    teacher.backbone.trunk.blocks[1].eval()
    modes = [module.training for module in teacher.modules()]
    store = extract_features(live, open_source(mixed))
    assert store.features.shape == (20, 32)
    assert [module.training for module in teacher.modules()] == modes
    assert live.model.backbone is teacher.backbone
