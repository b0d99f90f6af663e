"""How the proteins of a call lie among its tokens, and graphs over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphattn.data import Structure
from graphattn.graphs import (
    TokenGraph,
    batch,
    bipartite_complete_graph,
    bipartite_window_graph,
    union,
)
from graphattn.models.residue_edges import Residues


@dataclass(frozen=True)
class Laid:
    """Structures one after the other, each with the padding behind it.

    Attributes:
        structures: graphattn.data.Structure of every protein.
        padding: tokens after each of them.
        rows: (B, N) of padded rows; () where proteins stand without padding.
        residues: where all of them are.
        valid: bool [B, N] of padded rows.
    """

    structures: list[Structure]
    padding: list[int]
    rows: tuple[int, ...]
    residues: Residues
    valid: Tensor | None

    def graph(self, window: int, neighbors: int, self_loops: bool) -> TokenGraph:
        """Residues along the chain and in space; padding has no edges."""

        def near(structure: Structure) -> TokenGraph:
            along = structure.window_graph(window, self_loops=self_loops)
            if not neighbors:
                return along
            return union(along, structure.neighbor_graph(neighbors))

        return self.of_each(near)

    def of_each(self, make: Callable[[Structure], TokenGraph]) -> TokenGraph:
        """One graph of what `make` gives for every structure."""
        graphs = []
        for structure, padding in zip(self.structures, self.padding, strict=True):
            graphs.append(make(structure))
            if padding:
                # Listed: a structure without edges counts as causal, and the batch with it.
                edges = torch.empty((2, 0), dtype=torch.int64, device=graphs[-1].device)
                graphs.append(
                    TokenGraph(edge_index=edges, num_targets=padding, num_sources=padding)
                )
        return graphs[0] if len(graphs) == 1 else batch(graphs)


def laid_out(structures: list[Structure], tokens: Any, device: torch.device) -> Laid:
    """How structures lie among tokens [*, N] of one, [N] of several, or [B, N] in rows.

    Raises:
        ValueError: their residues are not as many as the tokens.
    """
    sizes = [len(own.sequence) for own in structures]
    padding, valid = [0] * len(sizes), None
    rows: tuple[int, ...] = ()
    # (A copy would count the places along its chains anew.)
    structures = [
        own if own.ca_positions.device == device else own.to(device) for own in structures
    ]
    if isinstance(tokens, Tensor) and tokens.dim() > 0:
        N = tokens.shape[-1]
        if tokens.dim() == 2 and len(structures) == len(tokens) and (len(tokens) > 1):
            if max(sizes) > N:
                raise ValueError(
                    f"structure must hold at most {N} residues, the length of the rows of tokens, "
                    f"got {max(sizes)}"
                )
            rows, padding = tuple(tokens.shape), [N - size for size in sizes]
            lengths = torch.tensor(sizes, device=device)
            valid = torch.arange(N, device=device) < lengths[:, None]
        elif sum(sizes) != N or (len(sizes) > 1 and tokens.dim() > 1):
            raise ValueError(
                f"structure must hold the residues that the tokens {list(tokens.shape)} are (one "
                "Structure of N; or a list, one after the other in tokens [N] or one per row of "
                f"tokens [B, N]), got {sizes}"
            )
    columns: list[list[Tensor]] = [[], [], []]
    for own, more in zip(structures, padding, strict=True):
        for column, name in zip(columns, ("ca_positions", "chain_index", "positions"), strict=True):
            value = getattr(own, name)
            column.append(torch.cat([value, value.new_zeros(more, *value.shape[1:])]))
    return Laid(structures, padding, rows, Residues(*map(torch.cat, columns)), valid)


def graph_of_track(
    name: str,
    length: int,
    is_chain: bool,
    window: int,
    graph: TokenGraph,
    laid: Laid | None,
    rows: tuple[int, ...],
) -> TokenGraph:
    """Who sees which of the `length` rows of a track: those around its own place, or a chain's all.

    Args:
        name: of the track.
        length: M, of every row of a padded batch.
        is_chain: whether it is another chain.
        window: rows on each side.
        graph: of the tokens.
        laid: their structures, if there are any.
        rows: [B, N] of padded proteins.

    Raises:
        ValueError: what is not told by the lengths.
    """
    sizes = [targets for targets, _ in graph.sizes]
    several = len(laid.structures) > 1 if laid is not None else len(sizes) > 1
    N = rows[1] if rows else graph.num_targets
    if is_chain:
        if several and not rows:
            raise ValueError(
                f"context[{name!r}] must be a pair (tokens, graph) where proteins are packed: "
                "nothing else says which chain belongs to which protein"
            )
        one = bipartite_complete_graph(N, length)
        return batch([one] * rows[0]) if rows else one
    if length not in (N, graph.num_targets):
        raise ValueError(
            f"context[{name!r}] must have one row per token ({N}), got {length}: a pair (track, "
            "graph) says otherwise who sees which row"
        )
    if laid is not None:
        return laid.of_each(lambda own: own.window_graph(window, self_loops=True))
    if len(sizes) == 1:
        return bipartite_window_graph(graph.num_targets, window)
    return batch([bipartite_window_graph(size, window) for size in sizes])
