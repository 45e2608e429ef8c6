"""An index built by tasks on a Ray cluster: a feature store's files apart, against one trained index, then joined."""

from __future__ import annotations

import functools
import logging
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64

from sop_faiss.errors import ConfigError, SopError
from sop_faiss.features.store import read_names
from sop_faiss.features.store_manifest import read_store_manifest
from sop_faiss.files import atomic_directory, atomic_file, locked_directory, sha256_file
from sop_faiss.index import cluster_tasks as work
from sop_faiss.index.build import IndexOptions, measure, not_measured, store_as_index
from sop_faiss.index.cluster_tasks import Part
from sop_faiss.index.encoder_doubts import facts_of_encoder, log_encoder_doubts
from sop_faiss.index.left_out import dropped_images
from sop_faiss.index.row_plan import RECALL_K, RowPlan, plan_rows
from sop_faiss.index.store import IdTable, IndexManifest, write_index
from sop_faiss.neighbors.disk.approximate_index import ApproximateIndex
from sop_faiss.neighbors.disk.auto_factory import near_by_table
from sop_faiss.neighbors.disk.factories import VectorIndex, empty_index
from sop_faiss.neighbors.disk.from_factory import read_approximate_index
from sop_faiss.output_checks import refuse_foreign, refuse_occupied
from sop_faiss.progress import ProgressCallback

_log = logging.getLogger(__name__)
_JOINED = "joined.faiss"
_OURS = re.compile(rf"\.?(?:trained|queries|part)-.*|{re.escape(_JOINED)}")
"""Files kept next to the index until it is complete, and what a kill leaves of them."""
_RETRIES = 5
"""How often a task is repeated whose worker was lost."""
_ANSWER_SECONDS = 10.0
"""How long a cluster may take to answer."""

Run = Callable[[Callable[..., Any], Sequence[tuple[Any, ...]]], Iterator[Any]]
"""Calls a function once for each of several arguments, somewhere; the results in the order of the arguments."""


def build_on_cluster(
    store: Path,
    out: Path,
    options: IndexOptions | None = None,
    *,
    address: str = "ray",
    progress: ProgressCallback | None = None,
) -> IndexManifest:
    """Build the index of a feature store by Ray tasks; the same index as `build_index` makes.

    Args:
        store: the feature store's directory. Each of its files is one part; the workers see it, and the directory of
            `out`, under the same paths.
        out: the index directory. Parts are kept next to it until all is done: after a failure, the same call
            continues with them.
        options: which kind of index; None for the defaults.
        address: of a Ray cluster; `ray`: the one that RAY_ADDRESS names, or this machine.
        progress: called with parts indexed and their number.

    Raises:
        ConfigError: Ray is not there, or cannot be reached, or this kind of index cannot be made in parts.
        SopError: as `build_index`; or workers were lost again and again.
    """
    with ray_tasks(address) as run:
        return build_by_tasks(store, out, options, run=run, progress=progress)


def build_by_tasks(
    store: Path, out: Path, options: IndexOptions | None = None, *, run: Run, progress: ProgressCallback | None = None
) -> IndexManifest:
    """Build as `build_on_cluster` does, by any means of running tasks."""
    options = options or IndexOptions()
    refuse_occupied(out)
    store, out = store.absolute(), out.absolute()
    store_manifest = read_store_manifest(store)
    count, dimension = int(store_manifest["count"]), int(store_manifest["dimension"])
    options.check(dimension)
    if options.max_query_ms is not None:
        raise ConfigError("`max_query_ms` is for indices that are built at once: leave it or `cluster` out")
    factory, why = options.choose(count, dimension)
    _log.info("index factory %s: %s", factory, why)
    index = empty_index(factory, dimension)
    if isinstance(index, ApproximateIndex) and not index.made_in_parts:
        raise ConfigError(f"an index {factory} cannot be made in parts: take Flat, or lists such as IVF1024,SQ8")
    names = read_names(store)
    plan = plan_rows(count, index)
    place = out.with_name(f".{out.name}.parts")
    refuse_foreign(place, _OURS, "the parts of the index")
    place.mkdir(parents=True, exist_ok=True)
    with locked_directory(place):
        sizes = [int(part["rows"]) for part in store_manifest["files"]]
        key = work.digest([part["sha256"] for part in store_manifest["files"]], factory)  # of all that training takes
        trained, queries = _train(run, store, sizes, plan, index, place, key)
        parts = _plan_parts(store, store_manifest, sizes, plan, factory, place, trained, queries)
        counts = []
        for done, rows in enumerate(run(work.index_part, [(part,) for part in parts]), start=1):
            counts.append(rows)
            if progress is not None:
                progress(done, len(parts))
        join = functools.partial(work.join_parts, parts, counts, dimension)
        of_encoder = facts_of_encoder(names, lambda rows: _gather(run, store, sizes, rows, dimension))
        search, last = {"effort": index.search_setting, **not_measured(options.recall), "why": why, **of_encoder}, None
        if queries is not None:
            last, joined = np.load(queries), place / _JOINED
            join(joined)
            search.update(_measured(joined, parts, len(plan.present), last, factory, options.recall))
        ids = IdTable(names.keys, names.sources, names.members, names.labels).take(plan.order)
        planned = replace(store_as_index(names, factory), dimension=dimension, search=search)
        with atomic_directory(out) as directory:
            write = functools.partial(join, last=last, search_setting=search["effort"])
            manifest = write_index(
                directory, planned, write, ids, left_out=dropped_images(names.manifest.get("dropped"))
            )
        shutil.rmtree(place, ignore_errors=True)
    log_encoder_doubts(manifest)
    return manifest


def _train(
    run: Run, store: Path, sizes: list[int], plan: RowPlan, index: VectorIndex, place: Path, key: str
) -> tuple[Path | None, Path | None]:
    """Write the trained index without a row and the held-out queries, once; None for each that does not exist."""
    if not isinstance(index, ApproximateIndex):
        return None, None
    trained, queries = place / f"trained-{key[:16]}.faiss", place / f"queries-{key[:16]}.npy"
    if not trained.is_file():
        vectors = _gather(run, store, sizes, np.concatenate([plan.held_out, plan.training]), index.dimension)
        index.train(vectors[len(plan.held_out) :])
        with atomic_file(queries) as temporary, temporary.open("wb") as stream:
            np.save(stream, vectors[: len(plan.held_out)])
        with atomic_file(trained) as temporary:
            index.write(temporary)
    return trained, queries if len(plan.held_out) else None


def _gather(
    run: Run, store: Path, sizes: list[int], rows: Int64[np.ndarray, " m"], dimension: int
) -> Float32[np.ndarray, "m d"]:
    """Read some rows of a store, in this order, by its parts."""
    vectors = np.empty((len(rows), dimension), np.float32)
    wanted = [(number, *each) for number, each in enumerate(work.rows_by_part(sizes, rows)) if each[1]]
    found = run(work.part_vectors, [(str(store), number, inside) for number, _, inside in wanted])
    for (_, places, _), part in zip(wanted, found, strict=True):
        vectors[places] = part
    return vectors


def _plan_parts(
    store: Path,
    store_manifest: dict[str, Any],
    sizes: list[int],
    plan: RowPlan,
    factory: str,
    place: Path,
    trained: Path | None,
    queries: Path | None,
) -> list[Part]:
    held_out = [inside for _, inside in work.rows_by_part(sizes, plan.held_out)]
    checksums = [None if file is None else sha256_file(file) for file in (trained, queries)]
    parts, first_row = [], 0
    for number, (size, skipped) in enumerate(zip(sizes, held_out, strict=True)):
        made_of = work.digest(store_manifest["files"][number]["sha256"], factory, checksums, first_row, sorted(skipped))
        parts.append(
            Part(
                store=str(store),
                number=number,
                directory=str(place / f"part-{number:05d}"),
                factory=factory,
                trained=None if trained is None else str(trained),
                made_of=made_of,
                first_row=first_row,
                skipped=skipped,
                held_out=None if queries is None else str(queries),
            )
        )
        first_row += size - len(skipped)
    return parts


def _measured(
    joined: Path, parts: list[Part], rows: int, queries: Float32[np.ndarray, "q d"], factory: str, target: float
) -> dict[str, Any]:
    """Tune searches on the rows held out, in an index of all others, and return what the manifest says of them."""
    k = min(RECALL_K, rows)
    index = read_approximate_index(joined, factory, queries.shape[1], rows)
    recall = measure(index, queries, k, near_by_table(work.read_nearest(parts), k), target)
    return {"effort": index.search_setting, **recall}


def _require_answer(address: str) -> None:
    """Refuse an address where nothing listens: Ray itself would wait there for many minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address in ("", "auto", "local"):
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_SECONDS).close()
    except (OSError, ValueError, OverflowError):
        raise ConfigError(
            f"no Ray cluster answers at {address!r}: wanted HOST:PORT of one that runs, or `ray` for this machine"
        ) from None


@contextmanager
def ray_tasks(address: str, **resources: int) -> Iterator[Run]:
    """Run tasks on a cluster; a connection that was made here is closed afterwards.

    Args:
        address: as of `build_on_cluster`.
        resources: what each task takes, as Ray names it: `num_cpus`, `num_gpus`.

    Raises:
        ConfigError: Ray is not there, or cannot be reached.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError("`cluster` needs Ray: pip install 'sop-faiss[cluster]'") from None
    ours = not ray.is_initialized()
    if ours:
        _require_answer(os.environ.get("RAY_ADDRESS", "") if address == "ray" else address)
        try:
            ray.init(address=None if address == "ray" else address, log_to_driver=False, logging_level=logging.WARNING)
        except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
            raise ConfigError(f"no Ray cluster at {address!r} ({str(error).splitlines()[0]})") from None

    def run(function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
        task = ray.remote(max_retries=_RETRIES, **resources)(function)
        try:
            for reference in [task.remote(*each) for each in arguments]:
                yield ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, SopError | OSError):
                raise error.cause from None
            raise
        except ray.exceptions.RayError as error:
            raise SopError(
                f"tasks were lost {_RETRIES + 1} times ({str(error).splitlines()[0]}): parts that are done stay, "
                "and the same command continues with them"
            ) from None

    try:
        yield run
    finally:
        if ours:
            ray.shutdown()
