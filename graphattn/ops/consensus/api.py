"""Consensus over a token graph: the front doors, their checks, and the choice of backend."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_choice
from graphattn.graphs.token_graph import TokenGraph
from graphattn.kernels.shared.launch import is_looked_into
from graphattn.ops.backends import choose_backend, wanted_backend
from graphattn.ops.consensus import compiled, native, operators, reference, structured, triton
from graphattn.ops.consensus.edge_hidden import EdgeHidden, check_edge_hidden, in_dtype
from graphattn.ops.consensus.parameters import EdgeNetworkParameters, FirstLayer, as_dtype
from graphattn.ops.counting import is_watched, note_uncounted
from graphattn.ops.inputs import (
    Valid,
    check_graph,
    check_tensors,
    check_valid,
    clear_invalid,
    compute_dtype,
    full_precision,
    may_be_differentiated,
)

Update = Literal["energy", "target"]


def consensus_update(
    state: Tensor,
    neighbor_state: Tensor,
    target_hidden: Tensor | FirstLayer,
    source_hidden: Tensor | FirstLayer,
    edge_network: EdgeNetworkParameters,
    graph: TokenGraph | Tensor,
    step_size: float | Tensor | Literal["auto"],
    *,
    update: Update = "energy",
    disagreement: tuple[Tensor, Tensor] | None = None,
    valid: Valid = None,
    backend: str = "auto",
    edge_hidden: EdgeHidden = None,
) -> Tensor:
    r"""One consensus step: every token moves towards the tokens it shares an edge with.

    .. math::
        u_i' = u_i - \eta \, g_i, \qquad
        R_{ij} = \alpha_{ij} I + \beta_{ij} \Lambda_{ij}^\top \Lambda_{ij}

    update = "energy" is the exact gradient step of
    :math:`E(u) = \frac12 \sum_{(i,j)} (u_i - u_j)^\top R_{ij} (u_i - u_j)`
    (Stabilizing Transformer Training Through Consensus, Eq. 14, Algorithms 1, 2 and 5): it moves
    both ends of every edge, :math:`g_i = \sum_j R_{ij} (u_i - u_j) + \sum_k R_{ki} (u_i - u_k)`.
    update = "target" moves the target only, :math:`g_i = \sum_j R_{ij} (u_i - v_j)` (Algorithms 3,
    4 and 6); this is what a causal graph or another track as neighbour needs.

    R is positive definite and never formed. An edge's hidden vector is
    ``gelu(target_hidden_i + source_hidden_j)`` (exact GELU): the edge network's first layer acts
    on [y_i; y_j], so it splits into two products that are computed once per token. Features of the
    edge itself (a distance, a kind of bond) are a third input of that layer: `edge_hidden`.

    Args:
        state: u, what moves, [*, N, H, D].
        neighbor_state: v, what it is compared with, [*, M, H, D]; `state` itself in self-consensus.
        target_hidden: [*, N, G, xi], G = H or 1 (one network for all heads). With 3 * xi features
            the thirds feed alpha, beta and Lambda (``trunk="separate"``: Algorithm 2, literally).
        source_hidden: [*, M, G, xi], likewise. Either may be a :class:`~graphattn.FirstLayer`,
            whose hidden vectors the operation then forms itself.
        edge_network: :class:`EdgeNetworkParameters`, the second layer.
        graph: N targets, M sources; shared by all leading dimensions.
        step_size: eta: a float, a tensor broadcastable to [*, N, H], or "auto": for "energy"
            1 / (2 max_i d_i) per head and sequence, d_i the sum of alpha + beta over the in- and
            out-edges of i (never oscillates); for "target" 1 / sum_j (alpha + beta)_ij per row.
        update: "energy" or "target".
        disagreement: (u, v) to use inside the differences only (rotary embedding, Eq. 42).
        valid: bool [*, N] or [N], or a pair for (targets, sources); an edge that touches an
            invalid token is no edge, and what invalid tokens hold is never read. They keep their
            state; NaN and infinity in it read as 0.
        backend: "reference" keeps tensors of every edge; "structured" goes over the edges of any
            graph in chunks, and over those of a window without listing them; "native" does so by
            compiled code on a CPU, with edges in the lanes of vectors; "triton" by fused kernels,
            which take one trunk and multiply numbers of the tensors' own dtype. "auto" takes
            "triton" on a GPU, "native" on a CPU and "structured" elsewhere, but "reference" inside
            torch.func, which looks into its steps. With `edge_hidden`, "triton" refuses and "auto"
            takes "structured" on a GPU, too.
        edge_hidden: what is added to an edge's sum, F e_ij for features e_ij: a
            :class:`~graphattn.FirstLayer` of ``tokens`` [E, 1, F] or [*, E, 1, F], the features in
            the order of ``graph.edge_index``, and ``weight`` [G, xi, F] (no bias), which is applied
            to a chunk of edges at a time; or the product itself, [E, G, xi] or [*, E, G, xi], as
            large as that is. An edge_index must be sorted. Edge (i, j) and edge (j, i) have each
            their own; what edges of invalid tokens hold is never read.

    Returns:
        u', [*, N, H, D] in the dtype of `state`; half precision is computed in float32 (by "triton"
        but for the factors of matrix products, and what is summed up at the ends of edges).

    Raises:
        ValueError: names the argument, its value and what is allowed. "energy" on a causal graph
            is refused: edge (i, j), j < i, would also move j, by what j must not know.

    Example:
        >>> import torch, graphattn as ga
        >>> network = ga.EdgeNetworkParameters(  # R = softplus(0) I = 0.693 I
        ...     alpha=torch.zeros(1, 3), alpha_bias=torch.zeros(1), beta=torch.zeros(1, 3),
        ...     beta_bias=torch.full((1,), -1e9), shear=torch.zeros(1, 2, 1, 3),
        ...     shear_bias=torch.zeros(1, 2, 1))
        >>> u, hidden = torch.tensor([0.0, 0.0, 1.0]).view(3, 1, 1), torch.zeros(3, 1, 3)
        >>> graph = ga.window_path_graph(3, window=1)
        >>> ga.consensus_update(u, u, hidden, hidden, network, graph, 0.1).flatten()
        tensor([0.0000, 0.1386, 0.8614])
    """
    graph, network, pair, edge_hidden = _check(
        state, neighbor_state, target_hidden, source_hidden, edge_network, graph, valid, edge_hidden
    )
    trunks = _width(target_hidden) // network.alpha.shape[-1]
    chosen = _choose(backend, state, trunks, edge_hidden is not None)
    if as_choice("update", update, ("energy", "target")) == "energy":
        check_energy_graph(graph)
    dtype = compute_dtype(state.dtype)
    compared = _disagreement(disagreement, state, neighbor_state)
    step = _step(step_size, state, dtype)
    moving = state
    if pair[0] is not None:  # an invalid token keeps its state, but hands on no NaN
        moving = torch.where(pair[0][..., None, None], state, state.nan_to_num(0.0, 0.0, 0.0))
        if step is not None:
            step = torch.where(pair[0][..., None], step, 0)
    hidden: tuple[Tensor | FirstLayer, ...] = tuple(
        x._replace(tokens=clear_invalid(x.tokens, of)) if isinstance(x, FirstLayer) else x
        for x, of in zip((target_hidden, source_hidden), pair, strict=True)
    )
    update_by: Callable[..., Tensor] = operators.consensus_update
    if chosen != "triton":
        reads_halves = False
        if chosen == "reference":
            note_uncounted("consensus_update with backend='reference'")
            update_by = reference.consensus_update
        elif is_watched(state):
            update_by = partial(compiled.consensus_update, backend=chosen)
        else:
            sums = native.sums_over_edges if chosen == "native" else structured.sums_over_edges
            update_by = partial(structured.consensus_update, sums=sums)
            reads_halves = chosen == "native"
        moving = as_dtype(moving, dtype)
        hidden = tuple(x.hidden() if isinstance(x, FirstLayer) else x for x in hidden)
        given: list[Any] = [*hidden, *compared, *network]  # the last in that dtype already
        if not reads_halves or may_be_differentiated(given):
            given = [as_dtype(x, dtype) for x in given]
        hidden = tuple(given[:2])
        compared = given[2], given[3]
    of_edges = {} if edge_hidden is None else {"edge_hidden": in_dtype(edge_hidden, dtype)}
    with full_precision(state.device):
        new = update_by(
            moving,
            *hidden,
            network,
            graph,
            step,
            update=update,
            disagreement=compared,
            valid=pair,
            **of_edges,
        )
    if pair[0] is not None and step is None:  # a source that is valid pulls at it all the same
        new = torch.where(pair[0][..., None, None], new, moving)
    return as_dtype(new, state.dtype)


def _choose(backend: str, state: Tensor, trunks: int, edge_hidden: bool) -> str:
    """The backend to run; on a CPU compiled code, if that can, without asking what others could."""
    own = state.device.type == "cpu" and wanted_backend(backend) == "auto" and not is_looked_into()
    if own and native.why_not(state) is None:
        return "native"
    return choose_backend(backend, support(state, trunks, edge_hidden), state.device)


def support(state: Tensor, trunks: int = 1, edge_hidden: bool = False) -> dict[str, str | None]:
    """Backend -> None where it can run a consensus step, otherwise the reason."""
    reason = triton.why_not(state, trunks, edge_hidden)
    return {
        "reference": None,
        "structured": None,
        "native": native.why_not(state),
        "triton": reason,
    }


def consensus_edge_matrices(
    target_hidden: Tensor,
    source_hidden: Tensor,
    edge_network: EdgeNetworkParameters,
    graph: TokenGraph | Tensor,
    *,
    edge_hidden: EdgeHidden = None,
) -> Tensor:
    """R of every edge and head, [*, E, H, D, D] in the order of ``graph.edge_index``, for study.

    The arguments are those of :func:`consensus_update`; symmetric positive definite, with
    eigenvalues between alpha and alpha + beta.

    Raises:
        ValueError: names the argument, its value and what is allowed.

    Example:
        >>> import torch, graphattn as ga
        >>> network = ga.EdgeNetworkParameters(
        ...     *(torch.randn(s) for s in [(2, 5), (2,), (2, 5), (2,), (2, 4, 3, 5), (2, 4, 3)]))
        >>> hidden, graph = torch.randn(6, 2, 5), ga.window_path_graph(6, window=2)
        >>> R = ga.consensus_edge_matrices(hidden, hidden, network, graph)
        >>> R.shape  # 18 edges, 2 heads, 3 x 3
        torch.Size([18, 2, 3, 3])
        >>> bool((torch.linalg.eigvalsh(R) > 0).all())
        True
    """
    check_tensors(target_hidden=target_hidden, source_hidden=source_hidden)
    network = _check_network(edge_network, target_hidden, target_hidden.shape, source_hidden.shape)
    graph = check_graph(
        graph, target_hidden, target_hidden.shape[-3], source_hidden.shape[-3], per_edge=True
    )
    edge_hidden = check_edge_hidden(edge_hidden, target_hidden, target_hidden.shape, graph)
    dtype = compute_dtype(target_hidden.dtype)
    with full_precision(target_hidden.device):
        R = reference.edge_matrices(
            target_hidden.to(dtype),
            source_hidden.to(dtype),
            network,
            graph,
            edge_hidden=in_dtype(edge_hidden, dtype),
        )
        return R.dense().to(target_hidden.dtype)


def check_energy_graph(graph: TokenGraph, stacklevel: int = 3) -> None:
    """Refuse "energy" where it would leak the future; warn where that is a matter of reading."""
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
    traced = torch.compiler.is_compiling()  # warnings, and facts of edges, are for eager calls
    # A table of neighbours would wait for its device, and meta tensors hold nothing.
    asked = not graph.is_table and graph.device.type != "meta"
    if not traced and asked and graph.points_backward and not graph.warned_backward:
        graph.warned_backward = True
        warnings.warn(
            "all edges of this edge list point backward. If the order of tokens is time, "
            "update='energy' leaks the future: use update='target'. If it is not (one direction "
            "of an undirected graph, say), update='energy' is right and moves both ends",
            stacklevel=stacklevel,
        )


def _check(
    state: Any,
    neighbor_state: Any,
    target_hidden: Any,
    source_hidden: Any,
    edge_network: Any,
    graph: Any,
    valid: Any,
    edge_hidden: Any,
) -> tuple[TokenGraph, EdgeNetworkParameters, tuple[Tensor | None, Tensor | None], EdgeHidden]:
    tensors = {"state": state, "neighbor_state": neighbor_state}
    hidden = {"target_hidden": target_hidden, "source_hidden": source_hidden}
    layers = {name: x for name, x in hidden.items() if isinstance(x, FirstLayer)}
    check_tensors(**tensors, **{name: x for name, x in hidden.items() if name not in layers})
    shapes = {
        name: _check_layer(name, x, state) if name in layers else x.shape
        for name, x in hidden.items()
    }
    N, M = state.shape[-3], neighbor_state.shape[-3]
    if neighbor_state.shape[-2:] != state.shape[-2:]:
        raise ValueError(
            f"neighbor_state must have the heads and features of state ({list(state.shape[-2:])}), "
            f"got {list(neighbor_state.shape[-2:])}"
        )
    for name, tokens in zip(shapes, (N, M), strict=True):
        if shapes[name][-3] != tokens:
            raise ValueError(f"{name} must have {tokens} tokens, got {shapes[name][-3]}")
    network = _check_network(edge_network, state, *shapes.values())
    if network.shear.shape[0] != state.shape[-2] or network.shear.shape[2] != state.shape[-1]:
        raise ValueError(
            f"edge_network must have {state.shape[-2]} heads and {state.shape[-1]} features like "
            f"state, got shear {list(network.shear.shape)} (heads, rank, features, hidden)"
        )
    graph = check_graph(graph, state, N, M, per_edge=edge_hidden is not None)
    pair = check_valid(valid, state.shape[:-3], state.device, N, M)
    return (
        graph,
        network,
        pair,
        check_edge_hidden(edge_hidden, state, shapes["target_hidden"], graph),
    )


def _disagreement(
    disagreement: Any, state: Tensor, neighbor_state: Tensor
) -> tuple[Tensor, Tensor]:
    """The pair (u, v) that is compared: the states themselves unless given."""
    if disagreement is None:
        return state, neighbor_state
    if not isinstance(disagreement, tuple | list) or len(disagreement) != 2:
        got = len(disagreement) if hasattr(disagreement, "__len__") else disagreement
        raise ValueError(f"disagreement must be a pair (u, v) or None, got {got!r}")
    for name, own, like in zip("uv", disagreement, (state, neighbor_state), strict=True):
        if not isinstance(own, Tensor) or own.shape != like.shape or own.dtype != like.dtype:
            got = f"{own.dtype} of shape {list(own.shape)}" if isinstance(own, Tensor) else own
            raise ValueError(
                f"disagreement {name} must be {like.dtype} of shape {list(like.shape)}, got {got}"
            )
    return disagreement[0], disagreement[1]


def _width(hidden: Tensor | FirstLayer) -> int:
    """Hidden features of all trunks."""
    return hidden.weight.shape[1] if isinstance(hidden, FirstLayer) else hidden.shape[-1]


def _check_layer(name: str, layer: FirstLayer, state: Tensor) -> torch.Size:
    """The shape of the hidden vectors that a first layer makes."""
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
    return torch.Size((*tokens.shape[:-1], weight.shape[1]))


def _check_network(
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


def _step(step_size: float | Tensor | str, state: Tensor, dtype: torch.dtype) -> Tensor | None:
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
