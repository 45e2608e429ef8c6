"""Are the scores of sop-retrieve's protocols equal to those of the official code of each data set?

    python benchmarks/bench_retrieval_protocols.py --ilias CHECKOUT --met CHECKOUT ... [--json FILE] [--record]

Each row: random, tied, duplicated and related features; queries without anything relevant where the official code
takes them; rankings longer than what is kept. Both sides get the same rankings: a stable sort of our similarities.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np
from protocol_peers import PEERS, Case
from report import Row, finish, meets

from sop_faiss.evaluate.ground_truth import NO_CLASS, PLAIN, Classes, make_ground_truth
from sop_faiss.evaluate.protocols import ILIAS_LISTS, PROTOCOLS, choose_protocol
from sop_faiss.evaluate.published_layouts import within_radius
from sop_faiss.evaluate.retrieval import score_retrieval
from sop_faiss.neighbors.similarity import similarity_rows

KINDS = ("random", "tied", "duplicated", "related")
EQUAL = "<= 1e-9"
SEEDS = 2
QUERIES, DIM, LABELS = 60, 16, 40
GALLERY = {"ilias": 1200}
"""More than is kept of a ranking, 1,000 for ILIAS and at most 128 for others, which have 300 images."""


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def draw(protocol: str, kind: str, seed: int) -> tuple[Case, np.ndarray, np.ndarray, dict[str, Any]]:
    """Draw a case: features of queries and gallery, and lists, classes and labels that suit the protocol."""
    rng, count = np.random.default_rng(seed), GALLERY.get(protocol, 300)
    gallery_labels, query_labels = rng.integers(0, LABELS, count), rng.integers(0, LABELS, QUERIES)
    centers = rng.standard_normal((LABELS, DIM))
    gallery, queries = rng.standard_normal((count, DIM)), rng.standard_normal((QUERIES, DIM))
    if kind == "tied":
        gallery = np.eye(DIM)[rng.integers(0, DIM, count)]
    elif kind == "duplicated":
        gallery = gallery[rng.integers(0, count // 10, count)]
    elif kind == "related":
        gallery, queries = gallery + 2 * centers[gallery_labels], queries + 2 * centers[query_labels]
    case = Case(kind=kind, gallery_labels=gallery_labels, query_labels=query_labels, classes=None)
    made: dict[str, Any] = {"lists": PROTOCOLS[protocol].lists or PLAIN}
    same = [np.flatnonzero(gallery_labels == label).tolist() for label in query_labels]
    if protocol in ("cub", "uned"):
        # Queries of the gallery: each has a part of its own, so that only copies of itself are as near as itself.
        gallery = np.concatenate([gallery, 0.5 * np.eye(count)], axis=1)
        queries = np.concatenate([queries, np.zeros((QUERIES, count))], axis=1)
    if protocol == "cub":
        queries, same = gallery, [np.flatnonzero(gallery_labels == label).tolist() for label in gallery_labels]
        case.entries = [{"ok": [i for i in each if i != own], "junk": [own]} for own, each in enumerate(same)]
    elif protocol == "uned":
        case.domains, case.gallery_domains = np.arange(QUERIES) % 3, rng.integers(0, 3, count)
        case.own_gallery = np.array([True, False, False])
        for query in np.flatnonzero(case.domains == 0):
            own = int(np.flatnonzero(case.gallery_domains == 0)[query])
            queries[query], query_labels[query] = gallery[own], gallery_labels[own]
        made["lists"] = ("domain0", "domain1", "domain2", "junk")
        case.entries = []
        for query, domain in enumerate(case.domains):
            fits = (gallery_labels == query_labels[query]) & (case.gallery_domains == domain)
            own = np.flatnonzero(np.all(gallery == queries[query], axis=1)) if domain == 0 else np.empty(0, int)
            relevant = [int(i) for i in np.flatnonzero(fits) if i not in own]
            case.entries.append({f"domain{domain}": relevant, "junk": own.tolist()})
        kept = [query for query in range(QUERIES) if case.entries[query][f"domain{case.domains[query]}"]]
        queries, case.entries = queries[kept], [case.entries[query] for query in kept]
        case.domains, case.query_labels = case.domains[kept], query_labels[kept]
    elif protocol == "reid":
        cameras, own_cameras = rng.integers(0, 6, count), rng.integers(0, 6, QUERIES)
        case.entries = [
            {"ok": [i for i in each if cameras[i] != camera], "junk": [i for i in each if cameras[i] == camera]}
            for each, camera in zip(same, own_cameras, strict=True)
        ]
        case.entries[0] = {"ok": [], "junk": same[0]}
    elif protocol == "place":
        places, asked = rng.uniform(0, 400, (count, 2)), rng.uniform(0, 450, (QUERIES, 2))
        case.names = {
            "database": [f"a/@{east!r}@{north!r}@.jpg" for east, north in places.tolist()],
            "queries": [f"a/@{east!r}@{north!r}@.jpg" for east, north in asked.tolist()],
        }
        case.entries = [{"ok": near} for near in within_radius(asked.tolist(), places.tolist(), 25.0)]
    elif protocol == "ilias":
        groups = rng.integers(0, len(ILIAS_LISTS), count)
        case.entries = [
            {name: own for g, name in enumerate(ILIAS_LISTS) if (own := [i for i in each if groups[i] == g])}
            for each in same
        ]
    elif protocol == "amstertime":
        sides = [list(range(count // 2)), list(range(count // 2, count))]
        case.entries = []
        for query in range(QUERIES):
            side = query % 2
            case.entries.append({("old", "new")[side]: [int(rng.choice(sides[1 - side]))], "junk": sides[side]})
    elif protocol == "met":
        query_labels = np.where(np.arange(QUERIES) % 4 == 0, NO_CLASS, query_labels)
        validation = np.arange(QUERIES) % 2 == 0
        case.classes = made["classes"] = Classes(gallery_labels, query_labels, validation)
        case.entries = [
            {"val" if own else "test": each if label != NO_CLASS else []}
            for own, label, each in zip(validation, query_labels, same, strict=True)
        ]
    else:
        parts = ("public", "private") if protocol == "gldv2" else ("strong", "crops/10")
        made["lists"] = parts if protocol == "gldv2" else (*parts, "junk")
        case.entries = [{parts[query % 2]: each} for query, each in enumerate(same)]
    return case, unit(queries), unit(gallery), made


def equality_row(protocol: str, checkout: Path | None) -> Row:
    option, repository, peer = PEERS[protocol]
    what, against = f"{protocol}: largest difference, in percent", repository
    if checkout is None:
        why = {"not measured": f"no --{option.replace('_', '-')} checkout"}
        return Row(what, against, None, EQUAL, None, why)
    largest, compared = 0.0, 0
    for kind in KINDS:
        for seed in range(SEEDS):
            case, queries, gallery, made = draw(protocol, kind, seed)
            names = [f"i{i}" for i in range(len(gallery))], [f"q{i}" for i in range(len(queries))]
            content = {"imlist": names[0], "qimlist": names[1], "gnd": case.entries}
            truth = make_ground_truth(content, Path("drawn"), **made)
            case.similarities = np.stack(list(similarity_rows(queries, gallery)))
            case.order = np.argsort(-case.similarities, axis=1, kind="stable")
            own = score_retrieval(queries, gallery, truth, choose_protocol(protocol, truth)).metrics
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
