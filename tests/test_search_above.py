"""Searches of all that reach a similarity, groups of near duplicates, and Parquet for vector databases."""

from __future__ import annotations

import csv
import itertools
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from sop_faiss.cli.index import main
from sop_faiss.errors import ConfigError
from sop_faiss.features.store import FeatureStore
from sop_faiss.index.build import IndexOptions, build_index
from sop_faiss.index.change import add_to_index, remove_from_index
from sop_faiss.index.duplicates import find_duplicates
from sop_faiss.index.export import export_parquet
from sop_faiss.index.search import FeatureIndex
from tests.oracle_neighbors import unit_rows
from tests.test_search import DIMENSION, make_store

FACTORIES = ["Flat", "IVF2,Flat", "IVF3,SQ8", "HNSW8"]


def spread_store(count: int = 300) -> FeatureStore:
    """Features at all similarities: clusters of random widths, so that pairs, chains and loners occur."""
    store = make_store(count=count)
    rng = np.random.default_rng(4)
    centers = unit_rows(rng, count // 6, DIMENSION)[rng.integers(0, count // 6, count)]
    rows = centers + rng.uniform(0, 0.4, (count, 1)) * rng.standard_normal((count, DIMENSION)) / np.sqrt(DIMENSION)
    store.features = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    store.features[17] = store.features[3]
    return store


@pytest.fixture(scope="module")
def store() -> FeatureStore:
    return spread_store()


@pytest.fixture(scope="module")
def place(store: FeatureStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("place")
    for factory in FACTORIES:
        build_index(store, root / factory, IndexOptions(factory))
    queries = make_store(seed=3, count=7)
    queries.write(root / "queries")
    return root


def invoke(*arguments: object, ok: bool = True) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert not ok or result.exit_code == 0, result.output
    return result


@pytest.mark.parametrize("threshold", [-1.0, 0.3, 0.9, 1.0])
def test_others_above_are_brute_force(place: Path, store: FeatureStore, threshold: float) -> None:
    similarities = (store.features.astype(np.float64) @ store.features.T.astype(np.float64)).astype(np.float32)
    np.fill_diagonal(similarities, -2)
    answers = FeatureIndex.open(place / "Flat").search_rows_above(range(len(store)), threshold)
    for line, answer in zip(similarities, answers, strict=True):
        order = np.lexsort((np.arange(len(line)), -line))
        wanted = order[line[order] >= np.float32(threshold)]
        if threshold < 1:  # at 1 the last bit decides
            np.testing.assert_array_equal(answer.rows[0], wanted)
        np.testing.assert_allclose(answer.similarities[0], line[answer.rows[0]], atol=1e-6)
        assert answer.keys == [[store.keys[row] for row in answer.rows[0]]]


@pytest.mark.parametrize("factory", FACTORIES[1:])
def test_others_above_in_kinds_that_search_a_part(place: Path, factory: str) -> None:
    index = FeatureIndex.open(place / factory)
    if index.manifest.search["effort"] is not None:
        index._vectors.search_setting = index._vectors.search_settings()[-1]
    total, found_of_all = 0, 0
    features = index.features(range(len(index))).astype(np.float64)
    for row, answer in enumerate(index.search_rows_above(range(len(index)), 0.8)):
        rows, similarities = answer.rows[0], answer.similarities[0]
        assert row not in rows and (rows >= 0).all() and len(set(rows.tolist())) == len(rows)
        assert (similarities >= 0.8 - 1e-6).all() and (np.diff(similarities) <= 0).all()
        np.testing.assert_allclose(similarities, np.clip(features[rows] @ features[row], -1, 1), atol=1e-5)
        wanted = set(np.flatnonzero(features @ features[row] >= 0.8 + 1e-5).tolist()) - {row}
        total, found_of_all = total + len(wanted), found_of_all + len(wanted & set(rows.tolist()))
    assert found_of_all == total if factory != "HNSW8" else found_of_all >= 0.8 * total > 0


def groups_by_brute_force(features: np.ndarray, threshold: float) -> list[list[int]]:
    groups = [{row} for row in range(len(features))]
    for one, two in itertools.combinations(range(len(features)), 2):
        if np.float32(features[one].astype(np.float64) @ features[two].astype(np.float64)) >= np.float32(threshold):
            first, second = (next(group for group in groups if row in group) for row in (one, two))
            if first is not second:
                first |= second
                groups.remove(second)
    return sorted((sorted(group) for group in groups if len(group) > 1), key=lambda rows: (-len(rows), rows[0]))


@pytest.mark.parametrize("threshold", [-1.0, 0.7, 0.9, 0.95, 0.99])
def test_groups_are_brute_force(place: Path, store: FeatureStore, threshold: float) -> None:
    groups = find_duplicates(FeatureIndex.open(place / "Flat"), threshold)
    assert [group.rows.tolist() for group in groups] == groups_by_brute_force(store.features, threshold)
    for group in groups:
        wanted = store.features[group.rows] @ store.features[group.rows[0]]
        np.testing.assert_allclose(group.similarities, wanted, atol=1e-6)


def test_groups_of_blocks_join(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = FeatureIndex.open(place / "Flat")
    whole = [group.rows.tolist() for group in find_duplicates(index, 0.9)]
    assert len(whole) > 5 and len(whole[0]) > 4
    monkeypatch.setattr("sop_faiss.index.duplicates._BLOCK_ROWS", 7)
    monkeypatch.setattr("sop_faiss.neighbors.disk.flat_index._RANGE_QUERIES", 3)
    steps: list[tuple[int, int]] = []
    parts = find_duplicates(index, 0.9, progress=lambda done, total: steps.append((done, total)))
    assert [group.rows.tolist() for group in parts] == whole and steps[-1] == (300, 300)


@pytest.mark.parametrize("factory", FACTORIES)
def test_export(place: Path, store: FeatureStore, tmp_path: Path, factory: str) -> None:
    index = FeatureIndex.open(place / factory)
    export_parquet(index, tmp_path / "out.parquet", block_rows=128)
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.column_names == ["id", "key", "source", "member", "label", "label_name", "vector"]
    assert pq.ParquetFile(tmp_path / "out.parquet").num_row_groups == 3
    rows = [store.keys.index(key) for key in table["key"].to_pylist()]
    assert table["id"].to_pylist() == list(range(300)) and sorted(rows) == list(range(300))
    assert table["member"].to_pylist() == [store.members[row] for row in rows]
    names = [None if store.labels[row] < 0 else store.manifest["class_names"][store.labels[row]] for row in rows]
    assert table["label_name"].to_pylist() == names
    vectors = np.array(table["vector"].to_pylist(), np.float32)
    np.testing.assert_allclose(vectors, store.features[rows], atol=0.01 if "SQ" in factory else 0)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    described = json.loads(table.schema.metadata[b"sop_faiss"])
    assert described["encoder"] == store.manifest["encoder"] and described["metric"] == "inner_product"


def test_export_is_whole_or_absent(place: Path, tmp_path: Path) -> None:
    index = FeatureIndex.open(place / "Flat")
    (tmp_path / "out.parquet").write_bytes(b"before")

    def full(done: int, total: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        export_parquet(index, tmp_path / "out.parquet", progress=full)
    assert [path.name for path in tmp_path.iterdir()] == ["out.parquet"]
    assert (tmp_path / "out.parquet").read_bytes() == b"before"


# as a user types it


def test_search_by_features(place: Path, store: FeatureStore) -> None:
    queries = FeatureStore.read(place / "queries")
    result = invoke("search", place / "Flat", "--features", place / "queries", "-k", 4, "--json", "-")
    content = json.loads(result.stdout)
    rows = np.argsort(-(queries.features @ store.features.T), axis=1, kind="stable")[:, :4]
    assert content["k"] == 4 and [query["query"] for query in content["queries"]] == queries.keys
    for query, line, label in zip(content["queries"], rows, queries.labels, strict=True):
        assert [neighbor["row"] for neighbor in query["neighbors"]] == line.tolist()
        name = None if label < 0 else queries.manifest["class_names"][label]
        assert query["label"] == name
        for neighbor in query["neighbors"]:
            unknown = name is None or neighbor["label"] is None
            assert neighbor["right"] is (None if unknown else neighbor["label"] == name)


@pytest.mark.parametrize("what", [["--key", "bild-0003"], ["--features", "queries"]])
def test_threshold_without_k_means_all(place: Path, what: list[str]) -> None:
    words = [place / what[1] if what[0] == "--features" else what[1]]
    every = invoke("search", place / "Flat", what[0], *words, "-k", 299, "--threshold", 0.2, "--json", "-")
    free = invoke("search", place / "Flat", what[0], *words, "--threshold", 0.2, "--json", "-")
    some = invoke("search", place / "Flat", what[0], *words, "-k", 3, "--threshold", 0.2, "--json", "-")
    every, free, some = (json.loads(each.stdout) for each in (every, free, some))
    assert free["k"] is None and free["queries"] == every["queries"]
    assert any(len(query["neighbors"]) > 10 for query in free["queries"])
    for short, long in zip(some["queries"], free["queries"], strict=True):
        assert short["neighbors"] == long["neighbors"][:3]


def test_verify_sizes(place: Path) -> None:
    words = ("search", place / "Flat", "--key", "bild-0003")
    by_size = invoke(*words, "--verify", "sizes")
    assert by_size.stdout == invoke(*words).stdout and "not verified" in by_size.stderr
    refused = invoke(*words, "--verify", "none", ok=False)
    assert refused.exit_code == 1 and "--verify none" in refused.stderr


def test_features_of_another_encoder(place: Path, tmp_path: Path) -> None:
    other = make_store(count=3)
    other.manifest["pooling"] = "mean"
    other.write(tmp_path / "other")
    result = invoke("search", place / "Flat", "--features", tmp_path / "other", ok=False)
    assert result.exit_code == 1 and "another pooling" in result.stderr and result.stderr.count("\n") == 1


def test_kinds_without_range_search(store: FeatureStore, tmp_path: Path) -> None:
    build_index(store, tmp_path / "fast", IndexOptions("PQ4x4fs"))
    index = FeatureIndex.open(tmp_path / "fast")
    with pytest.raises(ConfigError, match="only the k nearest") as error:
        index.search_above(store.features[:2], 0.5)
    assert "\n" not in str(error.value)
    result = invoke("duplicates", tmp_path / "fast", ok=False)
    assert result.exit_code == 1 and "only the k nearest" in result.stderr and "Traceback" not in result.output
    result = invoke("search", tmp_path / "fast", "--key", "bild-0003", "--threshold", 0.5, ok=False)
    assert result.exit_code == 1 and "only the k nearest" in result.stderr
    invoke("search", tmp_path / "fast", "--key", "bild-0003", "--threshold", 0.5, "-k", 5)


def test_duplicates_command(place: Path, store: FeatureStore, tmp_path: Path) -> None:
    wanted = groups_by_brute_force(store.features, 0.95)
    words = ("duplicates", place / "Flat", "--json", tmp_path / "a.json", "--csv", tmp_path / "a.csv")
    result = invoke(*words, "--html", tmp_path / "a.html")
    alike = sum(map(len, wanted))
    assert result.stdout.startswith(
        f"{alike} of 300 images are in {len(wanted)} groups, by similarities of 0.95 or more\n"
    )
    content = json.loads((tmp_path / "a.json").read_text())
    assert [[each["row"] for each in group["images"]] for group in content["groups"]] == wanted
    assert content["images_beyond_the_first"] == alike - len(wanted)
    lines = list(csv.DictReader((tmp_path / "a.csv").read_text().splitlines()))
    assert [int(line["row"]) for line in lines] == [row for rows in wanted for row in rows]
    assert lines[0]["group"] == "1" and lines[-1]["group"] == str(len(wanted))
    page = (tmp_path / "a.html").read_text()
    assert page.count("<article") == min(200, len(wanted)) and f"{len(wanted[0])} alike" in page
    assert "On the left the first image of a group" in page and "Query" not in page
    assert invoke("duplicates", place / "Flat", "--csv", "-").stdout_bytes == (tmp_path / "a.csv").read_bytes()
    refused = invoke("duplicates", place / "Flat", "--threshold", 1.5, ok=False)
    assert (
        refused.exit_code == 1 and refused.stderr == "error: threshold = 1.5: wanted a cosine similarity from -1 to 1\n"
    )


def test_export_command(place: Path, tmp_path: Path) -> None:
    result = invoke("export", place / "Flat", "--out", tmp_path / "out.parquet")
    assert result.stdout == f"300 vectors of dimension {DIMENSION} in {tmp_path / 'out.parquet'}\n"
    invoke("export", place / "Flat", "--out", tmp_path / "out.parquet")  # its own result may be written again
    (tmp_path / "other.parquet").write_bytes(b"PAR1 of something else PAR1")
    refused = invoke("export", place / "Flat", "--out", tmp_path / "other.parquet", ok=False)
    assert refused.exit_code == 1 and "suffix of data" in refused.stderr
    refused = invoke("export", place / "Flat", "--out", place / "Flat" / "x.parquet", ok=False)
    assert refused.exit_code == 1 and "read by this command" in refused.stderr


def test_info_reports_searches_and_changes(tmp_path: Path) -> None:
    store = spread_store()
    build_index(store, tmp_path / "index", IndexOptions("IVF4,Flat"))
    more = make_store(seed=8, count=10)
    more.keys = [f"new-{key}" for key in more.keys]
    add_to_index(tmp_path / "index", more)
    remove_from_index(tmp_path / "index", ["bild-0001", "bild-0002"])
    text = invoke("info", tmp_path / "index").stdout
    for words in (
        "nprobe ",
        "recall@10 ",
        "on 30 images held out (wanted 0.95)",
        "asked for",
        "10 added since; 2 rem",
    ):
        assert words in text


@pytest.mark.parametrize("command", ["duplicates", "export", "add", "remove", "merge", "search"])
def test_help(command: str) -> None:
    assert f"sop-index {command} " in invoke(command, "--help").stdout
