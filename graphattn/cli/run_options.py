"""The options of a training run on the command line: those of `RunConfig`, by the same names."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from graphattn.train.config import RunConfig


def with_run_options(*left_out: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command, in the place of its ``**options``, every option of RunConfig but some."""

    def give(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        kept = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        added = [option for option in _options() if option.name not in left_out]
        parameters = [*kept, *added]
        command.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
        return command

    return give


def config_of(file: Path | None, options: dict[str, Any]) -> RunConfig:
    """The config of a YAML file, in which the options that were given take the place of its own.

    Raises:
        ValueError: names the file or the option, the value and what is allowed.
    """
    given = {
        name: RunConfig.parse(name, value) if isinstance(value, str) else value
        for name, value in options.items()
        if value is not None
    }
    return RunConfig(**given) if file is None else RunConfig.load(file, **given)


def _options() -> list[inspect.Parameter]:
    hints = typing.get_type_hints(RunConfig)
    told = _told()
    found = []
    for own in dataclasses.fields(RunConfig):
        hint = hints[own.name]
        kind = hint if hint in (int, float, bool) else str
        default = own.default if own.default is not dataclasses.MISSING else {}
        if typing.get_origin(hint) is typing.Literal:
            text = f"{told[own.name]} One of {', '.join(typing.get_args(hint))}."
        else:
            text = told[own.name]
        text += f" Default: {default}." if default not in (None, "", {}) else ""
        XX
        if kind is bool:
            option = typer.Option(help=text, show_default=False)
        found.append(
            inspect.Parameter(
                own.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[kind | None, option],
            )
        )
    return found


def _told() -> dict[str, str]:
    """What the docstring of RunConfig says of every option, as one line."""
    text = inspect.cleandoc(RunConfig.__doc__ or "")
    section = text.partition("Args:\n")[2].partition("\nRaises:")[0]
    entries = re.split(r"\n(?=    \w)", "\n" + section.rstrip())
    found = {}
    for entry in entries[1:]:
        names, _, words = entry.partition(":")
        line = re.sub(r":\w+:`(?:~?[\w.]+\.)?(\w+)`|`+", r"\1", " ".join(words.split()))
        for name in names.split(","):
            found[name.strip()] = line[:1].upper() + line[1:]
    return found
