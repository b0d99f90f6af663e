"""Arguments and options of commands, one call each; a command gets their values by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_origin

import typer

Command = Callable[..., Any]


def argument(name: str, kind: Any, text: str, *, required: bool = False, **more: Any) -> Any:
    """Return a positional argument; it is None if it is not given."""
    return _parameter(name, kind, typer.Argument(help=text, **more), required=required)


def option(name: str, value: Any, text: str, *declarations: str, **more: Any) -> Any:
    """Return an option with the default `value`, or of the type `value` and None if not given."""
    if _is_type(value):
        more.setdefault("show_default", False)
    return _parameter(name, value, typer.Option(*declarations, help=text, **more))


def _is_type(value: Any) -> bool:
    return isinstance(value, type) or get_origin(value) is not None


def _parameter(name: str, value: Any, described: Any, *, required: bool = False) -> Any:
    kind, default = (value, None) if _is_type(value) else (type(value), value)
    if required:
        default = inspect.Parameter.empty
    elif default is None:
        kind = kind | None
    keyword, annotation = inspect.Parameter.KEYWORD_ONLY, Annotated[kind, described]
    return inspect.Parameter(name, keyword, default=default, annotation=annotation)


def with_options(*parameters: inspect.Parameter) -> Callable[[Command], Command]:
    """Give a command these parameters, and it their values as keyword arguments."""

    def add(command: Command) -> Command:
        def call(**values: Any) -> Any:
            return command(**values)

        call.__name__, call.__doc__ = command.__name__, command.__doc__
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {each.name: each.annotation for each in parameters}
        return call

    return add
