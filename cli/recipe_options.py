"""The options of a task that trains a network: its recipe, processes, and where its state is kept."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from sop_faiss.cli.path_options import NamedPath

R = TypeVar("R")
_NAMES = {"learning_rate": "--lr", "learning_rates": "--lr"}
_TYPES = {"int": int, "float": float, "str": str, "bool": bool}
_OF_ALL = {
    "batch_size": "Images of a step, over all ranks.",
    "weight_decay": "Weight decay of AdamW.",
    "flip": "Probability of a mirrored image.",
    "precision": "fp32, or bf16 (autocast).",
    "seed": "Of everything that is drawn.",
}


def recipe_options(
    defaults: Any, texts: Mapping[str, str], quick: str
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Give a click command an option for each choice of a training, and those that all trainings have.

    The command receives `given`, the choices that are given, `quick`, `workers` and `out`.

    Args:
        defaults: a dataclass with every choice.
        texts: the help of each choice that is an option, where not that of all trainings; a name without a text has
            that.
        quick: what `--quick` sets, in words.
    """

    def decorate(command: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(command)
        def with_given(*args: Any, **options: Any) -> R:
            chosen = {name: options.pop(name) for name in texts}
            given = {
                name: value
                for name, value in chosen.items()
                if value is not None and value is not False and value != ()
            }
            return command(*args, given=given, **options)

        decorated: Callable[..., R] = with_given
        for option in reversed([*(_option(defaults, *each) for each in texts.items()), *_shared(quick)]):
            decorated = option(decorated)
        return decorated

    return decorate


def spelled(choices: Mapping[str, Any]) -> str:
    """Write choices as options, for a help text."""
    values = {name: value[0] if isinstance(value, tuple) else value for name, value in choices.items()}
    return ", ".join(f"{_spelled_name(name)} {value:g}" for name, value in values.items())


def _spelled_name(name: str) -> str:
    return _NAMES.get(name, f"--{name.replace('_', '-')}")


def _option(defaults: Any, name: str, text: str) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Return the option of a choice; its type is that of the field."""
    default, kind = getattr(defaults, name), type(defaults).__dataclass_fields__[name].type
    several = kind.startswith("tuple")
    text = text or _OF_ALL[name]
    if not several and default is not None and kind != "bool" and "[default" not in text:
        text = f"{text}  [default: {default if kind == 'str' else format(default, 'g')}]"
    if kind == "bool":
        return click.option(_spelled_name(name), name, is_flag=True, help=text)
    scalar = float if several else _TYPES[kind.split(" ")[0]]
    return click.option(_spelled_name(name), name, type=scalar, multiple=several, help=text)


def _shared(quick: str) -> list[Callable[[Callable[..., R]], Callable[..., R]]]:
    return [
        click.option("--quick", is_flag=True, help=f"A short training. Where not given: {quick}."),
        click.option(
            "--workers", type=int, default=0, show_default=True, help="Processes that decode; 0: this one alone."
        ),
        click.option(
            "--out",
            type=NamedPath(),
            metavar="DIR",
            help="Keep the state after each pass over the images and on a signal; the same command continues from it, "
            "exactly.",
        ),
    ]
