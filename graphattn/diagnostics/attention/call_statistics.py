"""Statistics of one attention call, and the weights that are stored of it."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from graphattn.diagnostics.attention.operands import Operands
from graphattn.diagnostics.attention.statistics import (
    attention_entropy,
    head_diversity,
    sink_share,
)
from graphattn.diagnostics.attention.step_calls import StepOperands
from graphattn.graphs import TokenGraph, bipartite_complete_graph, complete_graph
from graphattn.ops.inputs import compute_dtype

Keep = Literal["weights", "mean", "statistics"]


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """One call of attention, with B sequences, H heads, Q queries and K keys."""

    name: str  #: the name of the module, as in ``model.named_modules()``
    shape: tuple[int, int, int, int]  #: B, H, Q, K
    sinks: Tensor  #: the share of the sink token, [B, H]; NaN if undefined
    entropy: Tensor  #: the entropy of rows in nats, [B, H]; NaN for negative weights
    diversity: Tensor  #: the diversity of heads, [B]; NaN for one head or negative weights
    effective_rank: Tensor  #: the effective rank of the outputs, [B]
    kept: Tensor | None = None  #: the stored weights, as `keep` says
    edges: TokenGraph | None = None  #: the graph of the stored weights; None: they are matrices
    keep: Keep = "weights"  #: what is stored
    same_tokens: bool | None = None  #: whether it is self-attention; None if not known
    signed: bool = False  #: whether some weights are negative, so that they are no shares

    @property
    def matrix(self) -> Tensor:
        """Weights [B, H, Q, K]; 0 for keys that a query may not see, and in rows of padding."""
        return self._dense(self._stored("weights"))

    @property
    def graph(self) -> TokenGraph:
        """The graph of `weights`: that of the layer, or a complete graph."""
        if self.edges is not None:
            return self.edges
        Q, K = self.shape[2:]
        stored = self._stored("weights")
        graph = complete_graph(Q) if Q == K else bipartite_complete_graph(Q, K)
        return graph.to(stored.device)

    @property
    def weights(self) -> Tensor:
        """Weights per edge [B, E, H], in the order of ``graph.edge_index``."""
        stored = self._stored("weights")
        return stored if self.edges is not None else stored.permute(0, 2, 3, 1).flatten(1, 2)

    def mean_over_heads(self) -> Tensor:
        """Return the mean of the weights over heads, [B, Q, K]."""
        return self._dense(self._stored("mean")).mean(dim=1)

    def _stored(self, what: Keep) -> Tensor:
        if self.kept is None or (what == "weights" and self.keep == "mean"):
            raise ValueError(
                f"keep must be {what!r} in record() to get these weights, got keep={self.keep!r}"
            )
        return self.kept

    def _dense(self, stored: Tensor) -> Tensor:
        if self.edges is None:
            return stored
        source, target = self.edges.edge_index
        full = stored.new_zeros(len(stored), *self.shape[2:], stored.shape[-1])
        full[:, target, source] = stored
        return full.permute(0, 3, 1, 2)


def of_edges(
    name: str,
    weights: Tensor,
    output: Tensor,
    graph: TokenGraph,
    token: int,
    keep: Keep,
    valid: Tensor | None = None,
) -> RecordedCall:
    """Record a call of a layer of graphattn.nn, with weights [*, E, H] and output [*, N, dim].

    Linear attention with rope=True has negative weights, for which shares are not defined.
    """
    weights = weights.detach().reshape(-1, *weights.shape[-2:])
    heads = weights.shape[-1]
    target = graph.edge_index[1]
    total = weights.new_zeros(len(weights), graph.num_targets)
    real = total.index_add(1, target, weights.abs().sum(dim=-1)) > 0
    undefined = weights.new_full((len(weights), heads), torch.nan)
    signed = bool((weights < 0).any())
    stored = {"weights": weights, "mean": weights.mean(dim=-1, keepdim=True), "statistics": None}
    return RecordedCall(
        name,
        (len(weights), heads, graph.num_targets, graph.num_sources),
        undefined if signed else _sinks(weights, graph, token, valid),
        undefined if signed else attention_entropy(weights, graph),
        head_diversity(weights, graph) if heads > 1 and not signed else undefined[:, 0],
        ranks(output.detach().reshape(len(weights), graph.num_targets, -1), real),
        stored[keep],
        graph,
        keep,
        signed=signed,
    )


def _sinks(weights: Tensor, graph: TokenGraph, token: int, valid: Tensor | None) -> Tensor:
    """Compute `sink_share` of a token counted from the first real one of every sequence; [B, H]."""
    in_one = len(graph.sizes) == 1 and graph.num_sources > 0 and graph.source_positions[0] == 0
    fits = valid is not None and valid.shape[-1] == graph.num_sources > token
    permuted = graph.own_positions is not None  # the first token may be anywhere in it
    if valid is None or not fits or not in_one or permuted:
        return sink_share(weights, graph, token)
    return _shares(weights, graph, _places(valid, len(weights), token), itself=True)


def _places(valid: Tensor, batch: int, token: int) -> Tensor:
    """Find the place of the token among the sources of every sequence, [B]; -1 if absent."""
    valid = valid.reshape(-1, valid.shape[-1])
    valid = valid.repeat_interleave(batch // len(valid), dim=0) if len(valid) == 1 else valid
    at = valid & (valid.long().cumsum(dim=1) == token + 1)
    return torch.where(at.any(dim=1), at.long().argmax(dim=1), -1)


def _shares(weights: Tensor, graph: TokenGraph, places: Tensor, *, itself: bool) -> Tensor:
    """Compute `sink_share` with one token per sequence; NaN where its place is -1.

    `itself` says whether a target at the token's position counts as a query in graphs where it may
    be another token.
    """
    shares = weights.new_full((len(weights), weights.shape[-1]), torch.nan)
    row = graph.positions[graph.edge_index[1]]
    for place in places.unique().tolist():
        if place >= 0:
            selected = weights[places == place]
            selected = selected if itself else selected.masked_fill((row == place)[:, None], 0)
            shares[places == place] = sink_share(selected, graph, place)
    return shares


def of_step(
    name: str, weights: Tensor, output: Tensor, step: StepOperands, token: int, keep: Keep
) -> RecordedCall:
    """Record a step of generation.

    If a window does not reach the sink token, its share is 0, as in a forward pass. If the text is
    not long enough to have this token, the share is NaN.
    """
    graph, valid = step.graph, step.valid[1]
    call = of_edges(name, weights, output, graph, 0, keep)
    if call.signed:
        return call
    weights = weights.detach().reshape(-1, *weights.shape[-2:])
    B, M = len(weights), graph.num_sources
    if valid is None or step.cut is None:
        place = token - step.first
        places = torch.full((B,), place if place < M else -1, device=weights.device)
        cut = places.new_full((B,), place < 0, dtype=torch.bool)
    else:
        places, cut = _places(valid, B, token), step.cut.reshape(-1)
    shares = _shares(weights, graph, places.masked_fill(cut, -1), itself=False)
    return replace(call, sinks=torch.where(cut[:, None], call.sinks * 0, shares))


def of_operands(name: str, call: Operands, token: int, keep: Keep) -> RecordedCall:
    """Record an attention call of another library's layer, in blocks of rows."""
    B, H, Q, K = call.shape
    seen = call.seen_keys()
    # A cache may have free places, which no query may see yet.
    ends = int((seen.any(dim=0) * torch.arange(1, K + 1, device=seen.device)).max()) if K else 0
    # If it is not known that queries and keys are the same tokens, a key that no query may see
    # does not mean that the query at its place is padding.
    same_tokens = bool(call.same_tokens) and (max(Q, ends) == Q if K > Q else K == Q)
    real = seen[:, :Q] if same_tokens else seen.new_ones(B, Q)
    at = seen.long().cumsum(dim=1) == token + 1
    column = (at & seen).long().argmax(dim=1)  # the place of the token in every sequence
    has_token = at.any(dim=1)
    if not has_token.any():
        most = int(seen.sum(dim=1).max()) if K else 0
        raise ValueError(
            f"token must be the number of one of the {most} real tokens of {name!r}, got {token}"
        )

    sink = torch.zeros(B, H, dtype=call.dtype, device=call.device)
    entropy, rows, num_queries = sink.clone(), sink.clone(), sink.clone()
    distances, pairs = sink[:, 0].clone(), sink[:, 0].clone()
    stored, attending = [], []
    for start, stop in call.blocks():
        weights = call.rows(start, stop).masked_fill(~real[:, None, start:stop, None], 0)
        total = weights.sum(dim=-1)
        counts = total > 0  # [B, H, q]
        attending.append(counts.any(dim=1))
        on_token = weights.gather(-1, column[:, None, None, None].expand(B, H, stop - start, 1))
        others = counts
        if same_tokens:
            row = torch.arange(start, stop, device=call.device)
            others = counts & (row != column[:, None])[:, None]
        sink += (on_token[..., 0] * others).sum(dim=-1)
        num_queries += others.sum(dim=-1)
        nats = -torch.special.xlogy(weights, weights).sum(dim=-1)
        total = total.masked_fill(~counts, 1)
        entropy += ((nats / total + total.log()).clamp_min(0) * counts).sum(dim=-1)
        rows += counts.sum(dim=-1)
        if H > 1:
            # A loop over pairs is four to nine times as fast as sorting the heads.
            for g, h in itertools.combinations(range(H), 2):
                distance = (weights[:, g] - weights[:, h]).abs_().sum(dim=(1, 2))
                distances += distance / 2 / math.comb(H, 2)
            pairs += counts.any(dim=1).sum(dim=-1)
        if keep != "statistics":
            stored.append(weights if keep == "weights" else weights.mean(dim=1, keepdim=True))
    sink = (sink / num_queries).masked_fill(~has_token[:, None], torch.nan)
    output = call.output.detach().reshape(B, Q, -1)
    return RecordedCall(
        name,
        call.shape,
        sink,
        entropy / rows,
        distances / pairs,
        ranks(output, torch.cat(attending, dim=1) if attending else real),
        torch.cat(stored, dim=2) if stored else None,
        None,
        keep,
        call.same_tokens,
    )


def ranks(x: Tensor, real: Tensor) -> Tensor:
    """Compute the participation ratio of every sequence's real tokens [B, N, C]; [B].

    (sum of eigenvalues)^2 / (sum of their squares) is computed without eigenvalues, from the trace
    and the norm of the smaller of the two Gram matrices. It is 0 if all tokens are equal.
    """
    x = x.to(compute_dtype(x.dtype))
    ratios = []
    for tokens, is_real in zip(x, real, strict=True):
        tokens = tokens[is_real]
        if len(tokens) == 0:
            ratios.append(x.new_tensor(torch.nan))
            continue
        centred = tokens - tokens.mean(dim=0)
        rounding = tokens.abs().max() * (16 * torch.finfo(x.dtype).eps)
        if not centred.square().sum() > rounding.square() * tokens.numel():
            ratios.append(x.new_tensor(0.0 if tokens.isfinite().all() else torch.nan))
            continue
        centred = centred / centred.abs().max()  # avoids overflow in the fourth powers below
        small = len(tokens) < tokens.shape[1]
        gram = centred @ centred.mT if small else centred.mT @ centred
        ratios.append(gram.diagonal().sum().square() / gram.square().sum())
    return torch.stack(ratios)
