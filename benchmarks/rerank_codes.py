"""What product-quantized tokens lose in local re-ranking, by number of bytes, against float16.

    python benchmarks/rerank_split.py data/retrieval_grocery chosen
    python benchmarks/rerank_codes.py chosen tokens.npz [--bytes 8 --bytes 16 ...]

Features (Lite0, central squares of 192 px) and tokens (320 px) of `chosen/query` and `chosen/database` are made
once, and kept in `tokens.npz`; all codes are learned from the same tokens, and score the same rankings: differences are
paired, with 95 % intervals by bootstrap over the queries.
"""

from __future__ import annotations

import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import report as report  # mistakes are one line
from rich.console import Console
from rich.table import Table

from sop_faiss.data.images.source import open_source
from sop_faiss.errors import DataError
from sop_faiss.evaluate.metrics import average_precision, ranks_of_relevant
from sop_faiss.evaluate.reranking import Reordering
from sop_faiss.features.extract import extract_features
from sop_faiss.index.rerank.order import order_by_tokens
from sop_faiss.index.rerank.settings import Rerank, TokenSettings
from sop_faiss.index.rerank.token_codes import TokenCodes
from sop_faiss.index.rerank.tokens import learn_tokenizer
from sop_faiss.model.encoders.load import encoder_of_spec
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.neighbors.product_codes import ProductCodes

SIZE, TOKEN_SIZE, LEARNED, DRAWS = 192, 320, 50_000, 2000


def make(folder: Path, out: Path) -> None:
    """Write features, classes and tokens of the queries and of the gallery."""
    encoder = encoder_of_spec(EncoderSpec("lite0", size=SIZE))
    gallery = open_source(str(folder / "database"))
    tokenizer = learn_tokenizer(encoder, TokenSettings(TOKEN_SIZE), len(gallery), gallery.read, gallery.keys)
    arrays: dict[str, Any] = {}
    for role in ("query", "database"):
        source = open_source(str(folder / role))
        assert source.labels is not None and source.class_names is not None
        made = dict(tokenizer.tokens(len(source), source.read, source.keys))
        arrays[f"{role}_features"] = extract_features(encoder, source).features
        arrays[f"{role}_classes"] = np.array(source.class_names)[source.labels]
        arrays[f"{role}_tokens"] = np.concatenate([made[place] for place in range(len(source))])
        arrays[f"{role}_counts"] = np.array([len(made[place]) for place in range(len(source))])
    np.savez(out, **arrays)


def precisions(kept: Any, gallery: Sequence[np.ndarray]) -> np.ndarray:
    """Return the average precision of each query, in percent."""
    queries = np.split(kept["query_tokens"].astype(np.float32), np.cumsum(kept["query_counts"])[:-1])
    settings = Rerank("local")

    def order(query: int, first: np.ndarray) -> np.ndarray:
        return order_by_tokens(settings, queries[query], [gallery[row] for row in first.tolist()])

    reordering = Reordering(settings.depth, order)
    similarities = kept["query_features"] @ kept["database_features"].T
    found = []
    for query, name in enumerate(kept["query_classes"]):
        relevant = np.flatnonzero(kept["database_classes"] == name)
        ranks = ranks_of_relevant(reordering.moved(query, similarities[query]), relevant, np.empty(0, np.int64))
        found.append(100 * average_precision(ranks, len(relevant)))
    return np.array(found)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("tokens", type=click.Path(path_type=Path))
@click.option(
    "--bytes", "sizes", multiple=True, type=int, default=(8, 16, 32, 64), show_default=True, help="Of a code."
)
def main(folder: Path, tokens: Path, sizes: tuple[int, ...]) -> None:
    """Compare codes of tokens."""
    if not tokens.is_file():
        make(folder, tokens)
    try:
        kept = dict(np.load(tokens))
        stored, cuts = kept["database_tokens"], np.cumsum(kept["database_counts"])[:-1]
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile):
        raise DataError(f"{tokens} is damaged, or of another kind: remove it, and it is made again") from None
    exact = precisions(kept, np.split(stored, cuts))
    norms = np.linalg.norm(stored.astype(np.float32), axis=1, keepdims=True)
    directions = stored.astype(np.float32) / np.maximum(norms, 1e-12)
    rng = np.random.default_rng(0)
    draw = rng.permutation(len(directions))[:LEARNED]
    lines = [("float16", TokenCodes(stored.shape[1]).token_bytes, exact.mean(), "", 0.0)]
    for size in sizes:
        codes = TokenCodes(stored.shape[1], ProductCodes.learn(directions[draw], size))
        packed = codes.packed(stored)
        started = time.process_time()
        decoded = codes.tokens(packed)
        milliseconds = 1000 * (time.process_time() - started) * 20_000 / len(stored)
        lost = precisions(kept, np.split(decoded, cuts)) - exact
        means = lost[rng.integers(0, len(lost), (DRAWS, len(lost)))].mean(1)
        low, high = np.percentile(means, [2.5, 97.5])
        difference = f"{lost.mean():+.2f} ({low:+.2f}..{high:+.2f})"
        lines.append((f"pq{size}", codes.token_bytes, exact.mean() + lost.mean(), difference, milliseconds))
    table = Table("codes", "bytes of a token", "mAP", "difference", "ms to decode 20,000")
    for name, length, score, difference, milliseconds in lines:
        table.add_row(name, str(length), f"{score:.2f}", difference, f"{milliseconds:.1f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
