"""What a retrieval evaluation found: a table of its queries as CSV, or a page with the best and the worst of them."""

from __future__ import annotations

import csv
import functools
from pathlib import Path

from sop_faiss.data.listing import FileSource
from sop_faiss.evaluate.retrieval import KS, Difficulty, QueryResult
from sop_faiss.files import atomic_file
from sop_faiss.pipeline.retrieve import RetrievalResult
from sop_faiss.progress import ProgressCallback
from sop_faiss.report.contact_sheet import Hit, Picture, Strip, Table, Verdict, write_contact_sheet

__all__ = ["PAGE_QUERIES", "metrics_table", "write_per_query", "write_retrieval_page"]

PAGE_QUERIES = 10
"""Best queries on the page, and as many worst ones."""


def metrics_table(result: RetrievalResult) -> tuple[list[str], list[list[str]]]:
    """Column names, and one row of percentages per difficulty."""
    metrics, counted = result.scores.metrics, result.scores.counted_queries
    names = ["mAP", *(f"mP@{k}" for k in KS), *(["R@1"] if "R@1" in metrics else [])]
    rows = []
    for difficulty in result.rules.difficulties:
        values = [metrics.get(difficulty.metric(name)) for name in names]
        shown = ["-" if value is None else f"{value:.2f}" for value in values]
        rows.append([difficulty.name or "all", str(counted[difficulty.name]), *shown])
    return ["", "queries", *names], rows


def write_per_query(path: Path, result: RetrievalResult) -> None:
    """Write one line per query, atomically: for each difficulty its scores in percent, then the head of its ranking.

    A query without relevant images has empty scores. `first_rank` counts from 1, ignored images taken out; the names in
    `top_1` and so on are the ranking with nothing taken out.
    """
    difficulties = result.rules.difficulties
    heading = ["query", "file"]
    for difficulty in difficulties:
        heading += [difficulty.metric(name) for name in ("relevant", "AP", *(f"P@{k}" for k in KS), "first_rank")]
    tops = max(len(query.top) for query in result.scores.queries)
    heading += [f"top_{rank}" for rank in range(1, tops + 1)]
    with atomic_file(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(heading)
        for position, query in enumerate(result.scores.queries):
            line = [result.queries.keys[position], result.queries.member_of(position)]
            for difficulty in difficulties:
                line += _score_cells(query, difficulty)
            writer.writerow([*line, *(result.data.truth.images[image] for image in query.top)])


def _score_cells(query: QueryResult, difficulty: Difficulty) -> list[str]:
    score = query.scores.get(difficulty.name)
    if score is None:
        return ["0", *[""] * (len(KS) + 2)]
    precisions = [f"{100 * score.precision_at[k]:.4f}" for k in KS]
    return [str(score.relevant_count), f"{100 * score.average_precision:.4f}", *precisions, str(score.first_rank)]


def write_retrieval_page(
    path: Path, result: RetrievalResult, *, footer: str = "", progress: ProgressCallback | None = None
) -> None:
    """Write a page of the queries with the highest and the lowest AP, each with the head of its ranking.

    Relevant, wrong and ignored pictures are told apart at one difficulty: medium where there are several.

    Args:
        path: the HTML file.
        result: what was found.
        footer: how it was made.
        progress: called with pictures read and their total.
    """
    difficulty = next((d for d in result.rules.difficulties if d.name in ("medium", "")), result.rules.difficulties[0])
    queries = result.scores.queries
    counted = [position for position, query in enumerate(queries) if difficulty.name in query.scores]
    counted.sort(key=lambda position: -queries[position].scores[difficulty.name].average_precision)
    shown = counted if len(counted) <= 2 * PAGE_QUERIES else counted[:PAGE_QUERIES] + counted[-PAGE_QUERIES:]
    columns, rows = metrics_table(result)
    which = "All" if shown is counted else f"The {PAGE_QUERIES} best and the {PAGE_QUERIES} worst of"
    at = f" at difficulty {difficulty.name}" if difficulty.name else ""
    write_contact_sheet(
        path,
        f"Retrieval on {result.data.name}",
        [_strip(result, position, difficulty) for position in shown],
        subtitle=f"{which} {len(counted)} queries by average precision{at}, protocol {result.rules.name}, "
        f"{len(result.data.gallery):,} pictures searched. Encoder {result.encoder['name']}.",
        summary=[Table(columns, rows, "Percent")],
        footer=footer,
        progress=progress,
    )


def _strip(result: RetrievalResult, position: int, difficulty: Difficulty) -> Strip:
    query, truth = result.scores.queries[position], result.data.truth.queries[position]
    score = query.scores[difficulty.name]
    verdicts = dict.fromkeys((int(i) for name in difficulty.relevant for i in truth.lists[name]), Verdict.RIGHT)
    verdicts |= dict.fromkeys((int(i) for name in difficulty.ignored for i in truth.lists[name]), Verdict.JUNK)
    hits = [
        Hit(_picture(result.data.gallery, image), similarity, verdicts.get(image, Verdict.WRONG))
        for image, similarity in zip(query.top.tolist(), query.top_similarities.tolist(), strict=True)
    ]
    note = f"AP {100 * score.average_precision:.1f} %, {score.relevant_count} relevant, first at {score.first_rank}"
    return Strip(_picture(result.queries, position), hits, note)


def _picture(source: FileSource, position: int) -> Picture:
    return Picture(source.keys[position], functools.partial(source.read, position))
