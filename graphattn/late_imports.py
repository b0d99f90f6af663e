"""Ways to use torch, torch's compiler and torch_geometric without waiting for their import."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def not_compiled(reason: str | None = None) -> Callable[[F], F]:
    """Decorate a function that torch.compile calls, and does not trace into.

    It is :func:`torch.compiler.disable`, which imports the compiler already where it decorates.
    """

    def decorate(function: F) -> F:
        disabled: list[Callable[..., Any]] = []  # made as soon as there is a compiler

        def disable() -> None:
            import torch

            disabled.append(torch.compiler.disable(function, reason=reason))

        after_import("torch._dynamo", disable)

        @wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            return (disabled[0] if disabled else function)(*arguments, **keywords)

        return call  # type: ignore[return-value]

    return decorate


def after_import(name: str, then: Callable[[], object]) -> None:
    """Call a function as soon as a module has been imported; at once if it is imported already."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Watch(name, then))


class _Watch(MetaPathFinder):
    """Finds one module as the other finders do, and calls a function after it was executed."""

    def __init__(self, name: str, then: Callable[[], object]) -> None:
        self.name, self.then = name, then
        self.is_asking = False  # the other finders

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.name or self.is_asking:
            return None
        self.is_asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.is_asking = False
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:  # it stays until then: who asks for a spec may not import
                    sys.meta_path.remove(self)
                    self.then()

            loader.exec_module = exec_module
        return spec
