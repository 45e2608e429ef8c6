"""Which size, crop and pooling an encoder retrieves best with: mAP among photos of one folder, and time per photo.

Every photo of a class that starts with `--queries` ranks all others; relevant are those of its class. AP is the mean
precision at the relevant photos. The photos are decoded once; both poolings come from one forward pass. `--formats`
cuts each photo to a random format (16:9, 4:3 or square, upright or not) at first: many collections are not square.

    python benchmarks/encoder_defaults.py --model lite0 --photos database/ --classes database.txt
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import report as report  # mistakes are one line
import torch

from sop_faiss import load_encoder
from sop_faiss.data.images.decode import decode_image
from sop_faiss.errors import DataError
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.encoders.forward import batches_of_equal_shape, exact_inference
from sop_faiss.model.encoders.pooling import pool_tokens
from sop_faiss.model.encoders.preprocess import Preprocess


def chosen_photos(listed: Path, queries: str, per_class: int) -> list[tuple[str, str]]:
    """Pairs of file and class: up to `per_class` of a queried class, 4 of another one; the same ones each time."""
    rng = np.random.default_rng(0)
    files: dict[str, list[str]] = {}
    for line in listed.read_text().splitlines():
        file, _, name = line.partition("\t")
        files.setdefault(name, []).append(file)
    return [
        (file, name)
        for name, those in sorted(files.items())
        for file in sorted(rng.permutation(those)[: per_class if name.startswith(queries) else 4].tolist())
    ]


def cut_to_formats(images: list[np.ndarray]) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    cut = []
    for image in images:
        height, width = image.shape[:2]
        side = min(height, width)
        other = round(side * rng.choice([0.5625, 0.75, 1.0]))
        rows, columns = (side, other) if rng.random() < 0.5 else (other, side)
        top, left = (height - rows) // 2, (width - columns) // 2
        cut.append(np.ascontiguousarray(image[top : top + rows, left : left + columns]))
    return cut


def preprocess_of(encoder: Encoder, rule: str, size: int) -> Preprocess:
    """`crop`: 256/224 of the size, then the center; `square`: the largest square; `whole`: longer side, no crop."""
    own = encoder.preprocess
    if rule == "crop":
        return Preprocess.square(size, mean=own.mean, std=own.std, multiple=own.multiple)
    square = replace(own, resize=size, crop=size)
    return square if rule == "square" else square.keeping_aspect()


def pooled_twice(encoder: Encoder, preprocess: Preprocess, images: list[np.ndarray]) -> dict[str, np.ndarray]:
    prepared: Iterator[tuple[int, np.ndarray]] = ((at, preprocess.apply(image)) for at, image in enumerate(images))
    found: dict[str, dict[int, np.ndarray]] = {"mean": {}, "gem": {}}
    with exact_inference(encoder):
        for positions, batch in batches_of_equal_shape(prepared, 16):
            tokens = encoder.tokens(preprocess.normalize(batch))[1]
            for pooling, rows in found.items():
                features = pool_tokens(tokens.patches[:, 0], tokens.patches, tokens.grid, pooling)
                rows.update(zip(positions, torch.nn.functional.normalize(features, dim=1).numpy(), strict=True))
    return {pooling: np.stack([rows[at] for at in range(len(images))]) for pooling, rows in found.items()}


def mean_average_precision(features: np.ndarray, classes: np.ndarray, queries: np.ndarray) -> float:
    similarities = features @ features.T
    np.fill_diagonal(similarities, -np.inf)
    precisions = []
    for query in queries:
        right = (classes == classes[query])[np.argsort(-similarities[query])[:-1]]
        precisions.append((np.cumsum(right)[right] / (np.flatnonzero(right) + 1)).mean())
    return 100 * float(np.mean(precisions))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lite0")
    parser.add_argument("--photos", type=Path, required=True)
    parser.add_argument("--classes", type=Path, required=True, help="lines of file, tab, class")
    parser.add_argument("--queries", default="Packages", help="what the classes of the queries start with")
    parser.add_argument("--per-class", type=int, default=10)
    parser.add_argument("--sizes", default="192,224,256,288,320")
    parser.add_argument("--rules", default="crop,square,whole")
    parser.add_argument("--formats", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    encoder = load_encoder(options.model)
    chosen = chosen_photos(options.classes, options.queries, options.per_class)
    if not chosen:
        raise DataError(f"{options.classes} has no line of a file, a tab and its class")
    images = [decode_image((options.photos / file).read_bytes()) for file, _ in chosen]
    images = cut_to_formats(images) if options.formats else images
    classes = np.array([name for _, name in chosen])
    queries = np.flatnonzero(np.char.startswith(classes, options.queries))
    print(f"{options.model}: {len(queries)} queries among {len(images)} photos")
    for size in map(int, options.sizes.split(",")):
        for rule in options.rules.split(","):
            started = time.process_time()
            features = pooled_twice(encoder, preprocess_of(encoder, rule, size), images)
            cost = 1000 * (time.process_time() - started) / len(images)
            scores = {name: mean_average_precision(rows, classes, queries) for name, rows in features.items()}
            mean, gem = (f"{name} {score:.1f}" for name, score in scores.items())
            print(f"{size} px {rule:6} {mean} {gem} mAP, {cost:.0f} ms", flush=True)


if __name__ == "__main__":
    main()
