"""What the three attention layers share: project, weigh the edges, average, project."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from torch import Tensor, nn
from torch_geometric.typing import OptTensor

from graphattn.graphs.arguments import as_float, as_int
from graphattn.graphs.token_graph import TokenGraph
from graphattn.nn.graph_layer import GraphLayer, Positions, edge_mask, valid_for_propagate
from graphattn.nn.rotary import RotaryEmbedding
from graphattn.ops.attention.api import attention_weights, rbf_attention
from graphattn.ops.inputs import Valid, ValidPair, compute_dtype, full_precision, repeat_heads
from graphattn.ops.segments import edge_softmax


class GraphAttention(GraphLayer):
    """Averages over the edges of a graph; subclasses say how alike two tokens are."""

    eps: float = 0.0
    # What PyG's generated code passes on; the pair is (sources, targets).
    propagate_type: ClassVar = {
        "query": Tensor,
        "key": Tensor,
        "value": Tensor,
        "valid": tuple[OptTensor, OptTensor],
        "rowptr": Tensor,
    }

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        top_k: int | None = None,
        rope: bool | RotaryEmbedding = False,
        backend: str = "auto",
    ) -> None:
        super().__init__(dim, heads, rope=rope, backend=backend)
        self.kv_heads = self.heads if kv_heads is None else as_int("kv_heads", kv_heads, 1)
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads = {heads}, got {kv_heads}")
        self.top_k = None if top_k is None else as_int("top_k", top_k, 1)

    def reset_parameters(self) -> None:
        """Draw every projection anew."""
        super().reset_parameters()
        for projection in self.children():
            if isinstance(projection, nn.Linear):
                projection.reset_parameters()

    # What a subclass states; those with projections call them query_proj, key_proj, value_proj.

    query_proj: nn.Linear
    key_proj: nn.Linear
    value_proj: nn.Linear | None
    output_proj: nn.Linear

    def log_affinity(self, query_i: Tensor, key_j: Tensor) -> Tensor:
        """How alike the two tokens of every edge are, [*, E, H]."""
        raise NotImplementedError

    def fused(
        self, query: Tensor, key: Tensor, value: Tensor, graph: TokenGraph, valid: ValidPair
    ) -> Tensor:
        """The operation that gives the same as `propagate`, [*, N, H, D]."""
        raise NotImplementedError

    def edge_weights(
        self, query: Tensor, key: Tensor, graph: TokenGraph, valid: ValidPair
    ) -> Tensor:
        """The weights of the operation, [*, E, H]."""
        raise NotImplementedError

    # What they share.

    def project(
        self, x: Tensor, context: Tensor, graph: TokenGraph, positions: Positions
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query [*, N, H, D], key and value [*, M, Hk, D]; queries and keys rotated."""
        query = self.split(self.query_proj(x), self.heads)
        key = self.split(self.key_proj(context), self.kv_heads)
        value = context if self.value_proj is None else self.value_proj(context)
        query, key = self.rotate(query, key, graph, positions)
        # Autocast leaves an unprojected value in float32 beside bfloat16 queries.
        return query, key, self.split(value, self.kv_heads).to(query.dtype)

    def message(
        self,
        query_i: Tensor,
        key_j: Tensor,
        value_j: Tensor,
        valid_i: Tensor | None,
        valid_j: Tensor | None,
        index: Tensor,
        rowptr: Tensor,
    ) -> Tensor:
        """weight_ij * v_j, with weights that sum to 1 over the edges of target i."""
        weights, _, keep = edge_softmax(
            self.log_affinity(query_i, key_j),
            index,
            rowptr,
            keep=edge_mask(valid_i, valid_j),
            top_k=self.top_k,
            eps=self.eps,
        )
        if keep is not None:  # 0 * NaN is NaN
            value_j = value_j.masked_fill(~keep[..., None], 0)
        return weights[..., None] * value_j

    def attend(
        self,
        x: Tensor,
        context: Tensor,
        context_dim: int,
        graph: Any,
        valid: Valid,
        positions: Positions,
        return_attention_weights: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The forward pass of every attention layer."""
        x, context, graph, pair = self.prepare(
            x, context, context_dim, graph, valid, per_edge=return_attention_weights
        )
        query, key, value = self.project(x, context, graph, positions)
        if self.uses_propagate():
            dtype = compute_dtype(query.dtype)
            with full_precision(x.device):
                mixed = self.propagate(
                    graph.edge_index,
                    size=(graph.num_sources, graph.num_targets),
                    query=query.to(dtype),
                    key=repeat_heads(key, self.heads).to(dtype),
                    value=repeat_heads(value, self.heads).to(dtype),
                    valid=valid_for_propagate(pair),
                    rowptr=graph.rowptr,
                ).to(query.dtype)
        else:
            mixed = self.fused(query, key, value, graph, pair)
        out = self.output_proj(mixed.flatten(-2))
        if not return_attention_weights:
            return out
        return out, self.edge_weights(query, key, graph, pair)


class DistanceAttention(GraphAttention):
    """Attention whose affinity is a Gaussian of the distance, with learned bandwidths sigma."""

    init_sigma: float
    log_sigma: nn.Parameter

    def initial_sigma(self, init_sigma: float | None) -> float:
        """The bandwidth at the start: sqrt(D) unless given."""
        if init_sigma is None:
            return math.sqrt(self.head_dim)
        return as_float("init_sigma", init_sigma, positive=True)

    def reset_parameters(self) -> None:
        """Draw every projection anew and return to the initial bandwidth."""
        super().reset_parameters()
        nn.init.constant_(self.log_sigma, math.log(self.init_sigma))

    def log_affinity(self, query_i: Tensor, key_j: Tensor) -> Tensor:
        distance = (query_i - key_j).square().sum(-1)
        return -distance / (2 * self.sigma().to(distance.dtype) ** 2)

    def sigma(self) -> Tensor:
        """The bandwidths, [heads] or [1]; float32 at least."""
        return self.log_sigma.to(compute_dtype(self.log_sigma.dtype)).exp()

    def fused(
        self, query: Tensor, key: Tensor, value: Tensor, graph: TokenGraph, valid: ValidPair
    ) -> Tensor:
        return rbf_attention(
            query,
            key,
            value,
            graph,
            self.sigma(),
            top_k=self.top_k,
            eps=self.eps,
            valid=valid,
            backend=self.backend,
        )

    def edge_weights(
        self, query: Tensor, key: Tensor, graph: TokenGraph, valid: ValidPair
    ) -> Tensor:
        return attention_weights(
            query, key, graph, sigma=self.sigma(), top_k=self.top_k, eps=self.eps, valid=valid
        )
