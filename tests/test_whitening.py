from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

from sop_faiss import FeatureIndex, load_encoder
from sop_faiss.cli.embed import main  # type: ignore[import-not-found]
from sop_faiss.data.images.source import open_source
from sop_faiss.errors import CheckpointError, ConfigError, FeatureError, IndexMismatchError
from sop_faiss.features.extract import extract_features
from sop_faiss.features.store import FeatureStore
from sop_faiss.index.build import build_index
from sop_faiss.model.encoders.whitening import (
    WHITENING_FILE,
    Whitening,
    WhiteningOrigin,
    learn_whitening,
    read_whitening,
)
from tests.encoders import write_run
from tests.images import make_image, write_folder
from tests.messages import command_fails

ORIGIN = WhiteningOrigin("photos", "0" * 64, 50, "f" * 64, "cls")


def unit_rows(count: int, width: int, seed: int = 0) -> np.ndarray:
    """Rows of unit norm whose directions are anything but equally strong."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(count, width)) * np.linspace(0.2, 3, width) + rng.normal(size=width)
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def slow_whitened(train: np.ndarray, features: np.ndarray, dimension: int) -> np.ndarray:
    """By the eigenvectors of the covariance, as the published evaluation of revisited Oxford/Paris learns it."""
    mean = train.astype(np.float64).mean(0)
    values, vectors = np.linalg.eigh(np.cov(train.astype(np.float64).T, bias=True))
    strongest = np.argsort(values)[::-1][:dimension]
    turned = (features - mean) @ vectors[:, strongest] / np.sqrt(values[strongest])
    return turned / np.linalg.norm(turned, axis=1, keepdims=True)


def test_whitened_features_are_those_of_the_eigenvectors() -> None:
    train, test = unit_rows(300, 16), unit_rows(20, 16, seed=1)
    for dimension in (16, 5):
        found = learn_whitening(train, dimension, ORIGIN).apply(test)
        expected = slow_whitened(train, test, dimension)
        assert found.shape == (20, dimension) and found.dtype == np.float32
        np.testing.assert_allclose(found @ found.T, expected @ expected.T, atol=1e-5)  # directions may be mirrored
        np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)


def test_whitened_training_features_are_white_before_they_are_scaled() -> None:
    train = unit_rows(300, 8)
    whitening = learn_whitening(train, None, ORIGIN)
    turned = (train - whitening.mean) @ whitening.components.T
    np.testing.assert_allclose(turned.T @ turned / len(train), np.eye(8), atol=1e-3)


def test_no_more_directions_than_the_set_spans() -> None:
    train = unit_rows(5, 16)  # five rows span four directions around their mean
    assert learn_whitening(train, None, ORIGIN).dimension == 4
    with pytest.raises(ConfigError, match=r"photos span 4 .* 1 to 4"):
        learn_whitening(train, 5, ORIGIN)
    with pytest.raises(ConfigError, match="span 0"):
        learn_whitening(train[:1], None, ORIGIN)


def test_file_keeps_everything(tmp_path: Path) -> None:
    whitening = learn_whitening(unit_rows(50, 8), 3, ORIGIN)
    whitening.write(tmp_path / WHITENING_FILE)
    for path in (tmp_path, tmp_path / WHITENING_FILE):
        read = read_whitening(path)
        assert read.origin == ORIGIN and read.fingerprint == whitening.fingerprint
        assert np.array_equal(read.components, whitening.components) and np.array_equal(read.mean, whitening.mean)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    with pytest.raises(CheckpointError, match="does not exist"):
        read_whitening(file)
    file.write_bytes(b"no")
    with pytest.raises(CheckpointError, match="whitening"):
        read_whitening(file)
    save_file({"mean": np.zeros(3, np.float32)}, file)
    with pytest.raises(CheckpointError, match="whitening"):
        read_whitening(file)
    whitening = learn_whitening(unit_rows(50, 8), 3, ORIGIN)
    facts = {"format": "sop_faiss whitening 1", "origin": json.dumps(asdict(ORIGIN))}
    save_file({"mean": whitening.mean[:5].copy(), "components": whitening.components}, file, metadata=facts)
    with pytest.raises(CheckpointError, match="do not fit"):
        read_whitening(file)
    Whitening(whitening.mean * np.nan, whitening.components, ORIGIN).write(file)
    with pytest.raises(FeatureError, match="NaN"):
        read_whitening(file)


# with an encoder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "photos")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("data") / "photos")


def embed(*arguments: object) -> str:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_learned_whitening_travels_with_the_features(run: Path, photos: Path, tmp_path: Path) -> None:
    others = write_folder(tmp_path / "others", classes=0, per_class=20, seed=5)
    where = ["--data", photos, "--whiten", others, "--whiten-dim", 6, "--out", tmp_path / "white"]
    assert embed("--model", run, *where).startswith("12 features of dimension 6 in ")
    store, plain = FeatureStore.read(tmp_path / "white"), extract_features(load_encoder(str(run)), open_source(photos))
    learned_on = extract_features(load_encoder(str(run)), open_source(others)).features
    expected = slow_whitened(learned_on, plain.features, 6)
    np.testing.assert_allclose(store.features @ store.features.T, expected @ expected.T, atol=1e-3)
    facts = store.manifest["whitening"]
    assert (facts["set_name"], facts["images"], facts["dimension"]) == (str(others), 20, 6)
    assert store.manifest["pooling"] == f"cls, whitened to 6 ({facts['fingerprint'][:12]})"
    assert store.manifest["dimension"] == 6


def test_queries_are_whitened_alike_and_others_refused(run: Path, photos: Path, tmp_path: Path) -> None:
    embed("--model", run, "--data", photos, "--whiten", photos, "--whiten-dim", 4, "--out", tmp_path / "white")
    build_index(FeatureStore.read(tmp_path / "white"), tmp_path / "index")
    index = FeatureIndex.open(tmp_path / "index")
    encoder = load_encoder(str(run), whitening=tmp_path / "white")
    assert encoder.feature_dim == 4
    index.check_encoder(encoder)
    store = extract_features(encoder, open_source(photos))
    found = index.search(store.features, 1)
    assert found.rows[:, 0].tolist() == list(range(12))
    assert encoder.encode(make_image(np.random.default_rng(0))).shape == (1, 4)
    with pytest.raises(IndexMismatchError, match=r"another pooling .*'cls' instead of"):
        index.check_encoder(load_encoder(str(run)))
    with pytest.raises(ConfigError, match="learn it again"):
        load_encoder(str(run), whitening=tmp_path / "white", student=True)
    with pytest.raises(ConfigError, match="learn it again"):
        load_encoder(str(run), whitening=tmp_path / "white", pooling="mean")


def test_mistakes_are_one_line(run: Path, photos: Path, tmp_path: Path) -> None:
    where = ["--model", run, "--data", photos, "--out", tmp_path / "f"]
    assert "does not exist" in command_fails(main, *where, "--whiten", tmp_path / "none")
    assert "give --whiten SRC" in command_fails(main, *where, "--whiten-dim", 3)
    assert "wanted 1 or more" in command_fails(main, *where, "--whiten", photos, "--whiten-dim", 0)
    assert "span" in command_fails(main, *where, "--whiten", photos, "--whiten-dim", 30)
    assert "whitening" in command_fails(main, *where, "--whitening", tmp_path / "none")
    assert "give one of them" in command_fails(main, *where, "--whiten", photos, "--whitening", photos)
    assert not (tmp_path / "f").exists()
