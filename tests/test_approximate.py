"""Approximate search against brute force in float64: exact where it looks everywhere, true and complete everywhere."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import faiss  # isort: skip  (after torch: one OpenMP runtime)
from sop_faiss.config import NeighborsConfig, TermConfig
from sop_faiss.errors import CheckpointError, ConfigError
from sop_faiss.model.checkpoint import find_checkpoint, read_tensors
from sop_faiss.neighbors import approximate
from sop_faiss.neighbors.approximate import ApproximateSearch, count_lists, index_bytes, index_pays
from sop_faiss.neighbors.mirror import NearestRows, RingMirror
from sop_faiss.sop.memory import Memory
from sop_faiss.sop.prototypes import PrototypeMaker
from sop_faiss.train.log.monitor import read_metrics
from sop_faiss.verbs.training.dry_run import describe_run
from sop_faiss.verbs.training.train import run_training
from tests.images import write_shards
from tests.memories import drifting_stores
from tests.memory_use import LargestTensor
from tests.oracle import brute_force_supports
from tests.runs import tiny_config

TIE = 1e-5
EVERYWHERE = {
    "ivf": NeighborsConfig(index="ivf", probes=10**6, rebuild_every_steps=7),
    "hnsw": NeighborsConfig(index="hnsw", ef_search=1000, rebuild_every_steps=7),
}
HARDLY = {
    "ivf": NeighborsConfig(index="ivf", probes=1, rebuild_every_steps=9),
    "hnsw": NeighborsConfig(index="hnsw", ef_search=1, rebuild_every_steps=9),
}
KINDS = pytest.mark.parametrize("kind", ["ivf", "hnsw"])


def indexed_memory(capacity: int, dim: int, k: int, settings: NeighborsConfig, *, seed: int = 0) -> Memory:
    memory = Memory(capacity, dim, torch.Generator().manual_seed(seed))
    memory.use_index(settings, k)
    return memory


def unit_rows(count: int, dim: int, seed: int) -> Tensor:
    return F.normalize(torch.randn(count, dim, generator=torch.Generator().manual_seed(seed)), dim=1)


def assert_true_and_in_order(found: NearestRows, queries: Tensor, memory: Memory) -> None:
    """k different rows that exist, with the similarities that they have now, falling, ties by rising row."""
    assert int(found.rows.min()) >= 0
    exact = queries.double() @ memory.embeddings.double().T
    torch.testing.assert_close(found.similarities.double(), exact.gather(1, found.rows), rtol=0, atol=TIE)
    assert (found.rows.sort(dim=1).values.diff(dim=1) > 0).all()
    steps = found.similarities.diff(dim=1)
    assert (steps <= 0).all()
    assert (found.rows.diff(dim=1)[steps == 0] > 0).all()


def count_builds(monkeypatch) -> list[int]:
    builds: list[int] = []
    build = approximate._build
    monkeypatch.setattr(approximate, "_build", lambda rows, kind: builds.append(len(rows)) or build(rows, kind))
    return builds


@pytest.mark.parametrize(("sizes", "steps"), [(range(1, 9), 350), (range(1, 700), 40)])
def test_with_all_lists_probed_it_is_exact_after_every_store(monkeypatch, sizes, steps):
    builds = count_builds(monkeypatch)
    generator = torch.Generator().manual_seed(7)
    memory = indexed_memory(500, 12, 6, EVERYWHERE["ivf"])
    for embeddings, ids in drifting_stores(60, 12, sizes, steps, generator):
        memory.store(embeddings, ids)
        queries = torch.cat([memory.embeddings[memory.sample(20, generator)], unit_rows(4, 12, memory.stored)])
        found = memory.search(queries, 7)
        assert_true_and_in_order(found, queries, memory)
        exact = (queries.double() @ memory.embeddings.double().T).topk(7, dim=1).values
        torch.testing.assert_close(found.similarities.double(), exact, rtol=0, atol=TIE)
    assert memory.stored > 3 * 500  # it wrapped
    assert len(builds) > 10
    assert memory.neighbor_recall == 1.0


@KINDS
def test_whatever_little_it_looks_at_what_it_returns_is_true(kind):
    generator = torch.Generator().manual_seed(7)
    memory = indexed_memory(400, 12, 4, HARDLY[kind])
    missed = 0
    for embeddings, ids in drifting_stores(60, 12, range(1, 40), 120, generator):
        memory.store(embeddings, ids)
        queries = torch.cat([memory.embeddings[memory.sample(20, generator)], unit_rows(4, 12, memory.stored)])
        found = memory.search(queries, 5)
        assert_true_and_in_order(found, queries, memory)
        best = (queries.double() @ memory.embeddings.double().T).topk(5, dim=1).values
        missed += int((found.similarities < best[:, -1:] - TIE).sum())
    assert missed > 100  # so that this was a test of an approximate search


@KINDS
def test_rows_stored_since_the_build_are_never_missed_and_overwritten_ones_are_gone(kind):
    settings = NeighborsConfig(index=kind, probes=1, ef_search=1, rebuild_every_steps=10**6)
    memory = indexed_memory(400, 8, 1, settings)
    memory.store(unit_rows(300, 8, 1), torch.arange(300))
    memory.search(memory.embeddings[:1], 1)  # builds
    for step in range(6):  # rows 300..399, then 0..79
        old = memory.embeddings[(memory.pointer + torch.arange(30)) % 400].clone()
        new = unit_rows(30, 8, 10 + step)
        rows = ((memory.pointer + torch.arange(30)) % 400).unsqueeze(1)
        memory.store(new, torch.arange(30))
        found = memory.search(new, 1)
        assert torch.equal(found.rows, rows)
        torch.testing.assert_close(found.similarities, torch.ones(30, 1), rtol=0, atol=TIE)
        assert_true_and_in_order(memory.search(old, 5), old, memory)


@KINDS
def test_recall_is_that_of_counting(kind):
    memory = indexed_memory(1500, 24, 8, HARDLY[kind])
    memory.search(memory.embeddings[:1], 1)
    sample = torch.randperm(1500, generator=torch.Generator().manual_seed(1234))[:256]
    rows = memory.embeddings.double()
    right = 0
    for row, found in zip(sample.tolist(), memory.search(memory.embeddings[sample], 9).rows.tolist(), strict=True):
        others = [other for other in found if other != row][:8]
        similarities = rows @ rows[row]
        similarities[row] = -2.0
        nearest = set(similarities.topk(8).indices.tolist())
        right += len(nearest & set(others))
    assert memory.neighbor_recall == right / (256 * 8)
    assert 0.05 < memory.neighbor_recall < 0.95


@KINDS
def test_looking_further_finds_more(kind):
    recalls = []
    for effort in (1, 3, 1000):
        memory = indexed_memory(1500, 24, 8, NeighborsConfig(index=kind, probes=effort, ef_search=effort))
        memory.search(memory.embeddings[:1], 1)
        recalls.append(memory.neighbor_recall)
    assert recalls[0] < recalls[1] < recalls[2]
    assert recalls[2] > 0.999


@KINDS
def test_it_is_built_anew_every_n_stores_and_when_half_is_new(monkeypatch, caplog, kind):
    caplog.set_level(logging.INFO)
    builds = count_builds(monkeypatch)
    memory = indexed_memory(100, 6, 2, NeighborsConfig(index=kind, rebuild_every_steps=4))
    for _ in range(3):  # stores before the first search cost nothing
        memory.store(unit_rows(60, 6, 1), torch.arange(60))
    assert builds == []
    for step in range(9):
        memory.search(memory.embeddings[:2], 2)
        assert len(builds) == 1 + step // 4
        memory.store(unit_rows(3, 6, step), torch.arange(3))
    memory.store(unit_rows(46, 6, 1), torch.arange(46))
    memory.search(memory.embeddings[:2], 2)
    assert len(builds) == 3  # 49 new rows of 100
    memory.store(unit_rows(1, 6, 1), torch.arange(1))
    memory.search(memory.embeddings[:2], 2)
    assert len(builds) == 4
    told = [message for message in caplog.messages if "recall@2" in message]
    assert len(told) == 1
    assert re.search(rf"neighbors\.index = {kind} of 100 rows built in .* s; recall@2 [01]\.\d{{4}}", told[0])


@KINDS
@pytest.mark.parametrize("k", [1, 60, 300])
def test_where_it_comes_upon_too_few_rows_it_searches_exactly(caplog, kind, k):
    caplog.set_level(logging.INFO)
    memory = indexed_memory(300, 8, 5, HARDLY[kind])
    queries = unit_rows(20, 8, 3)
    for step in range(12):
        found = memory.search(queries, k)
        assert found.rows.shape == (20, k)
        assert_true_and_in_order(found, queries, memory)
        memory.store(unit_rows(10, 8, 20 + step), torch.arange(10))
    told = [message for message in caplog.messages if "repeated exactly" in message]
    assert len(told) <= 1
    if k == 300:
        assert told
        exact = (queries.double() @ memory.embeddings.double().T).sort(dim=1, descending=True).values
        found = memory.search(queries, k)
        torch.testing.assert_close(found.similarities.double(), exact, rtol=0, atol=TIE)
    for wrong in (0, 301):
        with pytest.raises(ConfigError, match=f"{wrong} .* 300"):
            memory.search(queries, wrong)


@KINDS
def test_equal_rows(kind):
    memory = indexed_memory(200, 6, 4, EVERYWHERE[kind])
    memory.store(memory.embeddings[:1].expand(200, 6).clone(), torch.arange(200))  # a collapsed encoder
    found = memory.search(memory.embeddings[:10], 5)
    assert_true_and_in_order(found, memory.embeddings[:10], memory)
    assert memory.neighbor_recall == 1.0


def test_similarities_are_computed_in_blocks():
    memory = indexed_memory(500, 64, 4, EVERYWHERE["ivf"])
    queries = unit_rows(3000, 64, 5)
    with LargestTensor() as seen:
        together = memory.search(queries, 200)
    assert seen.elements <= 2**24 < 3000 * 200 * 64
    parts = [memory.search(part, 200) for part in queries.split(700)]
    assert torch.equal(together.rows, torch.cat([part.rows for part in parts]))
    assert torch.equal(together.similarities, torch.cat([part.similarities for part in parts]))


def make_maker(
    settings: NeighborsConfig, *, exclude: bool, capacity: int = 300, anchors: str = "random", seed: int = 1
):
    memory = Memory(capacity, 6, torch.Generator().manual_seed(seed))
    memory.use_index(settings, 4)
    return PrototypeMaker(
        memory,
        TermConfig(num_anchors=16, num_supports=4, tasks=2),
        contributions="similarity",
        eps=0.1,
        anchors=anchors,
        exclude_same_image=exclude,
        generator=torch.Generator().manual_seed(3),
    )


@pytest.mark.parametrize("exclude", [False, True])
def test_supports_are_the_oracles_where_it_looks_everywhere(exclude):
    maker = make_maker(EVERYWHERE["ivf"], exclude=exclude)
    memory = maker.memory
    for embeddings, ids in drifting_stores(50, 6, range(1, 30), 40, torch.Generator().manual_seed(8)):
        noise = 0.1 * torch.rand(len(ids), 6, generator=torch.Generator().manual_seed(memory.stored))
        memory.store(F.normalize(embeddings + noise, dim=1), ids)  # no copies, no ties
        prototypes = maker.draw()
        rows = prototypes.anchor_rows[0].tolist()[:2]
        for anchor, supports in zip(rows, prototypes.support_rows[0].tolist()[:2], strict=True):
            assert supports == brute_force_supports(memory.embeddings, memory.image_ids, anchor, 4, exclude)
    assert float(prototypes.health()["neighbor_recall"]) == memory.neighbor_recall == 1.0


@KINDS
@pytest.mark.parametrize("anchors", ["random", "fixed_vectors"])
def test_an_anchor_and_rows_of_its_image_are_never_its_supports(kind, anchors):
    maker = make_maker(HARDLY[kind], exclude=True, anchors=anchors)
    memory = maker.memory
    ids_of_fixed = None
    for embeddings, ids in drifting_stores(50, 6, range(1, 30), 40, torch.Generator().manual_seed(8)):
        memory.store(embeddings, ids)
        prototypes = maker.draw()
        own = memory.image_ids[prototypes.anchor_rows]
        if anchors == "fixed_vectors":
            ids_of_fixed = own if ids_of_fixed is None else ids_of_fixed
            own = ids_of_fixed
        same = (memory.image_ids[prototypes.support_rows] == own.unsqueeze(2)) & (own >= 0).unsqueeze(2)
        assert not same.any()
        if anchors == "random":
            assert (prototypes.support_rows != prototypes.anchor_rows.unsqueeze(2)).all()


@KINDS
def test_too_few_rows_of_other_images_is_the_same_error(kind):
    maker = make_maker(HARDLY[kind], exclude=True)
    maker.memory.store(unit_rows(300, 6, 2), torch.zeros(300, dtype=torch.int64))
    with pytest.raises(ConfigError, match="fewer than 4 rows of other images"):
        maker.draw()


@KINDS
@pytest.mark.parametrize(
    ("stop", "position"),  # before the first search; rows 0..79 are new; rows 360..399 and 0..59; time to build
    [(0, None), (4, [0, 80, 4]), (23, [360, 100, 5]), (27, None)],
)
def test_resume_goes_on_with_the_very_same_numbers(kind, stop, position):
    settings = HARDLY[kind]
    whole, queries = indexed_memory(400, 12, 4, settings), unit_rows(30, 12, 5)
    stores = list(drifting_stores(60, 12, range(20, 21), 40, torch.Generator().manual_seed(8)))
    found, recalls = [], []
    for step, (embeddings, ids) in enumerate(stores):
        if step == stop:
            state = {key: value.clone() for key, value in whole.state_dict().items()}
        found.append(whole.search(queries, 5))
        recalls.append(whole.neighbor_recall)
        whole.store(embeddings, ids)
    saved = state.get("index_position")
    assert position == (None if saved is None else saved.tolist())
    resumed = indexed_memory(400, 12, 4, settings, seed=9)
    resumed.search(queries, 5)  # an index of other contents, which must not survive
    resumed.load_state_dict(state)
    for step in range(stop, 40):
        again = resumed.search(queries, 5)
        assert torch.equal(again.rows, found[step].rows)
        assert torch.equal(again.similarities, found[step].similarities)
        assert resumed.neighbor_recall == recalls[step]
        resumed.store(*stores[step])


@KINDS
def test_a_resumed_index_is_of_the_former_rows(kind):
    """The index that comes back holds what the first one held, not what the memory holds now."""
    first, second = (indexed_memory(400, 12, 4, HARDLY[kind], seed=seed) for seed in (0, 1))
    former = first.embeddings.clone()
    first.search(former[:1], 1)
    first.store(unit_rows(90, 12, 3), torch.arange(90))
    assert first.state_dict()["index_former_rows"].shape == (90, 12)
    second.load_state_dict(first.state_dict())
    for memory in (first, second):
        assert np.array_equal(memory._approximate._index.reconstruct_n(0, 400), former.numpy())
    assert np.array_equal(*(faiss.serialize_index(memory._approximate._index) for memory in (first, second)))


def test_several_threads_build_the_same_graph():
    rows = unit_rows(3000, 16, 4)
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(4)
    try:
        one, two = (faiss.serialize_index(approximate._build(rows, "hnsw")) for _ in range(2))
        faiss.omp_set_num_threads(1)
        alone = faiss.serialize_index(approximate._build(rows, "hnsw"))
    finally:
        faiss.omp_set_num_threads(threads)
    assert np.array_equal(one, two)
    assert np.array_equal(one, alone)


def test_states_of_memories_with_and_without_an_index_and_damaged_ones():
    plain, indexed = Memory(200, 6, torch.Generator().manual_seed(0)), indexed_memory(200, 6, 3, EVERYWHERE["hnsw"])
    queries = unit_rows(5, 6, 3)
    indexed.load_state_dict(plain.state_dict())
    torch.testing.assert_close(indexed.search(queries, 4).similarities, plain.search(queries, 4).similarities)
    indexed.store(unit_rows(20, 6, 4), torch.arange(20))
    state = indexed.state_dict()
    plain.load_state_dict(state)
    torch.testing.assert_close(indexed.search(queries, 4).similarities, plain.search(queries, 4).similarities)
    for damage in (
        {"index_position": torch.tensor([200, 20, 1])},
        {"index_position": torch.tensor([0, 21, 1])},
        {"index_former_rows": torch.zeros(20, 5)},
    ):
        with pytest.raises(CheckpointError, match="the checkpoint's index has"):
            indexed.load_state_dict({**state, **damage})


def test_lists_grow_with_the_root_of_the_rows_and_small_indices_cannot_pay():
    assert [count_lists(rows) for rows in (2, 40, 400, 65536, 2**20)] == [1, 1, 10, 256, 1024]
    for kind in ("ivf", "hnsw"):
        assert index_pays(NeighborsConfig(index=kind), 2**20)
        assert not index_pays(NeighborsConfig(index=kind), 4096)
    assert not index_pays(NeighborsConfig(index="ivf", probes=1024), 2**20)
    assert index_bytes("ivf", 100, 8) == 100 * (8 * 4 + 8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"index": "lsh"}, r"neighbors\.index = 'lsh': wanted one of exact, ivf, hnsw"),
        ({"index": "ivf", "refresh": "incremental"}, "neighbors.refresh = incremental exclude each other"),
        ({"index": "hnsw", "engine": "torch"}, r"neighbors\.index = hnsw is an index of FAISS"),
        ({"rebuild_every_steps": 0}, r"neighbors\.rebuild_every_steps = 0: wanted 1 or more"),
        ({"probes": 0}, r"neighbors\.probes = 0"),
        ({"ef_search": -1}, r"neighbors\.ef_search = -1"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message) as caught:
        NeighborsConfig(**settings)
    assert "\n" not in str(caught.value)


def test_an_index_on_another_device_is_refused():
    mirror = RingMirror(10, 4, torch.device("meta"), engine="torch")
    with pytest.raises(ConfigError, match=r"neighbors\.index = ivf .* meta"):
        ApproximateSearch(mirror, NeighborsConfig(index="ivf"), 2)


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    return write_shards(tmp_path_factory.mktemp("approximate"), classes=2, per_class=12, size=20)


def records(run: Path) -> list[dict]:
    timings = ("images_per_second", "data_wait_share", "memory_peak_bytes")
    return [{key: value for key, value in line.items() if key not in timings} for line in read_metrics(run)]


@KINDS
def test_a_run_trains_tells_its_recall_and_resumes_exactly(tmp_path, shards, caplog, kind):
    caplog.set_level(logging.INFO)
    overrides = (
        f"data.train={shards}", f"neighbors.index={kind}", "neighbors.ef_search=1", "neighbors.probes=1",
        "neighbors.exclude_same_image=never", "train.epochs=2",
    )  # fmt: skip
    assert run_training(tiny_config(tmp_path, *overrides), tmp_path / "whole").finished
    run_training(tiny_config(tmp_path, *overrides, "train.stop_after_steps=5"), tmp_path / "parts")
    assert "cls.memory.index_former_rows" in read_tensors(find_checkpoint(tmp_path / "parts"), "objective")
    run_training(tiny_config(tmp_path, *overrides), tmp_path / "parts", resume=True)
    lines = records(tmp_path / "whole")
    assert len(lines) == 8
    assert all(0 < line["neighbor_recall_cls"] <= 1 for line in lines)
    assert not any("neighbor_recall_patch" in line for line in lines)  # no supports, no search
    assert records(tmp_path / "parts") == lines
    assert f"neighbors.index={kind} cannot save time in the 24 rows of the cls memory" in caplog.text
    one, two = (read_tensors(find_checkpoint(tmp_path / name), "objective") for name in ("whole", "parts"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_a_dry_run_counts_the_index(tmp_path, shards):
    exact = describe_run(tiny_config(tmp_path, f"data.train={shards}"))
    ivf = describe_run(tiny_config(tmp_path, f"data.train={shards}", "neighbors.index=ivf"))
    assert exact["neighbor_index_bytes"] == 0
    assert ivf["neighbor_index_bytes"] == index_bytes("ivf", 24, 8)  # the patch level has none
