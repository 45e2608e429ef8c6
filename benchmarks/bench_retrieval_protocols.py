"""Are the scores of sop-retrieve's protocols equal to those of the official code of each data set?

    python benchmarks/bench_retrieval_protocols.py --ilias CHECKOUT --met CHECKOUT ... [--json FILE] [--record]

Each row: random, tied, duplicated and related features; queries without anything relevant where the official code
takes them; rankings longer than what is kept. Both sides get the same rankings: a stable sort of our similarities.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
from protocol_peers import PEERS, Case
from report import Row, finish, meets

from sop_faiss.evaluate.protocols import ILIAS_LISTS, PROTOCOLS, choose_protocol
from sop_faiss.evaluate.retrieval import score_retrieval
from sop_faiss.evaluate.sets.ground_truth import NO_CLASS, PLAIN, Classes, make_ground_truth
from sop_faiss.evaluate.sets.published_layouts import within_radius
from sop_faiss.neighbors.similarity import similarity_rows

KINDS = ("random", "tied", "duplicated", "related")
EQUAL = "<= 1e-9"
SEEDS = 2
QUERIES, DIM, LABELS = 60, 16, 40
GALLERY = {"ilias": 1200}
"""More than is kept of a ranking, 1,000 for ILIAS and at most 128 for others, which have 300 images."""


def unit(rows: np.ndarray) -> np.ndarray:
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), np.float32)


def draw(protocol: str, kind: str, seed: int) -> tuple[Case, dict[str, Any]]:
    """Draw features of queries and gallery, and what the protocol knows of them; and how a ground truth is made."""
    rng, count = np.random.default_rng(seed), GALLERY.get(protocol, 300)
    case = Case(kind=kind, gallery_labels=rng.integers(0, LABELS, count), query_labels=rng.integers(0, LABELS, QUERIES))
    gallery, queries = rng.standard_normal((count, DIM)), rng.standard_normal((QUERIES, DIM))
    if kind == "tied":
        gallery = np.eye(DIM)[rng.integers(0, DIM, count)]
    elif kind == "duplicated":
        gallery = gallery[rng.integers(0, count // 10, count)]
    elif kind == "related":
        centers = 2 * rng.standard_normal((LABELS, DIM))
        gallery, queries = gallery + centers[case.gallery_labels], queries + centers[case.query_labels]
    case.queries, case.gallery = queries, gallery
    case.same = [np.flatnonzero(case.gallery_labels == label).tolist() for label in case.query_labels]
    made = {"lists": PROTOCOLS[protocol].lists or PLAIN} | (DRAWERS[protocol](rng, case) or {})
    case.queries, case.gallery = unit(case.queries), unit(case.gallery)
    case.similarities = np.stack(list(similarity_rows(case.queries, case.gallery)))
    case.order = np.argsort(-case.similarities, axis=1, kind="stable")
    return case, made


def queries_of_the_gallery(case: Case) -> None:
    """Give each gallery image a part of its own, so that no copy of a query comes before the query itself."""
    count = len(case.gallery)
    case.gallery = np.concatenate([case.gallery, 0.5 * np.eye(count)], axis=1)
    case.queries = np.concatenate([case.queries, np.zeros((QUERIES, count))], axis=1)


def draw_cub(_: np.random.Generator, case: Case) -> None:
    queries_of_the_gallery(case)
    case.queries = case.gallery
    same = [np.flatnonzero(case.gallery_labels == label).tolist() for label in case.gallery_labels]
    case.entries = [{"ok": [i for i in each if i != own], "junk": [own]} for own, each in enumerate(same)]


def draw_uned(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    """Three domains; the queries of the first are in the gallery. The official code divides by what is relevant."""
    queries_of_the_gallery(case)
    case.domains, case.gallery_domains = np.arange(QUERIES) % 3, rng.integers(0, 3, len(case.gallery))
    case.own_gallery = [True, False, False]
    of_first = np.flatnonzero(case.gallery_domains == 0)
    entries = []
    for query, domain in enumerate(case.domains.tolist()):
        own = [int(of_first[query])] if domain == 0 else []
        if own:
            case.queries[query], case.query_labels[query] = case.gallery[own[0]], case.gallery_labels[own[0]]
        fits = (case.gallery_labels == case.query_labels[query]) & (case.gallery_domains == domain)
        entries.append({f"domain{domain}": [i for i in np.flatnonzero(fits).tolist() if i not in own], "junk": own})
    kept = [query for query, entry in enumerate(entries) if next(iter(entry.values()))]
    case.entries, case.queries = [entries[query] for query in kept], case.queries[kept]
    case.domains, case.query_labels = case.domains[kept], case.query_labels[kept]
    return {"lists": ("domain0", "domain1", "domain2", "junk")}


def draw_reid(rng: np.random.Generator, case: Case) -> None:
    cameras, own = rng.integers(0, 6, len(case.gallery)), rng.integers(0, 6, QUERIES)
    case.entries = [
        {"ok": [i for i in each if cameras[i] != camera], "junk": [i for i in each if cameras[i] == camera]}
        for each, camera in zip(case.same, own, strict=True)
    ]
    case.entries[0] = {"ok": [], "junk": case.same[0]}


def draw_place(rng: np.random.Generator, case: Case) -> None:
    places, asked = rng.uniform(0, 400, (len(case.gallery), 2)).tolist(), rng.uniform(0, 450, (QUERIES, 2)).tolist()
    named = {"database": places, "queries": asked}
    case.names = {role: [f"a/@{east!r}@{north!r}@.jpg" for east, north in own] for role, own in named.items()}
    case.entries = [{"ok": near} for near in within_radius(asked, places, 25.0)]


def draw_ilias(rng: np.random.Generator, case: Case) -> None:
    groups = rng.integers(0, len(ILIAS_LISTS), len(case.gallery))
    case.entries = [
        {name: [i for i in each if groups[i] == place] for place, name in enumerate(ILIAS_LISTS)} for each in case.same
    ]


def draw_amstertime(rng: np.random.Generator, case: Case) -> None:
    sides = np.split(np.arange(len(case.gallery)), 2)
    case.entries = [
        {("old", "new")[query % 2]: [int(rng.choice(sides[1 - query % 2]))], "junk": sides[query % 2].tolist()}
        for query in range(QUERIES)
    ]


def draw_met(_: np.random.Generator, case: Case) -> dict[str, Any]:
    labels, validation = case.query_labels.copy(), np.arange(QUERIES) % 2 == 0
    labels[::4], labels[1::4] = NO_CLASS, NO_CLASS
    case.classes = Classes(case.gallery_labels, labels, validation)
    case.entries = [
        {"val" if own else "test": each if label != NO_CLASS else []}
        for own, label, each in zip(validation, labels, case.same, strict=True)
    ]
    return {"classes": case.classes}


def draw_two_groups(case: Case, names: tuple[str, str]) -> None:
    case.entries = [{names[query % 2]: each} for query, each in enumerate(case.same)]


def draw_copydays(_: np.random.Generator, case: Case) -> dict[str, Any]:
    draw_two_groups(case, ("strong", "crops/10"))
    return {"lists": ("strong", "crops/10", "junk")}


DRAWERS: dict[str, Callable[[np.random.Generator, Case], dict[str, Any] | None]] = {
    "cub": draw_cub,
    "reid": draw_reid,
    "place": draw_place,
    "gldv2": lambda _, case: draw_two_groups(case, ("public", "private")),
    "ilias": draw_ilias,
    "met": draw_met,
    "uned": draw_uned,
    "copydays": draw_copydays,
    "amstertime": draw_amstertime,
}


def equality_row(protocol: str, checkout: Path | None) -> Row:
    option, repository, peer = PEERS[protocol]
    what, against = f"{protocol}: largest difference, in percent", repository
    if checkout is None:
        why = {"not measured": f"no --{option.replace('_', '-')} checkout"}
        return Row(what, against, None, EQUAL, None, why)
    largest, compared = 0.0, 0
    for kind in KINDS:
        for seed in range(SEEDS):
            case, made = draw(protocol, kind, seed)
            names = [
                [f"{letter}{i}" for i in range(len(rows))]
                for letter, rows in (("i", case.gallery), ("q", case.queries))
            ]
            content = {"imlist": names[0], "qimlist": names[1], "gnd": case.entries}
            truth = make_ground_truth(content, Path("drawn"), **made)
            own = score_retrieval(case.queries, case.gallery, truth, choose_protocol(protocol, truth)).metrics
            for name, value in peer(checkout, case).items():
                largest, compared = max(largest, abs(own[name] - 100 * value)), compared + 1
    detail = {"scores_compared": compared, "features": ", ".join(KINDS)}
    return Row(what, against, largest, EQUAL, meets(largest, EQUAL), detail)


@click.command()
@click.option("--proxy-anchor", type=click.Path(path_type=Path, file_okay=False), help="Recall@k (cub, sop, inshop).")
@click.option("--reid", type=click.Path(path_type=Path, file_okay=False), help="CMC and mAP of Market-1501.")
@click.option("--vpr", type=click.Path(path_type=Path, file_okay=False), help="Place recognition.")
@click.option("--landmarks", type=click.Path(path_type=Path, file_okay=False), help="Google Landmarks v2.")
@click.option("--ilias", type=click.Path(path_type=Path, file_okay=False), help="ILIAS.")
@click.option("--met", type=click.Path(path_type=Path, file_okay=False), help="The Met dataset.")
@click.option("--uned", type=click.Path(path_type=Path, file_okay=False), help="Universal image embeddings.")
@click.option("--dino", type=click.Path(path_type=Path, file_okay=False), help="Copydays.")
@click.option("--amstertime", type=click.Path(path_type=Path, file_okay=False), help="AmsterTime.")
@click.option("--only", multiple=True, type=click.Choice(list(PEERS)), help="These protocols alone.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the figures here.")
@click.option("--record", is_flag=True, help="Append the figures to benchmarks/RESULTS.md.")
def main(only: tuple[str, ...], json_file: Path | None, record: bool, **checkouts: Path | None) -> None:
    """Compare the scores of each protocol with the official code, for which checkouts are named."""
    chosen = {protocol: option for protocol, (option, _, _) in PEERS.items() if not only or protocol in only}
    rows = [equality_row(protocol, checkouts[option]) for protocol, option in chosen.items()]
    finish("retrieval protocols", rows, json_file=json_file, record=record)


if __name__ == "__main__":
    main()
