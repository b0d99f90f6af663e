"""Checks, preparations and second derivatives that every operation shares."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_edge_index
from graphattn.graphs.token_graph import TokenGraph, as_token_graph
from graphattn.kernels.shared.launch import is_transformed

Valid = Tensor | tuple[Tensor | None, Tensor | None] | None
ValidPair = tuple[Tensor | None, Tensor | None]
# Bytes: the largest block that changes the threshold of glibc, 32 megabytes less its header.
LARGEST_BLOCK = (1 << 25) - (1 << 13)


def check_tensors(**tensors: Any) -> None:
    """Floating-point tensors of one dtype, one device and the same leading batch dimensions.

    The last three dimensions of each, [tokens, heads, features], are for the caller to check.
    """
    first_name, first = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if not tensor.is_floating_point() or tensor.dim() < 3:
            raise ValueError(
                f"{name} must be a floating-point tensor [*, tokens, heads, features], "
                f"got {tensor.dtype} of shape {list(tensor.shape)}"
            )
        if tensor.dtype != first.dtype or tensor.device != first.device:
            raise ValueError(
                f"{name} must have the dtype and device of {first_name} "
                f"({first.dtype}, {first.device}), got {tensor.dtype}, {tensor.device}"
            )
        if tensor.shape[:-3] != first.shape[:-3]:
            raise ValueError(
                f"{name} must have the batch dimensions of {first_name} "
                f"({list(first.shape[:-3])}), got {list(tensor.shape[:-3])}"
            )


def check_qkv(
    query: Any, key: Any, value: Any, names: tuple[str, str, str] = ("query", "key", "value")
) -> int:
    """Check that query, key and value fit each other, and return the number of query heads."""
    check_tensors(**dict(zip(names, (query, key, value), strict=True)))
    heads, features = query.shape[-2:]
    if key.shape[-1] != features:
        raise ValueError(
            f"{names[1]} must have {features} features like query, got {key.shape[-1]}"
        )
    if value.shape[-3:-1] != key.shape[-3:-1]:
        swapped = value.shape[-3:-1] == key.shape[-3:-1][::-1]
        raise ValueError(
            f"{names[2]} must have the tokens and heads of {names[1]} ({list(key.shape[-3:-1])}), "
            f"got {list(value.shape[-3:-1])}: "
            + _axes(f"{names[2]} fits" if swapped else "", value.dim())
        )
    if key.shape[-2] == 0 or heads % key.shape[-2]:
        what_fits = {key.shape[-3]: "they fit", key.shape[-2]: "query fits"}
        fits = [what for n, what in what_fits.items() if n and query.shape[-3] % n == 0]
        raise ValueError(
            f"{names[1]} heads must divide query heads ({heads}), got {key.shape[-2]}: "
            + _axes(fits[0] if fits else "", query.dim())
        )
    return cast(int, heads)


def _axes(what_fits: str, dims: int) -> str:
    """Say which axis is which in tensors with heads, and what fits in the layout of torch."""
    axes = "tensors are [*, tokens, heads, features]"
    return f"{axes}; {what_fits} after transpose({dims - 3}, {dims - 2})" if what_fits else axes


def check_graph(
    graph: Any,
    like: Tensor,
    num_targets: int,
    num_sources: int,
    *,
    per_edge: bool = False,
    source: Tensor | None = None,
) -> TokenGraph:
    """`graph` as a TokenGraph of these sizes on the device of `like`.

    With `per_edge`, the caller passes or gets one value per edge. These values follow the sorted
    order of edges, so a raw edge_index must be sorted already. An operation on tensors with heads
    also passes the tensor of its sources; the error of other sizes then says if they fit in another
    layout.
    """
    given = graph
    try:
        graph = as_token_graph(given, num_targets, num_sources)
    except ValueError as error:
        hint = _other_layout(given, like, source)
        raise ValueError(f"{error}{hint}") from None
    raw = as_edge_index(given) if per_edge and isinstance(given, Tensor) else None
    if raw is not None and not torch.equal(raw, graph.edge_index):
        raise ValueError(
            "edge_index must be sorted by target, then source, where per-edge values are used; "
            "graphattn.from_edge_index(..., return_permutation=True) sorts it and relates your "
            "order to the sorted one"
        )
    if graph.device != like.device:
        raise ValueError(
            f"graph is on {graph.device}, but the tensors are on {like.device}: "
            f"use graph.to({str(like.device)!r})"
        )
    return graph


def _other_layout(graph: Any, target: Tensor, source: Tensor | None) -> str:
    """Say, at the end of an error, that tensors fit a graph in another order of their axes."""
    if isinstance(graph, TokenGraph):
        needed = graph.num_targets, graph.num_sources
    elif isinstance(graph, Tensor) and graph.dim() == 2 and graph.shape[0] == 2 and graph.numel():
        last_source, last_target = graph.amax(1).tolist()
        needed = last_target + 1, last_source + 1  # at least these
    else:
        return ""

    def fit(targets: int, sources: int) -> bool:
        if isinstance(graph, TokenGraph):
            return (targets, sources) == needed
        return targets >= needed[0] and sources >= needed[1]

    if source is None:  # tokens [*, N, C] of a layer
        if target.dim() != 3 or not fit(len(target), len(target)):
            return ""
        return f": x is [*, tokens, dim] = {list(target.shape)}, and fits after transpose(0, 1)"
    if fit(target.shape[-3], source.shape[-3]):
        return ""  # the sizes are right, and something else is wrong
    fits = (
        fit(target.shape[-2], source.shape[-2]) and target.shape[-3] % max(source.shape[-3], 1) == 0
    )
    hint = f": {_axes('they fit' if fits else '', target.dim())}"
    if fits and target.dim() == 3:
        hint += ", or [batch, tokens, dim] after unflatten(-1, (heads, -1))"
    return hint


def check_valid(
    valid: Any, batch: torch.Size, device: torch.device, num_targets: int, num_sources: int
) -> ValidPair:
    """`valid` as a pair of bool tensors [*, N] and [*, M] (or None), * being `batch`."""
    if valid is None:
        return None, None
    if isinstance(valid, Tensor):
        if num_targets != num_sources:
            raise ValueError(
                f"valid must be a pair (targets [*, {num_targets}], sources [*, {num_sources}]) "
                "on a bipartite graph, got one tensor"
            )
        valid = (valid, valid)
    if not isinstance(valid, tuple | list) or len(valid) != 2:
        raise ValueError(
            "valid must be a bool tensor [*, N] or a pair of them (targets, sources), "
            f"got {type(valid).__name__}"
        )
    for mask, side, count in zip(
        valid, ("targets", "sources"), (num_targets, num_sources), strict=True
    ):
        if mask is None:
            continue
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(f"valid ({side}) must be a bool tensor, got {got}")
        shape = (count,) if mask.dim() == 1 else (*batch, count)
        # Compared size by size: torch.compile has several symbols for one size.
        if mask.dim() != len(shape) or any(a != b for a, b in zip(mask.shape, shape, strict=True)):
            raise ValueError(
                f"valid ({side}) must have shape {[*batch, count]} or [{count}], "
                f"got {list(mask.shape)}"
            )
        if mask.device != device:
            raise ValueError(f"valid ({side}) must be on {device}, got {mask.device}")
    return valid[0], valid[1]


def flat_masks(valid: ValidPair, batch: torch.Size) -> ValidPair:
    """Masks [B, tokens] with one batch dimension; if both are one tensor, so are the results."""
    of_target, of_source = (
        None if mask is None else mask.expand(*batch, -1).reshape(math.prod(batch), mask.shape[-1])
        for mask in valid
    )
    return of_target, of_target if valid[0] is valid[1] else of_source


def clear_invalid(x: Tensor, valid: Tensor | None) -> Tensor:
    """x [*, N, H, D] with zeros in place of invalid tokens, even of those that are NaN."""
    return x if valid is None else x.masked_fill(~valid[..., None, None], 0)


def clear_invalid_edges(x: Tensor, keep: Tensor | None) -> Tensor:
    """x [*, E, G, features] with zeros in place of edges outside `keep`, bool [*, E, 1]."""
    return x if keep is None else x.masked_fill(~keep[..., None], 0)


def valid_edges(valid: ValidPair, source: Tensor, target: Tensor) -> Tensor | None:
    """Mark the edges between valid tokens, bool [*, E, 1]; None if all tokens are valid."""
    of_target, of_source = valid
    keep = None if of_target is None else of_target[..., target]
    if of_source is not None:
        keep = of_source[..., source] if keep is None else keep & of_source[..., source]
    return None if keep is None else keep[..., None]


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Key/value heads [*, M, Hk, D] repeated so that head h reads head h // (heads / Hk)."""
    repeats = heads // x.shape[-2]
    return x if repeats == 1 else x.repeat_interleave(repeats, dim=-2)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for half precision, otherwise the dtype itself."""
    return torch.promote_types(dtype, torch.float32)


def may_be_differentiated(tensors: Iterable[Tensor | None]) -> bool:
    """Whether gradients may be asked for; under torch.func they always may."""
    if is_transformed():
        return True
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def gradients_by_autograd(
    function: Callable[..., Sequence[Tensor | None]],
    tensors: Sequence[Tensor | None],
    needed: Sequence[bool],
    upstream: Sequence[Tensor | None],
    *,
    zeros: bool = False,
) -> tuple[Tensor | None, ...]:
    """Compute gradients that can be differentiated again, for ``create_graph=True``.

    The backward passes of this library are written by hand and have no derivatives. If a backward
    pass runs with gradients enabled, its own result is to be differentiated. Then the forward pass
    is computed again by `function`, and autograd differentiates that.

    Args:
        function: the forward pass, in operations of torch; from `tensors` to results, or None in
            the place of a result that the call does not have.
        tensors: inputs of the forward pass; None for an input that the call does not have.
        needed: for every tensor, whether its gradient is needed.
        upstream: the gradient of every result; None for a result that was not used.
        zeros: whether a tensor that the results do not depend on gets zeros; None otherwise.

    Returns:
        One gradient per tensor, or None.
    """
    # An alias of every tensor, so that one that is passed twice gets a gradient for each place.
    aliases = [None if x is None else x.view_as(x) for x in tensors]
    pairs = [
        (result, d_result.to(result.dtype))
        for result, d_result in zip(function(*aliases), upstream, strict=True)
        if result is not None and d_result is not None and result.requires_grad
    ]
    gradients = iter(
        torch.autograd.grad(
            [result for result, _ in pairs],
            [x for x, need in zip(aliases, needed, strict=True) if need and x is not None],
            [d_result for _, d_result in pairs],
            create_graph=True,
            allow_unused=True,
            materialize_grads=zeros,
        )
    )
    return tuple(
        next(gradients) if need and x is not None else None
        for x, need in zip(aliases, needed, strict=True)
    )


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Autocast switched off: an operation computes in :func:`compute_dtype` wherever it runs."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return nullcontext()  # there is no autocast to switch off
    return torch.autocast(device.type, enabled=False)


def keep_freed_memory() -> None:
    """Make glibc keep freed memory in the process, for the next chunk of an operation.

    glibc returns a freed block to the system if it is larger than a threshold. The next block then
    consists of new pages, which is slow. The threshold rises to the size of the largest block that
    was freed, up to 32 megabytes. So one such block is allocated and freed, once; none of its pages
    is ever written. RBF attention over 65,536 tokens with a window of 17, forward and backward,
    asked the system for 227,000 pages before and for 131,000 after, which are those of its results.

    Under torch.compile nothing is done, because the call would only be traced.
    """
    if not torch.compiler.is_compiling():
        _free_a_large_block()


@cache
def _free_a_large_block() -> None:
    torch.empty(LARGEST_BLOCK, dtype=torch.uint8)
