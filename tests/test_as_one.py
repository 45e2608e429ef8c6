"""`sop-index search` with --together, --minus, --where, --table and --unique, as a user types it."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from sop_faiss.cli.index import main
from sop_faiss.data.images.source import open_source
from sop_faiss.features.extract import extract_features
from sop_faiss.index.find import find, find_others
from sop_faiss.index.narrowed import Narrowing, combined_query
from sop_faiss.index.rerank.reranker import open_reranker
from sop_faiss.index.rerank.settings import Rerank
from sop_faiss.index.search import FeatureIndex
from sop_faiss.model.encoders.load import load_encoder
from sop_faiss.verbs.finding.as_one import name_of_all
from tests.encoders import write_run
from tests.images import write_folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("place")
    write_run(root / "run")
    write_folder(root / "photos", classes=3, per_class=4)
    extract_features(load_encoder(str(root / "run")), open_source(root / "photos")).write(root / "features")
    invoke("build", "--model", root / "run", "--data", root / "photos", "--out", root / "photos.index")
    keys = FeatureIndex.open(root / "photos.index").ids.keys
    (root / "shop.csv").write_text("key,price\n" + "".join(f"{key},{number}\n" for number, key in enumerate(keys)))
    return root


def invoke(*arguments: object, ok: bool = True) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert not ok or result.exit_code == 0, result.output
    return result


def assert_one_line_error(result: Result, message: str) -> None:
    assert result.exit_code == 1 and result.stdout == "", result.output
    assert message in result.stderr and result.stderr.count("error: ") == 1, result.stderr


def found(place: Path, *arguments: object) -> dict[str, Any]:
    return json.loads(invoke("search", place / "photos.index", *arguments, "--json", "-").stdout)


def rows_of(content: dict[str, Any]) -> list[list[int]]:
    return [[each["row"] for each in query["neighbors"]] for query in content["queries"]]


def test_keys_together_less_another(place: Path) -> None:
    index = FeatureIndex.open(place / "photos.index")
    one, two, three = index.ids.keys[:3]
    query = combined_query(index.unit_features([0, 1]), index.unit_features([2]))
    wanted = [row for row in index.search(query, 12).rows[0].tolist() if row > 2][:4]
    content = found(place, "--key", one, "--key", two, "--minus", three, "-k", 4)
    assert rows_of(content) == [wanted] and content["queries"][0]["query"] == f"{one} + {two} - {three}"
    assert content["minus"] == [three] and content["together"] is True
    mean = combined_query(index.features([0, 1]))
    wanted = [row for row in index.search(mean, 12).rows[0].tolist() if row > 1][:4]
    assert rows_of(found(place, "--key", one, "--key", two, "--together", "-k", 4)) == [wanted]


def test_images_data_and_features_together(place: Path) -> None:
    index = FeatureIndex.open(place / "photos.index")
    members = [place / "photos" / member for member in index.ids.members]
    query = combined_query(index.features([0, 5]), index.features([7]))
    wanted = index.search(query, 5).rows.tolist()
    assert rows_of(found(place, members[0], members[5], "--minus", members[7], "-k", 5)) == wanted
    mean = index.search(combined_query(index.features(range(12))), 5).rows.tolist()
    assert rows_of(found(place, "--data", place / "photos", "--together", "-k", 5)) == mean
    assert rows_of(found(place, "--features", place / "features", "--together", "-k", 5)) == mean
    page = place / "found.html"
    invoke("search", place / "photos.index", members[0], members[5], "--together", "--html", page)
    assert " + " in page.read_text()


def test_where_and_unique(place: Path) -> None:
    index = FeatureIndex.open(place / "photos.index")
    names = index.manifest.class_names
    assert names is not None and index.ids.labels is not None
    key = index.ids.keys[0]
    content = found(place, "--key", key, "--where", f"label = '{names[1]}'")
    assert sorted(rows_of(content)[0]) == np.flatnonzero(index.ids.labels == 1).tolist()
    some = found(place, "--features", place / "features", "--table", place / "shop.csv", "--where", "price >= 9")
    assert all(sorted(rows) == [9, 10, 11] for rows in rows_of(some)) and len(some["queries"]) == 12
    result = invoke("search", place / "photos.index", "--key", key, "--unique", -1)
    assert "(+10 alike)" in result.stdout and "folded: 10 " in result.stderr
    (first,) = found(place, "--key", key, "--unique", -1)["queries"][0]["neighbors"]
    assert len(first["folded"]) == 10
    lines = list(
        csv.reader(
            invoke("search", place / "photos.index", "--key", key, "--unique", -1, "--csv", "-").stdout.split("\n")
        )
    )
    assert lines[0][-1] == "folded" and lines[1][-1] == "10"
    above = found(place, "--key", key, "--threshold", -1, "--where", f"label <> '{names[0]}'", "--unique", 1)
    assert set(rows_of(above)[0]) == set(np.flatnonzero(index.ids.labels > 0))


@pytest.mark.parametrize("method", ["global", "diffusion"])
def test_reranked_together_with_the_others(place: Path, method: str) -> None:
    index = FeatureIndex.open(place / "photos.index")
    keys = index.ids.keys
    reranker = open_reranker(index, Rerank(method))
    rerank = ("--rerank", method)
    narrowing = Narrowing(np.arange(3, 12), 0.9)
    line, folded = find_others(index, [5], 4, 0.1, narrowing, reranker)[0]
    words = ("--table", place / "shop.csv", "--where", "price >= 3", "--unique", 0.9, "--threshold", 0.1)
    (query,) = found(place, "--key", keys[5], *words, "-k", 4, *rerank)["queries"]
    assert [each["row"] for each in query["neighbors"]] == line.rows[0].tolist()
    assert folded is not None and [len(each["folded"]) for each in query["neighbors"]] == [len(each) for each in folded]
    mean = combined_query(index.unit_features([0, 1]), index.unit_features([2]))
    without = Narrowing(without=np.array([0, 1, 2]))
    wanted = find(index, mean, 5, None, without, reranker)[0][0].rows.tolist()
    words = ("--key", keys[0], "--key", keys[1], "--minus", keys[2], "-k", 5)
    assert rows_of(found(place, *words, *rerank)) == wanted
    members = [place / "photos" / index.ids.members[row] for row in (0, 1, 2)]
    wanted = find(index, mean, 5, None, None, reranker)[0][0].rows.tolist()
    assert rows_of(found(place, *members[:2], "--minus", members[2], "-k", 5, *rerank)) == wanted
    above = rows_of(found(place, "--features", place / "features", "--threshold", 0.2, *rerank))
    plain = rows_of(found(place, "--features", place / "features", "--threshold", 0.2))
    assert [sorted(rows) for rows in above] == [sorted(rows) for rows in plain] and above != plain


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--where", ""], "--where"),
        (["--where", "price < 3"], "--where"),
        (["--where", "label = 'no such'"], "--where"),
        (["--where", "label = 3"], "--where"),
        (["--where", "read_csv('x') = label"], "--where"),
        (["--table", "shop.csv"], "--table"),
        (["--table", "no.csv", "--where", "price < 3"], "--table"),
        (["--unique", "1.5"], "--unique"),
        (["--unique", "nan"], "--unique"),
        (["--minus", "nobody"], "nobody"),
        (["--minus", ""], ""),
        (["--minus", "KEY"], "--minus"),
    ],
)
def test_refused_in_one_line(place: Path, arguments: list[str], message: str) -> None:
    key = FeatureIndex.open(place / "photos.index").ids.keys[0]
    given = [key if each == "KEY" else each for each in arguments]
    assert_one_line_error(invoke("search", place / "photos.index", "--key", key, *given, ok=False), message)


def test_minus_of_a_store_or_a_missing_image(place: Path) -> None:
    image = next((place / "photos").rglob("*.jpg"))
    refused = invoke("search", place / "photos.index", "--features", place / "features", "--minus", image, ok=False)
    assert_one_line_error(refused, "--minus")
    assert_one_line_error(invoke("search", place / "photos.index", image, "--minus", image, ok=False), "--minus")
    missing = invoke("search", place / "photos.index", image, "--minus", place / "no.jpg", ok=False)
    assert_one_line_error(missing, "no.jpg")


def test_the_same_image_by_another_name(place: Path) -> None:
    one = sorted((place / "photos").rglob("*.*"))[0]
    other = one.parent / ".." / one.parent.name / one.name
    for query, minus in (((one,), other), ((one,), ""), (("--key", "x"), "")):
        refused = invoke("search", place / "photos.index", *query, "--minus", minus, ok=False)
        assert_one_line_error(refused, "--minus")


def test_nothing_else_passes(place: Path) -> None:
    key = FeatureIndex.open(place / "photos.index").ids.keys[0]
    words = ("search", place / "photos.index", "--key", key, "--where", f"key = '{key}'")
    assert "nothing found" in invoke(*words).stdout
    assert "nothing found" in invoke(*words, "--threshold", 0.5).stdout


def test_names_of_many() -> None:
    assert name_of_all(list("abcd"), list("wxyz")) == "a + 3 more - 4 images"
