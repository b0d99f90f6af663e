"""Make the options of a command from the fields of RunConfig."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from graphattn.train.runs.config import RunConfig


def with_run_options(*left_out: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command an option for every field of :class:`RunConfig`, instead of its `options`.

    The command gets a dict ``options`` with the text of the options that were given.
    """
    hints = typing.get_type_hints(RunConfig)
    said = descriptions()

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(command, eval_str=True).parameters
        fields = [own for own in dataclasses.fields(RunConfig) if own.name not in left_out]
        parameters = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in own.values()
            if parameter.name != "options"
        ]
        for field in fields:
            kind, metavar = _kind(hints[field.name])
            flag = f"--{field.name.replace('_', '-')}"
            names = f"{flag}/--no-{flag[2:]}" if kind is bool else flag
            default = RunConfig.__dataclass_fields__[field.name].default
            told = "" if default in ("", None, dataclasses.MISSING) else f" [default: {default}]"
            option = typer.Option(
                names,
                metavar=metavar,
                show_default=False,
                help=said[field.name] + told.replace("[", r"\["),
                rich_help_panel=_panel(field.name),
            )
            parameters.append(
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=None,
                    annotation=Annotated[kind | None, option],
                )
            )

        def called(**given: Any) -> Any:
            named = {field.name: given.pop(field.name) for field in fields}
            chosen = {name: value for name, value in named.items() if value is not None}
            return command(**given, options=chosen)

        called.__name__, called.__doc__ = command.__name__, command.__doc__
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {own.name: own.annotation for own in parameters}
        return called

    return add


def config_of(file: Any, options: dict[str, Any]) -> RunConfig:
    """Return the config of a file, if there is one, with values replaced by options.

    Raises: ValueError: if an option or key is not allowed; the message says what is allowed.
    """
    given = {
        name: RunConfig.parse(name, value) if isinstance(value, str) else value
        for name, value in options.items()
    }
    if file is None:
        return RunConfig(**given)
    if Path(file).suffix not in (".yaml", ".yml", ".json"):  # people give their text here
        raise ValueError(
            f"CONFIG must be a file of options that ends with .yaml, .yml or .json, got {file}: "
            f"if it is the data, give --data {file}"
        )
    return RunConfig.load(file, **given)


def descriptions() -> dict[str, str]:
    """Return the description of every field in the docstring of RunConfig."""
    text = inspect.getdoc(RunConfig) or ""
    entries = re.search(r"^Args:\n(.*?)^\S", text, re.S | re.M)
    assert entries is not None
    found: dict[str, str] = {}
    for names, said in re.findall(r"^    ([\w, ]+): (.*?)(?=^    \w|\Z)", entries[1], re.S | re.M):
        plain = re.sub(r":\w+:`([^`]*)`|``([^`]*)``|`([^`]*)`", r"\1\2\3", " ".join(said.split()))
        for name in names.split(", "):
            found[name] = plain[:1].upper() + plain[1:]
    return found


def _kind(hint: Any) -> tuple[Any, str | None]:
    """Return typer's type of a field; RunConfig parses texts, with one-line error messages."""
    if hint is bool:
        return bool, None
    if typing.get_origin(hint) is Literal:
        return str, "|".join(typing.get_args(hint))
    return str, {int: "INTEGER", float: "NUMBER", str: "TEXT"}.get(hint, "YAML")


_PANELS = {
    "data": "Data",
    "model": "Model",
    "objective": "Objective",
    "steps": "Training",
    "evaluate_every": "Records",
}


def _panel(name: str) -> str:
    found = ""
    for field in dataclasses.fields(RunConfig):
        found = _PANELS.get(field.name, found)
        if field.name == name:
            return found
    return found
