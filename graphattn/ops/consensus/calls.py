"""The checks of a consensus step, and the checked call that every backend gets."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_choice
from graphattn.graphs.token_graph import TokenGraph
from graphattn.ops.consensus.edge_network import (
    EdgeHidden,
    EdgeNetworkParameters,
    FirstLayer,
    as_dtype,
)
from graphattn.ops.inputs import (
    ValidPair,
    check_tensors,
    compute_dtype,
)
from graphattn.warn import warn_caller


class ConsensusKind(NamedTuple):
    """The facts that decide which backends can run a step.

    Attributes:
        state: a tensor [*, N, H, D] with the sizes, dtype and device of the states.
        trunks: 1 or 3, the number of trunks of the edge network.
        edge_hidden: not None if edges have features.
    """

    state: Tensor
    trunks: int = 1
    edge_hidden: Any = None


class ConsensusCall(NamedTuple):
    """The arguments of a consensus step after their checks.

    Attributes:
        state: [*, N, H, D]; a backend gets finite ones for invalid tokens.
        target_hidden: hidden vectors [*, N, G, xi or 3 xi], or the first layer that computes them.
        source_hidden: [*, M, G, xi or 3 xi], likewise.
        network: the second layer, in the compute dtype.
        graph: N targets, M sources, E edges.
        step_size: as the user gave it; a backend gets a tensor that is broadcastable to [*, N, H],
            or None for the automatic one.
        update: "energy" or "target".
        disagreement: u [*, N, H, D] and v [*, M, H, D], of which the differences are taken.
        valid: bool [N] or [*, N] for targets, and [M] or [*, M] for sources; None for either if all
            are valid.
        edge_hidden: [E, G, xi] or [*, E, G, xi], or a first layer; or None. A backend gets it in
            the compute dtype.
        only_sums: whether a backend returns the sums g [*, N, H, D] in place of u' (if the step is
            automatic, with the degrees [*, N, H], otherwise with None).
    """

    state: Tensor
    target_hidden: Tensor | FirstLayer
    source_hidden: Tensor | FirstLayer
    network: EdgeNetworkParameters
    graph: TokenGraph
    step_size: Any
    update: str
    disagreement: tuple[Tensor, Tensor]
    valid: ValidPair
    edge_hidden: EdgeHidden
    only_sums: bool = False

    @property
    def trunks(self) -> int:
        """How many trunks of the edge network the hidden vectors hold, 1 or 3."""
        return self.target_hidden.shape[-1] // self.network.alpha.shape[-1]


def check_energy_graph(graph: TokenGraph) -> None:
    """Refuse update="energy" on causal graphs; warn if an edge list may be meant as one."""
    if graph.num_targets != graph.num_sources:
        raise ValueError(
            "update='energy' moves both ends of an edge and needs one set of tokens, got "
            f"{graph.num_targets} targets and {graph.num_sources} sources: use update='target'"
        )
    if not graph.has_same_tokens:
        raise ValueError(
            "update='energy' moves both ends of an edge and needs one set of tokens, got sequences "
            f"of {graph.sizes} (targets, sources) from positions {graph.starts} on: use "
            "update='target'"
        )
    if graph.has_causal_part:
        raise ValueError(
            "update='energy' on a causal graph (or a batch that holds one) leaks the future: an "
            "edge (i, j) with j < i also moves j, by what i knows. Use update='target', which "
            "moves i only"
        )
    traced = torch.compiler.is_compiling()  # there are no warnings in compiled functions
    # To read a table of neighbours would wait for its device; meta tensors have no values.
    asked = not graph.is_table and graph.device.type != "meta"
    if not traced and asked and graph.points_backward and not graph.warned_backward:
        graph.warned_backward = True
        warn_caller(
            "all edges of this edge list point backward. If the order of tokens is time, "
            "update='energy' leaks the future: use update='target'. If it is not (one direction "
            "of an undirected graph, say), update='energy' is right and moves both ends",
        )


def check_arguments(
    state: Any, neighbor_state: Any, target_hidden: Any, source_hidden: Any, edge_network: Any
) -> EdgeNetworkParameters:
    """Check that the tensors of a call fit each other; the edge network in the compute dtype."""
    tensors = {"state": state, "neighbor_state": neighbor_state}
    for name, hidden in (("target_hidden", target_hidden), ("source_hidden", source_hidden)):
        if not isinstance(hidden, FirstLayer):
            tensors[name] = hidden
    check_tensors(**tensors)
    if neighbor_state.shape[-2:] != state.shape[-2:]:
        raise ValueError(
            f"neighbor_state must have the heads and features of state ({list(state.shape[-2:])}), "
            f"got {list(neighbor_state.shape[-2:])}"
        )
    for name, hidden, of in (
        ("target_hidden", target_hidden, state),
        ("source_hidden", source_hidden, neighbor_state),
    ):
        if isinstance(hidden, FirstLayer):
            _check_layer(name, hidden, state)
        if hidden.shape[-3] != of.shape[-3]:
            raise ValueError(f"{name} must have {of.shape[-3]} tokens, got {hidden.shape[-3]}")
    network = check_network(edge_network, state, target_hidden.shape, source_hidden.shape)
    if network.shear.shape[0] != state.shape[-2] or network.shear.shape[2] != state.shape[-1]:
        raise ValueError(
            f"edge_network must have {state.shape[-2]} heads and {state.shape[-1]} features like "
            f"state, got shear {list(network.shear.shape)} (heads, rank, features, hidden)"
        )
    return network


def as_disagreement(
    disagreement: Any, state: Tensor, neighbor_state: Tensor
) -> tuple[Tensor, Tensor]:
    """The pair (u, v) that is compared: the states themselves unless given."""
    if disagreement is None:
        return state, neighbor_state
    if not isinstance(disagreement, tuple | list) or len(disagreement) != 2:
        got = len(disagreement) if hasattr(disagreement, "__len__") else disagreement
        raise ValueError(f"disagreement must be a pair (u, v) or None, got {got!r}")
    for name, x, like in zip("uv", disagreement, (state, neighbor_state), strict=True):
        if not isinstance(x, Tensor) or x.shape != like.shape or x.dtype != like.dtype:
            got = f"{x.dtype} of shape {list(x.shape)}" if isinstance(x, Tensor) else x
            raise ValueError(
                f"disagreement {name} must be {like.dtype} of shape {list(like.shape)}, got {got}"
            )
    return disagreement[0], disagreement[1]


def _check_layer(name: str, layer: FirstLayer, state: Tensor) -> None:
    """Check the tokens, weight and bias of a first layer."""
    for part, tensor in zip(layer._fields, layer, strict=True):
        if part == "bias" and tensor is None:
            continue
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"{name}.{part} must be a floating-point tensor, got {got}")
        if tensor.device != state.device:
            raise ValueError(f"{name}.{part} must be on {state.device}, got {tensor.device}")
    tokens, weight, bias = layer
    batch = state.shape[:-3]
    if tokens.dim() < 3 or tokens.shape[:-3] != batch:
        raise ValueError(
            f"{name}.tokens must have shape [{', '.join(map(str, (*batch, 'N', 'G', 'in')))}], "
            f"got {list(tokens.shape)}"
        )
    groups, inputs = tokens.shape[-2:]
    if weight.dim() != 3 or (weight.shape[0], weight.shape[2]) != (groups, inputs):
        raise ValueError(
            f"{name}.weight must have shape [{groups}, xi, {inputs}], got {list(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:2]:
        raise ValueError(
            f"{name}.bias must have shape {list(weight.shape[:2])}, got {list(bias.shape)}"
        )


def check_network(
    edge_network: Any, like: Tensor, target_hidden: torch.Size, source_hidden: torch.Size
) -> EdgeNetworkParameters:
    """The parameters in the compute dtype, shapes checked against those of hidden vectors."""
    try:
        network = EdgeNetworkParameters(*edge_network)
    except TypeError:
        got = "None" if edge_network is None else type(edge_network).__name__
        raise ValueError(f"edge_network must be an EdgeNetworkParameters, got {got}") from None
    for name, tensor in zip(network._fields, network, strict=True):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"edge_network.{name} must be a tensor, got {tensor!r}")
        if tensor.device != like.device:
            raise ValueError(f"edge_network.{name} must be on {like.device}, got {tensor.device}")
    if network.shear.dim() != 4 or 0 in (network.shear.shape[1], network.shear.shape[3]):
        raise ValueError(
            "edge_network.shear must have shape [H, r, D, xi] with rank r >= 1 and xi >= 1, "
            f"got {list(network.shear.shape)}"
        )
    heads, rank, features, xi = network.shear.shape
    shapes = ((heads, xi), (heads,), (heads, xi), (heads,), None, (heads, rank, features))
    for name, tensor, shape in zip(network._fields, network, shapes, strict=True):
        if shape is not None and tensor.shape != shape:
            raise ValueError(
                f"edge_network.{name} must have shape {list(shape)}, got {list(tensor.shape)}"
            )
    for name, sizes in (("target_hidden", target_hidden), ("source_hidden", source_hidden)):
        if sizes[-2] not in (1, heads) or sizes[-1] not in (xi, 3 * xi):
            raise ValueError(
                f"{name} must end in [{heads} or 1 (heads), {xi} or {3 * xi} (hidden features)], "
                f"got {list(sizes[-2:])}"
            )
    if target_hidden[-2:] != source_hidden[-2:]:
        raise ValueError(
            "target_hidden and source_hidden must agree in heads and features, got "
            f"{list(target_hidden[-2:])} and {list(source_hidden[-2:])}"
        )
    dtype = compute_dtype(like.dtype)
    if all(tensor.dtype is dtype for tensor in network):
        return network
    return EdgeNetworkParameters(*(tensor.to(dtype) for tensor in network))


def as_step(step_size: float | Tensor | str, state: Tensor, dtype: torch.dtype) -> Tensor | None:
    """A tensor broadcastable to [*, N, H], or None for "auto"."""
    if isinstance(step_size, str):
        as_choice("step_size", step_size, ("auto",))
        return None
    if not isinstance(step_size, Tensor):
        number = isinstance(step_size, Real) and not isinstance(step_size, bool)
        if not number or not math.isfinite(step_size):
            raise ValueError(
                f"step_size must be a finite number, a tensor or 'auto', got {step_size!r}"
            )
        return torch.full((), float(step_size), dtype=dtype, device=state.device)
    if step_size.device != state.device:
        raise ValueError(f"step_size must be on {state.device}, got {step_size.device}")
    try:
        step_size.broadcast_to(state.shape[:-1])
    except RuntimeError:
        raise ValueError(
            f"step_size must be a number, 'auto', or broadcastable to {list(state.shape[:-1])} "
            f"(tokens, heads), got shape {list(step_size.shape)}"
        ) from None
    return as_dtype(step_size, dtype)
