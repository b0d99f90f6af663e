"""Checks of arguments: every error message names the argument, its value and what is allowed."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from graphattn.near_names import did_you_mean

# Integers for which torch has nearly no operations. Numbers of a uint64 that int64 cannot hold
# become negative, which is an error for every kind of index.
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def as_int(name: str, value: Any, minimum: int) -> int:
    """Return `value` as an int of at least `minimum`; booleans and floats raise ValueError.

    A symbolic length of torch.compile or torch.export (a SymInt) is returned unchanged.
    """
    if type(value) is not int and not isinstance(value, torch.SymInt):
        value = _index(name, value, minimum)
    if value < minimum:
        raise ValueError(f"{name} must be >= {minimum}, got {value}")
    if type(value) is int and value >= 2**63:
        raise ValueError(f"{name} must be < 2**63, got {value}")
    return value


def _index(name: str, value: Any, minimum: int) -> int:
    """Convert an integer of another type (of numpy, or a tensor with one element) to an int."""
    try:
        if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer >= {minimum}, got {value!r}") from None


def as_float(name: str, value: Any, *, positive: bool) -> float:
    """Return `value` as a finite float that is > 0 (with `positive`) or >= 0."""
    allowed = "a finite number > 0" if positive else "a finite number >= 0"
    try:
        if isinstance(value, bool | str):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be {allowed}, got {value!r}") from None
    if not number < float("inf") or number < 0 or (positive and number == 0):
        raise ValueError(f"{name} must be {allowed}, got {number}")
    return number


def as_share(name: str, p: Any) -> float:
    """A share of dropped edges as a float in [0, 1); a ValueError otherwise."""
    share = as_float(name, p, positive=False)
    if share >= 1:
        raise ValueError(f"{name} must be in [0, 1), got {p!r}")
    return share


def as_softcap(softcap: Any, name: str = "softcap") -> float | None:
    """A number > 0, or None; a ValueError otherwise."""
    if softcap is None:
        return None
    softcap = as_float(name, softcap, positive=True)
    if softcap > torch.finfo(torch.float32).max:  # infinity * tanh(0) is NaN
        raise ValueError(f"{name} must be a number of float32, got {softcap}")
    return softcap


def as_choice(name: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    """Return `value` if it is one of `allowed`; otherwise raise ValueError."""
    if value not in allowed:
        names = ", ".join(repr(a) for a in allowed)
        raise ValueError(
            f"{name} must be one of {names}, got {value!r}{did_you_mean(value, allowed)}"
        )
    return value


def as_edge_type(edge_type: Any) -> tuple[str, str, str]:
    """Check that `edge_type` is PyG's (source node type, relation, target node type)."""
    if (
        not isinstance(edge_type, tuple)
        or len(edge_type) != 3
        or not all(isinstance(part, str) for part in edge_type)
    ):
        raise ValueError(
            "edge_type must be a tuple (source node type, relation, target node type) of strings, "
            f"got {edge_type!r}"
        )
    return edge_type


def not_a_graph(given: Any, num_targets: int, num_sources: int) -> ValueError:
    """Return the error for an argument `graph` that is none; it says how to make one of it."""
    square = num_targets == num_sources
    some = f"causal_graph({num_targets})" if square else "from_edge_index(edges, N, M)"
    got = type(given).__name__
    remedy = f"make one, for instance graphattn.{some}"
    if isinstance(given, Tensor):
        got = f"a {given.dtype} tensor of shape {list(given.shape)}"
        if given.dtype == torch.bool:
            remedy = "use graphattn.from_mask(mask) for a mask [N, M], True where a token may look"
        elif given.shape[-2:] != (num_targets, num_sources):
            remedy = f"other tensors come after the graph, which is graphattn.{some} for instance"
        elif given.is_floating_point():
            remedy = (
                "use graphattn.from_mask(mask == 0) for a mask [N, M] that is 0 where a token may "
                "look and -inf elsewhere"
            )
        else:
            remedy = (
                "use graphattn.from_mask(mask.bool()) for a mask [N, M], 1 where a token may look"
            )
        if given.dtype == torch.bool and given.shape[-2:] != (num_targets, num_sources):
            remedy += "; a mask of padding [batch, N] is the argument valid="
    elif (library := type(given).__module__.split(".")[0]) in _CONVERSIONS:
        remedy = f"use graphattn.{_CONVERSIONS[library]}"
    return ValueError(
        "graph must be a TokenGraph, an edge_index tensor of shape [2, E] or a PyG EdgeIndex, "
        f"got {got}: {remedy}"
    )


_CONVERSIONS = {
    "networkx": "from_networkx(graph)",
    "numpy": "from_mask(torch.from_numpy(mask)), or edge_index=torch.from_numpy(edges)",
    "scipy": "from_scipy(matrix)",
    "torch_geometric": "from_pyg(data)",
}


def as_points(name: str, x: Any) -> Tensor:
    """Check that `x` is a floating-point tensor [N, C]."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor of shape [N, C], got {type(x).__name__}")
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(
            f"{name} must be a floating-point tensor of shape [N, C], "
            f"got {x.dtype} of shape {list(x.shape)}"
        )
    return x


def as_sources(source: Any, x: Tensor, self_loops: bool, *, name: str = "x") -> Tensor:
    """Check the sources [M, C] of a search around the points `x` [N, C]; `x` itself if None."""
    if source is None:
        return x
    source = as_points("source", source)
    if source.shape[1] != x.shape[1]:
        raise ValueError(
            f"source must have as many coordinates as {name} ({x.shape[1]}), got {source.shape[1]}"
        )
    if source.dtype != x.dtype or source.device != x.device:
        raise ValueError(
            f"source must have the dtype and device of {name} ({x.dtype}, {x.device}), "
            f"got {source.dtype}, {source.device}"
        )
    if self_loops:
        raise ValueError(
            "self_loops must be False if source is given, because sources are then other tokens; "
            "got self_loops=True"
        )
    return source


def as_edge_index(edge_index: Any) -> Tensor:
    """Convert a tensor or a PyG EdgeIndex to a plain int64 tensor [2, E]."""
    return as_plain_edge_index(edge_index).long()


def as_plain_edge_index(edge_index: Any) -> Tensor:
    """Convert a tensor or a PyG EdgeIndex to a plain tensor [2, E] of the same integer dtype."""
    if not isinstance(edge_index, Tensor):
        raise ValueError(
            f"edge_index must be a tensor of shape [2, E], got {type(edge_index).__name__}"
        )
    if hasattr(edge_index, "as_tensor"):  # a PyG EdgeIndex is a tensor subclass
        edge_index = edge_index.as_tensor()
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        raise ValueError(f"edge_index must have shape [2, E], got {list(edge_index.shape)}")
    if edge_index.dtype in UNSIGNED:
        return edge_index.long()
    if edge_index.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise ValueError(
            f"edge_index must hold integers, such as torch.int64, got {edge_index.dtype}"
        )
    return edge_index
