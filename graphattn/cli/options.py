"""Options of commands: those without a default, and those that come from a table."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

import typer

unset = partial(typer.Option, show_default=False)  # an option that has no default to be shown


def option_parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    """Return the parameter of a command for an option of this type."""
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def with_options(
    replaced: str, options: Sequence[inspect.Parameter]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command `options` in place of a parameter, which gets a dict of the given ones."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            is_replaced = parameter.name == replaced
            keyword = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            parameters += options if is_replaced else [keyword]

        def call(**values: Any) -> Any:
            all_values = {option.name: values.pop(option.name) for option in options}
            given = {name: value for name, value in all_values.items() if value is not None}
            return command(**values, **{replaced: given})

        call.__name__, call.__doc__ = command.__name__, command.__doc__
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {each.name: each.annotation for each in parameters}
        return call

    return add
