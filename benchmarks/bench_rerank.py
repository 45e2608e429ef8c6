"""A re-ranked query from the bytes of an image to its neighbors, in a process that is open: processor time by stage.

    OMP_NUM_THREADS=2 python benchmarks/bench_rerank.py --index DIR --data SRC
        [--queries N] [--rounds N] [--json FILE] [--record]

DIR is an index with tokens (`sop-index build ... --tokens --token-size 320`), SRC images to search by. One query at a
time; `OMP_NUM_THREADS` says how many threads the encoder uses. Processor time is of all threads: other work on the
machine changes it little, and the time to an answer much. With two free cores an answer takes about half of the
encoder's processor time, and the rest.
"""

from __future__ import annotations

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
@click.option("--queries", type=click.IntRange(1), default=20, show_default=True, help="Drawn evenly from them.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Of all queries.")
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
    spent: dict[str, list[float]] = {"all": []}
    waited = []

    def timed(stage: str, work: Callable[[], R]) -> R:
        started = time.process_time()
        done = work()
        spent.setdefault(stage, []).append(1000 * (time.process_time() - started))
        return done

    def tokens_of(encoded: bytes) -> Any:
        assert reranker is not None and reranker.store is not None
        tokenizer = reranker.store.tokenizer(encoder)
        return next(made for _, made in tokenizer.tokens(1, lambda _: encoded, ["the image"])).astype("float32")

    for number in range(-1, rounds):
        for encoded in images if number >= 0 else images[:1]:  # the first makes what is made once
            started, began = time.process_time(), time.perf_counter()
            feature = timed("decode and feature", lambda: encoder.encode(encoded))  # noqa: B023
            tokens = timed("decode and tokens", lambda: tokens_of(encoded))  # noqa: B023
            found = timed("search", lambda: index.search(feature, depth))  # noqa: B023
            timed("compare tokens", lambda: reranker.reordered(found, feature[0], tokens))  # noqa: B023
            spent["all"].append(1000 * (time.process_time() - started))
            waited.append(1000 * (time.perf_counter() - began))
    middle = {name: statistics.median(values[1:]) for name, values in spent.items()}
    encoding = middle["decode and feature"] + middle["decode and tokens"]
    two = encoding / 2 + middle["search"] + middle["compare tokens"]
    detail = {
        **{f"{name.replace(' ', '_')}_milliseconds": value for name, value in middle.items()},
        "wall_milliseconds": statistics.median(waited[1:]),
        "encoder": encoder.name,
        "codes": reranker.store.settings.codes,
        "token_size": reranker.store.settings.size,
        "images": len(index),
        "compared": depth,
        "threads": torch.get_num_threads(),
    }
    rows = [
        Row("a query re-ranked by tokens, ms of the processor, all threads", "-", middle["all"], "", None, detail),
        Row("the same with half of the encoder's, as on two free cores", "-", two, TARGET, meets(two, TARGET), {}),
    ]
    finish("rerank", rows, json_file=json_file, record=record)


if __name__ == "__main__":
    main()
