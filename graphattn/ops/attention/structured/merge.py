"""Which plan a graph takes, and graphs that are best done in parts, merged by their log-sums."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from graphattn.graphs.composites import Parts, Union
from graphattn.graphs.structure import Complete, GlobalTokens, Structure
from graphattn.graphs.token_graph import TokenGraph
from graphattn.ops.attention.structured import explicit
from graphattn.ops.attention.structured.contiguous import TilePlan
from graphattn.ops.attention.structured.recompute import Recomputed
from graphattn.ops.attention.structured.rows import RowPlan
from graphattn.ops.attention.structured.tiles import tiles_of
from graphattn.ops.inputs import ValidPair, clear_invalid

Result = tuple[Tensor, Tensor]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    graph: TokenGraph,
    *,
    score: str,
    scale: Tensor,
    edge_bias: Tensor | None = None,
    offset_bias: Tensor | None = None,
    top_k: int | None = None,
    valid: ValidPair = (None, None),
) -> Result:
    """Output [*, N, H, Dv] and log-sums [*, N, H]: every target averages the values it sees.

    `edge_bias` [E, H] is per edge, `offset_bias` [offsets, H] per relative offset.
    """
    batch = query.shape[:-3]
    B = batch.numel()

    def flat(x: Tensor) -> Tensor:
        return x.reshape(B, *x.shape[-3:])

    def flat_mask(mask: Tensor | None) -> Tensor | None:
        return None if mask is None else mask.expand(*batch, -1).reshape(B, mask.shape[-1])

    call = _Call(
        flat(clear_invalid(query, valid[0])),
        flat(clear_invalid(key, valid[1])),
        flat(clear_invalid(value, valid[1])),
        scale,
        score,
        top_k,
        (flat_mask(valid[0]), flat_mask(valid[1])),
    )
    structure = None if edge_bias is not None else graph.structure
    if top_k is not None and graph.num_targets and top_k >= int(graph.in_degree().max()):
        call, top_k = replace(call, top_k=None), None
    if structure is None or (offset_bias is not None and tiles_of(structure) is None):
        if offset_bias is not None:
            source, target = graph.edge_index
            edge_bias = offset_bias[graph.structure.offset_index(target, source)]  # type: ignore[union-attr]
        out, lse = call.run(RowPlan(*graph.csr(), score, top_k, call.valid), edge_bias)
    else:
        out, lse = _attend(structure, call, offset_bias)
    return out.view(*batch, *out.shape[1:]), lse.view(*batch, *lse.shape[1:])


@dataclass(frozen=True)
class _Call:
    """The tensors of a call, [B, N, H, D], and its options."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: Tensor
    score: str
    top_k: int | None
    valid: ValidPair

    def run(self, plan: TilePlan | RowPlan, bias: Tensor | None = None) -> Result:
        out, lse = Recomputed.apply(plan, self.query, self.key, self.value, self.scale, bias)
        return out, lse

    def part(self, targets: slice | Tensor | None, sources: slice | Tensor | None) -> _Call:
        """The call for some of the targets and some of the sources; None: all."""
        of_target, of_source = self.valid
        return replace(
            self,
            query=_some(self.query, targets),
            key=_some(self.key, sources),
            value=_some(self.value, sources),
            valid=(_some(of_target, targets), _some(of_source, sources)),
        )


def _some(x: Any, tokens: slice | Tensor | None) -> Any:
    return x if x is None or tokens is None else x[:, tokens]


def _attend(structure: Structure, call: _Call, table: Tensor | None = None) -> Result:
    """Tiles where there are some, sequences one by one, global tokens apart from the rest."""
    tiles = tiles_of(structure)
    if tiles is not None:
        return call.run(TilePlan(tiles, call.score, call.top_k, call.valid), table)
    if isinstance(structure, Parts):
        results = []
        for k, part in enumerate(structure.parts):
            targets = slice(*structure.target_ptr[k : k + 2])
            sources = slice(*structure.source_ptr[k : k + 2])
            results.append(_attend(part, call.part(targets, sources)))
        outs, sums = zip(*results, strict=True)
        return torch.cat(outs, dim=1), torch.cat(sums, dim=1)
    if isinstance(structure, Union) and call.top_k is None:
        others = [part for part in structure.parts if not isinstance(part, GlobalTokens)]
        if len(others) == 1 == len(structure.parts) - 1 and tiles_of(others[0]) is not None:
            tokens = next(part.tokens for part in structure.parts if isinstance(part, GlobalTokens))
            places = torch.tensor(tokens, device=call.query.device)
            return _attend_beside_global_tokens(places, others[0], call)
    rows = _rows_of(structure, call.query.device)
    return call.run(RowPlan(*rows, call.score, call.top_k, call.valid))


@lru_cache(maxsize=32)
def _rows_of(structure: Structure, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row pointers and sources of a graph that is neither tiles nor made of them."""
    return TokenGraph(structure=structure, device=device).csr()


def _attend_beside_global_tokens(tokens: Tensor, rest: Structure, call: _Call) -> Result:
    """The others see their own neighbours and, apart, the global tokens, which see everyone."""
    N = call.query.shape[1]
    other = torch.ones(N, dtype=torch.bool, device=tokens.device)
    other[tokens] = False
    of_target, of_source = (
        other.expand(len(call.query), N) if mask is None else mask & other for mask in call.valid
    )
    near = _attend(rest, replace(call, valid=(of_target, of_source)))
    columns = call.part(None, tokens)
    columns = replace(columns, valid=(of_target, columns.valid[1]))
    far = _attend(Complete(N, len(tokens)), columns)
    share, lse = explicit.softmax(torch.stack([near[1], far[1]], dim=-1), None)
    out = share[..., :1] * near[0] + share[..., 1:] * far[0]
    own_out, own_lse = _attend(Complete(len(tokens), N), call.part(tokens, None))
    return out.index_copy(1, tokens, own_out), lse.index_copy(1, tokens, own_lse)
