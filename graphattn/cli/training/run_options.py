"""Make the options of a command from the fields of RunConfig."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from graphattn.cli.options import option
from graphattn.train.runs.config import RunConfig


def run_options(*left_out: str) -> list[inspect.Parameter]:
    """Return an option for every field of :class:`RunConfig` but those `left_out`."""
    panel, options = "", []
    for field in dataclasses.fields(RunConfig):
        panel = field.metadata.get("panel", panel)
        if field.name not in left_out:
            options.append(_option(field, panel))
    return options


def config_of(file: Any, options: dict[str, Any]) -> RunConfig:
    """Return the config of a file, if there is one, with values replaced by options.

    Raises: ValueError: if an option or key is not allowed; the message says what is allowed.
    """
    values = {
        name: RunConfig.parse(name, value) if isinstance(value, str) else value
        for name, value in options.items()
    }
    if file is None:
        return RunConfig(**values)
    if Path(file).suffix not in (".yaml", ".yml", ".json"):  # people give their text here
        raise ValueError(
            f"CONFIG must be a file of options that ends with .yaml, .yml or .json, got {file}: "
            f"if it is the data, give --data {file}"
        )
    return RunConfig.load(file, **values)


def flag(name: str) -> str:
    """Return the option of a name: ``--batch-tokens`` of ``batch_tokens``."""
    return f"--{name.replace('_', '-')}"


def _option(field: dataclasses.Field[Any], panel: str) -> inspect.Parameter:
    """Return the option of a field; RunConfig parses its text, with one-line errors."""
    name, kind = flag(field.name), bool if field.type is bool else str
    metavar = None if kind is bool else _METAVARS.get(field.type, "YAML")
    if get_origin(field.type) is Literal:
        metavar = "|".join(get_args(field.type))
    text = field.metadata["description"].replace("`", "")
    text = text[:1].upper() + text[1:]
    if field.default not in ("", None, dataclasses.MISSING):
        text += f" [default: {field.default}]"
    declaration = f"{name}/--no-{name[2:]}" if kind is bool else name
    more = {"metavar": metavar, "rich_help_panel": panel}
    parameter: inspect.Parameter = option(
        field.name, kind, text.replace("[", r"\["), declaration, **more
    )
    return parameter


_METAVARS: dict[Any, str] = {int: "INTEGER", float: "NUMBER", str: "TEXT"}
