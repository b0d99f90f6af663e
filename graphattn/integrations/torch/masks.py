"""Convert masks of torch's attention to graphs, together with a graph or window given in code."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from graphattn.graphs import (
    bipartite_complete_graph,
    causal_graph,
    causal_window_graph,
    complete_graph,
    from_edge_index,
    from_mask,
    window_path_graph,
)
from graphattn.graphs.token_graph import TokenGraph
from graphattn.integrations.edge_values import from_pairs, structure_of_runs, to_pairs
from graphattn.late_imports import not_compiled

GraphOf = Callable[[int, int], TokenGraph]


class Places(NamedTuple):
    """Edges without any mask: all pairs, a window on each side, or a graph."""

    graph: TokenGraph | GraphOf | None = None
    window: int | None = None

    def of(self, num_targets: int, num_sources: int, device: torch.device) -> TokenGraph:
        """Return the graph of a call.

        Raises: ValueError: if the graph has another size, or if there is a window but targets and
            sources are not the same tokens.
        """
        if self.graph is not None:
            return _checked(self.graph, num_targets, num_sources).to(device)
        if self.window is not None and num_targets != num_sources:
            raise ValueError(
                f"window={self.window} needs self-attention, where targets and sources are the "
                f"same tokens, got {num_targets} targets and {num_sources} sources: convert only "
                "other modules with layers=, or give graph="
            )
        if self.window is not None and self.window < num_targets - 1:
            return window_path_graph(num_targets, self.window, self_loops=True).to(device)
        if num_targets == num_sources:
            return complete_graph(num_targets).to(device)
        return bipartite_complete_graph(num_targets, num_sources).to(device)

    @property
    def everywhere(self) -> bool:
        """Return whether only masks limit what is seen."""
        return self.graph is None and self.window is None


def _checked(graph: TokenGraph | GraphOf, num_targets: int, num_sources: int) -> TokenGraph:
    call = "graph"
    if not isinstance(graph, TokenGraph):
        call = f"graph({num_targets}, {num_sources})"
        graph = graph(num_targets, num_sources)
        if not isinstance(graph, TokenGraph):
            raise ValueError(f"{call} must return a TokenGraph, got {type(graph).__name__}")
    if (graph.num_targets, graph.num_sources) != (num_targets, num_sources):
        raise ValueError(
            f"{call} must have {num_targets} targets and {num_sources} sources, the numbers of "
            f"tokens of this call, got {graph.num_targets} and {graph.num_sources}"
        )
    return graph


class SeenMask(NamedTuple):
    """Edges of the targets of a batch.

    Attributes:
        graph: N targets and M sources, the same for all samples; B N and B M if `packed`.
        valid: which sources are real, bool [B, M]; None for all.
        packed: whether the graph contains every sample with its own tokens.
        bias: tensor that is added to the logits, [B or 1, H or 1, N, M], or None.
        key_bias: the same for every target, [B, M].
    """

    graph: TokenGraph
    valid: Tensor | None = None
    packed: bool = False
    bias: Tensor | None = None
    key_bias: Tensor | None = None

    def per_edge(self, heads: int) -> Tensor | None:
        """Return the biases of all edges, [E, H] or [B, E, H]."""
        packed = (len(self.graph.sizes or ()) or 1) if self.packed else 0
        biases = [] if self.bias is None else [self.bias]
        if self.key_bias is not None:
            num_targets = self.graph.num_targets // (packed or 1)
            biases.append(self.key_bias[:, None, None].expand(-1, -1, num_targets, -1))
        if not biases:
            return None
        first, *rest = (from_pairs(bias, self.graph, packed) for bias in biases)
        total = first + rest[0] if rest else first
        if not packed and len(total) == 1:
            total = total[0]
        return total.expand(*total.shape[:-1], heads)

    def dense(self, weights: Tensor, batch: int) -> Tensor:
        """Convert weights of edges [B, E, H] (or [1, E, H] if packed) to [B, H, N, M]."""
        return to_pairs(weights, self.graph, batch, self.packed)


def seen_everywhere(
    places: Places,
    num_targets: int,
    num_sources: int,
    device: torch.device,
    *,
    causal: bool = False,
    valid: Tensor | None = None,
    key_bias: Tensor | None = None,
) -> SeenMask:
    """Return the edges without a mask, without reading a tensor."""
    if not causal:
        return SeenMask(places.of(num_targets, num_sources, device), valid, key_bias=key_bias)
    n, window = num_targets, places.window
    if places.graph is None and num_targets == num_sources:
        graph = causal_graph(n) if window is None else causal_window_graph(n, min(window + 1, n))
        return SeenMask(graph.to(device), valid, key_bias=key_bias)
    mask = torch.ones(num_targets, num_sources, dtype=torch.bool, device=device).tril()
    [seen] = seen_in_mask(places, mask[None, None])
    return seen._replace(valid=valid, key_bias=key_bias)


@not_compiled()
def seen_in_mask(
    places: Places,
    mask: Tensor,
    *,
    valid: Tensor | None = None,
    key_bias: Tensor | None = None,
) -> list[SeenMask]:
    """Return the edges that a mask allows: one set for all heads, or one for each.

    Args:
        places: the edges without a mask.
        mask: bool (True: is seen), or floats that are added to logits (-inf: is not seen), [B or 1,
            H or 1, N, M].
        valid: which sources are real, bool [B, M].
        key_bias: numbers that are added to all logits of a source, [B, M].
    """
    allowed, bias = mask, None
    if mask.dtype != torch.bool:
        allowed = mask != float("-inf")
        bias = mask.masked_fill(~allowed, 0)
        if not mask.requires_grad and not bool(bias.any()):
            bias = None
    if allowed.shape[1] > 1 and bool((allowed[:, 1:] == allowed[:, :1]).all()):
        allowed = allowed[:, :1]
    if allowed.shape[0] > 1 and bool((allowed[1:] == allowed[:1]).all()):
        allowed = allowed[:1]
    base = places.of(mask.shape[-2], mask.shape[-1], mask.device)
    seen = []
    for head in range(allowed.shape[1]):
        one = allowed[:, head]
        of_head = bias if bias is None or allowed.shape[1] == 1 else bias[:, head : head + 1]
        if len(one) == 1:
            graph = _once(places, base, one[0])
            seen.append(SeenMask(graph, valid, bias=of_head, key_bias=key_bias))
        else:
            one = one if valid is None else one & valid[:, None]
            graph = _packed(base, one, everywhere=places.everywhere)
            seen.append(SeenMask(graph, packed=True, bias=of_head, key_bias=key_bias))
    return seen


def _within(base: TokenGraph, allowed: Tensor, *, everywhere: bool) -> TokenGraph:
    """Return the edges of a graph that a mask [N, M] allows, in a structured form if possible."""
    if bool(allowed.all()):
        return base
    if not everywhere:
        whole = base.to_mask().to(allowed.device)
        allowed = allowed & whole
        if torch.equal(allowed, whole):
            return base
    structure = structure_of_runs(allowed[None])
    if structure is None:
        return from_mask(allowed)
    n = len(allowed)
    return TokenGraph(structure=structure, num_targets=n, num_sources=n).to(allowed.device)


def _packed(base: TokenGraph, allowed: Tensor, *, everywhere: bool) -> TokenGraph:
    """Return the edges that a mask [B, N, M] allows, each sample with its own tokens."""
    if not everywhere:
        allowed = allowed & base.to_mask().to(allowed.device)
    B, N, M = allowed.shape
    sample, target, source = allowed.nonzero().T
    edges = torch.stack([sample * M + source, sample * N + target])
    samples = torch.arange(B, device=allowed.device)
    borders = samples.repeat_interleave(N), samples.repeat_interleave(M)
    return from_edge_index(edges, B * N, B * M, batch=borders)


# All layers, and several training steps, use the same mask.

MOST_MASKS = 4  # number of masks in the cache of a thread
MOST_PAIRS = 2**27  # number of pairs of all masks in the cache, without the newest
_kept = threading.local()


class _MaskEntry(NamedTuple):
    places: Places
    base: TokenGraph
    allowed: Tensor
    graph: TokenGraph
    inference: bool  # tensors made in inference mode cannot be used in training

    def is_of(self, places: Places, base: TokenGraph, allowed: Tensor) -> bool:
        if self.inference != torch.is_inference_mode_enabled():
            return False
        same = base is self.base  # a function may return another graph every time
        if places.graph is None:
            same = self.places == places
        kinds = (allowed.device, allowed.shape) == (self.allowed.device, self.allowed.shape)
        return same and kinds and torch.equal(allowed, self.allowed)


def _once(places: Places, base: TokenGraph, allowed: Tensor) -> TokenGraph:
    """Call `_within` with a cache; the key is the content of the mask, which may change later."""
    entries: list[_MaskEntry] = _kept.__dict__.setdefault("entries", [])
    for entry in entries:
        if entry.is_of(places, base, allowed):
            return entry.graph
    graph = _within(base, allowed, everywhere=places.everywhere)
    inference = torch.is_inference_mode_enabled()
    entries.insert(0, _MaskEntry(places, base, allowed.clone(), graph, inference))
    del entries[MOST_MASKS:]
    while len(entries) > 1 and sum(entry.allowed.numel() for entry in entries) > MOST_PAIRS:
        entries.pop()
    return graph
