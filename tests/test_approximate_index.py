"""Indices that look at a part of the rows: against brute force, with all their kinds, and against lying files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sop_faiss.errors import ConfigError, FeatureError, IndexMismatchError, SopError
from sop_faiss.index.resume_build import forget_training, trained_once
from sop_faiss.neighbors.disk.approximate_index import ApproximateIndex
from sop_faiss.neighbors.disk.auto_factory import (
    choices,
    exact_similarities,
    near_by_table,
    near_by_vectors,
    tune_search,
)
from sop_faiss.neighbors.disk.factories import append
from sop_faiss.neighbors.disk.from_factory import make_approximate_index, read_approximate_index
from sop_faiss.neighbors.exact import nearest_rows
from tests.messages import assert_one_line
from tests.oracle_neighbors import brute_force, unit_rows

COUNT, DIMENSION = 400, 16
KINDS = ("IVF8,Flat", "IVF8,SQ8", "HNSW8", "SQ8", "PQ8x4", "IVF4,RaBitQ", "OPQ4_8,IVF4,PQ4x4", "IVF8,Flat,RFlat")
FINE = ("IVF8,Flat", "IVF8,SQ8", "HNSW8", "SQ8", "IVF8,Flat,RFlat")


@pytest.fixture(scope="module")
def rows() -> np.ndarray:
    rng = np.random.default_rng(0)
    centers = unit_rows(rng, 10, DIMENSION)
    rows = centers[rng.integers(0, 10, COUNT)] + 0.3 * unit_rows(rng, COUNT, DIMENSION)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    rows[50:60] = rows[7]  # copies
    return rows.astype(np.float32)


def make(factory: str, rows: np.ndarray) -> ApproximateIndex:
    index = make_approximate_index(factory, rows.shape[1])
    index.train(rows)
    index.add(rows)
    return index


@pytest.mark.parametrize("factory", FINE)
def test_with_the_largest_search_setting_it_is_brute_force(factory: str, rows: np.ndarray) -> None:
    index = make(factory, rows)
    if index.setting_name:
        index.search_setting = index.search_settings()[-1]
    queries = unit_rows(np.random.default_rng(1), 20, DIMENSION)
    found = index.search(queries, 10)
    wanted, _ = brute_force(queries, rows, 10)
    scores = np.einsum("qd,qkd->qk", queries, rows[found.rows])
    tolerance = 1e-5 if "SQ" not in factory else 0.02
    np.testing.assert_allclose(scores, wanted, atol=tolerance)  # as near as the true neighbors, which may tie
    np.testing.assert_allclose(found.similarities, scores, atol=tolerance)


@pytest.mark.parametrize("factory", KINDS)
def test_answers_are_whole_and_in_order(factory: str, rows: np.ndarray) -> None:
    index = make(factory, rows)
    queries = unit_rows(np.random.default_rng(2), 6, DIMENSION)
    for k in (1, 10, COUNT if not factory.startswith("HNSW") else 300):
        found = index.search(queries, k)
        assert found.rows.shape == (6, k) and found.rows.min() >= 0
        assert all(len(set(line)) == k for line in found.rows.tolist())
        assert (np.diff(found.similarities) <= 0).all() and abs(found.similarities).max() <= 1
        tied = np.diff(found.similarities) == 0
        assert (np.diff(found.rows)[tied] > 0).all()


@pytest.mark.parametrize("factory", KINDS)
def test_written_and_read(factory: str, rows: np.ndarray, tmp_path: Path) -> None:
    index = make(factory, rows)
    queries = unit_rows(np.random.default_rng(3), 5, DIMENSION)
    index.features(np.array([3]))  # makes a map that is not written
    index.write(tmp_path / "index.faiss")
    for mapped in (True, False):
        again = read_approximate_index(tmp_path / "index.faiss", factory, DIMENSION, COUNT, mapped=mapped)
        assert again.search_setting == index.search_setting  # the least there is
        assert np.array_equal(again.search(queries, 7).rows, index.search(queries, 7).rows)
        np.testing.assert_array_equal(again.features(np.array([5, 399])), index.features(np.array([5, 399])))
        assert again.features(np.array([], np.int64)).shape == (0, DIMENSION)
    for wrong in ((factory, DIMENSION + 1, COUNT), (factory, DIMENSION, COUNT - 1), ("IVF7,Flat", DIMENSION, COUNT)):
        with pytest.raises((IndexMismatchError, ConfigError)) as error:
            read_approximate_index(tmp_path / "index.faiss", *wrong)
        assert "\n" not in str(error.value)
    (tmp_path / "index.faiss").write_bytes(b"IxFI" + bytes(10))
    with pytest.raises(IndexMismatchError, match="cannot be read by FAISS"):
        read_approximate_index(tmp_path / "index.faiss", factory, DIMENSION, COUNT)


@pytest.mark.parametrize("factory", ["IVF8,Flat", "IVF8,SQ8", "SQ8", "OPQ4_8,IVF4,PQ4x4"])
def test_rows_are_removed(factory: str, rows: np.ndarray) -> None:
    index = make(factory, rows)
    kept = np.random.default_rng(4).random(COUNT) < 0.6
    before = index.features(np.flatnonzero(kept))
    index.keep(kept)
    assert index.count == kept.sum()
    np.testing.assert_array_equal(index.features(np.arange(index.count)), before)
    if index.setting_name:
        index.search_setting = index.search_settings()[-1]
    assert sorted(index.search(rows[:1], index.count).rows[0]) == list(range(index.count))


def test_a_graph_cannot_lose_rows(rows: np.ndarray) -> None:
    with pytest.raises(ConfigError, match="cannot lose rows"):
        make("HNSW8", rows).keep(np.ones(COUNT, bool))


@pytest.mark.parametrize("factory", ["IVF8,SQ8", "HNSW8", "IVF8,Flat"])
def test_rows_of_another_index_are_appended(factory: str, rows: np.ndarray) -> None:
    more = rows[::4] + 0.02 * unit_rows(np.random.default_rng(5), 100, DIMENSION)
    more /= np.linalg.norm(more, axis=1, keepdims=True)
    index, other = make(factory, rows), make_approximate_index(factory, DIMENSION)
    other.train(more)
    other.add(more)
    assert not index.takes_codes_of(other)
    append(index, other)
    assert index.count == COUNT + 100
    np.testing.assert_allclose(index.features(np.arange(COUNT, COUNT + 100)), more, atol=0.06)


def test_codes_of_an_index_trained_alike_are_taken_over(rows: np.ndarray) -> None:
    index, other, whole = (make_approximate_index("IVF8,SQ8", DIMENSION) for _ in range(3))
    for each, part in ((index, rows[:250]), (other, rows[250:]), (whole, rows)):
        each.train(rows)
        each.add(part)
    assert index.takes_codes_of(other)
    index.take_codes_of(other)
    np.testing.assert_array_equal(index.features(np.arange(COUNT)), whole.features(np.arange(COUNT)))
    for setting in (1, 8):
        index.search_setting = whole.search_setting = setting
        assert np.array_equal(index.search(rows[:30], 5).rows, whole.search(rows[:30], 5).rows)


def test_all_above_a_similarity(rows: np.ndarray) -> None:
    index = make("IVF8,Flat", rows)
    index.search_setting = 8
    for query, found in zip(rows[:9], index.search_above(rows[:9], 0.8), strict=True):
        scores = rows.astype(np.float64) @ query
        certain = set(np.flatnonzero(scores > 0.8 + 1e-5))
        assert certain <= set(found.rows[0].tolist()) <= set(np.flatnonzero(scores > 0.8 - 1e-5))
        assert (np.diff(found.similarities) <= 0).all()


@pytest.mark.parametrize(
    "factory", ["nonsense", "", "IVF0,Flat", "IDMap,Flat", "LSH", "PQ5", "IVF8,Flat,extra", "\x00", "IVF8,Flat\n"]
)
def test_factories_that_are_refused(factory: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_approximate_index(factory, DIMENSION)
    assert "\n" not in str(error.value)


def test_what_users_ask_wrongly(rows: np.ndarray) -> None:
    index = make("IVF8,Flat", rows)
    for k in (0, COUNT + 1):
        with pytest.raises(ConfigError, match=f"wanted 1 <= k <= {COUNT}"):
            index.search(rows[:1], k)
    with pytest.raises(FeatureError, match="dimension 5, the index 16"):
        index.search(np.ones((1, 5), np.float32), 1)
    for setting in (0, 9):
        with pytest.raises(ConfigError, match=f"nprobe = {setting} .*1 to 8"):
            index.search_setting = setting
    with pytest.raises(ConfigError, match="cannot be trained on 400 vectors"):
        make("IVF500,Flat", rows)


# ------------------------------------------------------------------------------------------------------------- choice


@pytest.mark.parametrize(
    ("count", "max_bytes", "factory"),
    [
        (1, None, "Flat"),
        (100_000, None, "Flat"),
        (100_001, None, "IVF1024,Flat"),
        (1_000_000, None, "IVF4096,Flat"),
        (1_000_000, 10**9, "IVF4096,SQfp16"),
        (1_000_000, 5 * 10**8, "IVF4096,SQ8"),
        (1_000_000, 3 * 10**8, "IVF4096,SQ4"),
        (1_000_000, 10**8, "IVF4096,RaBitQ,Refine(SQfp16)"),
        (1000, 10**6, "IVF25,SQfp16"),
    ],
)
def test_choice(count: int, max_bytes: int | None, factory: str) -> None:
    choice = choices(count, 384, max_bytes)[0]
    assert choice.factory == factory and "\n" not in choice.why
    assert max_bytes is None or choice.index_bytes <= max_bytes
    make_approximate_index(factory, 384)


def test_nothing_fits() -> None:
    with pytest.raises(ConfigError, match="allow more memory") as error:
        choices(1_000_000, 384, 6 * 10**7)
    assert "IVF4096,PQ48" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("max_bytes", [10**7, 320_000, 170_000])
def test_a_chosen_index_is_as_large_as_was_told(max_bytes: int, tmp_path: Path) -> None:
    choice = choices(2000, 64, max_bytes)[0]
    rows = unit_rows(np.random.default_rng(0), 2000, 64)
    if choice.factory != "Flat":
        make(choice.factory, rows).write(tmp_path / "index.faiss")
        size = (tmp_path / "index.faiss").stat().st_size
        assert 0.9 * size < choice.index_bytes < 1.1 * size and size <= max_bytes


def test_exact_similarities_by_blocks(rows: np.ndarray) -> None:
    queries = unit_rows(np.random.default_rng(6), 7, DIMENSION)
    found = exact_similarities(queries, iter((rows[:3], rows[3:150], rows[150:])), 12)
    np.testing.assert_allclose(found, brute_force(queries, rows, 12)[0], atol=1e-6)


def test_the_smallest_search_setting_that_is_enough(rows: np.ndarray) -> None:
    rng = np.random.default_rng(7)
    queries = rows[rng.integers(0, COUNT, 60)] + 0.2 * unit_rows(rng, 60, DIMENSION)
    queries = (queries / np.linalg.norm(queries, axis=1, keepdims=True)).astype(np.float32)
    index, order = make("IVF16,Flat", rows), np.arange(COUNT)
    nearest = exact_similarities(queries, iter((rows,)), 10)
    recall_by_setting = {}
    for setting in index.search_settings():  # the oracle: try them all
        index.search_setting = setting
        found = index.search(queries, 10).rows
        scores = np.einsum("qd,qkd->qk", queries.astype(np.float64), rows[found])
        recall_by_setting[setting] = float((scores >= nearest[:, -1:] - 1e-6).mean())
    assert recall_by_setting[1] < 0.9 < recall_by_setting[16] == 1
    judges = [near_by_vectors(queries, nearest, rows, order), near_by_table(nearest_rows(queries, rows, 40), 10)]
    for judge in judges:
        recall = tune_search(index, queries, 10, judge, 0.9)
        assert index.search_setting == min(setting for setting, share in recall_by_setting.items() if share >= 0.9)
        assert recall.share == recall_by_setting[index.search_setting] and (recall.k, recall.queries) == (10, 60)


RERANKED = ("IVF8,RaBitQ,Refine(SQfp16)", "IVF8,Flat,RFlat", "RR16,IVF8,PQ4x4fs,Refine(Flat)")


@pytest.mark.parametrize("factory", RERANKED)
def test_reranking_kinds_lose_and_take_rows(factory: str, rows: np.ndarray, tmp_path: Path) -> None:
    index, part = make(factory, rows), np.arange(COUNT) % 3 > 0
    index.search_setting, index.rerank = 8, 20
    index.keep(part)
    kept = rows[part]
    found = kept[index.search(kept[:40], 1).rows[:, 0]]  # some rows are copies
    np.testing.assert_allclose(np.einsum("qd,qd->q", found, kept[:40]), 1, atol=1e-3)
    np.testing.assert_allclose(index.features(np.arange(len(kept))), kept, atol=1e-3)
    first, second = (make_approximate_index(factory, rows.shape[1]) for _ in range(2))
    for each, block in ((first, rows[:100]), (second, rows[100:])):
        each.train(rows)
        each.add(block)
    append(first, second)
    first.search_setting, first.rerank = 8, 20
    assert first.count == COUNT
    np.testing.assert_allclose(first.features(np.arange(COUNT)), rows, atol=1e-3)
    np.testing.assert_array_equal(first.search(rows[90:130], 1).rows[:, 0], np.arange(90, 130))


def test_candidates_are_tuned_and_written(rows: np.ndarray, tmp_path: Path) -> None:
    index = make(RERANKED[0], rows)
    rng = np.random.default_rng(7)
    queries = unit_rows(rng, 60, rows.shape[1])
    nearest = exact_similarities(queries, iter((rows,)), 10)
    recall = tune_search(index, queries, 10, near_by_vectors(queries, nearest, rows, np.arange(COUNT)), 0.9)
    assert recall.share >= 0.9 and index.rerank is not None
    index.write(tmp_path / "index.faiss")
    opened = read_approximate_index(tmp_path / "index.faiss", RERANKED[0], rows.shape[1], COUNT)
    assert opened.rerank == index.rerank
    opened.search_setting = index.search_setting
    found, again = index.search(queries, 10), opened.search(queries, 10)
    np.testing.assert_array_equal(found.rows, again.rows)
    np.testing.assert_allclose(found.similarities, again.similarities, atol=1e-6)  # other order of adding up


def test_a_rotation_is_not_learned_from_fewer_rows_than_dimensions() -> None:
    rows = unit_rows(np.random.default_rng(0), 260, 320)
    for factory in ("OPQ4,PQ4", "OPQ4,IVF2,PQ4,RFlat"):
        with pytest.raises(ConfigError, match="OPQ"):
            make_approximate_index(factory, 320).train(rows)


# trained once


@pytest.mark.parametrize("factory", ["IVF8,SQ8", "PQ8x4", "HNSW8", "OPQ4_8,IVF4,PQ4x4"])
def test_a_kept_training_gives_the_same_index(
    factory: str, rows: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, trained = tmp_path / "photos.index", []
    real = ApproximateIndex.train
    monkeypatch.setattr(ApproximateIndex, "train", lambda self, rows: (trained.append(len(rows)), real(self, rows))[1])

    def train(given: np.ndarray, factory: str = factory) -> bytes:
        index = trained_once(make_approximate_index(factory, DIMENSION), given, out)
        index.add(rows)
        index.write(tmp_path / "written")
        return (tmp_path / "written").read_bytes()

    first = train(rows)
    assert train(rows) == first and len(trained) == 1
    train(rows[1:])
    train(rows, "IVF4,Flat")
    assert len(trained) == 3, "trained anew on other rows, and for another factory"
    kept = tmp_path / ".photos.index.trained" / "trained.faiss"
    content = bytearray(kept.read_bytes())
    content[len(content) // 2] ^= 1
    kept.write_bytes(content)
    train(rows, "IVF4,Flat")
    assert len(trained) == 4, "trained anew where the kept one is damaged"
    forget_training(out)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_files_of_others_in_the_place_of_a_training_stay(rows: np.ndarray, tmp_path: Path, kind: str) -> None:
    place = tmp_path / ".photos.index.trained"
    mine = place if kind == "file" else place / "mine.txt"
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    with pytest.raises(SopError, match="trained "):
        trained_once(make_approximate_index("IVF8,SQ8", DIMENSION), rows, tmp_path / "photos.index")
    forget_training(tmp_path / "photos.index")
    assert mine.read_text() == "mine" and sum(path.is_file() for path in tmp_path.rglob("*")) == 1


@pytest.mark.parametrize(
    ("factory", "number"),
    [
        *((f"{name}{number}", number) for name in ("HNSW", "NSG", "IVF4_HNSW", "PQ8x") for number in (0, 2_000_000)),
        ("HNSW1", 1), ("IVF0,Flat", 0), ("IVF99999999999,Flat", 99_999_999_999), ("IVF4(HNSW0),Flat", 0),
        ("LSQ2x0", 0), ("PQ8x4fs_0", 0), ("RaBitQfs_0", 0), ("RR0,Flat", 0), ("ZnLattice0x10_6", 0), ("HNSW8_SQ0", 0),
        ("OPQ8_2000000000,Flat", 2_000_000_000), ("Pad2000000000,Flat", 2_000_000_000), ("RQ60000x8", 60_000),
    ],
)  # fmt: skip
def test_numbers_that_end_the_process_or_never_end_are_refused(factory: str, number: int) -> None:
    with pytest.raises(ConfigError) as error:
        make_approximate_index(factory, DIMENSION)
    assert_one_line(error, factory, f" {number} ")


def test_a_factory_of_many_letters_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        make_approximate_index("(" * 100_000, DIMENSION)
    assert_one_line(error, "100,000")


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("factory", ["IVF8,PQ4x4fs", "PCA8,SQ8", "SQ8,Refine(Flat)", "PCA8,IVF8,SQ8,Refine(Flat)"])
def test_what_was_written_is_read(factory: str, mapped: bool, rows: np.ndarray, tmp_path: Path) -> None:
    """FAISS leaves things out of its files: a pointer of fast scans, and the class of a refinement."""
    index = make(factory, rows)
    index.write(tmp_path / "index.faiss")
    again = read_approximate_index(tmp_path / "index.faiss", factory, DIMENSION, COUNT, mapped=mapped)
    np.testing.assert_array_equal(again.features(np.arange(40)), index.features(np.arange(40)))


def test_what_faiss_would_end_or_cannot_return(rows: np.ndarray) -> None:
    with pytest.raises(ConfigError, match="Refine"):
        make_approximate_index("SQ8,Refine(IVF2,Flat)", DIMENSION)
    with pytest.raises(ConfigError, match="ITQ8"):
        make("ITQ8,Flat", rows).features(np.arange(3))
