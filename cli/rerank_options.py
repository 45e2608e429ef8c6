"""The options of re-ranking: one set for the commands that rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click

from sop_faiss.cli.common import run_command
from sop_faiss.errors import ConfigError

R = TypeVar("R")
_OPTIONS = (
    click.option(
        "--rerank",
        metavar="METHOD",
        help="Put the first images into a new order: global (features refined by neighbors), local (parts of images "
        "compared), or diffusion.",
    ),
    click.option("--rerank-depth", type=int, metavar="N", help="Images that are re-ranked.  [default: 400]"),
    click.option(
        "--rerank-neighbors",
        type=int,
        metavar="K",
        help="Of each of these images.  [default: global 4, diffusion 10]",
    ),
    click.option("--rerank-beta", type=float, metavar="B", help="Of global: weight of a neighbor.  [default: 1]"),
    click.option(
        "--rerank-mutual", is_flag=True, help="Of local: count only parts of two images that are each other's best."
    ),
    click.option(
        "--rerank-one-way", is_flag=True, help="Of local: count the query's parts only, for things in parts of images."
    ),
)


def rerank_options(command: Callable[..., R]) -> Callable[..., R]:
    """Give a click command the options of re-ranking: it receives `rerank: Rerank | None`."""

    @functools.wraps(command)
    def with_rerank(*args: Any, rerank: str | None, **options: Any) -> R:
        names = ("depth", "neighbors", "beta", "mutual", "one_way")
        given = {name: options.pop(f"rerank_{name}") for name in names}
        given = {name: value for name, value in given.items() if value is not None and value is not False}
        if rerank is None:
            if given:
                raise ConfigError(
                    f"--rerank-{next(iter(given)).replace('_', '-')} says how --rerank works: give --rerank too"
                )
            return command(*args, rerank=None, **options)
        from sop_faiss.index.rerank.settings import Rerank

        return command(*args, rerank=Rerank(rerank, **given), **options)

    decorated: Callable[..., R] = run_command(with_rerank)
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated


def token_options(command: Callable[..., R]) -> Callable[..., R]:
    """Give a click command the options of tokens: it receives `token_size`, `token_count` and `token_codes`."""
    size = click.option(
        "--token-size",
        type=int,
        metavar="PIXELS",
        help="Longer side of the images for tokens (--rerank local).  [default: the encoder's size]",
    )
    count = click.option(
        "--token-count", type=int, metavar="N", help="Tokens kept of each image, the strongest.  [default: 50]"
    )
    codes = click.option(
        "--token-codes",
        metavar="CODES",
        help="How a token is kept: float16, or pqN: product-quantized to N bytes (pq32).  [default: float16]",
    )
    return size(count(codes(command)))


def token_settings(
    size: int | None, count: int | None, codes: str | None, *, used: bool, needed: str
) -> dict[str, Any]:
    """Return the settings of tokens that are given, by their names in `TokenSettings`.

    Args:
        size: of the images.
        count: of the tokens.
        codes: how each is kept.
        used: whether tokens are made.
        needed: the option that makes them.

    Raises:
        ConfigError: one is out of range, or given although no tokens are made.
    """
    from sop_faiss.index.rerank.settings import TokenSettings

    wanted: dict[str, Any] = {"size": size, "most": count, "codes": codes}
    given = {name: value for name, value in wanted.items() if value is not None}
    if given and not used:
        raise ConfigError(f"--token-size, --token-count and --token-codes say how tokens are made: give {needed} too")
    TokenSettings(**given)
    return given
