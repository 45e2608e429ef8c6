"""Kept neighbor lists against brute force in float64, after every one of hundreds of stores."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from sop_faiss.config import NeighborsConfig, TermConfig
from sop_faiss.errors import ConfigError
from sop_faiss.neighbors.incremental import keeping_pays
from sop_faiss.neighbors.mirror import NearestRows
from sop_faiss.sop.memory import Memory
from sop_faiss.sop.prototypes import PrototypeMaker
from tests.memories import drifting_stores
from tests.oracle import brute_force_supports

TIE = 1e-5


def keeping_memory(capacity: int, dim: int, k: int, exclude: bool = False, *, seed: int = 0, device="cpu") -> Memory:
    memory = Memory(capacity, dim, torch.Generator().manual_seed(seed), device)
    memory.keep_neighbors(k, exclude)
    return memory


def assert_nearest(found: NearestRows, memory: Memory, anchors: Tensor, k: int, exclude: bool) -> None:
    """Every place has the similarity that it should have, of a permitted row that has it: equal but for ties."""
    found = NearestRows(found.similarities.cpu(), found.rows.cpu())
    rows, ids, anchors = memory.embeddings.cpu().double(), memory.image_ids.cpu(), anchors.cpu()
    exact = rows[anchors] @ rows.T
    refused = anchors.unsqueeze(1) == torch.arange(len(rows))
    if exclude:
        refused |= (ids[anchors].unsqueeze(1) == ids) & (ids >= 0)
    exact = exact.masked_fill(refused, -torch.inf)
    places = min(k, len(rows) - 1)
    expected = exact.topk(places, dim=1).values
    torch.testing.assert_close(found.similarities.double(), expected, rtol=0, atol=TIE)
    is_row = found.similarities > -torch.inf  # where there are too few permitted rows, the rest is empty
    claimed = exact.gather(1, found.rows).where(is_row, -torch.inf)
    torch.testing.assert_close(claimed, found.similarities.double(), rtol=0, atol=TIE)
    distinct = found.rows.where(is_row, len(rows) + torch.arange(places)).sort(dim=1).values
    assert (distinct.diff(dim=1) > 0).all()
    ties = (found.similarities.diff(dim=1) == 0) & is_row[:, 1:]
    assert (found.rows.diff(dim=1)[ties] > 0).all()


@pytest.mark.parametrize("exclude", [False, True])
def test_hundreds_of_stores_of_a_drifting_encoder(exclude):
    generator = torch.Generator().manual_seed(7)
    memory = keeping_memory(150, 12, 4, exclude)
    for step, (embeddings, ids) in enumerate(drifting_stores(60, 12, range(1, 9), 500, generator)):
        memory.store(embeddings, ids)
        anchors = memory.sample(150 if step % 50 == 0 else 20, generator)
        assert_nearest(memory.nearest_others(anchors), memory, anchors, 4, exclude)


@settings(max_examples=60, deadline=None)
@given(
    capacity=st.integers(2, 60),
    k=st.integers(1, 6),
    exclude=st.booleans(),
    images=st.integers(1, 12),
    batches=st.lists(st.tuples(st.integers(0, 70), st.booleans()), max_size=8),
)
def test_any_sizes_duplicates_and_wraps(capacity, k, exclude, images, batches):
    generator = torch.Generator().manual_seed(1)
    memory = keeping_memory(capacity, 4, k, exclude)
    for count, coarse in batches:
        embeddings = torch.randn(count, 4, generator=generator)
        embeddings = F.normalize(embeddings.sign() if coarse else embeddings, dim=1)  # 16 different coarse ones
        memory.store(embeddings, torch.randint(-1, images, (count,), generator=generator))
        anchors = torch.randint(capacity, (12,), generator=generator)  # some twice
        assert_nearest(memory.nearest_others(anchors), memory, anchors, k, exclude)


def test_ties_are_broken_by_rising_row_also_at_the_last_place():
    generator = torch.Generator().manual_seed(2)
    memory = keeping_memory(64, 16, 5)
    for count in [64] + [7] * 60:
        # of +-1/4 all sums of products are exact, in any order
        memory.store(torch.randn(count, 16, generator=generator).sign() / 4, torch.arange(count))
        exact = (memory.embeddings @ memory.embeddings.T).fill_diagonal_(-torch.inf)
        expected = exact.sort(dim=1, descending=True, stable=True).indices[:, :5]
        assert torch.equal(memory.nearest_others(torch.arange(64)).rows, expected)


def test_lists_grow_past_their_width_and_stay_exact():
    memory = keeping_memory(400, 6, 2)  # 20 entries a list
    everything = torch.arange(400)
    memory.nearest_others(everything)
    generator = torch.Generator().manual_seed(3)
    for scale in (1.0, 0.5, 0.1, 0.01):  # ever nearer to one another, so that each store overflows the lists
        embeddings = F.normalize(torch.ones(60, 6) + scale * torch.randn(60, 6, generator=generator), dim=1)
        memory.store(embeddings, torch.arange(60))
        assert_nearest(memory.nearest_others(everything), memory, everything, 2, False)


def test_a_store_is_worked_off_in_blocks():
    memory = keeping_memory(3000, 6, 3)  # of 1398 rows
    memory.nearest_others(torch.arange(3000))
    generator = torch.Generator().manual_seed(4)
    memory.store(F.normalize(torch.randn(2000, 6, generator=generator), dim=1), torch.arange(2000))
    rows = torch.randperm(3000, generator=generator)[:60]
    assert_nearest(memory.nearest_others(rows), memory, rows, 3, False)


def test_only_lists_that_fell_short_are_searched(monkeypatch):
    memory = keeping_memory(300, 8, 3)
    queries = []
    search = memory._mirror.search
    monkeypatch.setattr(memory._mirror, "search", lambda q, k: queries.append(len(q)) or search(q, k))
    memory.nearest_others(torch.tensor([5, 9, 5]))
    memory.nearest_others(torch.tensor([9, 5]))
    assert queries == [2]
    memory.nearest_others(torch.arange(300))
    assert queries == [2, 298]
    embeddings = F.normalize(torch.randn(6, 8, generator=torch.Generator().manual_seed(5)), dim=1)
    memory.store(embeddings, torch.arange(6))
    memory.nearest_others(torch.arange(6, 300))
    assert queries == [2, 298]  # of 22 entries a list has lost 6 at most
    memory.nearest_others(torch.arange(300))
    assert queries == [2, 298, 6]


def make(incremental: bool, *, anchors="random", exclude=False, capacity=80, supports=4, seed=3) -> PrototypeMaker:
    return PrototypeMaker(
        Memory(capacity, 6, torch.Generator().manual_seed(1)),
        TermConfig(num_anchors=16, num_supports=supports, tasks=2),
        contributions="similarity",
        eps=0.1,
        anchors=anchors,
        exclude_same_image=exclude,
        generator=torch.Generator().manual_seed(seed),
        incremental=incremental,
    )


def stores(steps: int) -> list[tuple[Tensor, Tensor]]:
    return list(drifting_stores(30, 6, range(1, 12), steps, torch.Generator().manual_seed(8)))


@pytest.mark.parametrize("exclude", [False, True])
@pytest.mark.parametrize("anchors", ["random", "fixed_rows", "fixed_vectors"])
def test_prototypes_are_those_of_a_full_search(anchors, exclude):
    kept, full = make(True, anchors=anchors, exclude=exclude), make(False, anchors=anchors, exclude=exclude)
    assert kept.incremental == (anchors != "fixed_vectors")
    for embeddings, ids in stores(30):
        ours, theirs = kept.draw(), full.draw()
        assert torch.equal(ours.anchors, theirs.anchors)
        torch.testing.assert_close(ours.support_similarities, theirs.support_similarities, rtol=0, atol=TIE)
        torch.testing.assert_close(ours.contributions, theirs.contributions, rtol=0, atol=TIE)
        members = ours.members(1)
        similarities = (members[:, 1:] * members[:, :1]).sum(-1)
        torch.testing.assert_close(similarities, ours.support_similarities[1], rtol=0, atol=TIE)
        kept.memory.store(embeddings, ids)
        full.memory.store(embeddings, ids)


def test_supports_are_the_oracles():
    maker = make(True, exclude=True)
    for embeddings, ids in stores(20):
        maker.memory.store(F.normalize(embeddings + 0.1 * torch.rand(len(ids), 6), dim=1), ids)  # no copies, no ties
        prototypes = maker.draw()
    memory = maker.memory
    rows = (prototypes.anchors.unsqueeze(2) == memory.embeddings).all(-1).to(torch.int64).argmax(-1)
    for anchor, supports in zip(rows[0].tolist(), prototypes.support_rows[0].tolist(), strict=True):
        assert supports == brute_force_supports(memory.embeddings, memory.image_ids, anchor, 4, True)


@pytest.mark.parametrize("capacity", [80, 4])
def test_too_few_rows_is_an_error(capacity):
    maker = make(True, exclude=True, capacity=capacity)
    maker.memory.store(maker.memory.embeddings.clone(), torch.zeros(capacity, dtype=torch.int64))
    with pytest.raises(ConfigError, match="fewer than 4 rows of other images"):
        maker.draw()


def test_no_supports_keeps_no_lists():
    maker = make(True, supports=0)
    assert maker.draw().members(0).shape == (16, 1, 6)
    assert not maker.incremental
    with pytest.raises(RuntimeError, match="keep_neighbors"):
        maker.memory.nearest_others(torch.arange(3))


def test_resume_goes_on_with_the_very_same_numbers():
    whole = make(True, exclude=True)
    drawn = []
    for step, (embeddings, ids) in enumerate(stores(40)):
        if step == 20:
            memory_state, maker_state = whole.memory.state_dict(), whole.state_dict()
        drawn.append(whole.draw())
        whole.memory.store(embeddings, ids)
    resumed = make(True, exclude=True, seed=9)
    resumed.draw()  # lists of other contents, which must not survive
    resumed.memory.load_state_dict(memory_state)
    resumed.load_state_dict(maker_state)
    for (embeddings, ids), before in zip(stores(40)[20:], drawn[20:], strict=True):
        after = resumed.draw()
        assert torch.equal(after.support_rows, before.support_rows)
        assert torch.equal(after.support_similarities, before.support_similarities)
        resumed.memory.store(embeddings, ids)


def test_a_state_without_lists_has_them_made_anew():
    full, resumed = make(False), make(True, seed=9)
    for embeddings, ids in stores(10):
        full.memory.store(embeddings, ids)
    resumed.draw()
    resumed.memory.load_state_dict(full.memory.state_dict())
    everything = torch.arange(80)
    assert_nearest(resumed.memory.nearest_others(everything), resumed.memory, everything, 4, False)
    other_width = make(True, supports=2)
    other_width.memory.load_state_dict(resumed.memory.state_dict())
    assert_nearest(other_width.memory.nearest_others(everything), other_width.memory, everything, 2, False)
    full.memory.load_state_dict(resumed.memory.state_dict())  # and the other way round


def test_auto_takes_what_is_cheaper():
    cpu = torch.device("cpu")
    assert keeping_pays(anchors=4 * 4096, stored=1024, capacity=65536, dim=256, device=cpu)
    assert not keeping_pays(anchors=2 * 1024, stored=1024, capacity=65536, dim=256, device=cpu)
    assert not keeping_pays(anchors=256, stored=64, capacity=1024, dim=64, device=cpu)  # too small to matter
    with pytest.raises(ConfigError, match="refresh"):
        NeighborsConfig(refresh="lazy")


@pytest.mark.gpu
@pytest.mark.parametrize("exclude", [False, True])
def test_on_a_gpu(exclude):
    generator = torch.Generator().manual_seed(7)
    memory = keeping_memory(500, 16, 4, exclude, device="cuda")
    for embeddings, ids in drifting_stores(200, 16, range(1, 40), 100, generator):
        memory.store(embeddings.cuda(), ids.cuda())
        anchors = memory.sample(100, generator)
        assert_nearest(memory.nearest_others(anchors), memory, anchors, 4, exclude)
