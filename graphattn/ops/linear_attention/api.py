"""Linear attention over a token graph: the public functions, their checks, and the backends."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_float
from graphattn.graphs.token_graph import TokenGraph
from graphattn.kernels.shared.launch import is_transformed
from graphattn.ops.backends import (
    Backend,
    check_backend,
    choose,
    has_values,
    is_followed,
    is_known_finite,
    is_watched,
)
from graphattn.ops.counting import note_uncounted
from graphattn.ops.inputs import (
    Valid,
    ValidPair,
    check_graph,
    check_qkv,
    check_tensors,
    check_valid,
    clear_invalid,
    compute_dtype,
    full_precision,
    repeat_heads,
    valid_edges,
)
from graphattn.ops.linear_attention.averages import averages
from graphattn.ops.linear_attention.operators import linear_sums
from graphattn.ops.segments import segment_sum


def elu_features(x: Tensor) -> Tensor:
    r"""The positive features :math:`\phi(x) = \operatorname{elu}(x) + 1` of linear attention.

    That is :math:`1 + x` above 0 and :math:`e^x` below (Transformers are RNNs, Eq. 7), computed
    without subtracting and adding 1, which would round :math:`e^x` to 0 below -17.

    Example:
        >>> import torch, graphattn as ga
        >>> ga.elu_features(torch.tensor([-40.0, -1.0, 0.0, 2.0]))
        tensor([4.2484e-18, 3.6788e-01, 1.0000e+00, 3.0000e+00])
    """
    is_seen = torch.compiler.is_compiling() or is_followed()
    if not is_seen and torch.is_grad_enabled() and x.requires_grad:
        features: Tensor = _EluFeatures.apply(x)
        return features
    return _elu_features(x)


def _elu_features(x: Tensor) -> Tensor:
    return x.clamp(max=0).exp() + x.relu()


class _EluFeatures(torch.autograd.Function):
    """The features as one operation of autograd. Their slope is e^x below 0, and 1 above."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        features = _elu_features(x)
        ctx.save_for_backward(features)
        return features

    @staticmethod
    def backward(ctx: Any, d_features: Tensor) -> Tensor:
        (features,) = ctx.saved_tensors
        return d_features * torch.where(features <= 1, features, 1)  # 1 for a NaN, too


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    graph: TokenGraph | Tensor,
    *,
    rotated: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    valid: Valid = None,
    backend: str = "auto",
) -> Tensor:
    r"""Attention whose weights are products of features, in time linear in the tokens.

    Tensors are [*, tokens, heads, features]. Those of ``scaled_dot_product_attention`` of torch are
    [*, heads, tokens, features]: pass ``x.transpose(1, 2)`` of each. With as many heads as tokens,
    a wrong layout raises no error, and the result is wrong.

    .. math::
        y_i = \frac{\sum_{j \in N(i)} (\tilde q_i \cdot \tilde k_j) \, v_j}
                   {\varepsilon + \sum_{j \in N(i)} q_i \cdot k_j}

    with q, k the features of queries and keys, which must not be negative (:func:`elu_features`),
    and :math:`\tilde q, \tilde k` those features rotated by their positions, or the same again
    (Transformers are RNNs, Eq. 4-5 and 9; RoFormer, Eq. 19). On complete and causal graphs, blocks
    and batches of them, N tokens take O(N D Dv) operations and no N x N matrix; a window takes the
    least of that and of its edges; other graphs take O(E (D + Dv)). A target without edges gets
    exactly 0, and so does one whose weights all are 0.

    Args:
        query: features [*, N, H, D], >= 0.
        key: features [*, M, Hk, D], >= 0; Hk divides H, and query head h reads key head
            h // (H / Hk).
        value: [*, M, Hk, Dv].
        graph: N targets, M sources, shared by all leading dimensions `*`.
        rotated: the pair (query, key) for the numerator, of the same shapes; those of the
            denominator if None. Its products may be negative.
        eps: >= 0, added to the denominator.
        valid: bool [*, N] or [N], or a pair for (targets, sources); an edge that touches an
            invalid token is no edge, and what invalid tokens hold is never read.
        backend: "auto", "reference" (edge by edge) or "structured".

    Returns:
        [*, N, H, Dv] in the dtype of `query`; half precision is computed in float32.

    Raises:
        ValueError: names the argument, its value and what is allowed.

    Example:
        >>> import torch, graphattn as ga
        >>> q, k = (ga.elu_features(torch.randn(100, 2, 4)) for _ in range(2))
        >>> v = torch.randn(100, 2, 4)
        >>> y = ga.linear_attention(q, k, v, ga.causal_graph(100))
        >>> weights = torch.einsum("ihd,jhd->hij", q, k).tril()
        >>> weights = weights / weights.sum(-1, keepdim=True)
        >>> torch.allclose(y, torch.einsum("hij,jhd->ihd", weights, v), atol=1e-5)
        True
    """
    eps = as_float("eps", eps, positive=False)
    chosen, call = _checked_call(query, key, value, graph, rotated, valid, backend)
    with full_precision(query.device):
        one_by_one = is_watched(query) or is_transformed() or not has_values(query)
        if chosen.name == "structured" and not one_by_one:

            def differentiable(tensors: Any) -> Tensor:
                above, below = _sums(call._replace(tensors=Features(*tensors)))
                return average(above, below, eps)

            out = averages(call.tensors, call.graph, eps, differentiable)
        else:
            above, below = chosen(call)
            out = average(above, below, eps)
        return out.to(query.dtype)


def linear_attention_sums(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    graph: TokenGraph | Tensor,
    *,
    rotated: tuple[Tensor, Tensor] | None = None,
    valid: Valid = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The numerators [*, N, H, Dv] and denominators [*, N, H, 1] of :func:`linear_attention`.

    They are float32 for half precision. Those over disjoint sets of sources add up.
    """
    chosen, call = _checked_call(query, key, value, graph, rotated, valid, backend)
    with full_precision(query.device):
        sums: tuple[Tensor, Tensor] = chosen(call)
        return sums


def linear_attention_weights(
    query: Tensor,
    key: Tensor,
    graph: TokenGraph | Tensor,
    *,
    rotated: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    valid: Valid = None,
) -> Tensor:
    """The weights of :func:`linear_attention`, [*, E, H] in the order of ``graph.edge_index``.

    Tensors are [*, tokens, heads, features]. Those of ``scaled_dot_product_attention`` of torch are
    [*, heads, tokens, features]: pass ``x.transpose(1, 2)`` of each. With as many heads as tokens,
    a wrong layout raises no error, and the result is wrong.

    The arguments are those of the operation. Without `eps` the weights of a target sum to 1; with
    `rotated` to something else, and some may be negative (RoFormer, Eq. 19).

    Example:
        >>> import torch, graphattn as ga
        >>> x = torch.tensor([0.0, 1.0, 3.0]).view(3, 1, 1)
        >>> graph = ga.window_path_graph(3, window=1)  # edges 1->0, 0->1, 2->1, 1->2
        >>> ga.linear_attention_weights(x, x + 1, graph).flatten()
        tensor([0.0000, 0.2000, 0.8000, 1.0000])
    """
    _check(query, key, key, rotated)
    eps = as_float("eps", eps, positive=False)
    N, M = query.shape[-3], key.shape[-3]
    graph = check_graph(graph, query, N, M, per_edge=True, source=key)
    pair = check_valid(valid, query.shape[:-3], query.device, N, M)
    with full_precision(query.device):
        tensors = _readable(query, key, key, rotated, pair)
        above, below = _products(tensors, graph)
        source, target = graph.edge_index
        keep = valid_edges(pair, source, target)
        if keep is not None:
            above, below = above.masked_fill(~keep, 0), below.masked_fill(~keep, 0)
        total = eps + segment_sum(below[..., None], target, N)[..., 0]
        total = total.masked_fill(total == 0, 1)
        return (above / total.index_select(-2, target)).to(query.dtype)


def average(above: Tensor, below: Tensor, eps: float) -> Tensor:
    """Divide: above [*, D] / (eps + below [*, 1]), and 0 in place of 0 / 0.

    A row that is not finite gets the gradient 0, so that NaN in a row that a loss does not use
    cannot spread.
    """
    total = below + eps if eps > 0 else below
    empty = total == 0
    out = above / total.masked_fill(empty, 1)
    if is_known_finite(out):
        return out
    bad = ~(
        above.isfinite().all(-1, keepdim=True) & total.isfinite() & out.isfinite().all(-1, True)
    )
    clean = above.masked_fill(bad, 0) / total.masked_fill(bad | empty, 1)
    return torch.where(bad, out.detach(), clean)  # 0 * NaN is NaN


class Features(NamedTuple):
    """Features in the compute dtype, with keys and values repeated for every query head.

    `turned_query` and `turned_key` are the rotated features of the numerator, or the same tensors
    as `query` and `key`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    turned_query: Tensor
    turned_key: Tensor


class LinearCall(NamedTuple):
    """One call of linear attention after its checks; features of invalid tokens are 0."""

    tensors: Features
    graph: TokenGraph
    valid: ValidPair


def _checked_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    graph: TokenGraph | Tensor,
    rotated: tuple[Tensor, Tensor] | None,
    valid: Valid,
    backend: str,
) -> tuple[Backend, LinearCall]:
    """Check a call, and choose its backend."""
    check_backend(backend)
    _check(query, key, value, rotated)
    N, M = query.shape[-3], key.shape[-3]
    graph = check_graph(graph, query, N, M, source=key)
    pair = check_valid(valid, query.shape[:-3], query.device, N, M)
    chosen = choose(BACKENDS, None, backend)
    with full_precision(query.device):
        return chosen, LinearCall(_readable(query, key, value, rotated, pair), graph, pair)


def _check(
    query: Tensor, key: Tensor, value: Tensor, rotated: tuple[Tensor, Tensor] | None
) -> None:
    """Check that the features and values of a call fit each other."""
    check_qkv(query, key, value)
    if rotated is None:
        return
    if not isinstance(rotated, tuple | list) or len(rotated) != 2:
        raise ValueError(
            f"rotated must be a pair (query, key), got {type(rotated).__name__}: the features of "
            "the numerator"
        )
    check_tensors(query=query, **{"rotated (query)": rotated[0], "rotated (key)": rotated[1]})
    for name, x, like in zip(("query", "key"), rotated, (query, key), strict=True):
        if x.shape != like.shape:
            raise ValueError(
                f"rotated ({name}) must have the shape of {name}, {list(like.shape)}, "
                f"got {list(x.shape)}"
            )


def _readable(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotated: tuple[Tensor, Tensor] | None,
    valid: ValidPair,
) -> Features:
    """Features in the compute dtype, with 0 in place of those of invalid tokens."""
    dtype, heads = compute_dtype(query.dtype), query.shape[-2]

    def of_target(x: Tensor) -> Tensor:
        return clear_invalid(x, valid[0]).to(dtype)

    def of_source(x: Tensor) -> Tensor:
        return repeat_heads(clear_invalid(x, valid[1]).to(dtype), heads)

    q, k, v = of_target(query), of_source(key), of_source(value)
    if rotated is None:
        return Features(q, k, v, q, k)
    return Features(q, k, v, of_target(rotated[0]), of_source(rotated[1]))


def _sums(call: LinearCall) -> tuple[Tensor, Tensor]:
    """Numerators [*, N, H, Dv] and denominators [*, N, H, 1]."""
    tensors, graph, _ = call
    query, key, value = (by_head(x) for x in tensors[:3])
    ones = torch.ones_like(value[..., :1])
    if tensors.query is tensors.turned_query:  # one pass for both
        both = linear_sums(query, key, torch.cat([value, ones], dim=-1), graph)
        above, below = both.split([value.shape[-1], 1], dim=-1)
    else:
        turned_query, turned_key = by_head(tensors.turned_query), by_head(tensors.turned_key)
        above = linear_sums(turned_query, turned_key, value, graph)
        below = linear_sums(query, key, ones, graph)
    return above.transpose(-3, -2), below.transpose(-3, -2)


def by_head(x: Tensor) -> Tensor:
    """x [*, N, H, D] as [*, H, N, D], contiguous, because products read it several times."""
    return x.transpose(-3, -2).contiguous()


def _products(tensors: Features, graph: TokenGraph) -> tuple[Tensor, Tensor]:
    """The products of every edge for the numerator and for the denominator, [*, E, H]."""
    source, target = graph.edge_index
    query, key, _, turned_query, turned_key = tensors
    pairs = [(turned_query, turned_key), (query, key)]
    above, below = (
        (q.index_select(-3, target) * k.index_select(-3, source)).sum(-1)
        for q, k in (pairs if turned_query is not query else pairs[:1] * 2)
    )
    return above, below


def _sums_of_edges(call: LinearCall) -> tuple[Tensor, Tensor]:
    """Numerators and denominators by one message per edge."""
    note_uncounted("linear_attention with backend='reference'")
    tensors, graph, valid = call
    source, target = graph.edge_index
    above, below = _products(tensors, graph)
    messages = above[..., None] * tensors.value.index_select(-3, source)
    keep = valid_edges(valid, source, target)
    if keep is not None:
        messages = messages.masked_fill(~keep[..., None], 0)
    sums = (segment_sum(x, target, graph.num_targets) for x in (messages, below[..., None]))
    return next(sums), next(sums)


def _has_no_code(_: Any) -> str:
    """The reason why compiled code cannot run linear attention."""
    return "linear attention has no code of its own: it is products of matrices already"


BACKENDS = (  # fastest first
    Backend("fused", _has_no_code),
    Backend("triton", _has_no_code),
    Backend("native", _has_no_code),
    Backend("structured", run=_sums),
    Backend("reference", run=_sums_of_edges),
)
