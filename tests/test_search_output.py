"""Which of many queries a page shows."""

from __future__ import annotations

from sop_faiss.verbs.finding.search_output import spread_queries
from sop_faiss.verbs.finding.search_result import Found, SearchedQuery, SearchResult


def query(name: str, similarity: float, *rights: bool | None) -> SearchedQuery:
    found = [Found(rank, rank, "x", similarity, None, right) for rank, right in enumerate(rights, 1)]
    return SearchedQuery(name, None, found, lambda: b"")


def test_few_queries_stay_in_their_order() -> None:
    result = SearchResult([query("a", 0.1, True), query("b", 0.2, True)], {})
    assert spread_queries(result, 2) == (result, "")


def test_many_are_spread_from_the_best_to_the_worst() -> None:
    rights = [2, 4, 0, 1, 3]
    queries = [query(str(right), 0.5, *[place < right for place in range(4)]) for right in rights]
    shown, rule = spread_queries(SearchResult(queries, {"empty": 1}), 3)
    assert [each.key for each in shown.queries] == ["4", "2", "0"] and shown.dropped == {"empty": 1}
    assert "3 of them" in rule and "right" in rule


def test_without_classes_the_most_similar_are_the_best() -> None:
    queries = [query(str(value), value / 10, None, None) for value in (3, 1, 2)] + [query("none", 0.0)]
    shown, rule = spread_queries(SearchResult(queries, {}), 2)
    assert [each.key for each in shown.queries] == ["3", "none"] and "similarity" in rule
    assert [each.key for each in spread_queries(SearchResult(queries, {}), 1)[0].queries] == ["3"]
