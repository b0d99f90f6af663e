"""Certificates of modules, with one certificate per layer and per sequence."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from itertools import pairwise
from typing import Any

import torch
from threadpoolctl import ThreadpoolController
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from graphattn.graphs import TokenGraph
from graphattn.graphs.conversions.from_libraries import from_edge_index
from graphattn.graphs.structures.composites import Parts
from graphattn.nn import CrossConsensus, SelfConsensus
from graphattn.ops import use_backend
from graphattn.ops.inputs import check_graph, check_valid, valid_edges
from graphattn.spectral.arguments import check_finite
from graphattn.spectral.certificates.facts import Certificate, Fact, worst_of
from graphattn.spectral.certificates.layers import CERTIFIED, certify_sequence
from graphattn.spectral.certificates.two_tracks import cross_facts
from graphattn.spectral.laplacians.linear_maps import (
    derivative_of,
    largest_singular_value,
    spectral_radius,
)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch and BLAS to one thread.

    A certificate takes thousands of products of small blocks, in which threads mostly wait for each
    other. On a busy machine, two threads took more than ten times as long as one.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadpoolController().limit(limits=1, user_api="blas"):
            yield
    finally:
        torch.set_num_threads(threads)


@_one_thread()
def certify_module(
    module: nn.Module,
    x: Any,
    graph: Any,
    valid: Tensor | None,
    positions: Tensor | None,
    edge_features: Tensor | None,
    given: Mapping[str, Any],
    progress: bool | None,
    measure: bool,
) -> Certificate:
    """Implement :func:`graphattn.spectral.certify` for modules."""
    takes = inspect.signature(module.forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
    if unknown := [name for name in given if name not in takes and not takes_any]:
        raise TypeError(
            f"certify() got the argument {unknown[0]!r}, which is neither an argument of certify() "
            f"nor of forward() of {type(module).__name__}"
        )
    if "graph" not in takes:
        names = ", ".join(kind.__name__ for kind in CERTIFIED)
        raise ValueError(
            f"graph_or_layer must be a TokenGraph, one of {names}, or a module with "
            f"forward(x, graph), got {type(module).__name__}"
        )
    needs_graph = takes["graph"].default is inspect.Parameter.empty
    if not isinstance(x, Tensor) or (graph is None and needs_graph):
        missing = "x" if not isinstance(x, Tensor) else "graph"
        raise ValueError(
            f"{missing} must be given to certify a module: x and graph are the arguments of its "
            "forward(x, graph), such as tokens [N, dim] and their TokenGraph, got "
            f"{type(x if missing == 'x' else graph).__name__}"
        )
    if x.is_floating_point():
        of_x = valid[0] if isinstance(valid, tuple) else valid
        check_finite(x if of_x is None else x.masked_fill(~of_x[..., None], 0))
        x = x.to(torch.float64)
    module = deepcopy(module).cpu().double().eval()
    x, graph, valid, positions = _on_cpu((x, graph, valid, positions))
    keywords = {"valid": valid, "positions": positions}
    keywords |= _on_cpu({"edge_features": edge_features, **given}, in_full=True)
    keywords = {name: value for name, value in keywords.items() if value is not None}
    if isinstance(module, CrossConsensus) and not isinstance(keywords.get("context"), Tensor):
        raise ValueError(
            "context must be given to certify a CrossConsensus, the sources [*, M, "
            f"{module.context_dim}] towards which x moves, got "
            f"{type(keywords.get('context')).__name__}"
        )
    if isinstance(module, CERTIFIED):
        _check_tokens(module, x, graph)
        return _certify_call(module, {"x": x, "graph": graph, **keywords}, measure)
    calls = _calls_of_layers(module, x, graph, keywords)
    on = f"on {'tokens' if not x.is_floating_point() else 'x'} {list(x.shape)}"
    if not calls:
        subject = f"{type(module).__name__} {on}"
        return _certify_derivative(module, x, graph, keywords, subject, measure)
    parts = {
        name: _certify_call(layer, given, measure)
        for name, (layer, given) in _counted(calls, progress)
    }
    return worst_of(f"{type(module).__name__} of {len(parts)} layers {on}", parts)


def _on_cpu(given: Any, *, in_full: bool = False) -> Any:
    """Copy tensors and graphs, also in lists and dicts, to the CPU; `in_full`: to float64, too."""

    def one(value: Any) -> Any:
        if isinstance(value, TokenGraph):
            return value.to("cpu")
        if not isinstance(value, Tensor):
            return value
        value = value.detach().cpu()
        return value.double() if in_full and value.is_floating_point() else value

    return tree_map(one, given)


def _check_tokens(layer: nn.Module, x: Tensor, graph: Any) -> None:
    tokens = graph.num_targets if isinstance(graph, TokenGraph) else x.shape[-2]
    if x.dim() < 2 or x.shape[-2:] != (tokens, layer.dim):
        raise ValueError(
            f"x must have shape [*, {tokens}, {layer.dim}] (tokens of the graph, width of the "
            f"layer), got {list(x.shape)}"
        )


# The calls of layers in a module.

Call = tuple[nn.Module, Mapping[str, Any]]


def _calls_of_layers(
    module: nn.Module, x: Tensor, graph: Any, keywords: Mapping[str, Any]
) -> dict[str, Call]:
    """Run the module, and record all calls of graphattn's layers by the names of the layers."""
    calls: dict[str, Call] = {}
    handles: list[RemovableHandle] = []

    def listen(name: str, layer: nn.Module) -> None:
        parameters = inspect.signature(layer.forward)

        def note(_: nn.Module, args: Any, given: dict[str, Any]) -> None:
            times = sum(called is layer for called, _ in calls.values())
            key = name if not times else f"{name}, call {times + 1}"
            calls[key] = layer, dict(parameters.bind(*args, **given).arguments)

        handles.append(layer.register_forward_pre_hook(note, with_kwargs=True))

    for name, layer in module.named_modules():
        if isinstance(layer, CERTIFIED):
            listen(name, layer)
    try:
        with torch.no_grad():
            module(x, **({} if graph is None else {"graph": graph}), **keywords)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _counted(calls: dict[str, Call], progress: bool | None) -> Iterable[tuple[str, Call]]:
    """Yield the calls, and show on stderr how many of them are done."""
    if progress is None:
        progress = len(calls) > 1 and sys.stderr.isatty()
    if not progress:
        return calls.items()
    from rich.console import Console
    from rich.progress import track

    return track(calls.items(), "certify layers", console=Console(stderr=True))


def _certify_call(layer: nn.Module, given: Mapping[str, Any], measure: bool) -> Certificate:
    """Make the certificate of one call, which is the worst of its sequences."""
    x, graph = given["x"], given["graph"]
    if isinstance(layer, CrossConsensus):
        return _certify_cross(layer, given)
    if given.get("context") is not None:
        reason = f"{type(layer).__name__} across two tracks"
        return Certificate(f"{layer!r}", (Fact("eigenvalues", "not applicable", reason),))
    N, of_edges = x.shape[-2], given.get("edge_features")
    graph = check_graph(graph, x, N, N, per_edge=of_edges is not None)
    if of_edges is not None:
        of_edges = _checked_features(layer, of_edges, x, graph)
    parts = {
        name: certify_sequence(layer, *sequence, measure)
        for name, sequence in sequences_of(
            x, graph, given.get("valid"), given.get("positions"), of_edges
        )
    }
    if len(parts) == 1:
        return next(iter(parts.values()))
    return worst_of(f"{layer!r} on {len(parts)} sequences over {graph!r}", parts)


def _certify_cross(layer: CrossConsensus, given: Mapping[str, Any]) -> Certificate:
    """Make the certificate of a step towards other tokens, the worst of all entries of a batch."""
    x, context, features = given["x"], given["context"], given.get("edge_features")
    positions = given.get("positions")
    x, context, graph, valid = layer.prepare(
        x,
        context,
        given["graph"],
        given.get("valid"),
        per_edge=features is not None,
    )
    batch, (source, target) = x.shape[:-2], graph.edge_index
    checked = layer.checked_features(features, x, graph)
    if layer.rotary is not None:
        positions = layer.resolve_positions(graph, positions)

    def entry(t: Tensor | None, b: int, last: int) -> Tensor | None:
        """Entry b of a tensor whose last dimensions are not those of the batch."""
        return t if t is None or t.dim() == last else t.flatten(0, -last - 1)[b]

    parts = {}
    for b in range(max(1, batch.numel())):
        real, of_edges = graph, entry(checked.get("edge_features"), b, 2)
        masks = [entry(mask, b, 1) for mask in valid]
        if any(mask is not None for mask in masks):
            keep = valid_edges((masks[0], masks[1]), source, target)
            assert keep is not None
            keep = keep.reshape(-1)
            real = from_edge_index(graph.edge_index[:, keep], graph.num_targets, graph.num_sources)
            of_edges = None if of_edges is None else of_edges[keep]
        pair = None
        if positions is not None:
            pair = entry(positions[0], b, 1), entry(positions[1], b, 1)
        tokens = (
            x.flatten(0, -3)[b] if batch else x,
            context.flatten(0, -3)[b] if batch else context,
        )
        with torch.no_grad():
            facts = cross_facts(layer, *tokens, real, pair, of_edges)
        parts[f"x[{b}]"] = Certificate(f"{layer!r} over {real!r}", tuple(facts))
    if len(parts) == 1:
        return next(iter(parts.values()))
    return worst_of(f"{layer!r} on {len(parts)} sequences over {graph!r}", parts)


# tokens, graph, positions, features of edges
Sequence = tuple[Tensor, TokenGraph, Tensor | None, Tensor | None]


def _checked_features(layer: nn.Module, features: Any, x: Tensor, graph: TokenGraph) -> Tensor:
    """Check features of edges, which only consensus layers with `edge_features` take."""
    if not isinstance(layer, SelfConsensus):
        raise ValueError(
            "edge_features must be None unless the layer is a consensus layer, got "
            f"edge_features for a {type(layer).__name__}"
        )
    checked = layer.checked_features(features, x, graph)
    return checked["edge_features"]


def sequences_of(
    x: Tensor, graph: TokenGraph, valid: Any, positions: Any, edge_features: Tensor | None
) -> Iterator[tuple[str, Sequence]]:
    """Yield every sequence of a batch [*, N, C] or of a packed graph, without padding."""
    batch, N = x.shape[:-2], x.shape[-2]
    valid = check_valid(valid, batch, x.device, N, N)[0]
    if isinstance(positions, tuple):
        positions = positions[0]
    whole = _packed(graph)
    for b, tokens in enumerate(x.reshape(-1, *x.shape[-2:])):
        own_valid, own_positions = (
            None if t is None else t.expand(*batch, N).reshape(-1, N)[b] for t in (valid, positions)
        )
        for p, (start, part) in enumerate(whole):
            here = slice(start, start + part.num_targets)
            names = [f"x[{b}]"] if batch else []
            names += [f"sequence {p}"] if len(whole) > 1 else []
            place = None if own_positions is None else own_positions[here]
            of_edges = edge_features
            if of_edges is not None:  # Edges are sorted by target, so a sequence's are adjacent.
                first, last = (int(graph.rowptr[t]) for t in (here.start, here.stop))
                of_sequence = of_edges if of_edges.dim() == 2 else of_edges.flatten(0, -3)[b]
                of_edges = of_sequence[first:last]
            sequence: Sequence = tokens[here], part, place, of_edges
            if own_valid is not None and not bool(own_valid[here].all()):
                sequence = _without_padding(*sequence, own_valid[here])
            yield ", ".join(names), sequence


def _packed(graph: TokenGraph) -> list[tuple[int, TokenGraph]]:
    """List (first token, graph) of every sequence of a packed batch, or of the graph itself."""
    sizes = graph.sizes
    if len(sizes) == 1 or any(targets != sources for targets, sources in sizes):
        return [(0, graph)]
    starts = torch.tensor([0] + [targets for targets, _ in sizes]).cumsum(0)
    structure = graph.structure
    if isinstance(structure, Parts) and len(structure.parts) == len(sizes):
        graphs = [TokenGraph(structure=part) for part in structure.parts]
    else:
        target = graph.edge_index[1]
        graphs = [
            from_edge_index(
                graph.edge_index[:, (target >= start) & (target < stop)] - start, int(stop - start)
            )
            for start, stop in pairwise(starts)
        ]
    return list(zip(starts[:-1].tolist(), graphs, strict=True))


def _without_padding(
    x: Tensor,
    graph: TokenGraph,
    positions: Tensor | None,
    edge_features: Tensor | None,
    valid: Tensor,
) -> Sequence:
    """Select the valid tokens and the edges between them; positions do not change."""
    source, target = graph.edge_index
    place, is_real = valid.cumsum(0) - 1, valid[source] & valid[target]
    edges = place[graph.edge_index[:, is_real]]
    if edge_features is not None:
        edge_features = edge_features[is_real]
    positions = graph.positions if positions is None else positions
    graph = from_edge_index(edges, int(valid.sum()))
    return x[valid], graph, positions[valid], edge_features


# Modules without a layer that a theorem is about.


def _certify_derivative(
    module: nn.Module,
    x: Tensor,
    graph: Any,
    keywords: Mapping[str, Any],
    subject: str,
    measure: bool,
) -> Certificate:
    """Say that no theorem applies; measure the module's derivative at `x` if that is asked."""
    keywords = {**({} if graph is None else {"graph": graph}), **keywords}
    reason = f"{type(module).__name__} has no layer to which a theorem applies"
    facts = [Fact("low-pass filter", "not applicable", reason)]
    if not measure:
        return Certificate(subject, tuple(facts))
    with torch.no_grad():
        y = module(x, **keywords)
    if x.is_floating_point() and isinstance(y, Tensor) and y.shape == x.shape:
        with use_backend("reference"):  # This backend can be differentiated twice.
            T = derivative_of(lambda u: module(u, **keywords), x)
            numbers = {"norm": largest_singular_value(T), "spectral radius": spectral_radius(T)}
        what = "the module's derivative at these tokens"
        facts.append(Fact("map", "measured", what, numbers))
    return Certificate(subject, tuple(facts))
