"""The official scores of retrieval protocols, computed by functions of checkouts that the user names.

The modules of these checkouts read files, or import what is not needed here, when they are imported: so single
functions and classes are compiled out of their files, unchanged, with stand-ins for what they look up. `Numpy` is numpy
with a stable `argsort` (theirs leaves the order of equal scores open), without rounding to three digits, and with names
that numpy 2 removed.
"""

from __future__ import annotations

import ast
import collections
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sklearn.metrics import average_precision_score
from sklearn.neighbors import NearestNeighbors

__all__ = ["Case", "official"]


class Numpy:
    """Numpy as the official code needs it."""

    Inf = np.inf

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def argsort(values: Any, axis: int = -1) -> Any:
        return np.argsort(values, axis=axis, kind="stable")

    @staticmethod
    def round(values: Any, digits: int) -> Any:
        return values


def official(option: str, checkout: Path, file: str, *names: str, **stand_ins: Any) -> SimpleNamespace:
    """Compile functions and classes of a file of a checkout."""
    place = checkout / file
    if not place.is_file():
        raise SystemExit(f"{option}: {place} does not exist")
    wanted: list[ast.stmt] = [
        node
        for node in ast.walk(ast.parse(place.read_text()))
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names
    ]
    found: dict[str, Any] = {"np": Numpy(), "torch": torch, **stand_ins}
    exec(compile(ast.Module(wanted, []), str(place), "exec"), found)
    return SimpleNamespace(**{name: found[name] for name in names})


class Case(SimpleNamespace):
    """Rankings and what is known of queries and gallery, as the official code takes them.

    Attributes:
        kind: of the features.
        similarities: float32, (queries, gallery).
        order: gallery positions by falling similarity, of equal ones the first.
        entries: of each query, the lists of a gnd.json.
        classes: of gallery and queries, and which queries are for validation.
    """

    kind: str
    similarities: np.ndarray
    order: np.ndarray
    entries: list[dict[str, list[int]]]
    classes: Any


def landmarks(checkout: Path, case: Case) -> dict[str, float]:
    file = "research/delf/delf/python/datasets/google_landmarks_dataset/metrics.py"
    score = official("--landmarks", checkout, file, "MeanAveragePrecision").MeanAveragePrecision
    found = {}
    for part in ("public", "private"):
        solution = {query: entry[part] for query, entry in enumerate(case.entries) if entry.get(part)}
        predictions = {query: case.order[query, :100].tolist() for query in solution}
        found[f"mAP@100_{part}"] = score(predictions, solution)
    return found


def ilias(checkout: Path, case: Case) -> dict[str, float]:
    module = official(
        "--ilias",
        checkout,
        "evaluation/src/dataset.py",
        "ILIAS",
        average_precision_score=average_precision_score,
        defaultdict=collections.defaultdict,
        SCALE_GROUPS=[(0, 1), (1, 2), (2, 3), (3, 4)],
        CLUTTER_GROUPS=[(0, 1), (1, 2), (2, 3), (3, 4)],
    )
    found: dict[str, Any] = {}
    data = object.__new__(module.ILIAS)
    data.check_ids, data.gt, data.positive_info, data.taxonomy = False, {}, {}, collections.defaultdict(lambda: "a-b")
    ids = np.array([f"{position}" for position in range(case.order.shape[1])])
    scores: dict[str, list[float]] = collections.defaultdict(list)
    for query, entry in enumerate(case.entries):
        groups = {f"{place}": group for group, places in entry.items() for place in places}
        data.gt = {"object": set(groups)}
        data.positive_info = {name: tuple(int(part[-1]) - 1 for part in groups[name].split()) for name in groups}
        if not groups:
            continue
        order = case.order[query]
        report = data.evaluate(
            query_ids=["object/q"],
            db_ids=ids,
            sims=[case.similarities[query, order]],
            ranks=[order],
            report=True,
        )
        scores["mAP@1k"].append(report["map"])
        for kind in ("scale", "clutter"):
            for bounds, score in report[kind].items():
                scores[f"mAP@1k_{kind}{bounds[-1]}"].append(score)
    found.update({name: float(np.mean(each)) / 100 for name, each in scores.items()})
    return found


class _Index:
    """FAISS's flat index, for queries that are row numbers of a case."""

    def __init__(self, case: Case, rows: np.ndarray) -> None:
        self.case, self.rows = case, rows

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        found = self.case.order[queries, :k]
        return np.take_along_axis(self.case.similarities[queries], found, 1), found


def met(checkout: Path, case: Case) -> dict[str, float]:
    scores = official("--met", checkout, "code/utils/utils.py", "gap", "gap_non_distr", "classif_accuracy", "evaluate")
    faiss = SimpleNamespace(
        StandardGpuResources=lambda: None,
        IndexFlatIP=lambda _: SimpleNamespace(
            add=lambda _: None, search=lambda queries, k: _Index(case, queries).search(queries, k)
        ),
        index_cpu_to_gpu=lambda _resources, _device, index: index,
    )
    module = official(
        "--met",
        checkout,
        "code/classifiers/knn_classifier.py",
        "KNN_Classifier",
        "tune_KNN",
        faiss=faiss,
        itertools=itertools,
        evaluate=functools.partial(scores.evaluate, verbose=False),
        print=lambda *_: None,
    )
    module.tune_KNN.__globals__["evaluate"] = lambda *given, **_: scores.evaluate(*given, verbose=False)
    classes, gallery = case.classes, np.empty((case.order.shape[1], 1))
    rows = np.arange(len(case.order))
    own, asked = rows[classes.validation], rows[~classes.validation]
    grid = {
        "K": np.array([1, 2, 3, 5, 7, 10, 15, 20, 50]),
        "t": np.array([0.01, 0.1, 1.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 50.0, 100.0, 500.0]),
    }
    best = module.tune_KNN(grid, gallery, classes.gallery, own, classes.queries[own])[1]
    classifier = module.KNN_Classifier(K=int(best["K"]), t=float(best["t"]))
    classifier.fit(gallery, classes.gallery)
    found = scores.evaluate(*classifier.predict(asked), classes.queries[asked], verbose=False)
    return dict(zip(("GAP", "GAP-", "ACC"), found, strict=True))


def uned(checkout: Path, case: Case) -> dict[str, float]:
    module = official(
        "--uned",
        checkout,
        "universal_embedding/knn_utils.py",
        "compute_knn_metrics",
        jax=SimpleNamespace(pmap=lambda function: function),
        functools=functools,
        collections=collections,
        logging=SimpleNamespace(info=lambda *_: None),
    )
    found: dict[str, float] = {}
    for domain in np.unique(case.domains):
        asked = np.flatnonzero(case.domains == domain)

        def nearest(k: int, index_descrs: Any, query_descrs: Any) -> tuple[np.ndarray, np.ndarray]:
            places = case.order[query_descrs, :k]
            return np.take_along_axis(case.similarities[query_descrs], places, 1), places

        evaluator = SimpleNamespace(
            knn_query_batch_size=len(asked), _run_knn=nearest, split_and_pad=lambda rows: (rows, np.ones(len(rows)))
        )
        recall, precision, _, _ = module.compute_knn_metrics(
            evaluator,
            "",
            [asked],
            [np.empty((case.order.shape[1], 1))],
            None,
            None,
            case.own_gallery[domain],
            5,
            SimpleNamespace(save_neighbors=False),
            [int(label) for label in case.query_labels[asked]],
            case.gallery_labels,
            case.domains[asked],
            case.gallery_domains,
        )
        found |= {f"R@1_domain{domain}": float(recall), f"mMP@5_domain{domain}": float(precision)}
    for metric in ("R@1", "mMP@5"):
        found[metric] = float(np.mean([score for name, score in found.items() if name.startswith(f"{metric}_")]))
    return found


def place(checkout: Path, case: Case) -> dict[str, float]:
    """The positives of TestDataset, and the loop of main.py over predictions."""
    dataset = official(
        "--vpr",
        checkout,
        "test_dataset.py",
        "TestDataset",
        data=SimpleNamespace(Dataset=object),
        transforms=SimpleNamespace(ToTensor=lambda: None, Normalize=lambda mean, std: None, Compose=lambda each: None),
        NearestNeighbors=NearestNeighbors,
        read_images_paths=lambda folder: case.names[folder],
    ).TestDataset("database", "queries", positive_dist_threshold=25)
    tree = ast.parse((checkout / "main.py").read_text())
    block = next(
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "args.use_labels" and "recalls" in ast.unparse(node)
    )
    given: dict[str, Any] = {
        "np": np,
        "args": SimpleNamespace(use_labels=True, recall_values=[1, 5, 10]),
        "test_ds": dataset,
        "predictions": case.order[:, :10],
        "logger": SimpleNamespace(info=lambda _: None),
    }
    exec(compile(ast.Module([block], []), "main.py", "exec"), given)
    return {f"R@{k}": score / 100 for k, score in zip((1, 5, 10), given["recalls"], strict=True)}


def reid(checkout: Path, case: Case) -> dict[str, float]:
    score = official("--reid", checkout, "evaluate_gpu.py", "compute_mAP").compute_mAP
    precisions, curve = 0.0, np.zeros(case.order.shape[1])
    for order, entry in zip(case.order, case.entries, strict=True):
        ap, cmc = score(order, np.array(entry["ok"], int), np.array(entry["junk"], int))
        if cmc[0] != -1:
            precisions, curve = precisions + ap, curve + cmc.numpy()
    count = len(case.order)
    return {"mAP": precisions / count, **{f"R@{k}": curve[k - 1] / count for k in (1, 5, 10)}}


def metric_learning(checkout: Path, case: Case) -> dict[str, float]:
    score = official("--proxy-anchor", checkout, "code/utils.py", "calc_recall_at_k").calc_recall_at_k
    others = np.stack([order[order != query] for query, order in enumerate(case.order)])
    found = torch.from_numpy(case.gallery_labels[others]).float()
    labels = torch.from_numpy(case.gallery_labels)
    return {f"R@{k}": score(labels, found, k) for k in (1, 2, 4, 8)}


def copydays(checkout: Path, case: Case) -> dict[str, float]:
    score = official("--dino", checkout, "eval_copy_detection.py", "score_ap_from_ranks_1").score_ap_from_ranks_1
    found: dict[str, list[float]] = collections.defaultdict(list)
    for order, entry in zip(case.order, case.entries, strict=True):
        for block, positives in entry.items():
            if positives:
                found[f"mAP_{block}"].append(score(np.flatnonzero(np.isin(order, positives)), len(positives)))
    return {name: float(np.mean(each)) for name, each in found.items()}


def amstertime(checkout: Path, case: Case) -> dict[str, float]:
    score = official("--amstertime", checkout, "amstertime/eval.py", "calculate_metrics").calculate_metrics
    results: dict[str, list[Any]] = {"old": [], "new": []}
    for order, entry in zip(case.order, case.entries, strict=True):
        side = next(name for name in results if name in entry)
        results[side].append(np.isin(order[~np.isin(order, entry["junk"])][:128], entry[side]).astype(float))
    found: dict[str, float] = {}
    for name, rows in (("", results["new"] + results["old"]), ("_old", results["old"]), ("_new", results["new"])):
        scores = score(np.stack(rows))
        found |= dict(zip((f"mAP@128{name}", f"R@1{name}", f"R@5{name}"), map(float, scores), strict=True))
    return found


PEERS: dict[str, tuple[str, str, Callable[[Path, Case], dict[str, float]]]] = {
    "cub": ("proxy_anchor", "tjddus9597/Proxy-Anchor-CVPR2020", metric_learning),
    "reid": ("reid", "layumi/Person_reID_baseline_pytorch", reid),
    "place": ("vpr", "gmberton/VPR-methods-evaluation", place),
    "gldv2": ("landmarks", "tensorflow/models", landmarks),
    "ilias": ("ilias", "ilias-vrg/ilias", ilias),
    "met": ("met", "nikosips/met", met),
    "uned": ("uned", "nikosips/Universal-Image-Embeddings", uned),
    "copydays": ("dino", "facebookresearch/dino", copydays),
    "amstertime": ("amstertime", "seyrankhademi/AmsterTime", amstertime),
}
"""By protocol: the option that names the checkout, its repository, and what computes the official scores."""
