"""A result is never written over what a command reads, and what is wrong with its place is said before any work."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from click.testing import CliRunner

from sop_faiss.errors import ConfigError, SopError
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.verbs.output_paths import STDOUT, check_outputs, encoder_files, ground_truth_files, source_files


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "manifest.json").write_text("{}")
    (tmp_path / "query.JPG").write_bytes(b"an image")
    (tmp_path / "queries.txt").write_text("query.JPG")
    (tmp_path / "groups.csv").write_text("image,group")
    (tmp_path / "link").symlink_to(tmp_path / "index")
    return tmp_path


def test_good_places(here: Path) -> None:
    outputs = {"--json": STDOUT, "--csv": Path("found.csv"), "--html": here / "new" / "page.html", "--other": None}
    check_outputs(outputs, [Path("index"), Path("query.JPG")], to_stdout=["--json"])
    (here / "found.csv").write_text("query,query_label,rank,row,key,similarity,label,right\r\n")
    (here / "index.json").write_text('{\n "command": "sop-index info"}')
    check_outputs({"--csv": Path("found.csv"), "--json": Path("index.json")}, [Path("index")])
    assert not (here / "new").exists()


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("index/manifest.json", "inside .*index, which is read by this command"),
        ("index/new/page.html", "inside .*index, which is read"),
        ("link/page.html", "inside .*index, which is read"),
        ("new/../index/page.html", "inside .*index, which is read"),
        ("queries.txt", "is read by this command: name another file"),
        ("../{here}/queries.txt", "is read by this command: name another file"),
        ("index", "is a directory"),
        ("query.JPG", "query.JPG exists"),
        ("queries.txt/page.html", "cannot be written"),
        ("-", "would be stdout, where this result does not go: name a file"),
    ],
)
def test_bad_places(here: Path, file: str, message: str) -> None:
    with pytest.raises(SopError, match=message) as caught:
        check_outputs({"--html": Path(file.format(here=here.name))}, [Path("index"), Path("queries.txt")])
    assert "\n" not in str(caught.value)
    assert (here / "queries.txt").read_text() == "query.JPG"


def test_two_results_in_one_place(here: Path) -> None:
    for one, two in (("found", "found"), ("found", "./found"), ("-", "-")):
        with pytest.raises(ConfigError, match="--json and --csv are both"):
            check_outputs({"--json": Path(one), "--csv": Path(two)}, [], to_stdout=["--json", "--csv"])


def test_what_of_a_source_is_guarded(here: Path) -> None:
    (here / "photos").mkdir()
    (here / "shards").mkdir()
    (here / "shards" / "a.tar").write_bytes(b"")
    assert source_files(None) == source_files("absent") == source_files("a-{0..3}.tar") == []
    assert source_files("shards") == [Path("shards")] and source_files("queries.txt") == [Path("queries.txt")]
    assert source_files("shards/a.tar") == [Path("shards/a.tar")]
    (here / "photos" / "a").mkdir()
    (here / "photos" / "a" / "1.PNG").write_bytes(b"a photo")
    for force in (False, True):
        with pytest.raises(ConfigError):
            check_outputs({"--out": Path("photos/a/1.PNG")}, source_files("photos"), force=force)
        check_outputs({"--out": Path("photos/a/2.png")}, source_files("photos"), force=force)


def test_what_of_an_encoder_is_guarded(here: Path) -> None:
    (here / "run" / "checkpoints").mkdir(parents=True)
    (here / "run" / "config.yaml").write_text("")
    (here / "w.pth").write_bytes(b"")
    assert encoder_files(None) == []
    assert encoder_files(EncoderSpec("run")) == [Path("run/checkpoints"), Path("run/config.yaml")]
    with pytest.raises(ConfigError, match="a run"):
        check_outputs({"--json": Path("run/knn.json")}, encoder_files(EncoderSpec("run")))
    check_outputs({"--json": Path("run/knn.json")}, encoder_files(EncoderSpec("run")), force=True)
    for name in ("prototypes.jsonl", "bad_samples.jsonl", "stopped.json", "latest"):
        (here / "run" / name).write_text("a record")
        with pytest.raises(ConfigError, match="read by this command"):
            check_outputs({"--out": Path("run") / name}, encoder_files(EncoderSpec("run")), force=True)
    assert encoder_files(EncoderSpec("timm:resnet50", weights=Path("w.pth"))) == [Path("w.pth")]
    assert encoder_files(EncoderSpec("dino:w.pth")) == [Path("w.pth")]


def test_what_of_a_retrieval_set_is_guarded(here: Path) -> None:
    (here / "set").mkdir()
    (here / "set" / "gnd.json").write_text("{}")
    for dataset, root in (("set", None), ("set", here), (str(here / "set"), None)):
        (found,) = ground_truth_files(dataset, root, None)
        assert found.resolve() == here / "set" / "gnd.json"
    assert ground_truth_files("absent", None, Path("my.json")) == [Path("my.json")]
    (here / "set" / "groups.csv").write_text("image,group")
    assert ground_truth_files("groups.csv", Path("set"), None) == [Path("set/groups.csv")]


KNN = ("knn", "--train", "queries.txt", "--test", "index", "--model", "absent", "--json")
EMBED = ("embed", "--model", "absent", "--data", "queries.txt", "--out", "features", "--json")
RETRIEVE = ("retrieve", "--model", "absent", "--dataset", "index")
GROUPS = ("retrieve", "--model", "absent", "--dataset", "groups.csv", "--per-query")
SEARCH = ("index", "search", "index", "queries.txt", "--model", "absent")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*KNN, "queries.txt"), "--json queries.txt is read by this command"),
        ((*KNN, "a.json", "--confusion", "who.txt"), "--confusion who.txt would be a PNG: wanted a name that ends in"),
        (("linear", *KNN[1:-1], "--confusion", "who.jpg"), "--confusion who.jpg would be a PNG"),
        (("retrieve", "--compare", "a.json", "b.json", "--plot", "gain"), "--plot gain would be a PNG"),
        (("data", "preview", "queries.txt", "--config", "photos_demo", "--out", "v.pdf"), "--out v.pdf would be a PNG"),
        ((*EMBED, "features/manifest.json"), "--json features/manifest.json"),
        ((*RETRIEVE, "--json", "a", "--html", "a"), "--json and --html are both a"),
        ((*GROUPS, "groups.csv"), "--per-query groups.csv is read by this command"),
        ((*RETRIEVE, "--per-query", "query.JPG"), "--per-query query.JPG exists"),
        ((*SEARCH, "--html", "index/manifest.json"), "--html index/manifest.json"),
        ((*SEARCH, "--csv", "queries.txt"), "--csv queries.txt is read by this command"),
        ((*SEARCH, "--json", "a", "--csv", "./a"), "--json and --csv are both a"),
        ((*SEARCH, "--html", "-"), "--html - would be stdout"),
        ((*SEARCH, "--json", "-", "--csv", "-"), "--json and --csv are both -"),
        (("index", "info", "index", "--json", "index/manifest.json"), "--json index/manifest.json"),
        (("doctor", "--json", "index"), "output index is a directory"),
        (("data", "check", "queries.txt", "--json", "queries.txt"), "--json queries.txt is read by this command"),
        (("data", "check", "queries.txt", "--workers", "100000"), "workers is 100000, wanted 1 to 1,024"),
        (("data", "pack", "queries.txt", "out", "--workers", "100000"), "workers is 100000, wanted 1 to 1,024"),
    ],
)
def test_commands_say_so_before_any_work(here: Path, words: tuple[str, ...], message: str) -> None:
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    result = CliRunner().invoke(importlib.import_module(f"sop_faiss.cli.{words[0]}").main, words[1:])
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.count("\n") == 1 and result.stderr.startswith(f"error: {message}")
    assert {path: path.read_bytes() for path in here.rglob("*") if path.is_file()} == before
