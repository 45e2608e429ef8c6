"""Options that a command would ignore are an error."""

from __future__ import annotations

from collections.abc import Collection

import click
from click.core import ParameterSource

from sop_faiss.errors import ConfigError


def _given() -> dict[str, str]:
    """Return the options and arguments that were given, by the name of the function's parameter."""
    context = click.get_current_context()
    return {
        parameter.name: parameter.opts[0] if isinstance(parameter, click.Option) else parameter.human_readable_name
        for parameter in context.command.params
        if parameter.name and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    }


def refuse_idle(option: str, used: Collection[str]) -> None:
    """Refuse other options next to one that makes the command do something else.

    Args:
        option: as `--compare`.
        used: the parameters that are read with it, including its own.

    Raises:
        ConfigError: others were given.
    """
    idle = [name for parameter, name in _given().items() if parameter not in used]
    if idle:
        raise ConfigError(f"{', '.join(idle)}: not used with {option}: leave {'it' if len(idle) == 1 else 'them'} out")


def refuse_unchosen(option: str, tried: Collection[float], *parameters: str) -> None:
    """Refuse options that say how held-out images choose among several values, where only one is tried.

    Args:
        option: the one with the values, as `--lr`.
        tried: its values.
        parameters: the function's parameters of the options that are idle then.

    Raises:
        ConfigError: one of them was given.
    """
    given = _given()
    idle = [given[parameter] for parameter in parameters if parameter in given]
    if idle and len(tried) == 1:
        them = "it" if len(idle) == 1 else "them"
        raise ConfigError(
            f"{', '.join(idle)}: with one {option} ({next(iter(tried)):g}) nothing is chosen: give several {option}, "
            f"or leave {them} out"
        )


def refuse_without(parameter: str, needed: str, is_there: bool) -> None:
    """Refuse an option that only says how another one works.

    Args:
        parameter: the function's parameter of the option.
        needed: the other option, as `--qe N`.
        is_there: whether that one was given.

    Raises:
        ConfigError: the option was given without the other one.
    """
    name = _given().get(parameter)
    if name is not None and not is_there:
        raise ConfigError(f"{name} says how {needed.split()[0]} works: give {needed} too, or leave it out")
