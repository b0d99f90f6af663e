"""Consensus as a replacement of a model's attention."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from graphattn.graphs.arguments import as_choice, as_float, as_int
from graphattn.graphs.token_graph import TokenGraph
from graphattn.integrations.transformers.conversion.families import Family, value_projection
from graphattn.integrations.transformers.conversion.replacement import (
    ReplacedCall,
    Replacement,
    heads_of,
)
from graphattn.integrations.transformers.masks.graphs import SeenEdges
from graphattn.integrations.transformers.masks.mask_function import is_sketch
from graphattn.nn.edges.network import EdgeNetwork
from graphattn.ops import consensus_update
from graphattn.ops.inputs import ValidPair

WINDOW = 2  # as in the paper: two tokens on each side, or before


class Consensus(Replacement):
    """One consensus step of every token towards the tokens that it sees, with a matrix per edge.

    The state is ``source_proj(hidden)``, which starts as the model's value projection. The moved
    state goes through the model's output projection. Without a step, this would be attention of
    every token to itself.
    """

    mixer = "consensus"
    no_attention_weights: ClassVar = "consensus has no attention weights"

    def __init__(
        self,
        replaced: nn.Module,
        family: Family,
        *,
        window: int | Literal["default"] | None = "default",
        rank: int = 4,
        edge_hidden: int = 256,
        step_size: float | Literal["auto"] = "auto",
        update: Literal["energy", "target"] | None = None,
        rope: bool | Literal["isometric"] | None = None,
        edge_input: Literal["head", "full"] = "head",
        trunk: Literal["shared", "separate"] = "shared",
    ) -> None:
        causal = bool(getattr(replaced, "is_causal", False))
        if window == "default":
            window = WINDOW + 1 if causal else WINDOW
        assert not isinstance(window, str)
        super().__init__(replaced, family, window=window)
        if isinstance(step_size, str):
            self.step_size: Any = as_choice("step_size", step_size, ("auto",))
        else:
            self.step_size = as_float("step_size", step_size, positive=True)
        if update is None:
            update = "target" if causal else "energy"
        self.update: Any = as_choice("update", update, ("energy", "target"))
        if causal and self.update == "energy":
            raise ValueError(
                "update must be 'target' in a causal model, got 'energy', which leaks the future: "
                "an edge also moves its earlier token, which then depends on the later one"
            )
        isometric = rope in (None, "isometric")
        self.choose_rotation(None if rope is None else bool(rope))
        self.isometric = isometric and self.rotation is not None
        if self.rotation is not None and not self.isometric and self.step_size == "auto":
            raise ValueError(
                "step_size='auto' needs rope=False or rope='isometric': with rope=True (Eq. 42) "
                "the update is not a gradient step, and no bound on R gives a safe step size. "
                "Change rope, or set step_size to a number"
            )
        projection = value_projection(replaced, family, heads_of(replaced, family), self.head_dim)
        dim = self.heads * self.head_dim
        self.source_proj = projection
        self.edge_net = EdgeNetwork(
            self.heads,
            self.head_dim,
            dim,
            dim,
            rank=as_int("rank", rank, 1),
            hidden=as_int("edge_hidden", edge_hidden, 1),
            edge_input=as_choice("edge_input", edge_input, ("head", "full")),
            trunk=as_choice("trunk", trunk, ("shared", "separate")),
        ).to(projection.weight)

    def mix(self, hidden: Tensor, call: ReplacedCall) -> Tensor:
        if call.cache is not None and self.update == "energy":
            raise ValueError(
                "cache (past_key_values) must be None with update='energy', which would also move "
                "the tokens in the cache: convert with update='target', or pass use_cache=False"
            )
        state = self.source_proj(hidden).unflatten(-1, (self.heads, -1))  # [B, Q, H, D]
        turned = self.turned(state, call)
        compared, neighbors = turned.transpose(1, 2), hidden.unflatten(-1, (self.heads, -1))
        neighbors = neighbors.transpose(1, 2).to(compared.dtype)
        compared, neighbors = self.remember(call, compared, neighbors)  # [B, H, K, D]
        seen = self.seen(call, hidden, compared.shape[2])
        keys = slice(seen.keys.start, seen.keys.stop)
        context = neighbors[:, :, keys].transpose(1, 2).flatten(-2)
        of_sources = compared[:, :, keys].transpose(1, 2)
        graph, valid = self.edges(seen, call, hidden)
        u, of_targets = (turned if self.isometric else state), turned
        x = hidden.to(state.dtype)
        if seen.packed:
            u, of_targets, of_sources = (
                t.reshape(1, -1, *t.shape[2:]) for t in (u, of_targets, of_sources)
            )
            x, context = (t.reshape(1, -1, t.shape[-1]) for t in (x, context))
        on_targets, on_sources = self.edge_net.first_layers(x, context)
        moved = consensus_update(
            u,
            of_sources,
            on_targets,
            on_sources,
            self.edge_net.second_layer(),
            graph,
            self.step_size,
            update=self.update,
            disagreement=(of_targets, of_sources),
            valid=valid,
        )
        moved = moved.reshape(state.shape)
        return self.turned_back(moved, call) if self.isometric else moved

    def turned(self, state: Tensor, call: ReplacedCall) -> Tensor:
        """Rotate states [B, Q, H, D] by position."""
        (rotated,) = self.rotate(call, state.transpose(1, 2))
        return rotated.transpose(1, 2).to(state.dtype)

    def turned_back(self, state: Tensor, call: ReplacedCall) -> Tensor:
        """Apply the inverse rotation; if the model also scales (YaRN), it is not the transpose."""
        assert call.rotation is not None
        cos, sin = call.rotation
        size = cos.square() + sin.square()
        return self.turned(state, call._replace(rotation=(cos / size, -sin / size)))

    def edges(
        self, seen: SeenEdges, call: ReplacedCall, hidden: Tensor
    ) -> tuple[TokenGraph, ValidPair]:
        """Return the graph and the valid targets and sources; "energy" moves sources, too."""
        graph, valid = seen.graph, seen.valid
        if self.update == "target":
            return graph, (None, valid)
        if call.is_causal:
            raise ValueError(
                "is_causal must be False in a layer converted with update='energy', which moves "
                "both tokens of an edge, got True: convert with update='target'"
            )
        if call.mask is None or is_sketch(call.mask):
            return graph, (valid, valid)
        graph, valid = components(graph), seen_at_all(graph, valid)
        return graph, (valid, valid)


def seen_at_all(graph: TokenGraph, valid: Tensor | None) -> Tensor:
    """Return which tokens are seen by any token; others are padding, which must not move tokens."""
    tokens = torch.zeros(graph.num_sources, dtype=torch.bool, device=graph.edge_index.device)
    tokens[graph.edge_index[0]] = True
    return tokens if valid is None else tokens & valid


def components(graph: TokenGraph) -> TokenGraph:
    """Split a graph into a batch of runs of tokens without edges between them.

    A safe step size is one number per sequence, so the ends of sequences must be known, also of
    several that are packed in a row.
    """
    source, target = graph.edge_index
    first, last = torch.minimum(source, target), torch.maximum(source, target)
    crossing = torch.zeros(graph.num_targets + 1, dtype=torch.long, device=source.device)
    crossing.index_add_(0, first + 1, torch.ones_like(first))
    crossing.index_add_(0, last + 1, -torch.ones_like(last))
    starts = (crossing.cumsum(0)[:-1] == 0).nonzero().flatten().tolist()
    ends = [*starts[1:], graph.num_targets]
    sizes = tuple((end - start, end - start) for start, end in zip(starts, ends, strict=True))
    return TokenGraph(
        edge_index=graph.edge_index,
        num_targets=graph.num_targets,
        num_sources=graph.num_sources,
        sizes=sizes,
    )
