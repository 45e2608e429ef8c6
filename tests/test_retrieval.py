"""Protocols and scores: cases worked out by hand, and a sort-based oracle on small and on the real ground truth."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sop_faiss.errors import ConfigError, DataError, FeatureError
from sop_faiss.evaluate.retrieval import PROTOCOLS, choose_protocol, score_retrieval
from sop_faiss.evaluate.sets.ground_truth import GRADED, GroundTruth, read_ground_truth
from sop_faiss.neighbors.similarity import similarity_rows
from tests import oracle_metrics as oracle
from tests.ground_truths import GRADED_GND, PLAIN_GND, REAL_GND, changed, needs_real_gnd, write_json
from tests.unit_vectors import unit


def test_protocol_by_default_and_by_name(tmp_path: Path) -> None:
    graded = read_ground_truth(write_json(tmp_path / "gnd.json", GRADED_GND))
    plain = read_ground_truth(write_json(tmp_path / "gnd.json", PLAIN_GND))
    assert choose_protocol(None, graded).name == "revisitop"
    assert choose_protocol(None, plain).name == "plain"
    assert choose_protocol("dino", graded).box == "ignored"
    with pytest.raises(ConfigError, match="wanted one of revisitop, dino, plain"):
        choose_protocol("revisited", graded)
    with pytest.raises(DataError, match="`protocol=revisitop` or `protocol=dino`"):
        choose_protocol("plain", graded)
    with pytest.raises(DataError, match="choose `protocol=plain`"):
        choose_protocol("dino", plain)


def test_revisitop_needs_a_box_for_every_query(tmp_path: Path) -> None:
    content = changed(GRADED_GND)
    del content["gnd"][1]["bbx"]
    truth = read_ground_truth(write_json(tmp_path / "gnd.json", content))
    with pytest.raises(DataError, match=r"1 of 2 queries have no bbx \(first: q1\)"):
        choose_protocol(None, truth)
    assert choose_protocol("dino", truth).name == "dino"


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
        "R@5": 100.0,
        "R@10": 100.0,
        "R-precision": 50.0,
        "mAP@R": 50.0,
        "nDCG": pytest.approx(100 * (1 + 1 / math.log2(3)) / 2),
        "mAP_standard": pytest.approx(100 * (1 + 1 / 2) / 2),
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


@settings(max_examples=30)
@given(content=small_truths(), kind=st.sampled_from(KINDS), seed=st.integers(0, 2**31), count=st.integers(0, 30))
def test_distractors_are_gallery_images_at_the_end(
    tmp_path_factory: pytest.TempPathFactory, content: dict[str, Any], kind: str, seed: int, count: int
) -> None:
    """Equal to the sort of everything, distractors behind the gallery; some distractors are copies of its images."""
    truth = read_ground_truth(write_json(tmp_path_factory.mktemp("gnd") / "gnd.json", content))
    if not any(entry["easy"] or entry["hard"] for entry in content["gnd"]):
        return
    queries, gallery = random_features(kind, truth, seed, dimension=5)
    rng = np.random.default_rng(seed)
    more = np.concatenate([gallery[rng.integers(0, len(gallery), count)], unit(rng.standard_normal((count, 5)))])
    gnd = [{name: values.tolist() for name, values in query.lists.items()} for query in truth.queries]
    similarities = [row.tolist() for row in similarity_rows(queries, np.concatenate([gallery, more]))]
    wanted = oracle.revisited_scores(similarities, gnd)
    for blocks in ([more], np.array_split(more, 3), [more[::-1]]):
        got = score_retrieval(queries, gallery, truth, PROTOCOLS["revisitop"], distractors=iter(blocks)).metrics
        assert got == pytest.approx(wanted, abs=1e-9)


@needs_real_gnd
@pytest.mark.parametrize("name", ["roxford5k", "rparis6k"])
def test_distractors_on_the_real_ground_truth(name: str) -> None:
    truth = read_ground_truth(REAL_GND / f"gnd_{name}.pkl")
    queries, gallery = random_features("related", truth, seed=1)
    more = unit(np.random.default_rng(2).standard_normal((3000, 24)))
    gnd = [{key: values.tolist() for key, values in query.lists.items()} for query in truth.queries]
    similarities = [row.tolist() for row in similarity_rows(queries, np.concatenate([gallery, more]))]
    scores = score_retrieval(queries, gallery, truth, PROTOCOLS["revisitop"], distractors=iter(np.split(more, 3)))
    assert scores.metrics == pytest.approx(oracle.revisited_scores(similarities, gnd), abs=1e-9)
    alone = score_retrieval(queries, gallery, truth, PROTOCOLS["revisitop"]).metrics
    assert scores.metrics["mAP_hard"] < alone["mAP_hard"] - 0.1


def test_distractors_that_are_no_unit_rows(tmp_path: Path) -> None:
    truth = read_ground_truth(write_json(tmp_path / "gnd.json", GRADED_GND))
    gallery = line_features(5)
    for bad, message in ((np.zeros((1, 2), np.float32), "distractors: 1 of 1 rows"), (unit(np.eye(3)), "dimension 3")):
        with pytest.raises(FeatureError, match=message):
            score_retrieval(gallery[:2], gallery, truth, PROTOCOLS["dino"], distractors=iter([bad]))
