"""Ground truth from class folders and CSV files: cases by hand, and one clear line for what is wrong with them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from sop_faiss.errors import ConfigError, DataError
from sop_faiss.evaluate.sets.ground_truth import read_ground_truth
from sop_faiss.evaluate.sets.plain_sets import read_plain_set
from sop_faiss.evaluate.sets.retrieval_set import open_retrieval_set
from sop_faiss.verbs.scoring.make_gnd import write_ground_truth
from tests.images import write_folder
from tests.messages import assert_one_line


def touch(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"image")
    return root


def table(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_class_folders(tmp_path: Path) -> None:
    """Every image with a class mate is a query; it asks for its mates, and itself is junk."""
    root = touch(tmp_path / "set", "cup/a.jpg", "cup/b.jpg", "cup/c.jpg", "hat/d.jpg", "pen/e.jpg", "pen/f.jpg")
    data = open_retrieval_set("set", tmp_path)
    assert data.truth.images == ["cup/a.jpg", "cup/b.jpg", "cup/c.jpg", "hat/d.jpg", "pen/e.jpg", "pen/f.jpg"]
    assert [query.name for query in data.truth.queries] == [
        *("cup/a.jpg", "cup/b.jpg", "cup/c.jpg", "pen/e.jpg", "pen/f.jpg")
    ]
    assert [query.lists["ok"].tolist() for query in data.truth.queries] == [[1, 2], [0, 2], [0, 1], [5], [4]]
    assert [query.lists["junk"].tolist() for query in data.truth.queries] == [[0], [1], [2], [4], [5]]
    assert data.query_rows is not None and data.query_rows.tolist() == [0, 1, 2, 4, 5]
    assert read_plain_set(root).alone == 1


def test_class_folders_of_queries_and_database(tmp_path: Path) -> None:
    root = touch(tmp_path / "set", "query/cup/q.jpg", "query/fox/r.jpg", "database/cup/a.jpg", "database/pen/b.jpg")
    data = open_retrieval_set(str(root))
    assert data.truth.images == ["cup/a.jpg", "pen/b.jpg"]
    assert [(query.name, query.lists["ok"].tolist()) for query in data.truth.queries] == [
        ("cup/q.jpg", [0]),
        ("fox/r.jpg", []),
    ]
    assert data.query_rows is None
    assert data.queries.members == ["query/cup/q.jpg", "query/fox/r.jpg"]


def test_groups_that_are_whole_numbers_are_compared_as_such(tmp_path: Path) -> None:
    root = touch(tmp_path / "set", "query/02/q.jpg", "query/010/r.jpg", "database/10/a.jpg", "database/2/b.jpg")
    lines = "q.jpg,2,query\nr.jpg,010,query\na.jpg,10,database\nb.jpg,02,database\n"
    for place in (
        root,
        table(touch(tmp_path, "q.jpg", "r.jpg", "a.jpg", "b.jpg") / "g.csv", "image,group,role\n" + lines),
    ):
        truth = open_retrieval_set(str(place)).truth
        wanted = {query.name[-5:]: [truth.images[place][-5:] for place in query.lists["ok"]] for query in truth.queries}
        assert wanted == {"q.jpg": ["b.jpg"], "r.jpg": ["a.jpg"]}


def test_a_query_of_the_gallery_is_left_out_of_its_own_ranking(tmp_path: Path) -> None:
    touch(tmp_path, "a.jpg", "b.jpg", "c.jpg")
    lines = ("a.jpg,x,query", "a.jpg,x,database", "b.jpg,x,database", "c.jpg,y,database")
    truth = open_retrieval_set(str(table(tmp_path / "g.csv", "\n".join(["image,group,role", *lines])))).truth
    assert [(query.lists["ok"].tolist(), query.lists["junk"].tolist()) for query in truth.queries] == [([1], [0])]


def test_groups(tmp_path: Path) -> None:
    touch(tmp_path, "1.jpg", "2.jpg", "3.jpg")
    file = table(tmp_path / "groups.csv", "image,group\n1.jpg,x\n2.jpg,x\n\n3.jpg,y\n")
    data = open_retrieval_set(str(file))
    assert [(query.name, query.lists["ok"].tolist(), query.lists["junk"].tolist()) for query in data.truth.queries] == [
        ("1.jpg", [1], [0]),
        ("2.jpg", [0], [1]),
    ]
    table(file, "path,label,role\n1.jpg,x,query\n2.jpg,x,database\n3.jpg,y,database\n")
    data = open_retrieval_set("groups.csv", tmp_path)
    assert data.truth.images == ["2.jpg", "3.jpg"]
    assert [(query.name, query.lists["ok"].tolist()) for query in data.truth.queries] == [("1.jpg", [0])]


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_line_breaks_within_a_cell_stay(tmp_path: Path, line_end: str) -> None:
    file = tmp_path / "groups.csv"
    lines = ["image,group", '1.jpg,"two\nlines"', "2.jpg,twolines", "3.jpg,y\u2028z", '4.jpg,"two\nlines"', "5.jpg"]
    file.write_bytes(line_end.join(lines[:-1]).encode())
    content = read_plain_set(file).content
    assert content["qimlist"] == ["1.jpg", "4.jpg"] and len(content["imlist"]) == 4
    file.write_bytes(line_end.join(lines).encode())
    with pytest.raises(DataError, match="line 8: wanted 2 filled columns"):
        read_plain_set(file)


def test_pairs(tmp_path: Path) -> None:
    touch(tmp_path, "q.jpg", "1.jpg", "2.jpg", "3.jpg")
    file = table(
        tmp_path / "pairs.csv",
        "query,image,relevance\nq.jpg,1.jpg,ok\nq.jpg,2.jpg,junk\nq.jpg,3.jpg,wrong\n1.jpg,2.jpg,ok\n",
    )
    data = open_retrieval_set(str(file))
    assert data.truth.images == ["1.jpg", "2.jpg", "3.jpg"]
    first, second = data.truth.queries
    assert (first.lists["ok"].tolist(), first.lists["junk"].tolist()) == ([0], [1])
    assert (second.lists["ok"].tolist(), second.lists["junk"].tolist()) == ([1], [0])  # it would find itself
    table(file, "query,image\nq.jpg,1.jpg\n")
    assert len(open_retrieval_set(str(file)).truth.images) == 1


def test_a_made_ground_truth_is_the_same_set(tmp_path: Path) -> None:
    root = touch(tmp_path / "set", "cup/a.jpg", "cup/b.jpg", "hat/d.jpg")
    direct = open_retrieval_set(str(root))
    made = write_ground_truth("set", tmp_path, root / "gnd.json")
    assert (made.queries, made.gallery, made.alone) == (2, 3, 1)
    assert (made.relevant_min, made.relevant_median, made.relevant_max) == (1, 1.0, 1)
    read = open_retrieval_set(str(root))
    assert read.truth.images == direct.truth.images and read.truth.sha256 == direct.truth.sha256
    assert read.gallery.members == direct.gallery.members
    assert json.loads((root / "gnd.json").read_text())["gnd"][0] == {"ok": [1], "junk": [0]}
    with pytest.raises(ConfigError, match=r"exists and .* name another"):
        write_ground_truth("set", tmp_path, root / "gnd.json")
    with pytest.raises(ConfigError, match=r"wanted a \.json file"):
        write_ground_truth("set", tmp_path, root / "gnd.pkl")


def test_names_that_need_care_survive(tmp_path: Path) -> None:
    root = touch(tmp_path / "set", 'c"up, é/a b.jpg', 'c"up, é/ü.jpg')
    write_ground_truth(str(root), None, tmp_path / "gnd.json")
    assert read_ground_truth(tmp_path / "gnd.json").images == ['c"up, é/a b.jpg', 'c"up, é/ü.jpg']


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("image,group\n", "no line below its heading"),
        ("image,group\na,x\nb,y\n", "no two images share a group"),
        ("image,group\na,x\na,y\n", "line 3: a is in x and y"),
        ("image,group\na\n", "line 2: wanted 2 filled columns"),
        ("image,group\na,\n", "line 2: wanted 2 filled columns"),
        ("a.jpg,x\nb.jpg,x\n", "first line names a.jpg, x; wanted image,group"),
        ("image,group,role\na,x,query\nb,x,gallery\n", "role 'gallery'"),
        ("image,group,role\na,x,query\nb,y,database\n", "no query's group"),
        ("query,image,relevance\nq,a,maybe\n", "relevance 'maybe'"),
        ("query,image\na,b\na,a\n", "line 3: a is relevant to itself"),
        ("query,image\na,./a\n", "line 2: ./a is relevant to itself"),
        ("query,image\nq,a\nq,a\n", "line 3: a was already judged for q"),
        ("query,image,relevance\nq,a,junk\n", "no line says ok"),
        ("query,image\nq,../a\n", "leaves the image folder"),
        ('query,image\nq,"a\n', "is not CSV"),
    ],
)
def test_tables_that_cannot_be(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        open_retrieval_set(str(table(tmp_path / "t.csv", text)))
    assert_one_line(caught, message)


def test_every_name_must_be_utf8(tmp_path: Path) -> None:
    """Elsewhere such an image is dropped; here it would be missing from the ground truth."""
    touch(tmp_path, "cup/a.jpg", "cup/b.jpg", "cup/" + os.fsdecode(b"caf\xe9.jpg"))
    with pytest.raises(DataError, match=r"caf.*not UTF-8"):
        open_retrieval_set(str(tmp_path))


def test_folders_that_cannot_be(tmp_path: Path) -> None:
    touch(tmp_path / "loose", "cup/a.jpg", "b.jpg")
    touch(tmp_path / "single", "cup/a.jpg", "hat/b.jpg")
    touch(tmp_path / "flat", "a.jpg")
    touch(tmp_path / "apart", "query/cup/a.jpg", "database/hat/b.jpg")
    for name, message in (
        ("loose", "outside class folders"),
        ("single", "no two images share a group"),
        ("flat", "neither gnd.json nor gnd_"),
        ("apart", "no query's group"),
        ("nowhere", "is not a directory"),
        ("nowhere.csv", "does not exist: wanted a folder or a .csv"),
    ):
        with pytest.raises(DataError) as caught:
            open_retrieval_set(name, tmp_path)
        assert_one_line(caught, message)


def test_a_image_that_is_missing(tmp_path: Path) -> None:
    touch(tmp_path, "1.jpg")
    file = table(tmp_path / "groups.csv", "image,group\n1.jpg,x\n2.jpg,x\n")
    with pytest.raises(DataError, match=r"1 of 2 database images are missing .*first: 2\.jpg"):
        open_retrieval_set(str(file))


def test_the_command(tmp_path: Path) -> None:
    """Class folders measured as they are, and through a gnd.json made of them, give the same numbers."""
    from tests.test_cli_retrieve import RESNET, fails, run

    write_folder(tmp_path / "set", classes=3, per_class=3)
    first = run(*RESNET, "--dataset", tmp_path / "set", "--json", tmp_path / "1.json")
    assert first.exit_code == 0 and "9 queries in 9 images" in first.stdout, first.output
    assert "nDCG" in first.stdout and "R-precision" in first.stdout and "mAP@R" in first.stdout
    made = run("--dataset", tmp_path / "set", "--make-gnd", tmp_path / "set" / "gnd.json")
    assert made.exit_code == 0, made.output
    assert made.stdout == "9 queries in 9 images; relevant to a query: 2 to 2, median 2\n"
    second = run(*RESNET, "--dataset", tmp_path / "set", "--json", tmp_path / "2.json")
    assert second.exit_code == 0, second.output
    contents = [json.loads((tmp_path / f"{number}.json").read_text()) for number in (1, 2)]
    for key in ("metrics", "protocol", "per_query", "confidence"):
        assert contents[0][key] == contents[1][key]
    assert "exists" in fails("--dataset", tmp_path / "set", "--make-gnd", tmp_path / "set" / "gnd.json")
    assert run("--make-gnd", tmp_path / "x.json").exit_code == 2
