"""Convert masks to token graphs, with a structure or a list of edges."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphattn.graphs import (
    bipartite_complete_graph,
    causal_graph,
    causal_window_graph,
    complete_graph,
    from_edge_index,
    window_path_graph,
)
from graphattn.graphs.structures.recognize import ListedRows, structure_of_rows
from graphattn.graphs.token_graph import TokenGraph, makes_fakes
from graphattn.integrations.edge_values import structure_of_runs
from graphattn.integrations.transformers.masks.bands import EVERYTHING, FAR, MaskBand
from graphattn.integrations.transformers.masks.mask_function import is_sketch, read_sketch
from graphattn.integrations.transformers.masks.once import once
from graphattn.integrations.transformers.options import GraphOf

# If more than this share of all pairs is seen, computing all pairs is faster than a list of edges:
# 1 to 2 % of 1,024 x 1,024 (12 heads of 64 features, one thread of a CPU).
DENSE = 1 / 64


class SeenEdges(NamedTuple):
    """Edges of the Q queries of a batch: one graph for all samples, or one over the packed batch.

    Attributes:
        graph: Q targets and ``len(keys)`` sources; or B Q targets and B n sources where `packed`.
        keys: the range of keys that are its sources.
        valid: which of these keys are real, bool [B, len(keys)]; None for all.
        packed: whether the graph contains every sample with its own tokens.
        bias: numbers that a float mask adds to the logits, [B or 1, 1, Q, n].
    """

    graph: TokenGraph
    keys: range
    valid: Tensor | None = None
    packed: bool = False
    bias: Tensor | None = None


class Limits(NamedTuple):
    """Limits of a dense mask: sizes of the call, a configured window and a configured graph.

    Attributes:
        batch: B.
        num_targets: Q; the queries are the last of the tokens.
        band: offsets of a configured window.
        graph_of: a configured graph.
    """

    batch: int
    num_targets: int
    band: MaskBand | None
    graph_of: GraphOf | None

    @property
    def key(self) -> tuple[Any, ...]:
        """Key of a cache: functions are compared by identity, and may have no hash."""
        return *self[:3], id(self.graph_of)

    def check(self, mask: Tensor) -> None:
        """Raise a ValueError if the shape or dtype of a dense mask is wrong."""
        B, Q, shape = self.batch, self.num_targets, mask.shape
        if mask.dim() != 4 or shape[0] not in (1, B) or shape[2] not in (1, Q):
            raise ValueError(
                f"attention_mask must have the shape [{B} or 1, 1 or heads, {Q}, keys], got "
                f"{list(shape)}"
            )
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise ValueError(
                f"attention_mask must be bool (True: is seen) or float (is added), got {mask.dtype}"
            )


def seen_through(
    mask: Tensor | None,
    batch: int,
    num_targets: int,
    num_keys: int,
    *,
    causal: bool,
    window: int | None = None,
    graph_of: GraphOf | None = None,
    device: Any,
) -> SeenEdges:
    """Return the edges of queries for the mask that a model passes to its attention.

    Args:
        mask: None, a sketch of :func:`.masks.graph_mask`, or a dense mask [B or 1, 1, Q or 1, n]
            of bools (True: is seen) or floats (are added).
        batch: B.
        num_targets: Q.
        num_keys: K; the last of Q > 1 queries has the position of key K - 1, or n - 1 if there is a
            mask.
        causal: whether the module is causal; used if the mask does not say it.
        window: for causal modules the number of keys, including its own; for others that many on
            each side.
        graph_of: a configured graph.
    """
    if mask is not None and not is_sketch(mask):
        return seen_in_mask(mask, Limits(batch, num_targets, limit_of(window, causal), graph_of))
    band, valid, n = plain_band(mask, num_targets, num_keys, causal, window)
    if graph_of is not None:
        return seen_in_graph(graph_of, band, num_targets, n, valid, device)
    return seen_in_band(band, num_targets, n, valid, device)


def plain_band(
    mask: Tensor | None, num_targets: int, num_keys: int, causal: bool, window: int | None
) -> tuple[MaskBand, Tensor | None, int]:
    """Return offsets, real keys and number of keys for no mask or a sketch, limited by a window."""
    valid = None
    if mask is None:
        band = MaskBand(FAR, 0) if causal and num_targets > 1 else EVERYTHING
        # As in torch: query i sees the first i + 1 keys.
        n = num_targets if causal and 1 < num_targets < num_keys else num_keys
    else:
        band, valid, n = read_sketch(mask, num_targets)
        causal = band.after == 0
    if window is not None:
        band &= _window(window, causal, 0)
    return band, valid, n


def limit_of(window: int | None, causal: bool) -> MaskBand | None:
    """Return the offsets that a window allows in a dense mask, which already excludes later
    tokens."""
    return None if window is None else _window(window, causal, FAR)


def _window(window: int, causal: bool, after: int) -> MaskBand:
    return MaskBand(window - 1, after) if causal else MaskBand(window, window)


def seen_in_band(
    band: MaskBand, num_targets: int, num_sources: int, valid: Tensor | None, device: Any
) -> SeenEdges:
    """Return the edges if targets are the last of the sources and see a band of offsets."""
    if torch.compiler.is_compiling() or makes_fakes():
        graph, keys = _band_graph(band, num_targets, num_sources, device)
    else:
        graph, keys = _kept_band_graph(band, num_targets, num_sources, device)
    if valid is not None and len(keys) < num_sources:
        valid = valid[:, keys.start : keys.stop]
    return SeenEdges(graph, keys, valid)


def _band_graph(
    band: MaskBand, num_targets: int, num_sources: int, device: Any
) -> tuple[TokenGraph, range]:
    before, after = (min(reach, num_sources) for reach in band)
    everywhere = num_sources - 1
    if before >= everywhere and after >= everywhere:
        return _complete(num_targets, num_sources).to(device), range(num_sources)
    if after == 0 and before >= everywhere:
        past = num_sources - num_targets
        return causal_graph(num_targets, past=past).to(device), range(num_sources)
    whole = _band(before, after, num_sources).to(device)
    if num_targets == num_sources:
        return whole, range(num_sources)
    return whole.targets(num_sources - num_targets, num_sources)


# A graph caches tables, which layers and calls of the same length then share.
_kept_band_graph = lru_cache(maxsize=32)(_band_graph)


def _complete(num_targets: int, num_sources: int) -> TokenGraph:
    if num_targets == num_sources:
        return complete_graph(num_targets)
    return bipartite_complete_graph(num_targets, num_sources)


def _band(before: int, after: int, num_tokens: int) -> TokenGraph:
    if after == 0:
        return causal_window_graph(num_tokens, before + 1)
    if before == after:
        return window_path_graph(num_tokens, before, self_loops=True)
    i = torch.arange(num_tokens)
    last = (i + after).clamp(max=num_tokens - 1)
    rows = ListedRows((i - before).clamp(min=0), last, step=1, loops=True, num_sources=num_tokens)
    structure = structure_of_rows(rows)
    return TokenGraph(structure=structure, num_targets=num_tokens, num_sources=num_tokens)


def seen_in_mask(mask: Tensor, limits: Limits, most: float = 1.0) -> Any:
    """Return the edges that a dense mask allows within the limits of a call, once per mask.

    The mask is bool, or floats that are added, [B or 1, 1, Q or 1, n]. If more than the share
    `most` of all pairs is seen, and the mask has no known structure, the result is None.
    """
    limits.check(mask)
    simple = limits.graph_of is None and mask.dtype == torch.bool
    if limits.num_targets == 1 and simple and most == 1:
        return _seen_by_one(mask[:, 0, 0], limits.batch, limits.band)
    return _kept_seen(mask, limits, most)


@torch.compiler.disable(reason="edges of a mask depend on what it holds: see the page on models")
def _kept_seen(mask: Tensor, limits: Limits, most: float) -> Any:
    """Call :func:`_seen_in_mask` once per mask; the bias of a float mask keeps its gradient."""
    fixed, graph = without_room(mask, limits)
    seen = once(
        fixed,
        ("seen", limits.key, most),
        lambda: _seen_in_mask(fixed, limits, graph, most),
        graph=graph,
    )
    if seen is None or seen.bias is None:
        return seen
    bias = read_mask(mask[..., : fixed.shape[-1]])[1]
    assert bias is not None
    return seen._replace(bias=bias.expand(-1, -1, limits.num_targets, -1))


def _seen_by_one(mask: Tensor, batch: int, band: MaskBand | None) -> SeenEdges:
    """Return the edges of one new token with a cache: it sees every key that is real."""
    n = mask.shape[-1]
    if band is not None:
        offset = torch.arange(n, device=mask.device) - places_of_queries(mask[:, None])
        mask = mask & band.holds(offset)
    graph = bipartite_complete_graph(1, n).to(mask.device)
    return SeenEdges(graph, range(n), mask.expand(batch, n))


def read_mask(mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the pairs that a mask allows, and its bias of their logits."""
    if mask.dtype == torch.bool:
        return mask, None
    # transformers uses the minimum or -inf for hidden pairs
    seen = mask > torch.finfo(mask.dtype).min / 2
    return seen, mask.masked_fill(~seen, 0)


def without_room(mask: Tensor, limits: Limits) -> tuple[Tensor, TokenGraph | None]:
    """Return a mask without its gradient, and the configured graph of its tokens.

    With a graph, the mask is cut after the key of the last query: places of a static cache after it
    are not in the graph.
    """
    mask = mask.detach() if mask.requires_grad else mask
    if limits.graph_of is None:
        return mask, None
    seen = read_mask(mask)[0].any(1).expand(-1, limits.num_targets, -1)
    num_tokens = int(places_of_queries(seen).max()) + 1
    graph = configured_graph(limits.graph_of, limits.num_targets, num_tokens)
    return mask[..., :num_tokens], graph


def limited(allowed: Tensor, limits: Limits, graph: TokenGraph | None) -> Tensor:
    """Limit the pairs [B, H, Q or 1, n] of a mask by the band of a call and by a graph."""
    if limits.band is not None:
        places = places_of_queries(allowed.any(1).expand(-1, limits.num_targets, -1))
        offset = torch.arange(allowed.shape[-1], device=allowed.device) - places[..., None]
        allowed = allowed & limits.band.holds(offset)[:, None]
    return allowed if graph is None else allowed & dense(graph, allowed.device)


def _seen_in_mask(mask: Tensor, limits: Limits, graph: TokenGraph | None, most: float) -> Any:
    mask, bias = read_mask(mask)
    if bias is not None and not bool(bias.any()):
        bias = None
    mask = limited(mask[:, :1], limits, graph)[:, 0].expand(-1, limits.num_targets, -1)
    if len(mask) > 1 and bool((mask[1:] == mask[:1]).all()):
        mask = mask[:1]
    B, Q, n = mask.shape
    packed = B > 1
    structure = structure_of_runs(mask)
    if structure is not None:
        sizes = ((Q, n),) * B if packed else None
        graph = TokenGraph(structure=structure, num_targets=B * Q, num_sources=B * n, sizes=sizes)
        return SeenEdges(graph.to(mask.device), range(n), packed=packed, bias=bias)
    if int(mask.sum()) > most * mask.numel():
        return None
    sample, target, source = mask.nonzero().T
    edges = torch.stack([sample * n + source, sample * Q + target])
    graph = from_edge_index(edges, num_targets=B * Q, num_sources=B * n)
    return SeenEdges(graph, range(n), packed=packed, bias=bias)


def places_of_queries(mask: Tensor) -> Tensor:
    """Return the index of each query's own key, [B or 1, Q].

    If there are as many queries as keys, it is the same index. A single query has the last key that
    it sees, because places of a static cache after the newest token are empty. Several queries with
    a cache end at the last key that any of them sees.
    """
    _, Q, n = mask.shape
    if Q == n > 1:
        return torch.arange(n, device=mask.device)[None]
    last = n - 1 - mask.flip(-1).to(torch.uint8).argmax(-1)
    if Q == 1:
        return last
    i = torch.arange(Q, device=mask.device)
    first = (last - i).masked_fill(~mask.any(-1), -1).amax()
    first = torch.where(first < 0, n - Q, first.clamp(max=n - Q))
    return (first + i)[None]


def configured_graph(graph_of: GraphOf, num_targets: int, num_sources: int) -> TokenGraph:
    """Return the user's graph for the last `num_targets` of `num_sources` tokens."""
    graph = graph_of(num_targets, num_sources)
    if not isinstance(graph, TokenGraph):
        raise ValueError(
            f"graph({num_targets}, {num_sources}) must return a TokenGraph, got {type(graph)}"
        )
    sizes = graph.num_targets, graph.num_sources
    if sizes == (num_targets, num_sources):
        return graph
    if sizes == (num_sources, num_sources):  # the graph of all tokens, for new tokens with a cache
        return _last_rows(graph, num_targets)
    raise ValueError(
        f"graph({num_targets}, {num_sources}) must have {num_targets} targets (or {num_sources}, "
        f"of which the last are taken) and {num_sources} sources, got {sizes[0]} and {sizes[1]}: "
        "build it from num_sources, the number of all tokens so far"
    )


def _last_rows(graph: TokenGraph, count: int) -> TokenGraph:
    source, target = graph.edge_index
    first = graph.num_targets - count
    kept = target >= first
    edges = torch.stack([source[kept], target[kept] - first])
    return from_edge_index(edges, num_targets=count, num_sources=graph.num_sources)


def seen_in_graph(
    graph_of: GraphOf,
    band: MaskBand,
    num_targets: int,
    num_sources: int,
    valid: Tensor | None,
    device: Any,
) -> SeenEdges:
    """Limit a configured graph by a band; keep its structure if the band removes nothing."""
    graph = configured_graph(graph_of, num_targets, num_sources)
    shift = num_sources - num_targets
    inside = (graph.is_causal and shift == 0 and band.after == 0) or band.after >= num_sources - 1
    if not inside or band.before < num_sources - 1:
        source, target = graph.edge_index
        offset = source - target - shift
        edges = graph.edge_index[:, band.holds(offset)]
        graph = from_edge_index(edges, num_targets, num_sources)
    return SeenEdges(graph.to(device), range(num_sources), valid)


def dense(graph: TokenGraph, device: Any) -> Tensor:
    """Convert a graph to a mask, bool [N, M]."""
    return graph.to_mask().to(device)
