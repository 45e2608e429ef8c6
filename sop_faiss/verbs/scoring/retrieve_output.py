"""What a retrieval evaluation found: tables, the queries as CSV, and a page of queries from the best to the worst."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import NamedTuple

from sop_faiss.evaluate.protocols import Difficulty, Protocol
from sop_faiss.evaluate.published import PUBLISHED, PUBLISHED_OF_LAYOUTS, protocol_differences
from sop_faiss.evaluate.retrieval import QueryResult
from sop_faiss.evaluate.sets.retrieval_set import KNOWN_SETS
from sop_faiss.files import atomic_file
from sop_faiss.progress import ProgressCallback
from sop_faiss.report.ap_histogram import draw_ap_histogram
from sop_faiss.report.contact_sheet import (
    Chart,
    Commands,
    SheetHit,
    SheetTable,
    Strip,
    Verdict,
    source_image,
    spread_places,
    write_contact_sheet,
)
from sop_faiss.verbs.scoring.retrieve import RetrievalResult

PAGE_QUERIES = 40
"""Queries on the page."""


def metrics_table(result: RetrievalResult) -> tuple[list[str], list[list[str]]]:
    """Return column names, and a row of percentages per difficulty; if there is only one, a row per metric."""
    metrics, counted, rules = result.scores.metrics, result.scores.counted_queries, result.rules
    names = [metric.name for metric in rules.metrics]

    def between(metric: str) -> str:
        interval = result.intervals.get(metric)
        return "" if interval is None else f"{interval.low:.1f}..{interval.high:.1f}"

    if len(rules.difficulties) == 1:
        rows = [[name, f"{value:.2f}", between(name)] for name, value in metrics.items()]
        return [f"{sum(counted.values()):,} queries counted", "%", "95 %"], rows
    rows = []
    for difficulty in rules.difficulties:
        values = [metrics.get(difficulty.metric(name)) for name in names]
        shown = ["-" if value is None else f"{value:.2f}" for value in values]
        interval = between(difficulty.metric(names[0])) or "-"
        rows.append([difficulty.name or "all", str(counted[difficulty.name]), shown[0], interval, *shown[1:]])
    if rules.averages_groups:
        shown = [f"{metrics[name]:.2f}" for name in names]
        rows.append(["mean", str(sum(counted.values())), shown[0], "", *shown[1:]])
    return ["", "queries", names[0], "95 %", *names[1:]], rows


class PublishedTable(NamedTuple):
    """Published scores below one's own: what they are, and how this measurement differs, in words."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    differences: list[str]


def published_table(result: RetrievalResult) -> PublishedTable | None:
    """Return the scores next to published ones of the data set, one row per method; None where there are none."""
    own = result.scores.metrics
    others = PUBLISHED_OF_LAYOUTS.get((result.rules.name, len(result.queries), len(result.data.gallery)))
    if others is not None:
        names = list(dict.fromkeys(name for each in others for name in each.scores))
        scored = [("this encoder", own), *((each.method, each.scores) for each in others)]
        rows = [[method, *(_one_digit(scores.get(name)) for name in names)] for method, scores in scored]
        sources = "; ".join(dict.fromkeys(each.source for each in others))
        differences = [f"network, training and size of the images, different in each row (sources: {sources})"]
        return PublishedTable("Next to published values", ["", *names], rows, differences)
    name = next((name for name, sha256 in KNOWN_SETS.items() if sha256 == result.protocol["ground_truth_sha256"]), None)
    if name is None:
        return None
    rows = [["this encoder", *(_one_digit(own.get(f"mAP_{level}")) for level in ("medium", "hard"))]]
    rows += [[each.method, f"{each.medium:.1f}", f"{each.hard:.1f}"] for each in PUBLISHED[name]]
    differences = protocol_differences(result.protocol, result.encoder["name"])
    return PublishedTable("mAP next to published values (ViT-B/16)", ["", "medium", "hard"], rows, differences)


def _one_digit(score: float | None) -> str:
    return "-" if score is None else f"{score:.1f}"


def write_per_query(path: Path, result: RetrievalResult) -> None:
    """Write one line per query, atomically: for each difficulty its scores in percent, then the head of its ranking.

    A query without relevant images has empty scores. `first_rank` counts from 1, ignored images taken out; the names in
    `top_1` and so on are the ranking with nothing taken out.
    """
    difficulties = result.rules.difficulties
    heading = ["query", "file"]
    for difficulty in difficulties:
        names = ("relevant", *_columns(result.rules))
        heading += [difficulty.metric(name) for name in names]
    tops = max(len(query.top) for query in result.scores.queries)
    heading += [f"top_{rank}" for rank in range(1, tops + 1)]
    with atomic_file(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(heading)
        for position, query in enumerate(result.scores.queries):
            line = [result.queries.keys[position], result.queries.member_of(position)]
            for difficulty in difficulties:
                line += _score_cells(query, difficulty, result.rules)
            writer.writerow([*line, *(result.data.truth.images[image] for image in query.top)])


def _columns(rules: Protocol) -> dict[str, str]:
    """Map the columns of a query's scores to metrics: means over queries by another name, the first rank, the rest."""
    renamed = {metric.of_query: metric.name for metric in rules.metrics if metric.each}
    return renamed | {"first_rank": ""} | {metric.name: metric.name for metric in rules.metrics if not metric.each}


def _score_cells(query: QueryResult, difficulty: Difficulty, rules: Protocol) -> list[str]:
    score, columns = query.scores.get(difficulty.name), _columns(rules)
    if score is None:
        return ["0", *[""] * len(columns)]
    cells = [f"{100 * score.values[name]:.4f}" if name else str(score.first_rank) for name in columns.values()]
    return [str(score.relevant_count), *cells]


def write_retrieval_page(
    path: Path, result: RetrievalResult, *, footer: str = "", progress: ProgressCallback | None = None
) -> None:
    """Write a page of queries, evenly spaced by rank from the highest AP to the lowest, each with its nearest images.

    Relevant, wrong and ignored images are distinguished at one difficulty: medium where there are several.

    Args:
        path: the HTML file.
        result: what was found.
        footer: how it was made.
        progress: called with images read and their total.
    """
    difficulty = next((d for d in result.rules.difficulties if d.name in ("medium", "")), result.rules.difficulties[0])
    queries, headline = result.scores.queries, result.rules.headline
    counted = [position for position, query in enumerate(queries) if difficulty.name in query.scores]
    counted.sort(key=lambda position: -queries[position].scores[difficulty.name].values[headline.name])
    shown = [counted[place] for place in spread_places(len(counted), PAGE_QUERIES)]
    columns, rows = metrics_table(result)
    histogram = draw_ap_histogram(
        {
            each.name or "all": [
                100 * q.scores[each.name].values[headline.name] for q in queries if each.name in q.scores
            ]
            for each in result.rules.difficulties
        },
        headline.name,
    )
    measure = "average precision" if headline.name == "mAP" else headline.of_query
    which = f"{len(shown):,} of" if len(shown) < len(counted) else "All"
    spread = ", evenly spaced by rank from the highest to the lowest" if len(shown) < len(counted) else " by falling"
    at = f" at difficulty {difficulty.name}" if difficulty.name else ""
    write_contact_sheet(
        path,
        f"Retrieval on {_set_name(result)}",
        [_strip(result, position, difficulty) for position in shown],
        subtitle=f"{which} {len(counted):,} queries{spread} {measure}{at}. Protocol {result.rules.name}, "
        f"{len(result.data.gallery):,} images searched{_distractors(result)}. Encoder {result.encoder['name']}.",
        commands=Commands(marks="selected"),
        summary=_tables(result, columns, rows),
        charts=[Chart(f"Queries by {measure}", histogram)],
        footer=footer,
        progress=progress,
    )


def _set_name(result: RetrievalResult) -> str:
    """Return the data set's name without the folders above it."""
    return os.path.basename(os.path.abspath(result.data.name)) or str(result.data.gallery.root)  # noqa: PTH100, PTH119


def _tables(result: RetrievalResult, columns: list[str], rows: list[list[str]]) -> list[SheetTable]:
    tables = [SheetTable(columns, rows, f"Percent, and the 95 % interval of {result.rules.headline.name} over queries")]
    published = published_table(result)
    if published is not None:
        differences = "; ".join(published.differences) or "none known"
        caption = f"{published.title}. Differences: {differences}"
        tables.append(SheetTable(published.columns, published.rows, caption))
    return tables


def _distractors(result: RetrievalResult) -> str:
    extra = result.protocol["distractors"]
    return "" if extra is None else f", {extra['count']:,} distractors counted but not shown"


def _strip(result: RetrievalResult, position: int, difficulty: Difficulty) -> Strip:
    query, truth = result.scores.queries[position], result.data.truth.queries[position]
    score = query.scores[difficulty.name]
    verdicts = dict.fromkeys((int(i) for name in difficulty.relevant for i in truth.lists[name]), Verdict.RIGHT)
    verdicts |= dict.fromkeys((int(i) for name in difficulty.ignored for i in truth.lists[name]), Verdict.JUNK)
    hits = [
        SheetHit(source_image(result.data.gallery, image), similarity, verdicts.get(image, Verdict.WRONG))
        for image, similarity in zip(query.top.tolist(), query.top_similarities.tolist(), strict=True)
    ]
    headline = result.rules.headline
    of_query = f"{headline.of_query} {100 * score.values[headline.name]:.1f} %"
    note = f"{of_query}, {score.relevant_count} relevant, first at {score.first_rank or '-'}"
    box = truth.box if result.rules.box != "ignored" else None
    return Strip(source_image(result.data.whole_queries, position, box=box), hits, note)
