"""The layout of proteins in the tokens of a call, and graphs over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from graphattn.data import Structure
from graphattn.distributed.sharded_graph import ShardedGraph
from graphattn.graphs import (
    TokenGraph,
    batch,
    bipartite_complete_graph,
    bipartite_window_graph,
    union,
)
from graphattn.late_imports import not_compiled
from graphattn.models.mixers import Reach
from graphattn.models.proteins.context_steps import Track, TrackEmbeddings
from graphattn.models.proteins.residue_edges import ResidueEdges, Residues
from graphattn.models.proteins.scores import ProteinScores
from graphattn.models.proteins.source_tracks import SourceTracks
from graphattn.models.stack import BlockGraph, Graphs, one_each
from graphattn.nn.rotary import check_positions

# The neighbours of a residue depend on coordinates, which torch.compile cannot know from shapes.
eager = not_compiled(
    "graphs of a Structure depend on its coordinates: with fullgraph=True, compute graph, "
    "positions and edge_features outside and pass them instead of structure"
)


@dataclass(frozen=True)
class ProteinLayout:
    """Structures one after the other, each followed by its padding.

    Attributes:
        structures: one graphattn.data.Structure per protein.
        padding: number of padding tokens after each protein.
        rows: (B, N) if proteins are padded rows; () if they have no padding.
        residues: positions of all residues.
        valid: bool [B, N] for padded rows, True where a residue is real.
    """

    structures: list[Structure]
    padding: list[int]
    rows: tuple[int, ...]
    residues: Residues
    valid: Tensor | None

    def graph(self, window: int, neighbors: int, self_loops: bool) -> TokenGraph:
        """Make the graph along chains and in space; padding has no edges."""

        def near(structure: Structure) -> TokenGraph:
            along = structure.window_graph(window, self_loops=self_loops)
            if not neighbors:
                return along
            return union(along, structure.neighbor_graph(neighbors))

        return self.of_each(near)

    @eager
    def of_each(self, make: Callable[[Structure], TokenGraph]) -> TokenGraph:
        """Join the graphs that `make` returns for every structure."""
        graphs = []
        for structure, padding in zip(self.structures, self.padding, strict=True):
            graphs.append(make(structure))
            if padding:
                # List the edges: a structure without edges would count as causal, and so would the
                # batch.
                edges = torch.empty((2, 0), dtype=torch.int64, device=graphs[-1].device)
                graphs.append(
                    TokenGraph(edge_index=edges, num_targets=padding, num_sources=padding)
                )
        return graphs[0] if len(graphs) == 1 else batch(graphs)


def lay_out(
    structures: list[Structure], tokens: Any, device: torch.device, in_rows: bool = False
) -> ProteinLayout:
    """Lay out structures in tokens [*, N] of one, [N] of several, or [B, N] in padded rows.

    `tokens` are None if the structures alone determine their number. A single structure may be a
    padded row if `in_rows`.
    """
    sizes = [len(structure.sequence) for structure in structures]
    padding, valid = [0] * len(sizes), None
    rows: tuple[int, ...] = ()
    # A copy of the structure would compute the positions along its chains again.
    structures = [
        structure if structure.ca_positions.device == device else structure.to(device)
        for structure in structures
    ]
    if isinstance(tokens, Tensor) and tokens.dim() > 0:
        N = tokens.shape[-1]
        is_padded = len(tokens) > 1 or (in_rows and sizes[0] < N)
        if tokens.dim() == 2 and len(structures) == len(tokens) and is_padded:
            if max(sizes) > N:
                raise ValueError(
                    f"structure must have at most {N} residues, the length of the rows of tokens, "
                    f"got {max(sizes)}"
                )
            rows, padding = tuple(tokens.shape), [N - size for size in sizes]
            lengths = torch.tensor(sizes, device=device)
            valid = torch.arange(N, device=device) < lengths[:, None]
        elif sum(sizes) != N or (len(sizes) > 1 and tokens.dim() > 1):
            raise ValueError(
                f"structure must have one residue per token of tokens {list(tokens.shape)} (one "
                "Structure of N residues; or a list, packed in tokens [N] or one per row of "
                f"tokens [B, N]), got structures of {sizes} residues"
            )
    columns: list[list[Tensor]] = [[], [], []]
    for structure, more in zip(structures, padding, strict=True):
        for column, name in zip(columns, ("ca_positions", "chain_index", "positions"), strict=True):
            value = getattr(structure, name)
            column.append(torch.cat([value, value.new_zeros(more, *value.shape[1:])]))
    return ProteinLayout(structures, padding, rows, Residues(*map(torch.cat, columns)), valid)


def graph_of_track(
    name: str,
    length: int,
    is_chain: bool,
    window: int,
    graph: TokenGraph,
    layout: ProteinLayout | None,
    rows: tuple[int, ...],
) -> TokenGraph:
    """Return the graph of a track: a residue sees the rows near its own, or all of another chain.

    A track has `length` rows (per row of a padded batch). `rows` are (B, N) of padded proteins, or
    ().
    """
    sizes = [targets for targets, _ in graph.sizes]
    several = len(layout.structures) > 1 if layout is not None else len(sizes) > 1
    N = rows[1] if rows else graph.num_targets
    if is_chain:
        if several and not rows:
            raise ValueError(
                f"context[{name!r}] must be a pair (tokens, graph) if proteins are packed, because "
                "the graph says which chain belongs to which protein"
            )
        one = bipartite_complete_graph(N, length)
        return batch([one] * rows[0]) if rows else one
    if length not in (N, graph.num_targets):
        raise ValueError(
            f"context[{name!r}] must have one row per token ({N}), got {length} rows: for another "
            "number give a pair (track, graph), whose graph says which rows a token sees"
        )
    if layout is not None:
        return layout.of_each(lambda structure: structure.window_graph(window, self_loops=True))
    if len(sizes) == 1:
        return bipartite_window_graph(graph.num_targets, window)
    return batch([bipartite_window_graph(size, window) for size in sizes])


def _shard_of(graph: Any) -> ShardedGraph | None:
    """Return a part of one rank among the graphs of a call, if the residues are divided."""
    one = graph[0] if isinstance(graph, list | tuple) and graph else graph
    return one if isinstance(one, ShardedGraph) else None


def _of_rank(shard: ShardedGraph, residues: Residues) -> Residues:
    """Return a rank's part of the residues of all ranks."""
    count = len(residues.positions) if residues.positions is not None else 0
    if count != shard.whole.num_targets:
        raise ValueError(
            f"structure must have the {shard.whole.num_targets} residues of all ranks, whose graph "
            f"is divided, got {count}"
        )
    return Residues(*(shard.split(x, dim=0) for x in residues))


class ProteinCall(NamedTuple):
    """Arguments that one call passes to the blocks."""

    tokens: Tensor
    graphs: list[BlockGraph]
    given: dict[str, Any]  # for every block
    rows: tuple[int, ...]  # (B, N) of padded proteins that are joined into one sequence; else ()
    residues: Residues
    edge_features: Any
    known: dict[Any, Tensor]  # features of edges, one tensor per graph
    context: dict[str, Track]
    codes: dict[str, Tensor]  # of source tracks, in the shape of the tokens


class ProteinCalls(ProteinScores):
    """Base of ProteinModel: the arguments of every block, from those of a call."""

    edges: ResidueEdges
    reaches: list[Reach]
    window: int
    neighbors: int
    context: dict[str, int | str]
    context_window: int
    edge_maps: nn.ModuleDict
    tracks: TrackEmbeddings
    sources: SourceTracks

    def _lay_out(self, structure: Any, tokens: Any) -> ProteinLayout:
        """Check the structures of a call and lay them out in its tokens."""
        if not self.structure:
            raise ValueError(
                "structure must be None in a model made with structure=False, got "
                f"{type(structure).__name__}"
            )
        is_list = isinstance(structure, list | tuple)
        structures = list(structure) if is_list else [structure]
        for one in structures:
            if not isinstance(one, Structure):
                raise ValueError(
                    "structure must be a graphattn.data.Structure or a list of them, got "
                    f"{type(one).__name__}"
                )
        return lay_out(structures, tokens, self.embedding.weight.device, is_list)

    def _graphs_in_space(self, layout: ProteinLayout) -> list[TokenGraph]:
        """Return one graph per block; those of consensus have no self-loops (without effect)."""
        has_loops = [reach != "near" for reach in self.reaches]
        return one_each(has_loops, lambda has: layout.graph(self.window, self.neighbors, has))

    @eager
    def _in_space(self, structure: Any, tokens: Any, graph: Graphs) -> tuple[ProteinLayout, Graphs]:
        """Return the layout of the structures of a call, and graphs if none are given."""
        layout = self._lay_out(structure, tokens)
        return layout, self._graphs_in_space(layout) if graph is None else graph

    def _call(
        self,
        tokens: Any,
        graph: Graphs,
        structure: Any,
        valid: Any,
        positions: Any,
        edge_features: Any,
        context: Any,
        tracks: Any,
    ) -> ProteinCall:
        if edge_features is not None:
            if graph is None:
                raise ValueError(
                    "graph must be given together with edge_features, which are features of its "
                    "edges, got None"
                )
            if not self.structure:
                raise ValueError(
                    "edge_features must be None in a model made with structure=False, got "
                    f"{type(edge_features).__name__}"
                )
        shard = _shard_of(graph)
        layout: ProteinLayout | None = None
        rows: tuple[int, ...] = ()
        shape = tuple(tokens.shape) if isinstance(tokens, Tensor) else ()
        if structure is not None:
            if positions is not None:
                raise ValueError(
                    "positions must be None if structure is given, which has its own, got "
                    f"{type(positions).__name__}"
                )
            # With parts of one rank, the structure is that of all ranks.
            layout, graph = self._in_space(structure, None if shard else tokens, graph)
            if shard is not None:
                layout = replace(layout, residues=_of_rank(shard, layout.residues))
            if layout.valid is not None:  # the contents of padding have no effect
                tokens = tokens.masked_fill(~layout.valid, 0)
        tokens = self._readable(tokens, valid)
        if positions is not None:
            check_positions(positions, tokens.shape)
        if layout is not None:
            positions = layout.residues.positions
            if layout.valid is not None:
                valid = layout.valid if valid is None else valid & layout.valid
        codes = self.sources.readable(tracks, shape, valid)
        if layout is not None and layout.valid is not None and valid is not None:
            rows = layout.rows  # join the rows into one sequence, with their padding
            tokens, valid = tokens.flatten(), valid.flatten()
            codes = {name: of_track.flatten() for name, of_track in codes.items()}
        graphs = list(self.graph_of_blocks(graph, tokens.shape[-1]))
        residues = layout.residues if layout is not None else Residues(positions=positions)
        given = {"valid": valid, "positions": positions}
        call = ProteinCall(
            tokens,
            graphs,
            {name: value for name, value in given.items() if value is not None},
            rows,
            residues,
            edge_features,
            {},
            {},
            codes,
        )
        if context is not None:
            call.context.update(self._tracks(context, call, layout, shape[:-1]))
        return call

    def _of_edges(self, place: int, graph: BlockGraph, call: ProteinCall) -> dict[str, Tensor]:
        """Return the features of the edges of a block as keyword arguments of its mixer."""
        layer: Any = self.blocks[place].mixer
        takes_bias = str(place) in self.edge_maps
        if not self.structure or not (takes_bias or getattr(layer, "edge_features", None)):
            return {}
        given = call.edge_features
        if isinstance(given, list | tuple):
            if len(given) != len(self.blocks):
                raise ValueError(
                    "edge_features must be one tensor for all blocks, or one per block "
                    f"({len(self.blocks)}), got {len(given)}"
                )
            given = given[place]
        if given is not None:
            features = given
        else:
            # Not id(graph): code compiled by torch.compile would then fit only one graph.
            key = [other is graph for other in call.graphs].index(True), takes_bias
            if key not in call.known:
                call.known[key] = self._known_of(graph, call.residues, takes_bias)
            features = call.known[key]
        if takes_bias:
            return {"edge_bias": self.edge_maps[str(place)](features)}
        return {"edge_features": features}

    def _known_of(self, graph: BlockGraph, residues: Residues, as_bias: bool) -> Tensor:
        """Return features of the edges of a graph, or of its offsets for a bias if these are
        enough."""
        dtype = self.embedding.weight.dtype
        if as_bias and residues.are_unknown:
            table = self.edges.of_offsets(graph, dtype)
            if table is not None:
                return table
        return self.edges.of_edges(graph, residues, dtype)

    def _tracks(
        self, context: Any, call: ProteinCall, layout: ProteinLayout | None, batch: tuple[int, ...]
    ) -> dict[str, Track]:
        """Embed the tracks of a call, and return them with their graphs and masks."""
        if not isinstance(context, Mapping) or not set(context) <= set(self.context):
            got = list(context) if isinstance(context, Mapping) else type(context).__name__
            raise ValueError(
                f"context must be a dict of the model's tracks ({', '.join(self.context) or 'none'}"
                f"), got {got}"
            )
        valid, positions = call.given.get("valid"), call.given.get("positions")
        tracks = {}
        for name, track in context.items():
            graph = None
            if isinstance(track, tuple | list) and len(track) == 2:
                track, graph = track
            is_chain = self.context[name] == "sequence"
            features, known = self.tracks.embed(name, track, self.embedding, torch.Size(batch))
            if call.rows:
                features = features.expand(*batch, *features.shape[-2:])
                known = known.expand(features.shape[:-1]).flatten()
                length, features = features.shape[-2], features.flatten(0, -2)
            else:
                length = features.shape[-2]
            if graph is None:
                of_tokens = call.graphs[0]
                if isinstance(of_tokens, ShardedGraph):
                    raise ValueError(
                        f"context[{name!r}] must be a pair (track, graph) if the tokens are "
                        "divided among ranks, got a track alone: divide the graph from residues to "
                        "rows of the track by graphattn.distributed.shard, too"
                    )
                graph = graph_of_track(
                    name, length, is_chain, self.context_window, of_tokens, layout, call.rows
                ).to(features.device)
            aligned = not is_chain and features.shape[-2] == call.tokens.shape[-1]
            if aligned and valid is not None:
                known = known & valid
            places = (positions, positions if aligned else None)
            tracks[name] = Track(features, graph, (valid, known), places)
        return tracks
