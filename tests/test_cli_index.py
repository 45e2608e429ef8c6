"""sop-index as a user types it."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from sop_faiss.cli import index_output
from sop_faiss.cli.index import main
from sop_faiss.data.images.source import open_source
from sop_faiss.features.extract import extract_features
from sop_faiss.features.store import FeatureStore
from sop_faiss.index.search import FeatureIndex
from sop_faiss.model.encoders.load import load_encoder
from tests.encoders import tiny_config, write_run
from tests.images import encode, make_image, write_folder, write_shards
from tests.oracle_neighbors import brute_force


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, images in class folders, their features, an index of them, and one of shards."""
    root = tmp_path_factory.mktemp("place")
    write_run(root / "run")
    write_folder(root / "photos", classes=3, per_class=4)
    write_shards(root / "shards", classes=3, per_class=5, seed=1)
    extract_features(load_encoder(str(root / "run")), open_source(root / "photos")).write(root / "features")
    invoke("build", "--features", root / "features", "--out", root / "photos.index", ok=True)
    invoke("build", "--model", root / "run", "--data", root / "shards", "--out", root / "shards.index", ok=True)
    return root


def invoke(*arguments: object, ok: bool = False) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert not ok or result.exit_code == 0, result.output
    return result


def assert_one_line_error(result: Result, message: str) -> None:
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: ") and message in last, result.stderr
    assert result.stderr.count("error: ") == 1 and "Traceback" not in result.stderr


@pytest.mark.parametrize("command", [[], ["build"], ["search"], ["info"]])
def test_help_explains_itself(command: list[str]) -> None:
    result = invoke(*command, "--help", ok=True)
    assert "Example" in result.output and f"sop-index {' '.join(command)}".strip() in result.output


# build


def test_build_of_features_and_of_images_agree(place: Path, tmp_path: Path) -> None:
    result = invoke("build", "--model", place / "run", "--data", place / "photos", "--out", tmp_path / "index", ok=True)
    assert result.stdout.startswith("12 vectors of dimension 32, Flat index in ") and result.stdout.count("\n") == 1
    ours, theirs = FeatureIndex.open(tmp_path / "index"), FeatureIndex.open(place / "photos.index")
    np.testing.assert_allclose(ours.features(range(12)), theirs.features(range(12)), atol=1e-6)
    assert ours.ids.keys == theirs.ids.keys and ours.manifest.encoder == theirs.manifest.encoder
    assert ours.manifest.class_names == ["class_0", "class_1", "class_2"]


def test_bad_images_are_counted(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "photos", tmp_path / "photos")
    (tmp_path / "photos" / "class_0" / "0000.jpg").write_bytes(b"not an image")
    arguments = ("build", "--model", place / "run", "--data", tmp_path / "photos", "--out", tmp_path / "index")
    strict = invoke(*arguments, "--max-bad-fraction", 0.01)
    assert_one_line_error(strict, "1 of 12 images are unusable")
    assert "--max-bad-fraction 0.01" in strict.stderr and "class_0/0000.jpg" in strict.stderr
    assert not (tmp_path / "index").exists()
    result = invoke(*arguments, ok=True)
    assert "left out: class_0/0000.jpg: not-an-image" in result.stderr
    assert "11 vectors" in result.stdout and "not-an-image 1 left out" in result.stdout
    assert "left out   not-an-image 1" in invoke("info", tmp_path / "index", ok=True).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name what to index"),
        (["--model", "{run}"], "name what to index"),
        (["{photos}", "--data", "{photos}"], "name them once"),
        (["--features", "{features}", "--data", "{photos}"], "leave --model, its options and --data out"),
        (["--features", "{features}", "{photos}"], "leave --model, its options and --data out"),
        (["--features", "{features}", "--size", "64"], "leave --model, its options"),
        (["--features", "{features}", "--factory", "IVF16,Flat"], "IVF16,Flat"),
        (["--features", "{place}/absent"], "does not exist"),
        (["--features", "{photos}"], "not a feature store"),
        (["--features", "{place}/photos.index"], "not the manifest of a feature store"),
        (["--model", "{place}/absent", "--data", "{photos}"], "does not exist"),
        (["--model", "{run}", "--data", "{place}/absent"], "does not exist"),
        (["--model", "{run}", "--data", "{photos}", "--batch-size", "0"], "--batch-size 0"),
    ],
)
def test_build_refuses_in_one_line(place: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    places = {"place": place, "run": place / "run", "photos": place / "photos", "features": place / "features"}
    result = invoke("build", "--out", tmp_path / "out", *(argument.format(**places) for argument in arguments))
    assert_one_line_error(result, message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("option", "field"), [("--batch-size=0", "--batch-size"), ("--max-bad-fraction=7", "--max-bad-fraction")]
)
def test_bad_values_are_refused_where_they_are_not_used(place: Path, tmp_path: Path, option: str, field: str) -> None:
    """With features or keys nothing is encoded, and a bad number is a mistake all the same."""
    for words in (
        ("build", "--features", place / "features", "--out", tmp_path / "new"),
        ("add", place / "shards.index", "--features", place / "features"),
        ("search", place / "photos.index", "--features", place / "features"),
        ("search", place / "photos.index", "--key", "0000"),
    ):
        assert_one_line_error(invoke(*words, option), field)
    assert not (tmp_path / "new").exists()


def test_an_occupied_output_is_refused_before_the_model_is_loaded(place: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("all of it")
    result = invoke("build", "--model", place / "absent", "--data", place / "photos", "--out", tmp_path)
    assert_one_line_error(result, "already exists and is not empty")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_features_with_nan_are_refused(place: Path, tmp_path: Path) -> None:
    import hashlib

    import pyarrow as pa
    import pyarrow.parquet as pq

    shutil.copytree(place / "features", tmp_path / "features")
    manifest = json.loads((tmp_path / "features" / "manifest.json").read_text())
    part = tmp_path / "features" / manifest["files"][0]["name"]
    table = pq.read_table(part)
    values = table["feature"].combine_chunks().flatten().to_numpy(zero_copy_only=False).copy()
    values[40] = np.nan
    column = pa.FixedSizeListArray.from_arrays(pa.array(values), 32)
    pq.write_table(table.set_column(table.column_names.index("feature"), "feature", column), part)
    manifest["files"][0]["sha256"] = hashlib.sha256(part.read_bytes()).hexdigest()
    (tmp_path / "features" / "manifest.json").write_text(json.dumps(manifest))
    result = invoke("build", "--features", tmp_path / "features", "--out", tmp_path / "out")
    assert_one_line_error(result, "NaN")
    assert not (tmp_path / "out").exists()


# search


def test_search_by_images_is_brute_force(place: Path, tmp_path: Path) -> None:
    files = [place / "photos" / "class_1" / "0002.jpg", place / "photos" / "class_0" / "0001.jpg"]
    arguments = ("search", place / "photos.index", *files, files[0], "--model", place / "run", "-k", 5)
    result = invoke(*arguments, "--json", tmp_path / "found.json", "--csv", tmp_path / "found.csv", ok=True)
    store = FeatureStore.read(place / "features")
    wanted_rows = [store.members.index(f"{file.parent.name}/{file.name}") for file in files]
    similarities, rows = brute_force(store.features[wanted_rows], store.features, 5)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["k"] == 5 and found["encoder"] == store.manifest["encoder"] and len(found["queries"]) == 2
    for query, line, values in zip(found["queries"], rows, similarities, strict=True):
        assert query["label"] is None
        assert [neighbor["row"] for neighbor in query["neighbors"]] == line.tolist()
        np.testing.assert_allclose([neighbor["similarity"] for neighbor in query["neighbors"]], values, atol=2e-6)
        assert [neighbor["key"] for neighbor in query["neighbors"]] == [store.keys[row] for row in line]
        assert all(neighbor["right"] is None for neighbor in query["neighbors"])
    with (tmp_path / "found.csv").open(newline="") as stream:
        lines = list(csv.DictReader(stream))
    assert [int(line["row"]) for line in lines] == rows.reshape(-1).tolist()
    said = f"JSON: {tmp_path / 'found.json'}\nCSV: {tmp_path / 'found.csv'}\n"
    assert result.stderr.endswith(said)
    assert result.stdout.count("\n") == 2 * 6 + 1 and f"{similarities[0, 0]:.4f}" in result.stdout


def test_search_by_a_folder_marks_right_and_wrong(place: Path, tmp_path: Path) -> None:
    write_folder(tmp_path / "queries", classes=3, per_class=1, seed=5)
    (tmp_path / "queries" / "class_0").rename(tmp_path / "queries" / "zebra")  # numbers shift, names still count
    page = tmp_path / "page.html"
    result = invoke(
        *("search", place / "photos.index", "--data", tmp_path / "queries", "--model", place / "run"),
        *("-k", 12, "--json", "-", "--html", page, "--by-label"),
        ok=True,
    )
    for query in json.loads(result.stdout)["queries"]:
        for neighbor in query["neighbors"]:
            assert neighbor["right"] is (query["label"] == neighbor["label"])
        assert sum(neighbor["right"] for neighbor in query["neighbors"]) == (0 if query["label"] == "zebra" else 4)
    assert result.stderr.endswith(f"page: {page}\n") and "JSON" not in result.stderr
    html = page.read_text()
    assert (
        html.count("<article") == 3 and html.count('<li class="hit right"') == 8 and "4 of 12 shown are right" in html
    )
    assert html.count("data:image/jpeg") == 3 + 36 and 'class="problem"' not in html
    words = ("search", place / "photos.index", "--data", tmp_path / "queries", "--model", place / "run")
    marked = invoke(*words, "--by-label", ok=True).stdout
    plain = invoke(*words, "--html", page, "--force", ok=True).stdout
    assert {line.split()[2] for line in marked.splitlines() if line.startswith("   ")} == {"+", "-"}
    assert " + " not in plain and " - " not in plain and "[class_1]" in plain  # a folder need not be a class
    assert '<li class="hit right"' not in page.read_text() and " right</div>" not in page.read_text()


def test_found_images_can_be_opened(place: Path, tmp_path: Path) -> None:
    """By their paths in all outputs; below --images-root where they have moved."""
    moved = shutil.copytree(place / "photos", tmp_path / "moved")
    for words, root in (((), place / "photos"), (("--images-root", moved), moved)):
        arguments = ("search", place / "photos.index", "--key", "class_0/0000", "-k", 3, *words)
        neighbors = json.loads(invoke(*arguments, "--json", "-", ok=True).stdout)["queries"][0]["neighbors"]
        lines = list(csv.DictReader(invoke(*arguments, "--csv", "-", ok=True).stdout.splitlines()))
        text = invoke(*arguments, ok=True).stdout.splitlines()[1:]
        opened = FeatureIndex.open(place / "photos.index")
        for neighbor, line, shown in zip(neighbors, lines, text, strict=True):
            path = str(root / opened.ids.members[neighbor["row"]])
            assert neighbor["path"] == line["path"] == shown.rpartition("  ")[2] == path and Path(path).is_file()
            assert neighbor["member"] is None and line["member"] == ""
    arguments = ("search", place / "shards.index", "--key", "00000003", "-k", 1)
    (neighbor,) = json.loads(invoke(*arguments, "--json", "-", ok=True).stdout)["queries"][0]["neighbors"]
    assert neighbor["path"].endswith(".tar") and neighbor["member"].endswith(".jpg")


def test_printed_folders_are_plain(place: Path, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    shutil.copytree(place / "photos", tmp_path / "photos")
    odd = tmp_path / "work" / ".." / "photos"
    invoke("build", odd, "--model", place / "run", "--out", tmp_path / "index", ok=True)
    assert f"images     {tmp_path / 'photos'}" in invoke("info", tmp_path / "index", ok=True).stdout
    for words in ((), (odd,)):
        said = invoke("sync", tmp_path / "index", *words, ok=True).stdout
        assert said.endswith(f"is up to date with {tmp_path / 'photos'}\n") and "12 unchanged" in said


def test_classes_that_cannot_be_compared_are_not_judged(place: Path, tmp_path: Path) -> None:
    write_folder(tmp_path / "queries", classes=2, per_class=1)
    arguments = ("search", place / "shards.index", "--data", tmp_path / "queries", "--model", place / "run")
    found = json.loads(invoke(*arguments, "--json", "-", ok=True).stdout)
    neighbors = [neighbor for query in found["queries"] for neighbor in query["neighbors"]]
    assert {neighbor["label"] for neighbor in neighbors} <= {"0", "1", "2"}
    assert all(neighbor["right"] is None for neighbor in neighbors)


def test_search_by_key_needs_no_encoder(place: Path, tmp_path: Path) -> None:
    result = invoke(
        *("search", place / "shards.index", "--key", "00000003", "--key", "00000004", "-k", 14),
        *("--html", tmp_path / "page.html", "--json", "-"),
        ok=True,
    )
    first, second = json.loads(result.stdout)["queries"]
    assert first["query"] == "00000003" and first["label"] == "0" and second["label"] == "1"
    keys = [neighbor["key"] for neighbor in first["neighbors"]]
    assert len(set(keys)) == 14 and "00000003" not in keys
    assert sum(neighbor["right"] for neighbor in first["neighbors"]) == 4
    assert (tmp_path / "page.html").read_text().count("data:image/jpeg") == 30


def test_threshold(place: Path) -> None:
    every = json.loads(invoke("search", place / "shards.index", "--key", "00000003", "--json", "-", ok=True).stdout)
    similarities = [neighbor["similarity"] for neighbor in every["queries"][0]["neighbors"]]
    threshold = (similarities[3] + similarities[4]) / 2
    arguments = ("search", place / "shards.index", "--key", "00000003", "--threshold")
    some = json.loads(invoke(*arguments, threshold, "--json", "-", ok=True).stdout)
    assert some["queries"][0]["neighbors"] == every["queries"][0]["neighbors"][:4]
    assert "nothing found" in invoke(*arguments, 1.0, ok=True).stdout


def test_moved_images(place: Path, tmp_path: Path) -> None:
    for name in ("photos", "photos.index"):
        shutil.copytree(place / name, tmp_path / name)
    opened = FeatureIndex.open(tmp_path / "photos.index")
    shutil.rmtree(tmp_path / "photos.index")
    features = FeatureStore.read(place / "features")
    features.manifest["root"] = str(tmp_path / "gone")
    shutil.rmtree(tmp_path / "gone", ignore_errors=True)
    features.write(tmp_path / "features")
    invoke("build", "--features", tmp_path / "features", "--out", tmp_path / "moved.index", ok=True)
    arguments = (
        "search",
        tmp_path / "moved.index",
        "--key",
        opened.ids.keys[0],
        "-k",
        3,
        "--html",
        tmp_path / "p.html",
    )
    invoke(*arguments, ok=True)
    assert (tmp_path / "p.html").read_text().count("missing: ") == 2 * 4
    assert "give --images-root" in invoke("info", tmp_path / "moved.index", ok=True).stdout
    invoke(*arguments, "--images-root", tmp_path / "photos", ok=True)
    assert (tmp_path / "p.html").read_text().count("data:image/jpeg") == 4
    (tmp_path / "file").write_text("")
    refused = CliRunner().invoke(main, [*map(str, arguments), "--images-root", str(tmp_path / "file")])
    assert refused.exit_code == 1 and f"--images-root {tmp_path / 'file'}" in refused.stderr


def test_csv_on_stdout(place: Path, tmp_path: Path) -> None:
    arguments = ("search", place / "shards.index", "--key", "00000003", "-k", 4, "--csv")
    result = invoke(*arguments, "-", ok=True)
    invoke(*arguments, tmp_path / "found.csv", ok=True)
    assert result.stdout_bytes == (tmp_path / "found.csv").read_bytes()
    assert len(list(csv.DictReader(result.stdout.splitlines()))) == 4


HOSTILE = "red\x1b[31m\nerror: none \x9b2J"


def test_names_that_terminals_would_obey(place: Path, tmp_path: Path) -> None:
    folder = tmp_path / f"photos{HOSTILE}"
    write_folder(folder, classes=2, per_class=2)
    for number in (0, 1):
        (folder / f"class_{number}").rename(folder / f"{HOSTILE}{number}")
    image = folder / f"{HOSTILE}0" / f"{HOSTILE}.jpg"
    (folder / f"{HOSTILE}0" / "0000.jpg").rename(image)
    index = tmp_path / f"index{HOSTILE}"
    write_run(tmp_path / f"run{HOSTILE}")
    shown = [
        invoke("build", "--model", tmp_path / f"run{HOSTILE}", "--data", folder, "--out", index, ok=True),
        invoke("info", index, ok=True),
        invoke("search", index, "--key", HOSTILE, "-k", 3, ok=True),
        invoke("search", index, image, "--model", place / "run", "-k", 3, ok=True),
        invoke("search", index, "--key", "nobody"),
        invoke("search", tmp_path / HOSTILE, "--key", "nobody"),
    ]
    for result in shown:
        assert "\x1b" not in result.output and "\x9b" not in result.output and "\nerror: none" not in result.output
    keys = [line.split() for line in shown[3].stdout.splitlines()]
    assert keys[0] == ["red?[31m", "error:", "none", "?2J"] and keys[1][2] == "red?[31m"
    found = json.loads(invoke("search", index, "--key", HOSTILE, "-k", 3, "--json", "-", ok=True).stdout)
    assert found["queries"][0]["query"] == HOSTILE  # data stays exact
    assert HOSTILE in invoke("search", index, "--key", HOSTILE, "-k", 3, "--csv", "-", ok=True).stdout


def test_csv_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert index_output.for_stdout("a\x1b,b\r\n") == b"a\x1b,b\r\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert index_output.for_stdout("a\x1b,b\r\n") == b"a?,b\r\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{index}"], "name the queries in one way"),
        (["{index}", "{image}", "--key", "x"], "name the queries in one way"),
        (["{index}", "--key", "0000", "--model", "{run}"], "--key needs no encoder"),
        (["{index}", "--key", "nobody"], "key 'nobody' is not in the index"),
        (["{index}", "--key", "class_0/0000", "-k", "12"], "wanted 1 <= k <= 11"),
        (["{index}", "{image}", "--model", "{run}", "-k", "13"], "wanted 1 <= k <= 12"),
        (["{index}", "{image}", "--model", "{run}", "-k", "0"], "wanted 1 <= k <= 12"),
        (["{index}", "{image}", "--model", "{run}", "--batch-size", "-1"], "--batch-size -1"),
        (["{index}", "{image}", "--model", "{run}", "--threshold", "1.5"], "threshold = 1.5"),
        (["{index}", "{image}", "--model", "{run}", "--threshold", "nan"], "threshold = nan"),
        (["{index}", "{image}", "--model", "{run}", "--student"], "fingerprint"),
        (["{index}", "{image}", "--model", "{run}", "--size", "48"], "crop 48 instead of 32"),
        (["{index}", "{image}", "--model", "{run}", "--pooling", "mean"], "'mean' instead of"),
        (["{index}", "{image}", "--model", "{place}/absent"], "does not exist"),
        (["{index}", "{place}/absent.jpg", "--model", "{run}"], "absent.jpg does not exist"),
        (["{index}", "{photos}", "--model", "{run}"], "name a folder with --data"),
        (["{index}", "--data", "{place}/absent", "--model", "{run}"], "does not exist"),
        (["{index}", "{place}/bad.jpg", "{image}", "--model", "{run}"], "not-an-image 1"),
        (["{place}/absent", "--key", "x"], "does not exist"),
        (["{features}", "--key", "x"], "not the manifest of an index"),
    ],
)
def test_search_refuses_in_one_line(place: Path, arguments: list[str], message: str) -> None:
    (place / "bad.jpg").write_bytes(b"not an image")
    places = {
        "place": place,
        "index": place / "photos.index",
        "run": place / "run",
        "photos": place / "photos",
        "features": place / "features",
        "image": place / "photos" / "class_0" / "0000.jpg",
    }
    assert_one_line_error(invoke("search", *(argument.format(**places) for argument in arguments)), message)


def test_a_image_of_any_kind_can_be_asked(place: Path, tmp_path: Path) -> None:
    gray = make_image(np.random.default_rng(0), (50, 20))[..., 0]
    (tmp_path / "gray.png").write_bytes(encode(gray, "PNG"))
    result = invoke("search", place / "photos.index", tmp_path / "gray.png", "--model", place / "run", "-k", 1, ok=True)
    assert result.stdout.startswith("gray\n   1  ")


def test_another_run_is_refused(place: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "other", tiny_config(depth=1))
    image = place / "photos" / "class_0" / "0000.jpg"
    assert_one_line_error(
        invoke("search", place / "photos.index", image, "--model", tmp_path / "other"), "build the index again"
    )


# info


def test_info(place: Path, tmp_path: Path) -> None:
    text = invoke("info", place / "photos.index", ok=True).stdout
    for words in ("12 of dimension 32, Flat", "every byte verified", "12 of 12, 3 class names", "pooling cls"):
        assert words in text
    assert "no tokens, no parts" in text
    facts = json.loads(invoke("info", place / "photos.index", "--json", ok=True).stdout)
    assert (facts["count"], facts["dimension"], facts["labeled"], facts["verified"]) == (12, 32, 12, True)
    assert facts["root_exists"] is True
    result = invoke("info", place / "photos.index", "--json", tmp_path / "facts.json", ok=True)
    assert result.stderr == f"JSON: {tmp_path / 'facts.json'}\n"
    assert json.loads((tmp_path / "facts.json").read_text()) == facts


def test_info_of_a_damaged_index(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "photos.index", tmp_path / "index")
    path = tmp_path / "index" / "index.faiss"
    path.write_bytes(path.read_bytes()[:-1])
    assert_one_line_error(invoke("info", tmp_path / "index"), "it was cut")


def test_as_a_process(place: Path) -> None:
    arguments = [sys.executable, "-m", "sop_faiss.cli.index", "info", str(place / "absent")]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_reader_that_leaves_early(place: Path) -> None:
    keys = [word for number in range(15) for word in ("--key", f"{number:08d}")]
    words = ["-m", "sop_faiss.cli.index", "search", str(place / "shards.index"), *keys * 20, "-k", "14"]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": buffered}
    with subprocess.Popen([sys.executable, *words], **pipes) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "00000000  [0]\n"
        process.stdout.close()  # as `| head -1` does; the rest is more than a pipe holds
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_an_index_of_fewer_than_ten_images_is_searched_without_k(place: Path, tmp_path: Path) -> None:
    photos = write_folder(tmp_path / "photos", classes=1, per_class=4)
    invoke("build", "--model", place / "run", "--data", photos, "--out", tmp_path / "index", ok=True)
    image = photos / "class_0" / "0002.jpg"
    result = invoke("search", tmp_path / "index", image, "--model", place / "run", "--json", "-", ok=True)
    assert len(json.loads(result.stdout)["queries"][0]["neighbors"]) == 4
    result = invoke("search", tmp_path / "index", "--key", "0002", "--json", "-", ok=True)
    assert len(json.loads(result.stdout)["queries"][0]["neighbors"]) == 3
