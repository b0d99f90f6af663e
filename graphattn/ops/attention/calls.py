"""The checks of a call of attention, and the checked call that every backend gets."""

from __future__ import annotations

import math
from collections.abc import Hashable
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from graphattn.graphs.arguments import as_int, as_share, as_softcap
from graphattn.graphs.token_graph import TokenGraph
from graphattn.ops.attention.logits.edge_bias import check_edge_bias, is_table
from graphattn.ops.attention.logits.score import WIDE, Score, per_head
from graphattn.ops.backends import Backend, has_values, is_followed, wanted_backend
from graphattn.ops.dropout import Dropout, dropout_of_call
from graphattn.ops.inputs import ValidPair, clear_invalid, compute_dtype, flat_masks


class AttentionCall(NamedTuple):
    """The arguments of an attention operation after their checks.

    Attributes:
        query: [*, N, H, D], in the dtype of the caller.
        key: [*, M, Hk, D], in the same dtype; Hk divides H.
        value: [*, M, Hk, Dv], in the same dtype.
        graph: N targets, M sources, E edges.
        score: gives the logits; its numbers are tensors [H].
        top_k: sources kept per target and head; all if None.
        bias: added to the logits, in the compute dtype: [E, H], [*, E, H], or with `per_offset` a
            table [offsets, H]; none if None.
        per_offset: whether `bias` is such a table.
        valid: bool [N] or [*, N] for targets, and [M] or [*, M] for sources; None for either if all
            are valid.
        softcap: the bound of the logits, a number > 0; none if None.
        dropout: the share of the weights that is set to 0, in [0, 1).
        seed: int64 [], from which the dropout is drawn; None without dropout.
        rounded: whether a backend may round its output to half precision. It may not if eps or a
            sink is to be applied to the output.
        needs_log_sums: whether the caller reads the log-sums, which "fused" does not have.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    graph: TokenGraph
    score: Score
    top_k: int | None = None
    bias: Tensor | None = None
    per_offset: bool = False
    valid: ValidPair = (None, None)
    softcap: float | None = None
    dropout: float = 0.0
    seed: Tensor | None = None
    rounded: bool = True
    needs_log_sums: bool = False

    @property
    def scale(self) -> Tensor:
        """The factor [H] of a score that compiled code knows; 1 for a score of your own."""
        scale, query = self.score.strength, self.query
        return per_head("scale", 1.0, query.shape[-2], query) if scale is None else scale

    def widened(self) -> AttentionCall:
        """The call with query, key and value in the compute dtype."""
        if self.query.dtype in WIDE:
            return self
        dtype = compute_dtype(self.query.dtype)
        query, key, value = (x.to(dtype) for x in (self.query, self.key, self.value))
        return self._replace(query=query, key=key, value=value)

    def inputs(self) -> Inputs:
        """The inputs of a plan: zeros in place of invalid tokens, and masks per sample."""
        query, key, value, bias, valid = self.query, self.key, self.value, self.bias, self.valid
        masks = EVERYTHING
        if bias is not None and bias.dim() > 2:
            bias = bias.flatten(0, -3)
        if valid != (None, None):
            masks = Masks(*flat_masks(valid, query.shape[:-3]))
            query = clear_invalid(query, valid[0])
            key, value = clear_invalid(key, valid[1]), clear_invalid(value, valid[1])
        if self.seed is not None:
            dropout = dropout_of_call(self.dropout, self.seed, query, self.graph)
            masks = masks._replace(dropout=dropout)
        return Inputs(query, key, value, self.scale, bias, masks)


class Masks(NamedTuple):
    """Masks of the pairs that count in a call, beside those that are no edges.

    Attributes:
        targets, sources: the valid tokens, bool [B, N] and [B, M]; None for either if all are.
        dropout: the hashes of targets and sources; None without dropout.
    """

    targets: Tensor | None = None
    sources: Tensor | None = None
    dropout: Dropout | None = None

    def some(self, targets: Any, sources: Any) -> Masks:
        """The masks of some targets and sources, given as slices or index tensors."""
        return Masks(
            None if self.targets is None else self.targets[:, targets],
            None if self.sources is None else self.sources[:, sources],
            None if self.dropout is None else self.dropout.some(targets, sources),
        )


EVERYTHING = Masks()


class Inputs(NamedTuple):
    """Inputs of a plan: the tensors of a call, and its masks.

    Attributes:
        query, key, value: [*, N, H, D], [*, M, Hk, D] and [*, M, Hk, Dv].
        scale: the factor of the logits, [H].
        bias: a row per edge, [E, H] or [B, E, H], or per offset, [offsets, H]; none if None.
        masks: which pairs count.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: Tensor
    bias: Tensor | None = None
    masks: Masks = EVERYTHING


class Checked(NamedTuple):
    """The result of the checks of a call, beside its tensors.

    It depends on sizes, dtypes and options, and not on numbers in tensors. So a graph keeps it, and
    later calls of the same kind are not checked again.

    Attributes:
        top_k, eps, softcap, dropout: the options of the call.
        backend: runs the call.
        plan: runs the call without `backend`, for kinds of calls whose plan may be kept.
    """

    top_k: int | None
    eps: float
    softcap: float | None
    dropout: float
    backend: Backend
    plan: Any


PLAIN = frozenset({Tensor, nn.Parameter})
NUMBERS = frozenset({int, float, NoneType})


def kind_of_call(
    query: Tensor, key: Tensor, value: Tensor, score: Score, backend: str, *options: Any
) -> Hashable:
    """Everything that the checks of a call depend on; None if they must be made in every call."""
    if torch.compiler.is_compiling() or is_followed():
        return None
    types = tuple(map(type, options))  # in Python 1, 1.0 and True are equal
    if not (PLAIN.issuperset(map(type, (query, key, value))) and NUMBERS.issuperset(types)):
        return None
    return (
        kind_of_call, score.kernel, wanted_backend(backend), options, types,
        query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype,
        query.device, key.device, value.device, query.layout, key.layout, value.layout,
    )  # fmt: skip


def with_options(call: AttentionCall, top_k: Any, softcap: Any, dropout: Any) -> AttentionCall:
    """A call with its options checked.

    Raises:
        ValueError: names the argument, its value and what is allowed.
    """
    return call._replace(
        top_k=None if top_k is None else as_int("top_k", top_k, 1),
        softcap=as_softcap(softcap),
        dropout=as_share("dropout", dropout),
    )


def as_bias(
    edge_bias: Tensor | None, graph: TokenGraph, query: Tensor
) -> tuple[Tensor | None, bool]:
    """Biases of edges, checked and in the compute dtype, and whether they are a table of offsets.

    Raises:
        ValueError: names the argument, its value and what is allowed.
    """
    if edge_bias is None:
        return None, False
    dtype, batch = compute_dtype(query.dtype), query.shape[:-3]
    bias = check_edge_bias(edge_bias, graph, query.shape[-2], dtype, query.device, batch)
    return bias, is_table(bias, graph)


def check_sink(sink: float | Tensor | None, heads: int, query: Tensor) -> Tensor | None:
    """The logits [H] of a sink; None without one.

    They are checked where their values can be read.
    """
    if sink is None:
        return None
    logits = per_head("sink", sink, heads, query)
    if has_values(logits) and not all(logit < math.inf for logit in logits.tolist()):
        got = sink.tolist() if isinstance(sink, Tensor) else sink
        raise ValueError(f"sink must be finite, or -inf for none, got {got}")
    return logits
