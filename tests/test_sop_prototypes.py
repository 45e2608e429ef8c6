"""Anchors, supports and contributions against brute force."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from sop_faiss.config import TermConfig
from sop_faiss.errors import CheckpointError, ConfigError
from sop_faiss.sop.memory import Memory
from sop_faiss.sop.prototypes import PrototypeMaker, contributions
from tests.oracle import brute_force_supports, dense_labels


def make(
    *, capacity=60, count=12, supports=4, tasks=2, anchors="random", kind="similarity", exclude=False, images=None
) -> PrototypeMaker:
    memory = Memory(capacity, 6, torch.Generator().manual_seed(1))
    if images is not None:
        generator = torch.Generator().manual_seed(2)
        rows = F.normalize(torch.randn(capacity, 6, generator=generator), dim=1)
        memory.store(rows, torch.arange(capacity) % images)
    return PrototypeMaker(
        memory,
        TermConfig(num_anchors=count, num_supports=supports, tasks=tasks),
        contributions=kind,
        eps=0.1,
        anchors=anchors,
        exclude_same_image=exclude,
        generator=torch.Generator().manual_seed(3),
    )


def anchor_rows(maker: PrototypeMaker, prototypes) -> torch.Tensor:
    matches = (prototypes.anchors.unsqueeze(2) == maker.memory.embeddings).all(-1)
    return matches.to(torch.int64).argmax(-1)


@pytest.mark.parametrize("exclude", [False, True])
@pytest.mark.parametrize("images", [None, 15, 40])
def test_supports_equal_brute_force(exclude, images):
    maker = make(exclude=exclude, images=images)
    prototypes = maker.draw()
    rows = anchor_rows(maker, prototypes)
    for task in range(2):
        assert len(set(rows[task].tolist())) == 12  # without replacement
        for i, anchor in enumerate(rows[task].tolist()):
            expected = brute_force_supports(maker.memory.embeddings, maker.memory.image_ids, anchor, 4, exclude)
            assert prototypes.support_rows[task, i].tolist() == expected
    members = prototypes.members(1)
    assert members.shape == (12, 5, 6)
    assert torch.equal(members[:, 0], prototypes.anchors[1])
    similarities = (members[:, 1:] * members[:, :1]).sum(-1)
    torch.testing.assert_close(similarities, prototypes.support_similarities[1], rtol=1e-5, atol=1e-6)


def test_an_anchor_is_never_its_own_support_even_among_many_duplicates():
    maker = make(capacity=30, count=30, supports=3, tasks=1)
    maker.memory.store(maker.memory.embeddings[:1].expand(30, 6).clone(), torch.arange(30))
    prototypes = maker.draw()
    # all rows are equal, so a row number says nothing about the vector: every list has three others of 30
    for supports in prototypes.support_rows[0].tolist():
        assert len(set(supports)) == 3
    drawn = torch.randperm(30, generator=torch.Generator().manual_seed(3))
    for anchor, supports in zip(drawn.tolist(), prototypes.support_rows[0].tolist(), strict=True):
        assert anchor not in supports


def test_too_few_rows_of_other_images_is_an_error():
    with pytest.raises(ConfigError, match="fewer than 4 rows of other images"):
        make(exclude=True, images=1).draw()


@pytest.mark.parametrize("supports", [0, 2])
def test_health_equals_counting(supports):
    maker = make(capacity=20, count=6, supports=supports, tasks=2, images=4)
    maker.memory.image_ids[:3] = -1
    prototypes = maker.draw()
    told = prototypes.health()
    members, alike = set(), []
    for task in range(2):
        for anchor, line in zip(
            anchor_rows(maker, prototypes)[task].tolist(), prototypes.support_rows[task].tolist(), strict=True
        ):
            members |= {anchor, *line}
            images = {int(maker.memory.image_ids[row]) for row in line}
            alike.append(len(images) == 1 and -1 not in images)
    assert float(told["distinct_rows"]) == pytest.approx(len(members) / 20)
    assert (float(told["memory_fill"]), float(told["memory_age"])) == (1.0, 1.0)
    if supports:
        assert float(told["one_image_share"]) == pytest.approx(sum(alike) / 12)
        assert float(told["support_similarity"]) == pytest.approx(float(prototypes.support_similarities.mean()))
    else:
        assert told.keys() == {"memory_fill", "memory_age", "distinct_rows"}


@pytest.mark.parametrize(("anchors", "left"), [("fixed_vectors", 12 - 5), ("fixed_rows", 12)])
def test_a_row_that_no_longer_holds_the_anchor_is_no_member(anchors, left):
    maker = make(capacity=12, count=12, supports=0, tasks=2, anchors=anchors)
    assert float(maker.draw().health()["distinct_rows"]) == 1.0
    maker.memory.store(-maker.memory.embeddings[:5].clone(), torch.arange(5))
    assert float(maker.draw().health()["distinct_rows"]) == pytest.approx(left / 12)


def test_a_renewed_row_is_a_member_where_it_is_a_support():
    maker = make(capacity=12, count=2, supports=3, tasks=1, anchors="fixed_vectors")
    before = maker.draw()
    opposite = -maker.memory.embeddings.clone()
    maker.memory.store(opposite, torch.arange(12))
    after = maker.draw()
    assert torch.equal(after.anchors, before.anchors)
    assert float(after.health()["distinct_rows"]) == pytest.approx(len(set(after.support_rows.flatten().tolist())) / 12)


def test_no_supports_needs_no_search(monkeypatch):
    maker = make(supports=0)
    monkeypatch.setattr(maker.memory, "search", lambda *_: pytest.fail("searched"))
    assert maker.draw().members(0).shape == (12, 1, 6)


def test_one_search_serves_all_tasks(monkeypatch):
    maker = make(tasks=3)
    calls = []
    search = maker.memory.search
    monkeypatch.setattr(maker.memory, "search", lambda queries, k: calls.append(len(queries)) or search(queries, k))
    assert maker.draw().tasks == 3
    assert calls == [36]


@pytest.mark.parametrize("kind", ["similarity", "smooth", "one_hot"])
def test_contributions(kind):
    similarities = torch.tensor([[[0.8, -0.5], [1.2, 0.01], [0.3, 0.4]]])
    weights = contributions(similarities, kind, 0.1)[0]
    expected = {
        "similarity": [[0.9, 0.8, 1 / 3], [0.9, 1.0, 1 / 3], [0.9, 1 / 3, 0.4]],
        "smooth": [[0.9] * 3] * 3,
        "one_hot": [[1.0] * 3] * 3,
    }[kind]
    torch.testing.assert_close(weights, torch.tensor(expected))
    torch.testing.assert_close(dense_labels(weights).sum(1), torch.ones(9))


def test_random_anchors_change_and_follow_the_generator():
    first, second = make(), make()
    a, b = first.draw(), first.draw()
    assert not torch.equal(a.anchors, b.anchors)
    assert torch.equal(second.draw().anchors, a.anchors)


def test_fixed_rows_stay_but_their_contents_are_renewed():
    maker = make(anchors="fixed_rows")
    before = maker.draw()
    rows = anchor_rows(maker, before)
    assert torch.equal(maker.draw().anchors, before.anchors)
    maker.memory.store(-maker.memory.embeddings.clone(), torch.arange(60))
    after = maker.draw()
    assert torch.equal(after.anchors, -before.anchors)
    assert torch.equal(anchor_rows(maker, after), rows)


def test_fixed_vectors_stay_when_the_memory_is_renewed():
    maker = make(anchors="fixed_vectors")
    before = maker.draw()
    rows = anchor_rows(maker, before)
    assert all(anchor not in s for anchor, s in zip(rows[0].tolist(), before.support_rows[0].tolist(), strict=True))
    fresh = F.normalize(torch.randn(60, 6, generator=torch.Generator().manual_seed(8)), dim=1)
    maker.memory.store(fresh, torch.arange(60))
    after = maker.draw()
    assert torch.equal(after.anchors, before.anchors)
    exact = (after.anchors[0].double() @ fresh.double().T).topk(4, dim=1).indices
    assert after.support_rows[0].tolist() == exact.tolist()  # its old row is now like any other


@pytest.mark.parametrize("anchors", ["random", "fixed_rows", "fixed_vectors"])
def test_state_survives(anchors):
    maker, other = make(anchors=anchors), make(anchors=anchors)
    maker.draw()
    other.memory.load_state_dict(maker.memory.state_dict())
    other.load_state_dict(maker.state_dict())
    assert torch.equal(maker.draw().anchors, other.draw().anchors)
    with pytest.raises(CheckpointError, match=r"sop\.anchors"):
        make(anchors="fixed_rows" if anchors == "random" else "random").load_state_dict(maker.state_dict())
