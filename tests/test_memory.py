"""The FIFO memory against a plain list, for any batch size."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from sop_faiss.errors import CheckpointError
from sop_faiss.sop.memory import Memory
from tests.oracle import product_and_topk


def make_memory(capacity: int = 10, dim: int = 4, seed: int = 0) -> Memory:
    return Memory(capacity, dim, torch.Generator().manual_seed(seed))


def rows(count: int, dim: int = 4, seed: int = 1) -> torch.Tensor:
    return F.normalize(torch.randn(count, dim, generator=torch.Generator().manual_seed(seed)), dim=1)


@settings(max_examples=50, deadline=None)
@given(capacity=st.integers(2, 13), batches=st.lists(st.integers(0, 30), max_size=6))
def test_store_is_first_in_first_out_for_any_batch_size(capacity, batches):
    memory = make_memory(capacity)
    ring = list(zip(memory.embeddings.tolist(), memory.image_ids.tolist(), strict=True))
    pointer = next_id = 0
    for number, count in enumerate(batches):
        new = rows(count, seed=number)
        ids = torch.arange(next_id, next_id + count)
        memory.store(new, ids)
        for row, image_id in zip(new.tolist(), ids.tolist(), strict=True):
            ring[pointer] = (row, image_id)
            pointer = (pointer + 1) % capacity
        next_id += count
    assert memory.image_ids.tolist() == [image_id for _, image_id in ring]
    torch.testing.assert_close(memory.embeddings, torch.tensor([row for row, _ in ring]), rtol=0, atol=0)
    assert memory.pointer == pointer
    assert memory.stored == next_id


@settings(max_examples=50, deadline=None)
@given(
    capacity=st.integers(2, 13),
    filled=st.lists(st.integers(0, 9), max_size=3),
    batches=st.lists(st.integers(0, 30), max_size=6),
)
def test_mean_age_equals_counting_the_steps_of_each_row(capacity, filled, batches):
    memory = make_memory(capacity)
    ages, pointer = [None] * capacity, 0
    for count, ends_step in [*((count, False) for count in filled), *((count, True) for count in batches)]:
        memory.store(rows(count), torch.arange(count), ends_step=ends_step)
        for _ in range(count):
            ages[pointer], pointer = 0, (pointer + 1) % capacity
        ages = [None if age is None else age + ends_step for age in ages]
        known = [age for age in ages if age is not None]
        expected = sum(known) / len(known) if known else math.nan
        assert float(memory.mean_age()) == pytest.approx(expected, nan_ok=True)
        assert memory.fill == len(known) / capacity


def test_starts_with_random_unit_rows_of_no_image():
    memory = make_memory(50, 8)
    torch.testing.assert_close(memory.embeddings.norm(dim=1), torch.ones(50))
    assert (memory.image_ids == -1).all()
    assert not torch.equal(memory.embeddings, make_memory(50, 8, seed=1).embeddings)
    assert torch.equal(memory.embeddings, make_memory(50, 8).embeddings)


def test_the_rows_are_the_index_without_a_copy():
    memory = make_memory(100, 8)
    new = rows(3, 8, seed=5)
    memory.store(new, torch.arange(3))
    found = memory.search(new, 1)
    assert found.rows.flatten().tolist() == [0, 1, 2]
    storage = memory.embeddings.data_ptr()
    memory.embeddings[77] = new[1]  # written past the memory's own methods, and found all the same
    assert memory.search(new[1:2], 2).rows.tolist() == [[1, 77]]
    assert memory.embeddings.data_ptr() == storage


@pytest.mark.parametrize(("engine", "precision"), [("faiss", "float32"), ("torch", "float32"), ("torch", "bf16")])
@pytest.mark.parametrize("k", [1, 7, 200])
def test_search_equals_the_oracle_with_duplicates(engine, precision, k):
    memory = Memory(200, 8, torch.Generator().manual_seed(0), engine=engine, precision=precision)
    memory.store(memory.embeddings[:40].clone(), torch.arange(40))
    memory.store(memory.embeddings[:40].clone(), torch.arange(40))  # rows 40..79 repeat rows 0..39
    queries = torch.cat([rows(5, 8, seed=3), memory.embeddings[:5]])
    found = memory.search(queries, k)
    exact = queries.double() @ memory.embeddings.double().T
    for query in range(len(queries)):
        order = sorted(range(200), key=lambda row: (-round(float(exact[query, row]), 6), row))
        kth = float(exact[query, order[k - 1]])
        for row, similarity in zip(found.rows[query].tolist(), found.similarities[query].tolist(), strict=True):
            assert similarity == pytest.approx(float(exact[query, row]), abs=1e-5)
            assert similarity >= kth - 1e-5
        assert len(set(found.rows[query].tolist())) == k
    assert (found.similarities.diff(dim=1) <= 0).all()
    ties = found.similarities.diff(dim=1) == 0
    assert (found.rows.diff(dim=1)[ties] > 0).all()
    torch.testing.assert_close(found.similarities, product_and_topk(queries, memory.embeddings, k)[0])


def test_sample_draws_different_rows_from_its_generator():
    memory = make_memory(30)
    drawn = memory.sample(30, torch.Generator().manual_seed(4))
    assert sorted(drawn.tolist()) == list(range(30))
    assert torch.equal(drawn, memory.sample(30, torch.Generator().manual_seed(4)))


def test_half_precision_and_strided_rows_are_stored_as_float32():
    memory = make_memory(6, 4)
    wide = rows(8, 8, seed=2).bfloat16()
    memory.store(wide[::2, ::2], torch.arange(4))
    torch.testing.assert_close(memory.embeddings[:4], wide[::2, ::2].float(), rtol=0, atol=0)


def test_state_survives_and_another_shape_is_refused():
    memory = make_memory(7)
    memory.store(rows(9), torch.arange(9))
    other = make_memory(7, seed=9)
    other.load_state_dict(memory.state_dict())
    assert torch.equal(other.embeddings, memory.embeddings)
    assert other.search(rows(2), 3).rows.tolist() == memory.search(rows(2), 3).rows.tolist()
    memory.store(rows(3, seed=8), torch.arange(3))
    other.store(rows(3, seed=8), torch.arange(3))
    assert torch.equal(other.image_ids, memory.image_ids)
    assert float(other.mean_age()) == float(memory.mean_age()) == pytest.approx((4 * 2 + 3 * 1) / 7)
    with pytest.raises(CheckpointError, match=r"same capacity.* number of training images"):
        make_memory(8).load_state_dict(memory.state_dict())


def test_a_state_from_before_rows_had_ages_is_read_and_says_so(caplog):
    memory, other = make_memory(7), make_memory(7, seed=9)
    memory.store(rows(5), torch.arange(5))
    state = memory.state_dict()
    del state["stored_at"]
    state["position"] = state["position"][:2]
    other.store(rows(6), torch.arange(6))  # ages that must not survive
    other.load_state_dict(state)
    assert [record.getMessage() for record in caplog.records] == [
        "the checkpoint does not say how old the rows of its memory are: ages are counted from here"
    ]
    assert (other.pointer, other.stored) == (5, 5)
    assert math.isnan(float(other.mean_age()))
    for _ in range(2):
        other.store(rows(1), torch.arange(1))
    assert float(other.mean_age()) == pytest.approx(1.5)
