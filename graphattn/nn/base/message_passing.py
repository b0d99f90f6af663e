"""PyG's MessagePassing as the base of layers, from the moment torch_geometric is imported.

Importing torch_geometric takes seconds: it imports its datasets, and with them transformers and
pandas. Fused operations need nothing of it. So a layer inherits from :class:`Later` in its place.
As soon as somebody imports torch_geometric, MessagePassing takes the place of `Later` among the
bases of all layers, and each layer is one, also if it was made before. Who uses a member of
MessagePassing, such as ``layer.propagate(...)`` or ``layer.explain = True``, imports it, too.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Optional

from torch import Tensor, nn

from graphattn.late_imports import after_import

PYG = "torch_geometric.nn.conv.message_passing"

# Types of arguments as PyG names them: it writes code with them, and cannot write Tensor | None.
OptTensor = Optional[Tensor]  # noqa: UP045
PairTensor = tuple[Tensor, Tensor]

# What MessagePassing defines beside torch's Module, and what its constructor stores in a layer.
HOOKED = ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
MEMBERS = (
    "SUPPORTS_FUSED_EDGE_INDEX", "aggregate", "decomposed_layers", "edge_update", "edge_updater",
    "explain", "explain_message", "jittable", "message", "message_and_aggregate", "propagate",
    "special_args", "update",
    *(f"register_{method}_forward{when}_hook" for method in HOOKED for when in ("_pre", "")),
)  # fmt: skip
STATE = (
    "_apply_sigmoid", "_decomposed_layers", "_edge_mask", "_edge_user_args", "_explain",
    "_fused_user_args", "_loop_mask", "_user_args", "aggr", "aggr_module", "flow", "fuse",
    "inspector", "node_dim",
    *(f"_{method}_forward{when}_hooks" for method in HOOKED for when in ("_pre", "")),
)  # fmt: skip


class Member(property):
    """A member of MessagePassing, which is imported when the member is used.

    Calls of layers look members up in the class. A property then runs no Python code.
    """

    def __init__(self, name: str) -> None:
        def read(layer: Any) -> Any:
            importlib.import_module(PYG)
            return getattr(layer, name)

        def write(layer: Any, value: Any) -> None:
            importlib.import_module(PYG)
            setattr(layer, name, value)

        super().__init__(read, write)


class Stored:
    """An attribute of MessagePassing: `complete` stores it in the layer when it is first read."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, layer: Any, owner: type) -> Any:
        if layer is None:
            return self
        modules = vars(layer)["_modules"]
        if self.name not in modules:
            complete(layer)
        return modules[self.name] if self.name in modules else vars(layer)[self.name]


if TYPE_CHECKING:  # who reads code without running it sees what layers become
    from torch_geometric.nn import MessagePassing as Later
else:

    class Later(nn.Module):
        """The place of MessagePassing among the bases of layers."""

    for _name in MEMBERS:
        setattr(Later, _name, Member(_name))


def complete(layer: nn.Module) -> None:
    """Store in a layer what the constructor of MessagePassing makes, unless it is there.

    This imports torch_geometric.
    """
    base: Any = importlib.import_module(PYG).MessagePassing
    made = object.__new__(type(layer))
    base.__init__(made, aggr="add", node_dim=-3)
    for stored, new in ((vars(layer), vars(made)), (layer._modules, made._modules)):
        for name in STATE:
            if name in new:
                stored.setdefault(name, new[name])


def is_imported() -> bool:
    """Whether torch_geometric is there, so that layers are MessagePassing layers."""
    return not Later.__subclasses__()


def when_imported(then: Callable[[type], object]) -> None:
    """Let MessagePassing take the place of `Later`, and call a function with it.

    This happens at once if torch_geometric is imported, and otherwise when it is.
    """

    def replace() -> None:
        pyg = sys.modules[PYG].MessagePassing
        for layer in Later.__subclasses__():
            layer.__bases__ = tuple(pyg if base is Later else base for base in layer.__bases__)
        then(pyg)

    after_import(PYG, replace)
