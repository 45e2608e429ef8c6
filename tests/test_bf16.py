"""The rounded copy follows what is written; candidates found in bfloat16 are answered in float32."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from sop_faiss.neighbors import mirror as mirror_module
from sop_faiss.neighbors.bf16 import RoundedRows, rescore
from sop_faiss.neighbors.mirror import RingMirror
from sop_faiss.sop.memory import Memory
from tests.memory_use import LargestTensor

CPU = torch.device("cpu")
RECALL_FLOOR = 0.999
"""Of the 9 nearest of float32 over `clustered` embeddings, bf16 finds at least this share."""


def clustered(count: int, dim: int) -> Tensor:
    """Unit rows in 30 clusters whose rows have a cosine of about 0.8 with each other; some are equal."""
    generator = torch.Generator().manual_seed(3)
    centers = torch.randn(30, dim, generator=generator)[torch.randint(30, (count,), generator=generator)]
    rows = F.normalize(centers + 0.5 * torch.randn(count, dim, generator=generator), dim=1)
    rows[count // 2 : count // 2 + 20] = rows[:20]
    return rows


def recall(similarities: Tensor, exact: Tensor) -> float:
    """Share of the places that hold a row among the k nearest, ties of the k-th included."""
    kth = exact.double().topk(similarities.shape[1], dim=1).values[:, -1:]
    return float((similarities.double() >= kth - 1e-6).double().mean())


def bf16_mirror(rows: Tensor) -> RingMirror:
    mirror = RingMirror(*rows.shape, CPU, precision="bf16")
    mirror.rows.copy_(rows)
    return mirror


def test_recall_and_similarities_over_clustered_embeddings():
    rows = clustered(4096, 128)
    queries = rows[:500]
    found = bf16_mirror(rows).search(queries, 9)
    exact = queries.double() @ rows.double().T
    assert recall(found.similarities, exact) >= RECALL_FLOOR
    torch.testing.assert_close(found.similarities.double(), exact.gather(1, found.rows), rtol=0, atol=1e-6)
    assert (found.similarities.diff(dim=1) <= 0).all()


def test_the_wider_list_is_what_finds_them(monkeypatch):
    rows = clustered(4096, 128)
    monkeypatch.setattr(mirror_module, "count_candidates", lambda k, capacity: k)
    found = bf16_mirror(rows).search(rows[:500], 9)
    assert recall(found.similarities, rows[:500] @ rows.T) < RECALL_FLOOR


@given(
    capacity=st.integers(2, 12),
    writes=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 12), st.booleans(), st.booleans()), max_size=8),
)
def test_the_copy_follows_every_write(capacity, writes):
    mirror = RingMirror(capacity, 3, CPU, precision="bf16")
    for number, (start, count, past_the_mirror, searched) in enumerate(writes):
        start, count = start % capacity, min(count, capacity)
        new = torch.rand(count, 3, generator=torch.Generator().manual_seed(number))
        if past_the_mirror:
            mirror.rows[(start + torch.arange(count)) % capacity] = new
        else:
            mirror.write(start, new)
        if searched:
            assert torch.equal(mirror._rounded.current(), mirror.rows.to(torch.bfloat16))
    assert torch.equal(mirror._rounded.current(), mirror.rows.to(torch.bfloat16))


def test_a_store_copies_only_what_it_stores(monkeypatch):
    memory = Memory(50, 4, torch.Generator().manual_seed(0), precision="bf16")
    queries = memory.embeddings[:3].clone()
    memory.search(queries, 2)
    copied = []
    follow = RoundedRows.follow
    monkeypatch.setattr(RoundedRows, "follow", lambda self, part: copied.append(part) or follow(self, part))
    for _ in range(3):
        memory.store(torch.rand(20, 4), torch.arange(20))
        memory.search(queries, 2)
    assert copied == [slice(0, 20), slice(20, 40), slice(40, 50), slice(0, 10)]
    memory.embeddings[5] = 0  # past the memory's own methods: everything, once
    memory.search(queries, 2)
    memory.search(queries, 2)
    assert copied[4:] == [slice(None)]
    memory.load_state_dict(memory.state_dict())
    memory.search(queries, 2)
    assert copied[5:] == [slice(None)]


@pytest.mark.parametrize(("count", "dim", "asked", "given"), [(30, 4, 7, 12), (1000, 256, 500, 300)])
def test_candidates_are_scored_in_blocks(count, dim, asked, given):
    generator = torch.Generator().manual_seed(0)
    rows, queries = torch.rand(count, dim, generator=generator), torch.rand(asked, dim, generator=generator)
    rows, queries = F.normalize(rows, dim=1), F.normalize(queries, dim=1)
    rows[20] = rows[3]
    candidates = torch.stack([torch.randperm(count, generator=generator)[:given] for _ in range(asked)])
    with LargestTensor() as seen:
        found = rescore(queries, rows, candidates, 5)
    assert seen.elements == dim * given * min(asked, 2**24 // (dim * given))
    exact = (queries.double() @ rows.double().T).gather(1, candidates)
    torch.testing.assert_close(found.similarities.double(), exact.topk(5, dim=1).values, rtol=0, atol=1e-6)
    assert all(set(got) <= set(given) for got, given in zip(found.rows.tolist(), candidates.tolist(), strict=True))
    assert rescore(queries[:0], rows, candidates[:0], 5).rows.shape == (0, 5)


def test_resumed_answers_are_the_same():
    memory = Memory(300, 8, torch.Generator().manual_seed(0), precision="bf16")
    memory.store(F.normalize(torch.rand(40, 8), dim=1), torch.arange(40))
    resumed = Memory(300, 8, torch.Generator().manual_seed(1), precision="bf16")
    resumed.load_state_dict(memory.state_dict())
    for part in (memory, resumed):
        part.store(F.normalize(torch.ones(9, 8) + torch.eye(9, 8), dim=1), torch.arange(9))
    queries = memory.embeddings[:50].clone()
    before, after = memory.search(queries, 5), resumed.search(queries, 5)
    assert torch.equal(before.rows, after.rows) and torch.equal(before.similarities, after.similarities)
