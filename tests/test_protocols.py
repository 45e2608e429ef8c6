"""Every protocol of published sets against a literal oracle: random, tied, truncated and empty rankings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sop_faiss.errors import ConfigError
from sop_faiss.evaluate.protocols import ILIAS_LISTS, PROTOCOLS, choose_protocol
from sop_faiss.evaluate.retrieval import score_retrieval
from sop_faiss.evaluate.sets.ground_truth import PLAIN, GroundTruth, make_ground_truth
from sop_faiss.neighbors.similarity import similarity_rows
from tests import oracle_protocols as oracle
from tests.unit_vectors import unit

GALLERY = {"ilias": 1040, "gldv2": 150, "amstertime": 300}
"""More than the protocol keeps of a ranking; 60 images for the others."""


def draw_truth(protocol: str, seed: int, queries: int = 6) -> GroundTruth:
    """Random lists; to the last query but one nothing is relevant, to the last one only one image."""
    rng = np.random.default_rng(seed)
    images = GALLERY.get(protocol, 60)
    groups = {"uned": ("cars", "met", "junk"), "copydays": ("strong", "crops/10", "junk")}
    lists = PROTOCOLS[protocol].lists or groups[protocol]
    gnd = []
    for number in range(queries):
        own = rng.permutation(images)
        count = (0, 1)[number - queries + 2] if number >= queries - 2 else 12
        relevant, junk = own[:count].tolist(), own[12:20].tolist()
        own_lists = [name for name in lists if name != "junk"]
        if protocol == "ilias":
            parts = {name: [p for p in relevant if p % 16 == place] for place, name in enumerate(ILIAS_LISTS)}
        else:
            parts = {own_lists[number % len(own_lists)]: relevant}
        gnd.append(parts | ({"junk": junk} if "junk" in lists else {}))
    content = {"imlist": [f"i{n}" for n in range(images)], "qimlist": [f"q{n}" for n in range(queries)], "gnd": gnd}
    return make_ground_truth(content, Path("drawn"), lists)


def draw_features(kind: str, truth: GroundTruth, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    queries, gallery = rng.standard_normal((len(truth.queries), 8)), rng.standard_normal((len(truth.images), 8))
    if kind == "tied":
        gallery = np.eye(8)[rng.integers(0, 8, len(gallery))]
    elif kind == "related":
        for query, entry in zip(queries, truth.queries, strict=True):
            for name in truth.lists:
                gallery[entry.lists[name]] += 0.7 * query
    return unit(queries), unit(gallery)


@pytest.mark.parametrize("kind", ["random", "tied", "related"])
@pytest.mark.parametrize("protocol", sorted(oracle.METRICS))
def test_equal_to_the_oracle_with_and_without_distractors(protocol: str, kind: str) -> None:
    truth = draw_truth(protocol, seed=1)
    queries, gallery = draw_features(kind, truth, seed=2)
    rules = choose_protocol(protocol, truth)
    gnd = [{name: own.tolist() for name, own in query.lists.items()} for query in truth.queries]
    more = np.concatenate([draw_features(kind, truth, seed=3)[1][:50], gallery[:20]])  # some are copies: ties
    for blocks in (None, np.split(more, [7, 30])):
        everything = gallery if blocks is None else np.concatenate([gallery, more])
        similarities = [row.tolist() for row in similarity_rows(queries, everything)]
        found = score_retrieval(queries, gallery, truth, rules, distractors=None if blocks is None else iter(blocks))
        assert found.metrics == pytest.approx(oracle.scores(protocol, similarities, gnd), abs=1e-9)


def test_queries_to_which_nothing_is_relevant() -> None:
    """Those whose official code counts them as 0 do so, the others leave them out."""
    for protocol in ("place", "reid", "cub", "gldv2"):
        truth = draw_truth(protocol, seed=0)
        found = score_retrieval(*draw_features("related", truth, 0), truth, PROTOCOLS[protocol])
        counts_all = protocol in oracle.ZERO_IF_NOTHING
        assert sum(found.counted_queries.values()) == (6 if counts_all else 5)
        assert bool(found.queries[-2].scores) == counts_all
        if counts_all:
            empty = found.queries[-2].scores[""]
            assert set(empty.values.values()) == {0.0} and (empty.first_rank, empty.relevant_count) == (0, 0)


def test_groups_are_difficulties_of_the_lists_that_a_reader_found() -> None:
    truth = draw_truth("uned", seed=0)
    rules = choose_protocol("uned", truth)
    assert [(each.name, each.relevant, each.ignored) for each in rules.difficulties] == [
        ("cars", ("cars",), ("junk",)),
        ("met", ("met",), ("junk",)),
    ]
    with pytest.raises(ConfigError, match="gldv2"):
        choose_protocol("gld", truth)


def test_ilias_groups_take_out_the_positives_of_other_groups() -> None:
    content = {
        "imlist": ["a", "b"],
        "qimlist": ["q"],
        "gnd": [{"scale1 clutter1": [0], "scale2 clutter1": [1]}],
    }
    truth = make_ground_truth(content, Path("made"), ILIAS_LISTS)
    gallery = unit(np.array([[1.0, 0.1], [0.1, 1.0]]))
    found = score_retrieval(gallery[:1], gallery, truth, PROTOCOLS["ilias"]).metrics
    assert found == dict.fromkeys(("mAP@1k", "mAP@1k_scale1", "mAP@1k_scale2", "mAP@1k_clutter1"), 100.0)


def test_plain_lists_are_the_default_of_made_ground_truths() -> None:
    content = {"imlist": ["a"], "qimlist": ["q"], "gnd": [{"ok": [0]}]}
    truth = make_ground_truth(content, Path("made"))
    assert truth.lists == PLAIN and truth.queries[0].lists["junk"].tolist() == []
