"""The encoder's options for a command that does not always need an encoder."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from sop_faiss.cli.common import run_command
from sop_faiss.cli.encoder_options import encoder_options
from sop_faiss.errors import ConfigError
from sop_faiss.model.encoders.spec import EncoderSpec

__all__ = ["optional_encoder_options"]

R = TypeVar("R")


def optional_encoder_options(command: Callable[..., R]) -> Callable[..., R]:
    """Give a click command the encoder's options, `--model` being optional: it receives `EncoderSpec | None`.

    Another of the encoder's options without `--model` is an error, not ignored.
    """

    @functools.wraps(command)
    def with_choice(*args: Any, encoder: EncoderSpec, **options: Any) -> R:
        if not encoder.model and encoder != EncoderSpec(""):
            raise ConfigError("options of an encoder are given, but no --model")
        return command(*args, encoder=encoder if encoder.model else None, **options)

    decorated = encoder_options(run_command(with_choice))
    for parameter in decorated.__click_params__:  # type: ignore[attr-defined]  # click keeps the options there
        if parameter.name == "model":
            parameter.required, parameter.default = False, ""
    return decorated
