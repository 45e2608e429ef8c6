"""A re-ranked query from the bytes of an image to its neighbors, in a process that is open: processor time by stage.

    OMP_NUM_THREADS=1 python benchmarks/bench_rerank.py --index DIR --data SRC
        [--queries N] [--rounds N] [--json FILE] [--record]

DIR is an index with tokens (`sop-index build ... --tokens --token-size 320`), SRC images to search by. One query at a
time; of each query and stage the least of all rounds counts, and of the queries the median. Processor time is of all
threads: other work on the machine changes it less than the time to an answer, but threads that wait for each other
spend it, so that one thread is measured. The time to an answer holds on a machine that does nothing else.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import torch
from report import Row, finish, meets

from sop_faiss.data.images.source import open_source
from sop_faiss.index.own_encoder import encoder_of_index
from sop_faiss.index.rerank.reranker import open_reranker
from sop_faiss.index.rerank.settings import Rerank
from sop_faiss.index.search import FeatureIndex

R = TypeVar("R")
TARGET = "<= 50"


@click.command()
@click.option("--index", "directory", required=True, type=click.Path(path_type=Path), help="An index with tokens.")
@click.option("--data", required=True, help="Images to search by.")
@click.option("--queries", type=click.IntRange(1), default=10, show_default=True, help="Drawn evenly from them.")
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True, help="Of all queries.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the rows here, too.")
@click.option("--record", is_flag=True, help="Append the table to benchmarks/RESULTS.md.")
def main(directory: Path, data: str, queries: int, rounds: int, json_file: Path | None, record: bool) -> None:
    """Measure a re-ranked query, stage by stage."""
    index, source = FeatureIndex.open(directory), open_source(data)
    encoder = encoder_of_index(index)
    reranker = open_reranker(index, Rerank("local"))
    assert reranker is not None and reranker.store is not None
    depth = min(reranker.settings.depth, len(index))
    images = [source.read(number * len(source) // queries) for number in range(queries)]
    spent: dict[tuple[str, int], float] = {}
    waited: dict[int, float] = {}

    def timed(stage: str, query: int, work: Callable[[], R]) -> R:
        started = time.process_time()
        done = work()
        _keep_least(spent, (stage, query), time.process_time() - started)
        return done

    def tokens_of(encoded: bytes) -> Any:
        assert reranker is not None and reranker.store is not None
        tokenizer = reranker.store.tokenizer(encoder)
        return next(made for _, made in tokenizer.tokens(1, lambda _: encoded, ["the image"])).astype("float32")

    for _ in range(rounds):
        for query, encoded in enumerate(images):
            started, began = time.process_time(), time.perf_counter()
            feature = timed("decode and feature", query, functools.partial(encoder.encode, encoded))
            tokens = timed("decode and tokens", query, functools.partial(tokens_of, encoded))
            found = timed("search", query, functools.partial(index.search, feature, depth))
            timed("compare tokens", query, functools.partial(reranker.reordered, found, feature[0], tokens))
            _keep_least(spent, ("all", query), time.process_time() - started)
            _keep_least(waited, query, time.perf_counter() - began)
    stages = dict.fromkeys(stage for stage, _ in spent)
    middle = {each: statistics.median(value for (stage, _), value in spent.items() if stage == each) for each in stages}
    wall = 1000 * statistics.median(waited.values())
    detail = {
        **{f"{name.replace(' ', '_')}_milliseconds": 1000 * value for name, value in middle.items()},
        "encoder": encoder.name,
        "codes": reranker.store.settings.codes,
        "token_size": reranker.store.settings.size,
        "images": len(index),
        "compared": depth,
        "threads": torch.get_num_threads(),
    }
    rows = [
        Row(
            "a query re-ranked by tokens, ms of the processor, all threads", "-", 1000 * middle["all"], "", None, detail
        ),
        Row("the same, ms to the answer", "-", wall, TARGET, meets(wall, TARGET), {}),
    ]
    finish("rerank", rows, json_file=json_file, record=record)


def _keep_least(times: dict[Any, float], name: Any, seconds: float) -> None:
    times[name] = min(seconds, times.get(name, seconds))


if __name__ == "__main__":
    main()
