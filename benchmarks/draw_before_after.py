"""Draw what two encoders find for the same queries, one row per query: docs/before_after.jpg.

    python benchmarks/draw_before_after.py retrieval_grocery/ lite0 runs/grocery docs/before_after.jpg

Queries are a seeded draw, one per group of relevant images, so that nobody chose them. The color of a frame says
whether a neighbor is relevant (green) or not (red).
"""

from __future__ import annotations

import io
from pathlib import Path

import click
import numpy as np
from jaxtyping import Int64
from PIL import Image, ImageDraw, ImageFont, ImageOps

import sop_faiss
from sop_faiss.cli.common import run_command
from sop_faiss.evaluate.sets.retrieval_set import RetrievalSet, open_retrieval_set

SIDE, GAP, FRAME, HEADING = 104, 6, 4, 26
FOUND = 5
GREEN, RED = (46, 160, 67), (207, 66, 60)


@click.command(help=__doc__)
@click.argument("dataset")
@click.argument("before")
@click.argument("after")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--size", default=288, show_default=True, help="Pixels of the square that both encoders see.")
@click.option("--pooling", default="gem", show_default=True, help="Pooling of both encoders.")
@click.option("--queries", default=6, show_default=True, help="Rows of the picture.")
@click.option("--seed", default=0, show_default=True, help="Of the draw of queries.")
@run_command
def main(dataset: str, before: str, after: str, out: Path, size: int, pooling: str, queries: int, seed: int) -> None:
    data = open_retrieval_set(dataset)
    drawn = _drawn(data, queries, seed)
    found = [_nearest(name, data, drawn, size=size, pooling=pooling) for name in (before, after)]
    step = SIDE + GAP
    columns = (0, step + 2 * GAP, (1 + FOUND) * step + 6 * GAP)  # left edges of the query and of both results
    sheet = Image.new("RGB", (columns[2] + FOUND * step, HEADING + len(drawn) * step), "white")
    font = ImageFont.load_default(15)
    for left, text in zip(columns, ("query", f"before: {before}", "after training on these photos"), strict=True):
        ImageDraw.Draw(sheet).text((left, 4), text, fill="black", font=font)
    for row, query in enumerate(drawn):
        top = HEADING + row * step
        _paste(sheet, (columns[0], top), data.queries.read(query), "white")
        relevant = set(data.truth.queries[query].lists["ok"].tolist())
        for left, of_queries in zip(columns[1:], found, strict=True):
            for rank, position in enumerate(of_queries[row].tolist()):
                color = GREEN if position in relevant else RED
                _paste(sheet, (left + rank * step, top), data.gallery.read(position), color)
    sheet.save(out, quality=82, optimize=True)


def _drawn(data: RetrievalSet, count: int, seed: int) -> list[int]:
    """Return a draw of queries, at most one of those with the same relevant images."""
    groups: dict[tuple[int, ...], int] = {}
    for position in np.random.default_rng(seed).permutation(len(data.truth.queries)).tolist():
        groups.setdefault(tuple(data.truth.queries[position].lists["ok"].tolist()), position)
    return list(groups.values())[:count]


def _nearest(name: str, data: RetrievalSet, drawn: list[int], *, size: int, pooling: str) -> Int64[np.ndarray, "q k"]:
    encoder = sop_faiss.load_encoder(name, size=size, pooling=pooling)
    gallery = encoder.encode([data.gallery.read(position) for position in range(len(data.gallery))])
    queries = encoder.encode([data.queries.read(position) for position in drawn])
    return np.argsort(-(queries @ gallery.T), axis=1)[:, :FOUND]


def _paste(sheet: Image.Image, corner: tuple[int, int], encoded: bytes, color: tuple[int, int, int] | str) -> None:
    with Image.open(io.BytesIO(encoded)) as opened:
        side = SIDE - 2 * FRAME
        image = ImageOps.fit(ImageOps.exif_transpose(opened).convert("RGB"), (side, side))
    sheet.paste(ImageOps.expand(image, FRAME, color), corner)


if __name__ == "__main__":
    main()
