"""sop-knn as a user types it: what it prints and writes, and one clear line for every mistake."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from sop_faiss.cli.knn import main
from sop_faiss.data.images.source import open_source
from sop_faiss.data.pack import pack
from sop_faiss.evaluate.sets.labeled_part import LabeledPart
from sop_faiss.features.extract import extract_features
from sop_faiss.features.store import FeatureStore
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.encoders.load import encoder_of_spec
from sop_faiss.model.encoders.spec import EncoderSpec
from tests.images import encode, make_image, write_folder, write_shards, write_tar
from tests.messages import command_fails

RESNET = ("--model", "timm:test_resnet", "--random-weights", "0", "--size", "32")
MANIFEST: dict[str, Any] = {
    "encoder": {"name": "made", "fingerprint": "f" * 64},
    "preprocess": {"resize": 32, "crop": 32},
    "pooling": "cls",
    "root": "/nowhere",
    "sources": ["made"],
}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def fails(*arguments: object) -> str:
    """Run, check that it fails as commands do, and return its line."""
    return command_fails(main, *arguments)


def write_store(directory: Path, seed: int, labels: np.ndarray | None, rows: int = 12, **manifest: Any) -> Path:
    """A store of unit rows near one axis per class."""
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((rows, 8)) * 0.1
    features[np.arange(rows), (np.zeros(rows, int) if labels is None else labels) % 8] += 1
    features = (features / np.linalg.norm(features, axis=1, keepdims=True)).astype(np.float32)
    keys = [f"{seed}-{row}" for row in range(rows)]
    store = FeatureStore(keys, labels, [""] * rows, keys, features, MANIFEST | manifest)
    store.write(directory)
    return directory


@pytest.fixture
def stores(tmp_path: Path) -> tuple[Path, Path]:
    labels = np.arange(12) % 3
    return write_store(tmp_path / "train", 1, labels), write_store(tmp_path / "test", 2, labels)


# ---- what it does ---------------------------------------------------------------------------------------------------


def test_two_feature_stores_without_a_model(stores: tuple[Path, Path], tmp_path: Path) -> None:
    file = tmp_path / "deep" / "knn.json"
    result = run("--train", stores[0], "--test", stores[1], "-k", 3, "-k", 12, "--json", file)
    assert result.exit_code == 0, result.output
    assert "12 test and 12 training images, 3 classes" in result.stdout
    content = json.loads(file.read_text())
    assert set(content) == {
        "command",
        "dataset",
        "protocol",
        "metrics",
        "intervals",
        "encoder",
        "environment",
        "seconds",
        "per_class",
    }
    assert content["command"] == "sop-knn"
    assert content["metrics"]["top1_k3"] == content["metrics"]["top1_best"] == 100.0
    assert set(content["metrics"]) == {"top1_k3", "top5_k3", "top1_k12", "top5_k12", "top1_best"}
    assert content["protocol"]["ks"] == [3, 12] and content["protocol"]["best_k"] == 3
    assert content["per_class"] == {str(label): {"images": 4, "right": 4, "top1": 100.0} for label in range(3)}
    assert content["encoder"] == MANIFEST["encoder"]
    environment = content["environment"]
    assert {"python", "torch", "faiss", "platform", "cpus"} <= set(environment)
    assert not any(str(value).startswith("/") for value in environment.values())


def test_json_alone_on_stdout(stores: tuple[Path, Path]) -> None:
    result = run("--train", stores[0], "--test", stores[1], "-k", 3, "--json", "-")
    assert json.loads(result.stdout)["metrics"]["top1_k3"] == 100.0
    assert "JSON" not in result.stderr


def test_a_directory_of_both_sets(stores: tuple[Path, Path], tmp_path: Path) -> None:
    named = run("--train", stores[0], "--test", stores[1], "-k", 3)
    both = run("--data", stores[0].parent, "-k", 3)
    assert both.exit_code == 0 and both.stdout == named.stdout
    assert "--test SRC" in fails("--train", stores[0]) and "--data" in fails("--data", tmp_path / "none")


def test_default_ks(stores: tuple[Path, Path], tmp_path: Path) -> None:
    many = write_store(tmp_path / "many", 3, np.arange(200) % 3, rows=200)
    result = run("--train", many, "--test", stores[1])
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.stdout.splitlines() if "%" not in line and line.split()][-4:] == [
        *("10", "20", "100", "200")
    ]


def test_progress_on_stderr_only(tmp_path: Path) -> None:
    write_folder(tmp_path / "train", classes=3, per_class=5, seed=1, prefix="")
    write_shards(tmp_path / "test", classes=3, per_class=2, seed=2)
    result = run(*RESNET, "--train", tmp_path / "train", "--test", tmp_path / "test", "-k", 15)
    assert result.exit_code == 0, result.output
    assert "embedding" in result.stderr and "embedding" not in result.stdout


def test_k_above_the_training_images(
    stores: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = ("--train", stores[0], "--test", stores[1])
    said = fails(*where)
    assert "200" in said and "k <= 12" in said
    assert "such as -k 12" in said
    assert "-k 13" in fails(*where, "-k", 3, "-k", 13)
    assert "-k 7, but 6 training images vote" in fails(*where, "-k", 7, "-k", 7, "--images-per-class", 2)
    photos = write_folder(tmp_path / "photos", classes=3, per_class=5, prefix="")
    monkeypatch.setattr(Encoder, "forward", lambda *_: pytest.fail("images were encoded first"))
    assert "go up to 200, but 15 training images" in fails(*RESNET, "--train", photos, "--test", stores[1])


def test_one_test_image_is_classified_as_among_others(stores: tuple[Path, Path], tmp_path: Path) -> None:
    one = write_store(tmp_path / "one", 5, np.array([1]), rows=1)
    arguments = ("--train", stores[0], "--test", one, "-k", 1, "-k", 12, "--json", tmp_path / "one.json")
    result = run(*arguments, "--confusion", tmp_path / "one.png")
    assert result.exit_code == 0 and "1 test and 12 training" in result.stdout, result.output
    metrics = json.loads((tmp_path / "one.json").read_text())["metrics"]
    assert metrics == dict.fromkeys(["top1_k1", "top5_k1", "top1_k12", "top5_k12", "top1_best"], 100.0)


def test_part_of_the_training_images(stores: tuple[Path, Path], tmp_path: Path) -> None:
    names = tmp_path / "list.txt"
    names.write_text("1-0\n1-1\n\n1-5\n")
    for arguments, count, part in (
        (("--train-list", names), 3, {"train_list": "list.txt"}),
        (("--train-share", 0.5, "--seed", 3), 6, {"train_share": 0.5, "seed": 3}),
        (("--labels", "50%", "--seed", 3), 6, {"train_share": 0.5, "seed": 3}),
        (("--images-per-class", 1), 3, {"images_per_class": 1, "seed": 0}),
    ):
        result = run("--train", stores[0], "--test", stores[1], "-k", 1, *arguments, "--json", tmp_path / "k.json")
        assert result.exit_code == 0, result.output
        protocol = json.loads((tmp_path / "k.json").read_text())["protocol"]
        assert (protocol["train_images"], protocol["train_images_of_all"]) == (count, 12)
        assert protocol["train_part"] == part
        assert f"and {count} training images" in result.stdout
        assert "wanted k <=" in fails("--train", stores[0], "--test", stores[1], "-k", count + 1, *arguments)
    sets = ("--train", stores[0], "--test", stores[1], "-k", 3)
    assert "in one way" in fails(*sets, "--train-share", 0.5, "--images-per-class", 1)
    assert "--train-share/--labels 0" in fails(*sets, "--labels", "0%")
    assert "or 1%" in run(*sets, "--labels", "half").stderr
    assert "lower it" in fails(*sets, "--images-per-class", 5)
    assert "cannot be read" in fails(*sets, "--train-list", tmp_path / "nowhere.txt")
    assert str(stores[0] / "k.json") in fails(*sets, "--train-list", names, "--json", stores[0] / "k.json")


def test_only_the_part_is_encoded(tmp_path: Path) -> None:
    """The other images are never read, and the result is that of a store of all of them."""
    train, test = (
        write_folder(tmp_path / name, classes=2, per_class=6, seed=seed) for name, seed in (("a", 1), ("b", 2))
    )
    part = LabeledPart(train_share=0.34, seed=1)
    extract_features(
        encoder_of_spec(EncoderSpec("timm:test_resnet", random_weights=0, size=32)), images := open_source(train)
    ).write(tmp_path / "store")
    assert images.labels is not None
    members = [images.member_of(row) for row in range(12)]
    for row in set(range(12)) - set(part.rows(images.labels, images.keys, members).tolist()):
        (train / members[row]).write_bytes(b"broken")
    words = (*RESNET, "--test", test, "-k", 3, "--train-share", 0.34, "--seed", 1, "--json", tmp_path / "k.json")
    results = []
    for source in (train, tmp_path / "store"):
        result = run("--train", source, *words)
        assert result.exit_code == 0, result.output
        results.append(json.loads((tmp_path / "k.json").read_text()))
    assert results[0]["metrics"] == results[1]["metrics"]
    for result in results:
        result["protocol"].pop("train")
    assert results[0]["protocol"] == results[1]["protocol"] and results[0]["protocol"]["train_images_of_all"] == 12


def test_accuracy_and_image_of_classes(tmp_path: Path) -> None:
    write_folder(tmp_path / "train", classes=3, per_class=4, seed=1)
    shutil.copytree(tmp_path / "train", tmp_path / "test")
    (tmp_path / "test" / "class_2" / "0000.jpg").rename(tmp_path / "test" / "class_0" / "other.jpg")
    csv_file, png_file = tmp_path / "classes.csv", tmp_path / "confusion.png"
    sets = ("--train", tmp_path / "train", "--test", tmp_path / "test")
    result = run(*RESNET, *sets, "-k", 1, "--per-class", csv_file, "--confusion", png_file)
    assert result.exit_code == 0, result.output
    lines = csv_file.read_text().splitlines()  # every copy finds itself, under the class that it was copied from
    assert lines == ["class,images,right,top1", "class_0,5,4,80.0000", "class_1,4,4,100.0000", "class_2,3,3,100.0000"]
    assert png_file.read_bytes().startswith(b"\x89PNG")
    assert result.stderr.splitlines()[-2:] == [f"CSV: {csv_file}", f"image: {png_file}"]


def test_labels_of_two_label_sets(stores: tuple[Path, Path], tmp_path: Path) -> None:
    cats = write_store(tmp_path / "cats", 3, np.arange(12) % 2, class_names=["cat", "dog"])
    cars = write_store(tmp_path / "cars", 4, np.arange(12) % 2, class_names=["bus", "car"])
    assert "cat and bus" in fails("--train", cats, "--test", cars)
    assert "without names" in fails("--train", cats, "--test", stores[1])
    assert "without names" in fails("--train", stores[0], "--test", cats)
    far = write_store(tmp_path / "far", 5, np.arange(12) % 3 + 7)
    assert "no class in common (such as 0 and 7)" in fails("--train", stores[0], "--test", far)


def test_store_and_images_of_the_same_encoder(tmp_path: Path) -> None:
    from sop_faiss.data.images.source import open_source
    from sop_faiss.features.extract import extract_features
    from sop_faiss.model.encoders.load import load_encoder

    train, test = write_folder(tmp_path / "a", seed=1), write_folder(tmp_path / "b", seed=2)
    encoder = load_encoder("timm:test_resnet", random_weights=0, size=32)
    extract_features(encoder, open_source(train)).write(tmp_path / "store")
    mixed = run(*RESNET, "--train", tmp_path / "store", "--test", test, "-k", 2, "--json", tmp_path / "1.json")
    both = run(*RESNET, "--train", train, "--test", test, "-k", 2, "--json", tmp_path / "2.json")
    assert mixed.exit_code == both.exit_code == 0, mixed.output + both.output
    first, second = (json.loads((tmp_path / f"{n}.json").read_text()) for n in (1, 2))
    assert first["metrics"] == second["metrics"]
    assert first["encoder"] == second["encoder"]
    other_seed = ("--model", "timm:test_resnet", "--random-weights", 1, "--size", 32)
    assert "their encoder differs" in fails(*other_seed, "--train", tmp_path / "store", "--test", test, "-k", 3)
    other_size = (*RESNET[:-1], 48)
    assert "their preprocessing differs" in fails(*other_size, "--train", tmp_path / "store", "--test", test, "-k", 3)


def test_classes_are_compared_by_name(tmp_path: Path) -> None:
    """The test folder lacks the first class, so its numbers are shifted; and it has a class of its own."""
    write_folder(tmp_path / "train", classes=3, per_class=4, seed=1)
    shutil.copytree(tmp_path / "train", tmp_path / "test")
    shutil.rmtree(tmp_path / "test" / "class_0")
    (tmp_path / "test" / "zebra").mkdir()
    (tmp_path / "test" / "zebra" / "a.jpg").write_bytes(encode(make_image(np.random.default_rng(3))))
    result = run(*RESNET, "--train", tmp_path / "train", "--test", tmp_path / "test", "-k", 1, "--json", tmp_path / "j")
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "j").read_text())
    assert content["metrics"]["top1_k1"] == pytest.approx(100 * 8 / 9)  # every copy finds itself, the zebra cannot
    assert content["protocol"]["test_images_of_unseen_classes"] == 1
    assert content["protocol"]["labels_compared_by"] == "name"
    assert "1 test images" in result.stderr


@pytest.mark.parametrize("command", ["knn", "linear"])
def test_classes_that_are_whole_numbers_are_those_numbers(tmp_path: Path, command: str) -> None:
    """As text, 10 comes before 2: folders, lists, shards with and without names, and stores must agree all the same."""
    train = write_folder(tmp_path / "train", classes=12, per_class=2, prefix="")
    images = {label: (train / str(label) / "0001.jpg").read_bytes() for label in (2, 9, 10, 11)}
    for label, content in images.items():
        folder = tmp_path / "folder" / f"{label:02d}"
        folder.mkdir(parents=True)
        (folder / "a.jpg").write_bytes(content)
    write_tar(
        tmp_path / "bare" / "a.tar",
        [
            (f"{label}.{ending}", content)
            for label, image in images.items()
            for ending, content in (("jpg", image), ("cls", str(label).encode()))
        ],
    )
    named = tmp_path / "named" / "a.tar"
    order = sorted(map(str, range(12)))
    members = [(f"{label}.jpg", image) for label, image in images.items()]
    members += [(f"{label}.cls", str(order.index(str(label))).encode()) for label in images]
    write_tar(named, sorted(members))
    (named.parent / "manifest.json").write_text(json.dumps({"classes": order, "shards": [{"name": "a.tar"}]}))
    lines = [f"folder/{label:02d}/a.jpg,{label}" for label in images]
    (tmp_path / "list.csv").write_text("\n".join(["path,label", *lines]))
    pack(str(tmp_path / "folder"), tmp_path / "packed")
    store = FeatureStore.read(write_store(tmp_path / "old", 1, np.array([1, 2]), rows=2, class_names=["1", "10", "2"]))
    assert store.labels is not None and store.labels.tolist() == [10, 2] and store.manifest["class_names"] is None
    metric, more = ("top1_best", ("-k", 1)) if command == "knn" else ("top1", ("--lr", 3))
    for test in ("folder", "bare", "named", "list.csv", "packed"):
        sets = ("--train", train, "--test", tmp_path / test)
        main = importlib.import_module(f"sop_faiss.cli.{command}").main
        result = CliRunner().invoke(main, [*map(str, (*RESNET, *sets, *more, "--json", tmp_path / "found.json"))])
        assert result.exit_code == 0, result.output
        found = json.loads((tmp_path / "found.json").read_text())
        assert found["metrics"][metric] == 100 and set(found["per_class"]) == {"2", "9", "10", "11"}, test
        assert found["protocol"]["labels_compared_by"] == "number"


def test_names_beside_numbers_are_refused(tmp_path: Path) -> None:
    """A folder `1`, `2`, `cat` has names; those of a set with `1` and `2` alone are numbers, and mean anything."""
    one, two = (write_folder(tmp_path / name, classes=3, prefix="") for name in ("one", "two"))
    (two / "2").rename(two / "cat")
    for train, test in ((one, two), (two, one)):
        message = fails(*RESNET, "--train", train, "--test", test, "-k", 1)
        assert "without names" in message and str(one) in message and str(two) in message


def test_help_shows_an_example() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert "sop-knn --model runs/photos --train" in result.stdout


# ---- what a user gets wrong -----------------------------------------------------------------------------------------


def test_stores_of_different_encoders(stores: tuple[Path, Path], tmp_path: Path) -> None:
    labels = np.arange(12) % 3
    changes: tuple[tuple[str, dict[str, Any]], ...] = (
        ("encoder", {"encoder": {"name": "other", "fingerprint": "0" * 64}}),
        ("preprocessing", {"preprocess": {"resize": 64, "crop": 64}}),
        ("pooling", {"pooling": "mean"}),
    )
    for what, manifest in changes:
        other = write_store(tmp_path / what, 3, labels, **manifest)
        assert f"their {what} differs" in fails("--train", stores[0], "--test", other)


def test_labels_that_are_missing(stores: tuple[Path, Path], tmp_path: Path) -> None:
    none = write_store(tmp_path / "none", 3, None)
    assert "but none has one" in fails("--train", none, "--test", stores[1])
    some = write_store(tmp_path / "some", 4, np.where(np.arange(12) < 5, -1, 1))
    assert "but 5 of 12 have none" in fails("--train", stores[0], "--test", some)
    flat = write_folder(tmp_path / "flat", classes=0)
    assert "needs a label for every image" in fails(*RESNET, "--train", stores[0], "--test", flat)


def test_model_missing_or_idle(stores: tuple[Path, Path], tmp_path: Path) -> None:
    images = write_folder(tmp_path / "images", prefix="")
    assert "give --model" in fails("--train", stores[0], "--test", images)
    assert "leave the encoder's options out" in fails(*RESNET, "--train", stores[0], "--test", stores[1])
    assert "encoder's options" in fails("--size", 32, "--train", stores[0], "--test", stores[1])


def test_bad_values_are_refused_between_two_stores(stores: tuple[Path, Path]) -> None:
    where = ("--train", stores[0], "--test", stores[1], "-k", 1)
    for option in ("--batch-size", "--workers", "--max-bad-fraction"):
        assert f"{option} -1" in fails(*where, option, -1)


def test_sources_that_cannot_be(stores: tuple[Path, Path], tmp_path: Path) -> None:
    train, _ = stores
    assert "every image would find itself" in fails("--train", train, "--test", train)
    assert "does not exist" in fails("--train", train, "--test", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "is empty" in fails(*RESNET, "--train", train, "--test", tmp_path / "empty")
    corrupt = write_folder(tmp_path / "corrupt", classes=2, per_class=2)
    for image in corrupt.rglob("*.jpg"):
        image.write_bytes(image.read_bytes()[:100])
    good = write_folder(tmp_path / "good", classes=2, per_class=2)
    assert "unusable" in fails(*RESNET, "--train", good, "--test", corrupt, "-k", 3)


def test_damaged_stores(stores: tuple[Path, Path], tmp_path: Path) -> None:
    train, test = stores
    (part,) = test.glob("features-*.parquet")
    whole = part.read_bytes()
    part.write_bytes(whole[: len(whole) // 2])
    assert part.name in fails("--train", train, "--test", test)
    part.write_bytes(whole)
    (test / "manifest.json").rename(tmp_path / "aside")
    assert "manifest.json" in fails("--train", train, "--test", test)


def test_features_with_nan(stores: tuple[Path, Path]) -> None:
    train, test = stores
    (part,) = test.glob("features-*.parquet")
    table = pq.read_table(part)
    column = table["feature"].combine_chunks()
    values = column.flatten().to_numpy().copy()
    values[3] = np.nan
    broken = type(column).from_arrays(values, 8)
    pq.write_table(table.set_column(4, "feature", broken), part)
    manifest = json.loads((test / "manifest.json").read_text())
    from sop_faiss.files import sha256_file

    manifest["files"][0]["sha256"] = sha256_file(part)
    (test / "manifest.json").write_text(json.dumps(manifest))
    assert "NaN" in fails("--train", train, "--test", test)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-k", 0), "each at least 1"),
        (("-k", 5, "-k", -3), "each at least 1"),
        (("--temperature", 0), "wanted above 0"),
        (("--temperature", "nan"), "wanted above 0"),
        (("--json", "."), "is a directory"),
        (("--json", Path(__file__) / "x.json"), "cannot be written"),
    ],
)
def test_impossible_options(stores: tuple[Path, Path], arguments: tuple[object, ...], message: str) -> None:
    assert message in fails("--train", stores[0], "--test", stores[1], "-k", 3, *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "runs/nothing"), "runs/nothing does not exist"),
        (("--model", "timm:test_resnet"), "without weights"),
        (("--model", "timm:test_resnett", "--random-weights", 0), "did you mean"),
        ((*RESNET, "--batch-size", 0), "--batch-size 0"),
        ((*RESNET, "--workers", 0), "--workers 0"),
        ((*RESNET, "--max-bad-fraction", 2), "--max-bad-fraction 2"),
        ((*RESNET, "--pooling", "max"), "--pooling max"),
        ((*RESNET, "--device", "tpu"), "device 'tpu'"),
    ],
)
def test_impossible_encoders(tmp_path: Path, arguments: tuple[object, ...], message: str) -> None:
    train, test = write_folder(tmp_path / "a"), write_folder(tmp_path / "b", seed=1)
    assert message in fails(*arguments, "--train", train, "--test", test, "-k", 3)


def test_usage_errors_of_click() -> None:
    assert run().exit_code == 2
    assert run("--train", "a", "--test", "b", "-k", "many").exit_code == 2
    assert run("--nonsense").exit_code == 2
