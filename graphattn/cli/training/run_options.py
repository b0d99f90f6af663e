"""Make the options of a command from the fields of RunConfig."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from graphattn.cli.options import option_parameter, unset, with_options
from graphattn.train.runs.config import RunConfig


def with_run_options(*left_out: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command an option for every field of :class:`RunConfig`, instead of its `options`.

    The command gets a dict ``options`` with the text of the options that were given.
    """
    panel, run_options = "", []
    for field in dataclasses.fields(RunConfig):
        panel = field.metadata.get("panel", panel)
        if field.name not in left_out:
            run_options.append(_parameter(field, panel))
    return with_options("options", run_options)


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


def _parameter(field: dataclasses.Field[Any], panel: str) -> inspect.Parameter:
    """Return the parameter of an option. RunConfig parses its text, with one-line errors."""
    name = flag(field.name)
    kind: Any = bool if field.type is bool else str
    metavar = None if kind is bool else _METAVARS.get(field.type, "YAML")
    if get_origin(field.type) is Literal:
        metavar = "|".join(get_args(field.type))
    help_text = field.metadata["description"].replace("`", "")
    help_text = help_text[:1].upper() + help_text[1:]
    if field.default not in ("", None, dataclasses.MISSING):
        help_text += f" [default: {field.default}]"
    option = unset(
        f"{name}/--no-{name[2:]}" if kind is bool else name,
        metavar=metavar,
        help=help_text.replace("[", r"\["),
        rich_help_panel=panel,
    )
    return option_parameter(field.name, kind, option)


_METAVARS: dict[Any, str] = {int: "INTEGER", float: "NUMBER", str: "TEXT"}
