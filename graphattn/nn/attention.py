"""The base class of the softmax attention layers, and that of the two that use distances."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from graphattn.distributed.sharded_graph import ShardedGraph
from graphattn.graphs.arguments import as_float, as_int, as_share, as_softcap
from graphattn.graphs.token_graph import TokenGraph
from graphattn.nn.attention_steps import AttentionSteps
from graphattn.nn.base.across_ranks import (
    attention_on_ring,
    attention_own_first,
    attention_with_globals,
)
from graphattn.nn.base.graph_layer import Positions, Rotations, edge_mask, valid_for_propagate
from graphattn.nn.base.message_passing import OptTensor
from graphattn.nn.base.overrides import (
    message_takes,
    names_of,
    overridden_weights,
    propagate_without,
)
from graphattn.nn.blocks.value_embedding import ValueEmbedding
from graphattn.nn.rotary import RotaryEmbedding
from graphattn.ops.attention.api import attend, attention_weights
from graphattn.ops.attention.logits.edge_bias import check_edge_bias, per_edge
from graphattn.ops.attention.logits.score import (
    GaussianKernel,
    Score,
    bandwidth,
    capped,
    edge_logits,
)
from graphattn.ops.dropout import Kept, draw_seed, dropout_of_call
from graphattn.ops.inputs import (
    Valid,
    ValidPair,
    compute_dtype,
    full_precision,
    repeat_heads,
    valid_edges,
)
from graphattn.ops.segments import edge_softmax


class GraphAttention(AttentionSteps):
    """Softmax attention over the edges of a graph; a subclass defines the logit of an edge."""

    eps: float = 0.0
    qk_norm: bool = False
    input_divisor: float | None = None  # of a layer that scales its input in place
    merged_by = attention_on_ring, attention_with_globals, attention_own_first
    # What PyG's generated code passes to `message()`; the pair is (sources, targets).
    propagate_type: ClassVar = {
        "query": Tensor,
        "key": Tensor,
        "value": Tensor,
        "valid": tuple[OptTensor, OptTensor],
        "rowptr": Tensor,
        "edge_bias": OptTensor,
        "kept": OptTensor,
    }

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        context_dim: int | None = None,
        top_k: int | None = None,
        rope: bool | RotaryEmbedding = False,
        backend: str = "auto",
        attention_dropout: float = 0.0,
        sink: bool = False,
        softcap: float | None = None,
        value_embeddings: int | None = None,
    ) -> None:
        super().__init__(
            dim, heads, kv_heads=kv_heads, context_dim=context_dim, rope=rope, backend=backend
        )
        self.top_k = None if top_k is None else as_int("top_k", top_k, 1)
        self.attention_dropout = as_share("attention_dropout", attention_dropout)
        self.softcap = as_softcap(softcap)
        if not isinstance(sink, bool):
            raise ValueError(f"sink must be True or False, got {sink!r}")
        self.sink = nn.Parameter(torch.zeros(self.heads)) if sink else None
        if value_embeddings is not None:
            self.value_embedding = ValueEmbedding(
                value_embeddings, self.context_dim, self.kv_heads, self.head_dim
            )

    def reset_parameters(self) -> None:
        """Draw every projection anew; sinks return to 0."""
        super().reset_parameters()
        if self.sink is not None:
            nn.init.zeros_(self.sink)
        if self.embeds_values:
            self.value_embedding.reset_parameters()

    # What a subclass defines. One without projections for queries and keys overrides `project` and
    # `project_flat`.

    query_proj: nn.Linear
    key_proj: nn.Linear
    value_proj: nn.Linear | None

    def score(self) -> Score:
        """The function that gives the logit of an edge, for every backend and for steps.

        A layer of your own overrides this method and returns its own :class:`~graphattn.Score`.
        """
        raise NotImplementedError

    # The steps of the forward pass, in the order in which it runs them.

    def forward(
        self,
        x: Tensor,
        graph: TokenGraph | ShardedGraph | Tensor,
        context: Tensor | None = None,
        *,
        valid: Valid = None,
        positions: Positions = None,
        edge_bias: Tensor | None = None,
        return_attention_weights: bool = False,
        tokens: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Average the values of the sources of every target."""
        context = x if context is None else context
        given = {"edge_bias": edge_bias}
        if tokens is not None:  # an overridden forward_pass may not take it
            given["tokens"] = tokens
        out: Tensor | tuple[Tensor, Tensor] = self.forward_pass(
            x, context, graph, valid, positions, return_attention_weights, **given
        )
        return out

    def project(self, x: Tensor, context: Tensor, rotations: Rotations) -> tuple[Any, ...]:
        """Query [*, N, H, D], key and value [*, M, Hk, D], with rotated queries and keys."""
        if self.input_divisor is not None:
            own = context is x
            x = x / self.input_divisor
            context = x if own else context / self.input_divisor
        query, key = self.query_proj(x), self.key_proj(context)
        value = context if self.value_proj is None else self.value_proj(context)
        query, key = self.split(query, self.heads), self.split(key, self.kv_heads)
        if self.qk_norm:
            query, key = normalized(query), normalized(key)
        query, key = self.rotate(query, key, rotations)
        # Autocast leaves an unprojected value in float32 beside bfloat16 queries.
        return query, key, self.split(value, self.kv_heads).to(query.dtype)

    def sides(self, projected: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        query, key, value = projected
        return (query,), (key, value)

    def from_sides(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> tuple[Any, ...]:
        return *targets, *sources

    def fetch(
        self, shard: ShardedGraph, projected: Any, valid: ValidPair, of_edges: dict[str, Tensor]
    ) -> Any:
        query, key, value = projected
        bias, like = shard.edge_bias(of_edges.get("edge_bias")), query.shape[:-3]
        if bias is not None:  # before rows travel, so that other ranks are told of an error
            check_edge_bias(bias, shard.graph, self.heads, bias.dtype, query.device, like)
        graph, (key, value), valid = shard.fetch((key, value), (-3, -3), valid)
        return (query, key, value), graph, valid, _bias_argument(bias)

    def unfused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        graph: TokenGraph,
        valid: ValidPair,
        *,
        edge_bias: Tensor | None = None,
    ) -> Tensor:
        """:meth:`mix` edge by edge: the sums of :meth:`message`."""
        self.check_message_masks(valid)
        if edge_bias is not None:
            self.check_message_bias()
        propagate = propagate_without(self, "edge_bias") if edge_bias is None else self.propagate
        dtype = compute_dtype(query.dtype)
        with full_precision(query.device):
            averages: Tensor = propagate(
                graph.edge_index,
                size=(graph.num_sources, graph.num_targets),
                query=query.to(dtype),
                key=repeat_heads(key, self.heads).to(dtype),
                value=repeat_heads(value, self.heads).to(dtype),
                valid=valid_for_propagate(valid),
                rowptr=graph.rowptr,
                edge_bias=self.bias_of_edges(edge_bias, query, graph),
                kept=self.kept_edges(query, graph),
            )
        return averages.to(query.dtype)

    def message(
        self,
        query_i: Tensor,
        key_j: Tensor,
        value_j: Tensor,
        valid_i: Tensor | None,
        valid_j: Tensor | None,
        index: Tensor,
        rowptr: Tensor,
        edge_bias: Tensor | None = None,
    ) -> Tensor:
        """The message of every edge (i, j), weight_ij * v_j, [*, E, H, D].

        The weights are the softmax of the logits over the edges of target i. They sum to 1, or to
        less where `eps` or the sink takes a share. Edges that touch an invalid token, or that
        top_k leaves out, have weight 0.

        Args:
            query_i: [*, E, H, D], the query of the target i of every edge.
            key_j, value_j: [*, E, H, D], key and value of its source j.
            valid_i, valid_j: bool [*, E, 1, 1], whether target and source are valid; all if None.
            index: [E], the target of every edge, in rising order.
            rowptr: [N + 1]; the edges of target i are rowptr[i] .. rowptr[i + 1] - 1.
            edge_bias: [E, H] or [*, E, H], added to the logits; none if None.
        """
        keep = edge_mask(valid_i, valid_j)
        weights, keep = self.softmax(query_i, key_j, index, rowptr, keep, edge_bias)
        if keep is not None:  # because 0 * NaN is NaN
            value_j = value_j.masked_fill(~keep[..., None], 0)
        return weights[..., None] * value_j

    def softmax(
        self,
        query_i: Tensor,
        key_j: Tensor,
        index: Tensor,
        rowptr: Tensor,
        keep: Tensor | None,
        edge_bias: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """The weights of :meth:`message`, [*, E, H], and the edges that top_k has kept, too."""
        logits = capped(self.log_affinity(query_i, key_j), self.softcap)
        weights, _, keep = edge_softmax(
            logits if edge_bias is None else logits + edge_bias,
            index,
            rowptr,
            keep=keep,
            top_k=self.top_k,
            eps=self.eps,
            sink=self.sink_logits(query_i),
        )
        return weights, keep

    def log_affinity(self, query_i: Tensor, key_j: Tensor) -> Tensor:
        """The logit of every edge, [*, E, H], before the softcap and the bias.

        Args:
            query_i: [*, E, H, D], the query of the target of every edge.
            key_j: [*, E, H, D], the key of its source.
        """
        return edge_logits(self.score().ready(self.heads, query_i), query_i, key_j)

    def aggregate(
        self,
        inputs: Tensor,
        index: Tensor,
        ptr: Tensor | None = None,
        dim_size: int | None = None,
        kept: Tensor | None = None,
    ) -> Tensor:
        """The sum of the messages of every target, [*, N, H, D], with dropout.

        Dropout is done here and not in `message()`, so that it holds for an overridden `message()`,
        too.

        Args:
            inputs: [*, E, H, D], the messages.
            index: [E], the target of every edge.
            ptr, dim_size: as in PyG.
            kept: bool [*, E, H], the edges that dropout keeps; all if None.
        """
        if kept is not None:
            inputs = Kept(self.attention_dropout, kept[..., None]).weights(inputs)
        total: Tensor = super().aggregate(inputs, index, ptr, dim_size)
        return total

    def fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        graph: TokenGraph,
        valid: ValidPair,
        *,
        edge_bias: Tensor | None = None,
    ) -> Tensor:
        """:meth:`mix` as one operation on all edges; the sums of :meth:`message` are the same."""
        out, _ = attend(
            query,
            key,
            value,
            graph,
            valid,
            self.score(),
            top_k=self.top_k,
            eps=self.eps,
            edge_bias=edge_bias,
            backend=self.backend,
            sink=self.sink,
            softcap=self.softcap,
            dropout=self.current_dropout,
            needs_log_sums=False,
        )
        return out

    # The weights of edges.

    def edge_weights(
        self,
        query: Tensor,
        key: Tensor,
        graph: TokenGraph,
        valid: ValidPair,
        *,
        edge_bias: Tensor | None = None,
    ) -> Tensor:
        """The weights that :meth:`fused` averages with, [*, E, H]."""
        return attention_weights(
            query,
            key,
            graph,
            score=self.score(),
            top_k=self.top_k,
            eps=self.eps,
            edge_bias=edge_bias,
            valid=valid,
            sink=self.sink,
            softcap=self.softcap,
        )

    def weights_of_edges(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        graph: TokenGraph,
        valid: ValidPair,
        *,
        edge_bias: Tensor | None = None,
    ) -> Tensor:
        """:meth:`edge_weights`, or the weights that an overridden :meth:`log_affinity` gives."""
        replaced = overridden_weights(self)
        if not replaced:
            return self.edge_weights(query, key, graph, valid, **_bias_argument(edge_bias))
        if replaced != ("log_affinity",):
            raise ValueError(
                f"return_attention_weights=True: this {type(self).__name__} has its own "
                f"{names_of(replaced)}, and what it weighs an edge by is not known. Override "
                "edge_weights(query, key, graph, valid), too"
            )
        source, target = graph.edge_index
        dtype = compute_dtype(query.dtype)
        key = repeat_heads(key, self.heads).to(dtype)
        bias = self.bias_of_edges(edge_bias, query, graph)
        with full_precision(query.device):
            weights, _ = self.softmax(
                query.to(dtype).index_select(-3, target),
                key.index_select(-3, source),
                target,
                graph.rowptr,
                valid_edges(valid, source, target),
                bias,
            )
        return weights.to(query.dtype)

    # The options of a call.

    def check_message_bias(self) -> None:
        """Refuse a bias if `message()` is overridden and takes none: it would ignore the bias."""
        if not message_takes(self, "edge_bias"):
            raise ValueError(
                f"edge_bias cannot be used with the message() of {type(self).__name__}, which "
                "would ignore it: let it take edge_bias ([E, heads] or [*, E, heads], or None) and "
                "add it to its logits, or hand it on to super().message(...)"
            )

    def bias_of_edges(
        self, edge_bias: Tensor | None, query: Tensor, graph: TokenGraph
    ) -> Tensor | None:
        """The biases per edge and head, [E, H] or [*, E, H], checked and in the compute dtype."""
        dtype, batch = compute_dtype(query.dtype), query.shape[:-3]
        checked = check_edge_bias(edge_bias, graph, self.heads, dtype, query.device, batch)
        return per_edge(checked, graph)

    @property
    def current_dropout(self) -> float:
        """The share of weights that a call drops; 0 outside of training."""
        return self.attention_dropout if self.training else 0.0

    def kept_edges(self, query: Tensor, graph: TokenGraph) -> Tensor | None:
        """Mark the edges that dropout keeps in a call through `propagate`, bool [*, E, H].

        None if there is no dropout.
        """
        p = self.current_dropout
        if p == 0:
            return None
        if "kept" not in self._user_args:
            raise ValueError(
                f"attention_dropout = {p} cannot be used with the aggregate() of "
                f"{type(self).__name__}, which would not drop any message: let it take kept (bool "
                "[*, E, heads], or None) and hand it on to super().aggregate()"
            )
        dropout = dropout_of_call(p, draw_seed(None, query.device, graph), query, graph)
        source, target = graph.edge_index
        return dropout.kept_edges(source, target, query.shape[:-3])

    def sink_logits(self, like: Tensor) -> Tensor | None:
        """The sink of every head in the dtype of `like`, [heads]; None if there is none."""
        return None if self.sink is None else self.sink.to(like.dtype)

    def without_dropout(self) -> Self:
        """Return this layer, or a copy in eval mode that shares its weights."""
        if self.current_dropout == 0:
            return self
        in_eval_mode = copy.copy(self)
        in_eval_mode.training = False
        return in_eval_mode

    # Steps of generation.

    def project_flat(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Project tokens [*, dim] to query, key and value, before they are split and rotated.

        The value is None if values are the keys. The result is None if anything follows the
        rotation, or if embeddings of tokens are added to the values.
        """
        if self.embeds_values:
            return None
        if self.input_divisor is not None:
            x = x / self.input_divisor
        query, key = self.query_proj(x), self.key_proj(x)
        if self.qk_norm:
            query = normalized(self.split(query, self.heads))
            key = normalized(self.split(key, self.kv_heads))
        return query, key, x if self.value_proj is None else self.value_proj(x)

    def flat_projections(self) -> tuple[nn.Linear | None, ...] | None:
        if self.embeds_values or self.input_divisor is not None:
            return None  # the C++ step of a whole block projects tokens as they are
        return None if self.qk_norm else (self.query_proj, self.key_proj, self.value_proj)


def normalized(x: Tensor) -> Tensor:
    """RMS norm of every head of x [*, H, D], without parameters (the QK norm of nanochat)."""
    # Autocast may compute it in float32, and queries must have the dtype of the values.
    return functional.rms_norm(x, x.shape[-1:]).to(x.dtype)


def _bias_argument(edge_bias: Tensor | None) -> dict[str, Tensor]:
    """The keyword argument `edge_bias`, left out if None: overridden methods may not take it."""
    return {} if edge_bias is None else {"edge_bias": edge_bias}


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

    def score(self) -> Score:
        return GaussianKernel(self.sigma, log_sigma=self.log_sigma)

    def sigma(self) -> Tensor:
        """The bandwidths, [heads] or [1]; float32 at least."""
        return bandwidth(self.log_sigma)
