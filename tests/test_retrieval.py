"""Ground truth from outside, retrieval data sets on disk, protocols, and scores against a sort-based oracle."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from sop_faiss.data.decode import decode_image
from sop_faiss.errors import ConfigError, DataError, FeatureError
from sop_faiss.evaluate.ground_truth import GRADED, PLAIN, GroundTruth, read_ground_truth
from sop_faiss.evaluate.retrieval import PROTOCOLS, choose_protocol, score_retrieval
from sop_faiss.evaluate.retrieval_set import crop_to_box, open_retrieval_set
from sop_faiss.evaluate.similarity import similarity_rows
from tests import oracle_metrics as oracle
from tests.images import encode, make_image

REAL_GND = Path(__file__).parents[2] / "shared" / "data" / "revisited_gnd"
needs_real_gnd = pytest.mark.skipif(not REAL_GND.is_dir(), reason="the revisited ground-truth files are not here")

GRADED_GND: dict[str, Any] = {
    "imlist": ["a", "b", "c", "d", "e"],
    "qimlist": ["q0", "q1"],
    "gnd": [
        {"bbx": [1, 2, 11.5, 12], "easy": [0], "hard": [1, 2], "junk": [3]},
        {"bbx": [0, 0, 16, 16], "easy": [], "hard": [4], "junk": []},
    ],
}
PLAIN_GND: dict[str, Any] = {
    "imlist": ["a.jpg", "b.jpg", "c.jpg"],
    "qimlist": ["a.jpg", "q.jpg"],
    "gnd": [{"ok": [0, 2], "junk": [1]}, {"ok": [1]}],
}


def write_json(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


def write_pickle(path: Path, content: Any, protocol: int = 2) -> Path:
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    return path


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def changed(content: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**json.loads(json.dumps(content)), **changes}


# ---- reading ground truth -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_and_json_read_the_same(tmp_path: Path, protocol: int) -> None:
    from_json = read_ground_truth(write_json(tmp_path / "gnd.json", GRADED_GND))
    from_pickle = read_ground_truth(write_pickle(tmp_path / "gnd_x.pkl", GRADED_GND, protocol))
    for truth in (from_json, from_pickle):
        assert truth.lists == GRADED
        assert truth.images == GRADED_GND["imlist"]
        assert [query.name for query in truth.queries] == ["q0", "q1"]
        assert truth.queries[0].box == (1.0, 2.0, 11.5, 12.0)
        assert {name: values.tolist() for name, values in truth.queries[0].lists.items()} == {
            "easy": [0],
            "hard": [1, 2],
            "junk": [3],
        }


def test_plain_lists_without_junk_and_box(tmp_path: Path) -> None:
    truth = read_ground_truth(write_json(tmp_path / "gnd.json", PLAIN_GND))
    assert truth.lists == PLAIN
    assert truth.queries[1].box is None
    assert truth.queries[1].lists["junk"].tolist() == []


class Evil:
    """Unpickled carelessly, it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (self.path, "executed"))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_hostile_pickle_is_not_executed(tmp_path: Path, protocol: int) -> None:
    trace = tmp_path / "trace"
    content = changed(GRADED_GND, imlist=[*"abcde"])
    content["gnd"][0]["easy"] = Evil(trace)
    file = write_pickle(tmp_path / "gnd_evil.pkl", content, protocol)
    with pytest.raises(DataError, match="would run code, and is not loaded") as caught:
        read_ground_truth(file)
    assert "\n" not in str(caught.value)
    assert not trace.exists()


@pytest.mark.parametrize(
    "encoded",
    [
        b"",
        b"\x80\x02",
        b"not a pickle",
        b"cos\nsystem\n(S'true'\ntR.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
        b"\x80\x02]r\xff\xff\xff\x7f.",  # memo slot 2**31 - 1: the C unpickler would allocate 32 GB
        b"]p99999999999\n.",
        b"\x80\x05\x96\xff\xff\xff\xff\xff\x00\x00\x00.",  # bytearray of 2**40 bytes
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\x00\x00\x00abc.",  # text of 2**40 bytes
        b"\x80\x02Pname\n.",
        b"\x80\x02\x82\x01.",
        b"(" * 100_000,
        b"\x80\x02h\x07.",
        b"\x80\x02}K\x01.",
        b"0.",
        pickle.dumps(np.arange(3)),
        pickle.dumps({1, 2, 3}),
    ],
)
def test_damaged_and_foreign_pickles(tmp_path: Path, encoded: bytes) -> None:
    file = tmp_path / "gnd_x.pkl"
    file.write_bytes(encoded)
    with pytest.raises(DataError, match=r"gnd_x\.pkl") as caught:
        read_ground_truth(file)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


@given(data=st.data())
def test_a_pickle_with_flipped_bytes_reads_or_is_refused(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    encoded = bytearray(pickle.dumps(GRADED_GND, protocol=data.draw(st.sampled_from([0, 2, 4]))))
    for _ in range(data.draw(st.integers(1, 3))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    file = tmp_path_factory.mktemp("gnd") / "gnd_x.pkl"
    file.write_bytes(encoded[: data.draw(st.integers(1, len(encoded)))])
    try:
        assert isinstance(read_ground_truth(file), GroundTruth)
    except DataError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("9" * 10_000, "not JSON"),
        ("[1]", "imlist, qimlist and gnd"),
        ('{"imlist": ["a"]}', "imlist, qimlist and gnd"),
        ("NaN", "imlist, qimlist and gnd"),
    ],
)
def test_damaged_json(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "gnd.json"
    file.write_text(text)
    with pytest.raises(DataError, match=message):
        read_ground_truth(file)


def gnd_of(**entry: Any) -> dict[str, Any]:
    return changed(GRADED_GND, gnd=[{"easy": [0], "hard": [1], "junk": [], **entry}, GRADED_GND["gnd"][1]])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (changed(GRADED_GND, imlist=[]), "imlist is not a list with at least one name"),
        (changed(GRADED_GND, imlist="abcde"), "imlist is not a list"),
        (changed(GRADED_GND, imlist=[*"abcd", 5]), r"imlist\[4\] is not an image name"),
        (changed(GRADED_GND, imlist=[*"abcda"]), "imlist names 'a' twice"),
        (changed(GRADED_GND, imlist=[*"abcd", "/etc/passwd"]), "leaves the image folder"),
        (changed(GRADED_GND, imlist=[*"abcd", "x/../../y"]), "leaves the image folder"),
        (changed(GRADED_GND, imlist=[*"abcd", "\ud800"]), "not an image name"),
        (changed(GRADED_GND, imlist=[*"abcd", "a\0"]), "not an image name"),
        (changed(GRADED_GND, qimlist=["q0"]), "2 entries, qimlist 1 names"),
        (changed(GRADED_GND, gnd={}), "gnd has dict"),
        (changed(GRADED_GND, gnd=[[], []]), r"gnd\[0\] is not a table"),
        (changed(GRADED_GND, gnd=[{}, {}]), "lacks 'ok'"),
        (changed(GRADED_GND, gnd=[GRADED_GND["gnd"][0], {"ok": [1]}]), r"gnd\[1\] lacks 'easy' \(it has ok\)"),
        (changed(GRADED_GND, gnd=[{"easy": [0]}, GRADED_GND["gnd"][1]]), "lacks 'hard'"),
        (gnd_of(easy=[5]), "holds 5; wanted positions in imlist, 0 to 4"),
        (gnd_of(easy=[-1]), "holds -1"),
        (gnd_of(easy=[True]), "holds True"),
        (gnd_of(easy=[0.0]), "holds 0.0"),
        (gnd_of(easy=["a"]), "holds str"),
        (gnd_of(easy=[10**300]), "holds 1000"),
        (gnd_of(easy=7), "not a list of positions"),
        (gnd_of(easy=[2, 2]), "lists image 2 twice"),
        (gnd_of(easy=[2], hard=[2]), "lists image 2 twice"),
        (gnd_of(bbx=[1, 2, 3]), "not four numbers"),
        (gnd_of(bbx="abcd"), "not four numbers"),
        (gnd_of(bbx=[1, 2, float("nan"), 4]), "not four numbers"),
        (gnd_of(bbx=[1, 2, 10**400, 4]), "not four numbers"),
        (gnd_of(bbx=[5, 2, 3, 4]), "is not a box"),
        (gnd_of(bbx=[-1, 2, 3, 4]), "is not a box"),
        (changed(PLAIN_GND, qimlist=["q", "q"]), "asks 'q' twice"),
    ],
)
def test_ground_truth_that_contradicts_itself(tmp_path: Path, content: Any, message: str) -> None:
    for file in (write_json(tmp_path / "gnd.json", content), write_pickle(tmp_path / "gnd_x.pkl", content)):
        with pytest.raises(DataError, match=message) as caught:
            read_ground_truth(file)
        assert "\n" not in str(caught.value)


def test_files_that_are_missing_too_large_or_of_another_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="does not exist"):
        read_ground_truth(tmp_path / "gnd.json")
    with pytest.raises(DataError, match=r"wanted \.json or \.pkl"):
        read_ground_truth(write_json(tmp_path / "gnd.mat", GRADED_GND))
    file = write_json(tmp_path / "gnd.json", GRADED_GND)
    monkeypatch.setattr("sop_faiss.evaluate.ground_truth.MAX_FILE_BYTES", 100)
    with pytest.raises(DataError, match="at most 100 are read"):
        read_ground_truth(file)


# ---- the data set on disk -------------------------------------------------------------------------------------------


def write_set(root: Path, content: dict[str, Any], *, folders: tuple[str, str], ending: str = ".jpg") -> Path:
    """Small pictures for every name, in the folders of queries and gallery, and gnd.json."""
    rng = np.random.default_rng(0)
    for folder, names in zip(folders, (content["qimlist"], content["imlist"]), strict=True):
        (root / folder).mkdir(parents=True, exist_ok=True)
        for name in names:
            file = root / folder / (name if "." in name else name + ending)
            if not file.exists():
                file.write_bytes(encode(make_image(rng, (20, 24)), "PNG" if ending == ".png" else "JPEG"))
    write_json(root / "gnd.json", content)
    return root


@pytest.mark.parametrize("ending", [".jpg", ".jpeg", ".png", ".JPG"])
@pytest.mark.parametrize("folders", [("jpg", "jpg"), ("query", "database")])
def test_names_without_ending_are_found(tmp_path: Path, ending: str, folders: tuple[str, str]) -> None:
    root = write_set(tmp_path / "set", GRADED_GND, folders=folders, ending=ending)
    found = open_retrieval_set(str(root))
    assert found.gallery.keys == GRADED_GND["imlist"]
    assert [found.gallery.member_of(i) for i in range(5)] == [f"{folders[1]}/{name}{ending}" for name in "abcde"]
    assert found.queries.member_of(1) == f"{folders[0]}/q1{ending}"
    assert found.gallery.read(2) == (root / folders[1] / f"c{ending}").read_bytes()


def test_same_name_in_query_and_database_is_two_pictures(tmp_path: Path) -> None:
    root = write_set(tmp_path / "set", PLAIN_GND, folders=("query", "database"))
    found = open_retrieval_set("set", tmp_path)
    assert found.queries.read(0) == (root / "query/a.jpg").read_bytes() != found.gallery.read(0)


def test_a_picture_asked_for_two_boxes_is_two_queries(tmp_path: Path) -> None:
    gnd = [{"ok": [0], "bbx": [0, 0, 8, 8]}, {"ok": [1], "bbx": [8, 8, 16, 16]}]
    root = write_set(tmp_path, changed(PLAIN_GND, qimlist=["q.jpg", "q.jpg"], gnd=gnd), folders=("query", "database"))
    found = open_retrieval_set(str(root))
    assert len(set(found.queries.keys)) == 2
    assert not np.array_equal(decode_image(found.queries.read(0)), decode_image(found.queries.read(1)))


def test_crop_rounds_and_clips() -> None:
    picture = np.arange(20 * 24 * 3, dtype=np.uint8).reshape(20, 24, 3)
    assert np.array_equal(crop_to_box(picture, (1.0, 2.0, 11.6, 12.4)), picture[2:12, 1:12])
    assert np.array_equal(crop_to_box(picture, (20.0, 15.0, 99.0, 99.0)), picture[15:, 20:])
    with pytest.raises(DataError, match="outside"):
        crop_to_box(picture, (24.0, 0.0, 30.0, 10.0))
    with pytest.raises(DataError, match="outside"):
        crop_to_box(picture, (1.0, 0.0, 1.2, 10.0))  # no whole pixel


def test_query_is_cropped_after_decoding_and_without_loss(tmp_path: Path) -> None:
    root = write_set(tmp_path, GRADED_GND, folders=("jpg", "jpg"))
    found = open_retrieval_set(str(root))
    whole = decode_image((root / "jpg/q0.jpg").read_bytes())
    assert np.array_equal(decode_image(found.queries.read(0)), whole[2:12, 1:12])
    assert found.whole_queries.read(0) == (root / "jpg/q0.jpg").read_bytes()


def test_query_is_cropped_upright(tmp_path: Path) -> None:
    root = write_set(tmp_path, GRADED_GND, folders=("jpg", "jpg"))
    turned = Image.fromarray(make_image(np.random.default_rng(1), (30, 40)))
    exif = turned.getexif()
    exif[0x0112] = 6
    (root / "jpg/q1.jpg").write_bytes(encode(turned, exif=exif))
    upright = decode_image((root / "jpg/q1.jpg").read_bytes())
    assert upright.shape == (40, 30, 3)
    assert np.array_equal(decode_image(open_retrieval_set(str(root)).queries.read(1)), upright[:16, :16])


def test_missing_pictures_are_counted_in_one_line(tmp_path: Path) -> None:
    root = write_set(tmp_path, GRADED_GND, folders=("query", "database"))
    for name in "bd":
        (root / "database" / f"{name}.jpg").unlink()
    with pytest.raises(DataError, match=r"2 of 5 database pictures are missing .*first: b\); nothing is downloaded"):
        open_retrieval_set(str(root))
    shutil.rmtree(root / "query")
    with pytest.raises(DataError, match="pictures are missing"):
        open_retrieval_set(str(root))


def test_which_ground_truth(tmp_path: Path) -> None:
    root = write_set(tmp_path / "set", GRADED_GND, folders=("jpg", "jpg"))
    other = write_json(tmp_path / "other.json", changed(GRADED_GND, qimlist=["a", "b"]))
    assert open_retrieval_set(str(root), gnd=other).queries.keys == ["a", "b"]
    write_pickle(root / "gnd_set.pkl", GRADED_GND)
    with pytest.raises(DataError, match=r"gnd\.json, gnd_set\.pkl; wanted one ground-truth file"):
        open_retrieval_set(str(root))
    (root / "gnd.json").unlink()
    assert open_retrieval_set(str(root)).truth.path.name == "gnd_set.pkl"
    (root / "gnd_set.pkl").unlink()
    with pytest.raises(DataError, match="--gnd"):
        open_retrieval_set(str(root))


def test_directories_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data root .* is not a directory"):
        open_retrieval_set("roxford5k", tmp_path / "nowhere")
    with pytest.raises(DataError, match="--data-root"):
        open_retrieval_set("roxford5k", tmp_path)


def test_known_set_with_another_ground_truth(tmp_path: Path) -> None:
    root = write_set(tmp_path / "roxford5k", GRADED_GND, folders=("jpg", "jpg"))
    with pytest.raises(DataError, match=r"gnd_roxford5k\.pkl does not exist"):
        open_retrieval_set("roxford5k", tmp_path)
    own = write_pickle(root / "gnd_roxford5k.pkl", GRADED_GND)
    with pytest.raises(DataError, match=r"not the published ground truth of roxford5k .*--gnd"):
        open_retrieval_set("roxford5k", tmp_path)
    assert len(open_retrieval_set("roxford5k", tmp_path, own).queries) == 2


@needs_real_gnd
@pytest.mark.parametrize(("name", "images"), [("roxford5k", 4993), ("rparis6k", 6322)])
def test_published_ground_truth_is_recognised(tmp_path: Path, name: str, images: int) -> None:
    (tmp_path / name / "jpg").mkdir(parents=True)
    shutil.copy(REAL_GND / f"gnd_{name}.pkl", tmp_path / name)
    wanted = rf"{images} of {images} database pictures are missing .*revisitop"
    with pytest.raises(DataError, match=wanted):
        open_retrieval_set(name, tmp_path)


# ---- protocols ------------------------------------------------------------------------------------------------------


def test_protocol_by_default_and_by_name(tmp_path: Path) -> None:
    graded = read_ground_truth(write_json(tmp_path / "gnd.json", GRADED_GND))
    plain = read_ground_truth(write_json(tmp_path / "gnd.json", PLAIN_GND))
    assert choose_protocol(None, graded).name == "revisitop"
    assert choose_protocol(None, plain).name == "plain"
    assert choose_protocol("dino", graded).box == "ignored"
    with pytest.raises(ConfigError, match="wanted one of revisitop, dino, plain"):
        choose_protocol("revisited", graded)
    with pytest.raises(DataError, match="choose --protocol revisitop, dino"):
        choose_protocol("plain", graded)
    with pytest.raises(DataError, match="choose --protocol plain"):
        choose_protocol("dino", plain)


def test_revisitop_needs_a_box_for_every_query(tmp_path: Path) -> None:
    content = changed(GRADED_GND)
    del content["gnd"][1]["bbx"]
    truth = read_ground_truth(write_json(tmp_path / "gnd.json", content))
    with pytest.raises(DataError, match=r"1 of 2 queries have no bbx \(first: q1\)"):
        choose_protocol(None, truth)
    assert choose_protocol("dino", truth).name == "dino"


# ---- scores ---------------------------------------------------------------------------------------------------------


def line_features(count: int) -> np.ndarray:
    """Rows ever farther from the first."""
    angles = np.linspace(0, 1.5, count)
    return unit(np.stack([np.cos(angles), np.sin(angles)], axis=1))


def test_scores_by_hand(tmp_path: Path) -> None:
    """Gallery a b c d e in this order for both queries. q0: easy a; hard b, c; junk d. q1: hard e."""
    truth = read_ground_truth(write_json(tmp_path / "gnd.json", GRADED_GND))
    gallery = line_features(5)
    scores = score_retrieval(gallery[[0, 0]], gallery, truth, PROTOCOLS["revisitop"], top_count=3)
    assert scores.counted_queries == {"easy": 1, "medium": 2, "hard": 2}  # q1 has no easy image
    # easy: b, c, d leave, a is first. medium: q0 perfect; q1 has e at rank 4. hard: a and d leave for q0, none for q1.
    last_of_five = (0 / 4 + 1 / 5) / 2
    assert scores.metrics["mAP_easy"] == pytest.approx(100)
    assert scores.metrics["mAP_medium"] == pytest.approx(100 * (1 + last_of_five) / 2)
    assert scores.metrics["mAP_hard"] == pytest.approx(100 * (1 + last_of_five) / 2)
    assert scores.metrics["mP@1_medium"] == pytest.approx(50)
    assert scores.metrics["mP@5_medium"] == pytest.approx(100 * (1 + 1 / 5) / 2)
    assert scores.metrics["mP@10_medium"] == scores.metrics["mP@5_medium"]  # k shrinks to 3 and to 5
    assert "R@1" not in scores.metrics
    assert scores.queries[1].scores["hard"].first_rank == 5
    assert scores.queries[0].top.tolist() == [0, 1, 2]
    assert "easy" not in scores.queries[1].scores


def test_plain_scores(tmp_path: Path) -> None:
    truth = read_ground_truth(write_json(tmp_path / "gnd.json", PLAIN_GND))
    gallery = line_features(3)
    scores = score_retrieval(gallery[[0, 2]], gallery, truth, PROTOCOLS["plain"])
    # q 0: a, (b is junk), c: perfect. q 1 sees c, b, a: b at rank 1.
    assert scores.metrics == {
        "mAP": pytest.approx(100 * (1 + 1 / 4) / 2),
        "mP@1": 50.0,
        "mP@5": pytest.approx(75),
        "mP@10": pytest.approx(75),
        "R@1": 50.0,
    }


def test_dino_reports_medium_and_hard_only(tmp_path: Path) -> None:
    truth = read_ground_truth(write_json(tmp_path / "gnd.json", GRADED_GND))
    gallery = line_features(5)
    dino = score_retrieval(gallery[[0, 0]], gallery, truth, PROTOCOLS["dino"]).metrics
    full = score_retrieval(gallery[[0, 0]], gallery, truth, PROTOCOLS["revisitop"]).metrics
    assert dino == {name: value for name, value in full.items() if not name.endswith("easy")}


def test_a_difficulty_without_queries_is_left_out_and_no_query_at_all_is_an_error(tmp_path: Path) -> None:
    gallery = line_features(5)
    gnd = [{"easy": [0], "hard": [], "junk": []}, {"easy": [1], "hard": [], "junk": []}]
    truth = read_ground_truth(write_json(tmp_path / "gnd.json", changed(GRADED_GND, gnd=gnd)))
    scores = score_retrieval(gallery[:2], gallery, truth, PROTOCOLS["dino"])
    assert scores.counted_queries == {"medium": 2, "hard": 0}
    assert "mAP_hard" not in scores.metrics
    gnd = [{"easy": [], "hard": [], "junk": [0]}] * 2
    truth = read_ground_truth(write_json(tmp_path / "gnd.json", changed(GRADED_GND, gnd=gnd)))
    with pytest.raises(DataError, match="nothing to measure"):
        score_retrieval(gallery[:2], gallery, truth, PROTOCOLS["dino"])


def test_features_that_do_not_fit(tmp_path: Path) -> None:
    truth = read_ground_truth(write_json(tmp_path / "gnd.json", GRADED_GND))
    gallery = line_features(5)
    with pytest.raises(FeatureError, match="3 query features for 2 names"):
        score_retrieval(gallery[:3], gallery, truth, PROTOCOLS["dino"])
    for value in (np.nan, 0.0):
        bad = gallery.copy()
        bad[3] = value
        with pytest.raises(FeatureError, match=r"gallery features: 1 of 5 rows .*row 3"):
            score_retrieval(gallery[:2], bad, truth, PROTOCOLS["dino"])


def random_features(kind: str, truth: GroundTruth, seed: int, dimension: int = 24) -> tuple[np.ndarray, np.ndarray]:
    """Unit rows of queries and gallery: unrelated, tied, repeated, related, or separated by relevance."""
    rng = np.random.default_rng(seed)
    queries = rng.standard_normal((len(truth.queries), dimension))
    gallery = rng.standard_normal((len(truth.images), dimension))
    if kind == "tied":
        gallery = np.eye(dimension)[rng.integers(0, dimension, len(gallery))]
    elif kind == "duplicated":
        gallery = gallery[rng.integers(0, 1 + len(gallery) // 10, len(gallery))]
    elif kind in ("related", "separated"):
        for query, entry in zip(queries, truth.queries, strict=True):
            for name in ("easy", "hard"):
                gallery[entry.lists[name]] += (0.5 if kind == "related" else 50) * query
    return unit(queries), unit(gallery)


KINDS = ("random", "tied", "duplicated", "related", "separated")


def assert_equal_to_oracle(queries: np.ndarray, gallery: np.ndarray, truth: GroundTruth) -> None:
    gnd = [{name: values.tolist() for name, values in query.lists.items()} for query in truth.queries]
    similarities = [row.tolist() for row in similarity_rows(queries, gallery)]
    wanted = oracle.revisited_scores(similarities, gnd)
    got = score_retrieval(queries, gallery, truth, PROTOCOLS["revisitop"]).metrics
    assert got == pytest.approx(wanted, abs=1e-9)


@st.composite
def small_truths(draw: st.DrawFn) -> dict[str, Any]:
    images, queries = draw(st.integers(1, 25)), draw(st.integers(1, 4))
    gnd = []
    for _ in range(queries):
        roles = draw(st.lists(st.sampled_from(["easy", "hard", "junk", "wrong"]), min_size=images, max_size=images))
        entry = {name: [i for i, role in enumerate(roles) if role == name] for name in GRADED}
        gnd.append({**entry, "bbx": [0, 0, 1, 1]})
    return {"imlist": [f"i{i}" for i in range(images)], "qimlist": [f"q{i}" for i in range(queries)], "gnd": gnd}


@settings(max_examples=60)
@given(content=small_truths(), kind=st.sampled_from(KINDS), seed=st.integers(0, 2**31))
def test_equal_to_the_oracle_on_small_sets(
    tmp_path_factory: pytest.TempPathFactory, content: dict[str, Any], kind: str, seed: int
) -> None:
    truth = read_ground_truth(write_json(tmp_path_factory.mktemp("gnd") / "gnd.json", content))
    if not any(entry["easy"] or entry["hard"] for entry in content["gnd"]):
        return
    assert_equal_to_oracle(*random_features(kind, truth, seed, dimension=5), truth)


@needs_real_gnd
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["roxford5k", "rparis6k"])
def test_equal_to_the_oracle_on_the_real_ground_truth(name: str, kind: str) -> None:
    truth = read_ground_truth(REAL_GND / f"gnd_{name}.pkl")
    assert_equal_to_oracle(*random_features(kind, truth, seed=1), truth)


@needs_real_gnd
@pytest.mark.parametrize(
    ("name", "counted", "chance"),
    [("roxford5k", (68, 70, 70), (1.02, 1.69, 0.81)), ("rparis6k", (70, 70, 70), (1.68, 4.03, 2.50))],
)
def test_chance_level_of_the_real_ground_truth(name: str, counted: tuple[int, ...], chance: tuple[float, ...]) -> None:
    truth = read_ground_truth(REAL_GND / f"gnd_{name}.pkl")
    assert (truth.lists, len(truth.queries)) == (GRADED, 70)
    runs = [
        score_retrieval(*random_features("random", truth, seed), truth, PROTOCOLS["revisitop"]) for seed in range(5)
    ]
    for difficulty, queries, expected in zip(("easy", "medium", "hard"), counted, chance, strict=True):
        assert runs[0].counted_queries[difficulty] == queries
        mean = np.mean([run.metrics[f"mAP_{difficulty}"] for run in runs])
        assert mean == pytest.approx(expected, abs=0.08)


def test_similarities_do_not_depend_on_the_blocks() -> None:
    rng = np.random.default_rng(0)
    queries, gallery = unit(rng.standard_normal((7, 32))), unit(rng.standard_normal((50, 32)))
    whole = np.stack(list(similarity_rows(queries, gallery)))
    blocks = np.stack(list(similarity_rows(queries, gallery, gallery_block=3, matrix_elements=100)))
    assert np.array_equal(whole, blocks)
    assert np.abs(whole - queries.astype(np.float64) @ gallery.T.astype(np.float64)).max() < 1e-7
