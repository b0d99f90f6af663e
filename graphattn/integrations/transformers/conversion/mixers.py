"""Modules that `convert` puts into a model.

They are attention by distance, attention with fewer projections, and consensus.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import wrap_torch_function

from graphattn.graphs.arguments import as_choice, as_float, as_int
from graphattn.graphs.token_graph import TokenGraph
from graphattn.integrations.transformers.conversion.families import (
    Family,
    value_projection,
    without_values,
)
from graphattn.integrations.transformers.conversion.replacement import (
    Bandwidth,
    ReplacedCall,
    Replacement,
    device_and_dtype,
    heads_of,
    key_heads_of,
)
from graphattn.integrations.transformers.masks.graphs import SeenEdges
from graphattn.integrations.transformers.masks.mask_function import is_sketch
from graphattn.nn.edges.network import EdgeNetwork
from graphattn.ops import consensus_update, dot_product_attention, rbf_attention
from graphattn.ops.inputs import ValidPair

WINDOW = 2  # of consensus, as in the paper: two tokens on each side, or before


class ReplacedAttention(Replacement):
    """Weighted averages over the tokens that a token sees; `operation` computes them."""

    # A mode for torch functions, such as graphattn.diagnostics.record, sees every call.
    @wrap_torch_function(lambda self, query, key, value, *_: (query, key, value))
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, call: ReplacedCall
    ) -> Tensor:
        """Average values [B, Hk, K, D] by queries [B, H, Q, D] and keys: [B, Q, H, D]."""
        seen = self.seen(call, hidden, key.shape[2])
        keys = slice(seen.keys.start, seen.keys.stop)
        q, k, v = (x.transpose(1, 2) for x in (query, key[:, :, keys], value[:, :, keys]))
        q, k = q.to(v.dtype), k.to(v.dtype)  # with autocast, dtypes can differ
        if seen.packed:
            q, k, v = (x.reshape(1, -1, *x.shape[2:]) for x in (q, k, v))
        valid = None if seen.valid is None else (None, seen.valid)
        dropout = self.dropout_of_weights if self.training else 0.0
        out = self.operation(q, k, v, seen.graph, valid=valid, dropout=dropout)
        return out.reshape(*hidden.shape[:2], self.heads, -1)

    def operation(self, query: Tensor, key: Tensor, value: Tensor, graph: Any, **kw: Any) -> Tensor:
        """Call the operation of this library."""
        raise NotImplementedError

    def slices(self, hidden: Tensor) -> Tensor:
        """Return the slices of the hidden states for each head, [B, H, Q, D]."""
        return hidden.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def keep(self, replaced: nn.Module, *names: str) -> None:
        """Copy references to projections, and to norms of queries and keys if there are any."""
        for name in (*names, *(("q_norm", "k_norm") if self.family.norms else ())):
            if hasattr(replaced, name):
                setattr(self, name, getattr(replaced, name))

    def projected(self, hidden: Tensor, parts: int) -> tuple[Tensor, ...]:
        """Compute queries, keys and (for 3 parts) values as the model does: [B, Hx, Q, D]."""
        family, D = self.family, self.head_dim
        if family.fused is None:
            names = (family.query, family.key, family.value)[:parts]
            made = [getattr(self, name)(hidden) for name in names]
            if family.norms == "full":
                made[0] = self.normed("q_norm", made[0]).to(hidden.dtype)
                made[1] = self.normed("k_norm", made[1]).to(hidden.dtype)
            heads = [x.unflatten(-1, (-1, D)) for x in made]
        else:
            all_of_them = getattr(self, family.query)(hidden)
            layout = (parts, -1, D) if family.fused == "thirds" else (-1, parts, D)
            where = -3 if family.fused == "thirds" else -2
            heads = list(all_of_them.unflatten(-1, layout).unbind(where))
        if family.norms == "head":
            heads[0] = self.normed("q_norm", heads[0])
            heads[1] = self.normed("k_norm", heads[1])
        query, key, *value = (x.transpose(1, 2) for x in heads)
        return query, key, *value

    def normed(self, name: str, x: Tensor) -> Tensor:
        norm = getattr(self, name, None)
        return x if norm is None else norm(x)


class ReplacedByGaussianKernel(ReplacedAttention):
    """Gaussian kernel attention: queries, keys and values are slices of the hidden states."""

    mixer = "gka"

    def __init__(
        self,
        replaced: nn.Module,
        family: Family,
        *,
        window: int | None = None,
        init_sigma: float | None = None,
        normalize: bool = False,
        eps: float = 0.0,
        rope: bool | None = None,
    ) -> None:
        super().__init__(replaced, family, window=window)
        sigma = self.head_dim**0.5
        if init_sigma is not None:
            sigma = as_float("init_sigma", init_sigma, positive=True)
        self.normalize = bool(normalize)
        self.eps = as_float("eps", eps, positive=False)
        self.choose_rotation(rope)
        self.bandwidth = Bandwidth(self.heads, sigma, *device_and_dtype(replaced))

    def mix(self, hidden: Tensor, call: ReplacedCall) -> Tensor:
        (features,) = self.rotate(call, self.slices(hidden))
        features = features.to(hidden.dtype)
        if self.normalize:
            features = functional.rms_norm(features, features.shape[-1:])
        if call.cache is None:
            key = value = features
        else:
            key, value = self.remember(call, features, features)
        return self.attend(features, key, value, hidden, call)

    def operation(self, query: Tensor, key: Tensor, value: Tensor, graph: Any, **kw: Any) -> Tensor:
        sigma = self.bandwidth(query)
        return rbf_attention(query, key, value, graph, sigma, eps=self.eps, **kw)


class ValueLess(ReplacedAttention):
    """Softmax attention whose values are slices of the hidden states."""

    mixer = "vlt"

    def __init__(
        self,
        replaced: nn.Module,
        family: Family,
        *,
        window: int | None = None,
        top_k: int | None = None,
    ) -> None:
        super().__init__(replaced, family, window=window)
        self.top_k = None if top_k is None else as_int("top_k", top_k, 1)
        self.softcap = getattr(replaced, "attn_logit_softcapping", None)
        if family.fused is None:
            self.keep(replaced, family.query, family.key)
        else:
            fused = without_values(getattr(replaced, family.query), family, self.head_dim)
            setattr(self, family.query, fused)

    def mix(self, hidden: Tensor, call: ReplacedCall) -> Tensor:
        query, key = self.projected(hidden, 2)
        query, key = self.rotate(call, query, key)
        value = self.slices(hidden)
        key, value = self.remember(call, key.to(hidden.dtype), value)
        return self.attend(query, key, value, hidden, call)

    def operation(self, query: Tensor, key: Tensor, value: Tensor, graph: Any, **kw: Any) -> Tensor:
        return dot_product_attention(
            query, key, value, graph, scale=self.scale, softcap=self.softcap, top_k=self.top_k, **kw
        )


class Krause(ReplacedAttention):
    """Krause attention: the model's own projections, weights by distance, only the nearest."""

    mixer = "krause"

    def __init__(
        self,
        replaced: nn.Module,
        family: Family,
        *,
        window: int | None = None,
        top_k: int | None = None,
        init_sigma: float | None = None,
        sigma_per_head: bool = True,
    ) -> None:
        super().__init__(replaced, family, window=window)
        self.top_k = None if top_k is None else as_int("top_k", top_k, 1)
        sigma = self.scale**-0.5  # logits then differ from the model's only by squared lengths
        if init_sigma is not None:
            sigma = as_float("init_sigma", init_sigma, positive=True)
        self.keep(replaced, *family.projections)
        count = self.heads if sigma_per_head else 1
        self.bandwidth = Bandwidth(count, sigma, *device_and_dtype(replaced))
        self.key_heads = key_heads_of(replaced, family)

    def mix(self, hidden: Tensor, call: ReplacedCall) -> Tensor:
        query, key, value = self.projected(hidden, 3)
        query, key = self.rotate(call, query, key)
        key, value = self.remember(call, key.to(value.dtype), value)
        return self.attend(query, key, value, hidden, call)

    def operation(self, query: Tensor, key: Tensor, value: Tensor, graph: Any, **kw: Any) -> Tensor:
        sigma = self.bandwidth(query)
        return rbf_attention(query, key, value, graph, sigma, top_k=self.top_k, **kw)


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
        edge_networks: Literal["per_head", "shared"] | None = None,
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
            edge_networks=edge_networks,
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
