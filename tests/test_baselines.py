"""What an encoder must beat, measured by the same command."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from sop_faiss.cli.knn import main
from sop_faiss.cli.retrieve import main as retrieve
from sop_faiss.data.images.source import open_source
from sop_faiss.data.images.subset import Subset
from sop_faiss.evaluate import baselines
from sop_faiss.evaluate.baselines import small_images
from sop_faiss.evaluate.knn import knn_scores
from sop_faiss.evaluate.patch_dictionary import learn_dictionary
from sop_faiss.evaluate.sets.labeled_part import LabeledPart
from sop_faiss.features.extract import ExtractionOptions, extract_features
from sop_faiss.model.encoders.load import encoder_of_spec
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.verbs.scoring.knn import KnnOptions, evaluate_knn
from tests.images import encode, write_folder
from tests.messages import command_fails

RANDOM = EncoderSpec("timm:test_resnet", random_weights=0, size=32)


@pytest.fixture
def few_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "learn_dictionary", partial(learn_dictionary, patches=400, iterations=2))
    monkeypatch.setattr(baselines, "CENTROIDS", 20)


@pytest.fixture
def photos(tmp_path: Path) -> tuple[str, str]:
    train = write_folder(tmp_path / "train", classes=3, per_class=6, seed=1, prefix="")
    return str(train), str(write_folder(tmp_path / "test", classes=3, per_class=2, seed=2, prefix=""))


def test_all_three_are_in_the_json_and_the_table(
    photos: tuple[str, str], tmp_path: Path, few_patches: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baselines, "_SEED", 7)
    options = ("--train", photos[0], "--test", photos[1], "-k", "3", "-k", "5", "--json", str(tmp_path / "knn.json"))
    model = ("--model", "lite0", "--size", "64", "--baselines", "--images-per-class", "4")
    result = CliRunner().invoke(main, [*model, *options])
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "knn.json").read_text())
    found = content["baselines"]
    assert list(found) == ["raw pixels", "patch dictionary", "random weights"]
    for name, each in found.items():
        assert set(each["metrics"]) == {"top1_k3", "top5_k3", "top1_k5", "top5_k5"}
        line = next(line for line in result.stdout.splitlines() if line.strip().startswith(name))
        assert line.split()[-2:] == [f"{each['metrics'][f'top1_k{k}']:.2f}" for k in (3, 5)]
    assert found["patch dictionary"]["centroids"] == 20
    spec = EncoderSpec(
        "timm:tf_efficientnet_lite0", random_weights=7, size=64, pooling="gem", mean=(0.5,) * 3, std=(0.5,) * 3
    )
    alone = evaluate_knn(*photos, spec, KnnOptions((3, 5), part=LabeledPart(images_per_class=4)))
    assert not alone.baselines and "baselines" not in alone.content()
    assert found["random weights"]["metrics"]["top1_k3"] == alone.metrics["top1_k3"]


def test_the_same_images_vote_as_for_the_model(photos: tuple[str, str], few_patches: None) -> None:
    (Path(photos[0]) / "0" / "broken.jpg").write_bytes(b"no image")
    extraction = ExtractionOptions(max_bad_fraction=0.5)
    result = evaluate_knn(*photos, RANDOM, KnnOptions((3,), extraction=extraction, baselines=True))
    assert result.protocol["train_dropped"] == 1
    pixels = result.baselines[0]
    train, test = (open_source(each) for each in photos)
    usable = extract_features(encoder_of_spec(RANDOM), train, extraction)
    rows = [train.keys.index(key) for key in usable.keys]
    sources = (Subset(train, np.array(rows)), test)
    seen = [small_images(each, baselines.SIDE).reshape(len(each), -1).astype(float) for each in sources]
    centered = [each - seen[0].mean(0) for each in seen]
    unit = [(each / np.linalg.norm(each, axis=1, keepdims=True)).astype(np.float32) for each in centered]
    by_hand = knn_scores(unit[0], train.labels[rows], unit[1], test.labels, (3,))
    assert pixels.metrics == by_hand.metrics
    assert result.baselines[2].left_out and result.baselines[2].to_dict() == {"left_out": result.baselines[2].left_out}


def test_what_would_not_fit_is_left_out_and_said(
    photos: tuple[str, str], few_patches: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baselines, "_MOST_BYTES", 24 * 80 * 4)
    sets = ("--train", photos[0], "--test", photos[1])
    result = CliRunner().invoke(
        main,
        [*("--model", RANDOM.model, "--random-weights", "0", "--size", "32", "-k", "3", "--baselines"), *sets],
    )
    assert result.exit_code == 0, result.output
    assert "raw pixels: left out" in result.stdout and "patch dictionary: left out" not in result.stdout
    assert "random weights: left out" in result.stdout


def test_feature_stores_have_no_images(photos: tuple[str, str], tmp_path: Path) -> None:
    extract_features(encoder_of_spec(RANDOM), open_source(photos[0])).write(tmp_path / "store")
    message = command_fails(main, "--train", tmp_path / "store", "--test", tmp_path / "store", "--baselines", "-k", "3")
    assert "store" in message
    command = ("--model", RANDOM.model, "--random-weights", "0", "--size", "32", "--test", photos[1], "-k", "3")
    assert "--baselines" in command_fails(main, *command, "--train", tmp_path / "store", "--baselines")


def test_small_images_are_the_images_themselves_at_their_own_size(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (48, 48, 3), dtype=np.uint8)
    (tmp_path / "one.png").write_bytes(encode(pixels, "PNG"))
    source = open_source(tmp_path / "one.png")
    np.testing.assert_array_equal(small_images(source, 48)[0], pixels)
    assert small_images(source, 32).shape == (1, 32, 32, 3)


def test_retrieval_has_the_same_baselines(photos: tuple[str, str], few_patches: None, tmp_path: Path) -> None:
    file = tmp_path / "retrieve.json"
    command = ("--model", "lite0", "--size", "64", "--dataset", photos[0], "--baselines")
    result = CliRunner().invoke(retrieve, [*command, "--json", str(file)])
    assert result.exit_code == 0, result.output
    content = json.loads(file.read_text())
    assert list(content["baselines"]) == ["raw pixels", "patch dictionary", "random weights"]
    for name, each in content["baselines"].items():
        assert each["metrics"].keys() == content["metrics"].keys()
        line = next(line for line in result.stdout.splitlines() if line.strip().startswith(name))
        assert line.split()[-2:] == [f"{each['metrics'][metric]:.2f}" for metric in ("mAP", "R@1")]
    assert "--baselines" in command_fails(retrieve, *command, "--qe", "2")
