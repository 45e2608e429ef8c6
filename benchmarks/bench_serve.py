"""The served page under load from 50 clients: p99 against p50 of the response time, mixed-up answers, errors.

    python benchmarks/bench_serve.py --index DIR [--model M] [--random-weights SEED]
        [--clients N] [--seconds S] [--quick] [--json FILE] [--record]

`sop-index serve` runs in a separate process, on the same machine as the clients. Each client sends its next request as
soon as it has an answer, over one connection: for the neighbors of an image of the index, then the same by sending an
image. Every answer is compared with the answer to the same request without load.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click
import numpy as np
from report import Row, finish, meets

from sop_faiss.index.images import index_images
from sop_faiss.index.search import FeatureIndex

QUESTIONS, K = 64, 24
TOLERANCE = 1e-5


@dataclass
class Load:
    """What the clients measured."""

    seconds: list[float] = field(default_factory=list)
    errors: int = 0
    mixed_up: int = 0


def question(host: str, method: str, path: str, body: bytes = b"") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}"]
    if method == "POST":
        lines += ["Content-Type: application/octet-stream", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: bytes) -> tuple[int, Any]:
    """Status and content."""
    writer.write(asked)
    await writer.drain()
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    length = int(head.split("content-length:")[1].split("\r\n")[0])
    return int(head.split()[1]), json.loads(await reader.readexactly(length))


def same(one: Any, other: Any) -> bool:
    """Return whether query, similarities and images agree; images may differ where similarities nearly tie."""
    left, right = one["found"], other["found"]
    values = [np.array([each["similarity"] for each in found]) for found in (left, right)]
    if one["query"] != other["query"] or len(left) != len(right) or np.abs(values[0] - values[1]).max() > TOLERANCE:
        return False
    return {each["row"] for each in left[: K // 2]} <= {each["row"] for each in right}


async def client(port: int, questions: list[bytes], wanted: list[Any], until: float, seed: int, load: Load) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    draw = random.Random(seed)
    while time.perf_counter() < until:
        which = draw.randrange(len(questions))
        started = time.perf_counter()
        status, content = await answer(reader, writer, questions[which])
        load.seconds.append(time.perf_counter() - started)
        load.errors += status != 200
        load.mixed_up += status == 200 and not same(content, wanted[which])
    writer.close()


async def under_load(port: int, questions: list[bytes], clients: int, seconds: float) -> Load:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    wanted = []
    for each in questions:
        status, content = await answer(reader, writer, each)
        if status != 200:
            raise SystemExit(f"asked alone, the server answers {status}: {content}")
        wanted.append(content)
    writer.close()
    if any(same(wanted[one], wanted[other]) for one in range(len(wanted)) for other in range(one)):
        raise SystemExit("two of the questions have the same answer: a mix-up of them would not be seen")
    load, until = Load(), time.perf_counter() + seconds
    await asyncio.gather(*(client(port, questions, wanted, until, seed, load) for seed in range(clients)))
    return load


def rows_of(what: str, load: Load, clients: int, seconds: float) -> list[Row]:
    middle, slow = np.percentile(load.seconds, [50, 99])
    detail = {
        "p50_milliseconds": 1000 * float(middle),
        "p99_milliseconds": 1000 * float(slow),
        "longest_milliseconds": 1000 * max(load.seconds),
        "answers_per_second": len(load.seconds) / seconds,
    }
    told = f"{what}, {clients} clients for {seconds:g} s"
    ratio = float(slow / middle)
    count = {"answers": len(load.seconds)}
    return [
        Row(f"{told}: p99 of the time to an answer", "p50", ratio, "<= 5", meets(ratio, "<= 5"), detail),
        Row(f"{told}: errors", "-", load.errors, "<= 0", load.errors == 0, count),
        Row(
            f"{told}: answers mixed up", "the answer when asked alone", load.mixed_up, "<= 0", not load.mixed_up, count
        ),
    ]


def start(index: Path, model: list[str]) -> tuple[subprocess.Popen[str], int]:
    words = [sys.executable, "-m", "sop_faiss.cli.index", "serve", str(index), *model, "--port", "0"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("http://"):
            return process, int(line.split()[0].rsplit(":", 1)[1].strip("/"))
        print(line, end="", file=sys.stderr)
    raise SystemExit("the server did not start")


@click.command()
@click.option("--index", "folder", type=click.Path(path_type=Path), required=True, help="An index directory.")
@click.option("--model", help="Its encoder; without one, no images are sent.")
@click.option("--random-weights", help="As of sop-index serve.")
@click.option("--clients", type=int, default=50, show_default=True)
@click.option("--seconds", type=float, default=60, show_default=True, help="Of each row.")
@click.option("--quick", is_flag=True, help="10 seconds of each row.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the rows here, too.")
@click.option("--record", is_flag=True, help="Append the table to benchmarks/RESULTS.md.")
def main(
    folder: Path,
    model: str | None,
    random_weights: str | None,
    clients: int,
    seconds: float,
    quick: bool,
    json_file: Path | None,
    record: bool,
) -> None:
    """Measure sop-index serve under load."""
    seconds = 10.0 if quick else seconds
    index = FeatureIndex.open(folder)
    chosen = np.random.default_rng(0).permutation(len(index))[:QUESTIONS].tolist()
    options = [] if model is None else ["--model", model]
    process, port = start(folder, options + ([] if random_weights is None else ["--random-weights", random_weights]))
    host = f"127.0.0.1:{port}"
    kinds = {
        "neighbors of an image of the index": [
            question(host, "GET", f"/api/search?k={K}&key={quote(index.ids.keys[row])}") for row in chosen
        ]
    }
    if model is not None:
        images = index_images(index)
        kinds["neighbors of an image that is sent"] = [
            question(host, "POST", f"/api/search?k={K}", images.read(row)) for row in chosen
        ]
    rows = []
    try:
        for what, questions in kinds.items():
            rows += rows_of(what, asyncio.run(under_load(port, questions, clients, seconds)), clients, seconds)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
    finish("serve", rows, json_file=json_file, record=record)


if __name__ == "__main__":
    main()
