"""Published data sets in their folders: what each reader makes of a small one, every protocol as a user runs it, and
one line for everything that can be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from sop_faiss.cli.retrieve import main
from sop_faiss.errors import ConfigError, DataError
from sop_faiss.evaluate.published import PUBLISHED_OF_LAYOUTS, PublishedScores
from sop_faiss.evaluate.sets.ground_truth import NO_CLASS
from sop_faiss.evaluate.sets.published_layouts import LAYOUTS, read_layout, within_radius
from sop_faiss.evaluate.sets.retrieval_set import open_retrieval_set
from tests.messages import assert_one_line, command_fails
from tests.published_sets import WRITERS, Painter, write_published_set

RESNET = ("--model", "timm:test_resnet", "--random-weights", "0", "--size", "32")
GLDV2 = "retrieval_solution_v2.1.csv"


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sets")
    return {name: write_published_set(root / name, name) for name in WRITERS}


def asked(root: Path, protocol: str, **options: Any) -> dict[str, dict[str, list[str]]]:
    """Names of the files in each list of each query, without those that are empty."""
    truth = open_retrieval_set(str(root), protocol=protocol, **options).truth
    return {
        query.name: {name: [truth.images[place] for place in own] for name, own in query.lists.items() if len(own)}
        for query in truth.queries
    }


# ---- readers --------------------------------------------------------------------------------------------------------


def test_metric_learning_sets(sets: dict[str, Path]) -> None:
    cub = asked(sets["cub"], "cub")
    assert len(cub) == 6  # of the second half of the classes
    first = "images/003.Bird/Bird 3 0.jpg"
    assert cub[first] == {"ok": [first.replace("3 0", "3 1"), first.replace("3 0", "3 2")], "junk": [first]}
    sop = asked(sets["sop"], "sop")
    assert sop["chair_final/0_0.JPG"] == {"ok": ["chair_final/0_1.JPG"], "junk": ["chair_final/0_0.JPG"]}
    inshop = asked(sets["inshop"], "inshop")
    folder = "Img/img/WOMEN/Tees/id_2"
    assert inshop[f"{folder}/00_1_front.jpg"] == {"ok": [f"{folder}/01_1_front.jpg", f"{folder}/02_1_front.jpg"]}
    assert len(inshop) == 3


def test_reidentification(sets: dict[str, Path]) -> None:
    """The same person by the same camera is junk, -1 is not in the gallery, 0000 is wrong for all."""
    found = asked(sets["reid"], "reid")
    own = found["query/0007_c1s1_000001_00.jpg"]
    assert [Path(name).name[:7] for name in own["ok"]] == ["0007_c3"]
    assert [Path(name).name[:7] for name in own["junk"]] == ["0007_c1", "0007_c1"]
    assert found["query/0011_c2s1_000001_00.jpg"] == {"junk": ["bounding_box_test/0011_c2s1_000099_01.jpg"]}
    data = open_retrieval_set(str(sets["reid"]), protocol="reid")
    names = [Path(name).name for name in data.truth.images]
    assert not any(name.startswith("-1") for name in names) and any(name.startswith("0000") for name in names)
    assert data.choices == {"ignored_by_all": 1}


def test_places_from_names_and_from_two_columns(sets: dict[str, Path], tmp_path: Path) -> None:
    found = asked(sets["place"], "place")
    east = {name.split("@")[1]: [own.split("@")[1] for own in lists.get("ok", [])] for name, lists in found.items()}
    assert east == {"10.00": ["0.00", "20.00"], "65.00": ["40.00"], "500.00": []}  # 25 m are within 25 m
    near = asked(sets["place"], "place", radius=10.0)
    assert sum(len(lists.get("ok", [])) for lists in near.values()) == 2
    paint = Painter(tmp_path)
    roles = enumerate(("query", "database", "database"))
    rows = [f"{paint.image(f'{number}.jpg', number)},{role},{number * 20},5.5" for number, role in roles]
    paint.text("places.csv", "Image,role,easting,northing", *rows)
    assert asked(tmp_path / "places.csv", "place") == {"0.jpg": {"ok": ["1.jpg"]}}


def test_within_a_radius_as_the_slow_way() -> None:
    rng = np.random.default_rng(0)
    queries, database = (rng.integers(0, 40, (count, 2)).astype(float).tolist() for count in (30, 50))
    slow = [
        [place for place, other in enumerate(database) if (own[0] - other[0]) ** 2 + (own[1] - other[1]) ** 2 <= 25]
        for own in queries
    ]
    assert within_radius(queries, database, 5.0) == slow and any(slow) and not all(slow)


def test_landmarks_and_ilias(sets: dict[str, Path]) -> None:
    landmarks = asked(sets["gldv2"], "gldv2")
    names = [f"index/a/{n}/c/a{n}c{'0' * 13}.jpg" for n in range(3)]
    assert landmarks[f"test/f/a/1/fa{'1' * 14}.jpg"] == {"public": names}
    assert [list(lists) for lists in landmarks.values()] == [["public"], ["private"]]  # the third is ignored
    ilias = asked(sets["ilias"], "ilias")
    own = "ilias_core/zippy_toy_001"
    assert ilias[f"{own}/query/Q001_00.jpg"] == {
        "scale1 clutter1": [f"{own}/pos/P001_00.jpg"],
        "scale4 clutter4": [f"{own}/pos/P001_01.jpg"],
        "scale2 clutter2": [f"{own}/pos/P001_02.jpg"],  # a clutter of 18 is in the upper group
    }


def test_met_has_classes_and_queries_without_one(sets: dict[str, Path]) -> None:
    data = open_retrieval_set(str(sets["met"]), protocol="met")
    classes = data.truth.classes
    assert classes is not None and classes.gallery.tolist() == [100, 100, 101, 101]
    assert (
        classes.queries.tolist() == [100, 101, NO_CLASS] * 2 and classes.validation.tolist() == [True] * 3 + [False] * 3
    )
    found = asked(sets["met"], "met")
    assert found["images/test_met/1.jpg"] == {"test": ["images/MET/101/0.jpg", "images/MET/101/1.jpg"]}
    assert found["images/val_met/5.jpg"] == {}
    assert data.choices == {"database_list": "MET_database.json"}


def test_domains_copies_and_old_photos(sets: dict[str, Path]) -> None:
    uned = asked(sets["uned"], "uned")
    assert uned["images/cars/2.jpg"] == {"cars": ["images/cars/3.jpg"], "junk": ["images/cars/2.jpg"]}
    assert uned["images/met/test0.jpg"] == {"met": ["images/met/index0.jpg"]}  # class 0 of the other domain is not
    copydays = asked(sets["copydays"], "copydays")
    assert copydays["strong/200002.jpg"] == {"strong": ["original/200000.jpg"]}
    assert copydays["jpegqual/3/200100.jpg"] == {"jpegqual/3": ["original/200100.jpg"]}
    old = asked(sets["amstertime"], "amstertime")["old/0001.jpg"]
    assert old == {"old": ["new/0001.png"], "junk": [f"old/000{n}.jpg" for n in range(3)]}


# ---- as a user runs it ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", sorted(LAYOUTS))
def test_every_protocol_as_a_command(protocol: str, sets: dict[str, Path], tmp_path: Path) -> None:
    assert set(WRITERS) == set(LAYOUTS)
    outputs = ("--json", tmp_path / "r.json", "--per-query", tmp_path / "r.csv")
    arguments = [*RESNET, "--dataset", sets[protocol], "--protocol", protocol, *outputs]
    if protocol == "uned":
        arguments += ["--html", tmp_path / "r.html"]
    result = CliRunner().invoke(main, [str(each) for each in arguments])
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "r.json").read_text())
    assert content["protocol"]["name"] == protocol
    metrics, confidence = content["metrics"], content["confidence"]
    assert all(0 <= value <= 100 for value in metrics.values())
    headline = next(name for name in metrics if name in confidence)
    assert confidence[headline][0] <= metrics[headline] <= confidence[headline][1]
    for name in metrics:  # each is printed, by its own name or in the row of its group
        assert all(part in result.stdout for part in name.split("_", 1) if name != "mAP_standard"), name
    rows = (tmp_path / "r.csv").read_text().splitlines()
    assert len(rows) == 1 + content["protocol"]["queries"] and rows[0].startswith("query,file,relevant")
    choices = {
        "place": {"radius_meters": 25.0, "queries_counted_as_0": 1},
        "reid": {"ignored_by_all": 1, "queries_counted_as_0": 1},
        "cub": {"classes": [3, 4]},
        "gldv2": {"solution": GLDV2},
    }
    assert content["protocol"].items() >= choices.get(protocol, {}).items()
    if protocol == "met":
        assert set(content["protocol"]["chosen_on_validation"]) == {"neighbors", "sharpness", "validation_GAP"}
        assert {"GAP", "GAP-", "ACC", "R@1"} == set(metrics)


def test_distractors_expansion_and_comparison(sets: dict[str, Path], tmp_path: Path) -> None:
    files = []
    for name, extra in (("a", ()), ("b", ("--distractors", sets["sop"], "--radius", 30))):
        files.append(tmp_path / f"{name}.json")
        outputs = ("--dataset", sets["place"], "--protocol", "place", "--json", files[-1])
        assert CliRunner().invoke(main, [str(each) for each in (*RESNET, *outputs, *extra)]).exit_code == 0
    assert json.loads(files[1].read_text())["protocol"]["distractors"]["count"] == 6
    compared = CliRunner().invoke(main, ["--compare", str(files[0]), str(files[0].with_name("a.json"))])
    assert "R@1, 3 queries" in compared.stdout
    assert "classifies by the nearest images" in command_fails(
        main, *RESNET, "--dataset", sets["met"], "--protocol", "met", "--distractors", sets["sop"]
    )
    assert "classifies by similarities" in command_fails(
        main, *RESNET, "--dataset", sets["met"], "--protocol", "met", "--rerank", "global"
    )


def test_published_scores_beside_ones_own(sets: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    others = (PublishedScores("Someone's", {"R@1": 69.1, "R@4": 86.1}, "their page"),)
    monkeypatch.setitem(PUBLISHED_OF_LAYOUTS, ("cub", 6, 6), others)
    shown = CliRunner().invoke(main, [*RESNET, "--dataset", str(sets["cub"]), "--protocol", "cub"]).stdout
    assert all(part in shown for part in ("Someone's", "69.1", "86.1", "their page", "this encoder"))


# ---- what can be wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", sorted(LAYOUTS))
def test_another_layout_a_missing_folder_and_a_file(protocol: str, sets: dict[str, Path], tmp_path: Path) -> None:
    other = sets["sop" if protocol != "sop" else "cub"]
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "empty").mkdir()
    for place in (other, tmp_path / "nowhere", tmp_path / "file", tmp_path / "empty"):
        with pytest.raises(DataError) as error:
            open_retrieval_set(str(place), protocol=protocol)
        assert_one_line(error, f"protocol {protocol}", "wanted", str(place))


def replaced(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        text = (root / name).read_text()
        assert old in text
        (root / name).write_text(text.replace(old, new))

    return change


def written(name: str, text: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        (root / name).write_text(text)

    return change


def renamed(folder: str, new: str) -> Callable[[Path], object]:
    """The first file of a folder has another name."""
    return lambda root: min((root / folder).iterdir()).rename(root / folder / new)


def removed(name: str) -> Callable[[Path], None]:
    return lambda root: (root / name).unlink()


@pytest.mark.parametrize(
    ("protocol", "change", "parts"),
    [
        ("cub", removed("images/003.Bird/Bird 3 1.jpg"), ("1 of 6 images", "Bird 3 1.jpg")),
        ("cub", replaced("images.txt", "12 ", "77 "), ("image_class_labels.txt", "image 12")),
        ("cub", replaced("image_class_labels.txt", "1 1\n", "1 one\n"), ("'one'", "whole number")),
        ("cub", written("image_class_labels.txt", "\n"), ("nothing", "no query")),
        ("sop", written("Ebay_test.txt", "heading\n1 2 3\n"), ("line 2", "3 columns of 4")),
        ("sop", written("Ebay_test.txt", "heading\n"), ("sop", "nothing is relevant")),
        ("sop", replaced("Ebay_test.txt", "chair_final/0_0", "../../0_0"), ("leaves the image folder",)),
        ("inshop", replaced("Eval/list_eval_partition.txt", "query", "ask"), ("'ask'", "train, query, gallery")),
        ("reid", renamed("query", "x.jpg"), ("query/x.jpg",)),
        ("place", renamed("images/test/queries", "@a@b@.jpg"), ("'a' and 'b'",)),
        ("gldv2", replaced("index.csv", "id\n", "name\n"), ("index.csv", "no column id")),
        ("gldv2", replaced(GLDV2, ",Public", ",Hidden"), ("'Hidden'",)),
        ("gldv2", replaced(GLDV2, ",Public", ""), ("line 2", "2 columns")),
        ("gldv2", replaced("index.csv", f"a1c{'0' * 13}\n", ""), (f"a1c{'0' * 13}", "index.csv")),
        ("gldv2", replaced(GLDV2, "P", '"P'), ("not CSV",)),
        ("ilias", replaced("image_ids/positive_ids.txt", ",60", ""), ("id,scale,clutter",)),
        ("ilias", replaced("image_ids/positive_ids.txt", "0.01", "big"), ("'big'",)),
        ("ilias", removed("ilias_core/bold_bimp_000/pos/P000_01.jpg"), ("P000_01.jpg", "positive_ids.txt")),
        ("met", replaced("ground_truth/testset.json", '"path"', '"file"'), ("testset.json", "entry 0", "path")),
        ("met", written("ground_truth/valset.json", "{]"), ("valset.json", "not JSON")),
        ("met", written("ground_truth/valset.json", "{}"), ("valset.json", "not a list")),
        ("met", replaced("ground_truth/MET_database.json", "101", "1.5"), ("'1.5'", "whole number")),
        ("met", replaced("ground_truth/MET_database.json", "101", "9" * 40), ("too large",)),
        ("uned", replaced("info_files/met/test.json", "[1]", "[]"), ("has no class",)),
        ("uned", removed("images/met/index1.jpg"), ("1 of 6 images", "index1.jpg")),
        ("copydays", lambda root: [file.unlink() for file in (root / "original").iterdir()], ("original",)),
        ("amstertime", lambda root: (root / "old" / "0000.jpg").write_bytes(b""), ()),
    ],
)
def test_damaged_sets(protocol: str, change: Callable[[Path], object], parts: tuple[str, ...], tmp_path: Path) -> None:
    root = write_published_set(tmp_path / "set", protocol)
    change(root)
    message = command_fails(main, *RESNET, "--dataset", root, "--protocol", protocol)
    assert all(part in message for part in parts), message


def test_impossible_options(sets: dict[str, Path], tmp_path: Path) -> None:
    place = ("--dataset", sets["place"], "--protocol", "place")
    for radius in ("0", "-1", "nan", "inf"):
        assert f"--radius {float(radius)}" in command_fails(main, *RESNET, *place, "--radius", radius)
    assert "--protocol place" in command_fails(
        main, *RESNET, "--dataset", sets["cub"], "--protocol", "cub", "--radius", 5
    )
    (tmp_path / "gnd.json").write_text("{}")
    assert "--gnd" in command_fails(main, *RESNET, *place, "--gnd", tmp_path / "gnd.json")
    with pytest.raises(ConfigError, match="radius"):
        read_layout("cub", sets["cub"], 0.0)


def test_no_query_has_a_relevant_image(tmp_path: Path) -> None:
    paint = Painter(tmp_path)
    paint.image("query/0001_c1s1_000001_00.jpg", 1)
    paint.image("bounding_box_test/0001_c1s1_000002_00.jpg", 1)
    message = command_fails(main, *RESNET, "--dataset", tmp_path, "--protocol", "reid")
    assert "no query has a relevant image" in message
