"""Options of commands that take images, or features instead: an encoder that need not be named, and `[SRC]`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click

from sop_faiss.cli.common import run_command
from sop_faiss.cli.encoder_options import encoder_options
from sop_faiss.cli.path_options import refuse_empty
from sop_faiss.errors import ConfigError
from sop_faiss.model.encoders.spec import EncoderSpec

R = TypeVar("R")


def optional_encoder_options(command: Callable[..., R]) -> Callable[..., R]:
    """Give a click command the encoder's options, `--model` being optional: it receives `EncoderSpec | None`.

    None: no option is given. Without `--model` the others are for the encoder that the command takes by itself; the
    spec's `model` is empty then.
    """

    @functools.wraps(command)
    def with_choice(*args: Any, encoder: EncoderSpec, **options: Any) -> R:
        return command(*args, encoder=None if encoder == EncoderSpec("") else encoder, **options)

    decorated = encoder_options(run_command(with_choice))
    for parameter in decorated.__click_params__:  # type: ignore[attr-defined]  # click keeps the options there
        if parameter.name == "model":
            parameter.required, parameter.default, parameter.show_default = False, "", False
    return decorated


def source_argument(command: Callable[..., R]) -> Callable[..., R]:
    """Give a click command the argument `[SRC]`, or `--data SRC`: it receives `data: str | None`."""

    @functools.wraps(command)
    def with_source(*args: Any, src: str | None, data: str | None, **options: Any) -> R:
        if src is not None and data is not None:
            raise ConfigError(f"SRC {src} and --data {data} both name the images: name them once")
        return command(*args, data=data if src is None else src, **options)

    decorated = click.option(
        "--data", metavar="SRC", callback=refuse_empty, help="The same as SRC: .tar shards, a folder, or a list."
    )(run_command(with_source))
    return click.argument("src", required=False, metavar="[SRC]", callback=refuse_empty)(decorated)
