"""Attention over a token graph: the public functions, and the steps that all of them share.

RBF and dot-product attention are one engine with two scores (`logits/score.py`); a score of your
own is a third. A call is checked (`calls.py`), one backend of the table is chosen (`backends.py`),
and that backend runs it.

RBF attention is dot-product attention with scale 1 / sigma^2 and a key bias -||k||^2 / (2 sigma^2),
because ||q||^2 cancels in the normalisation. A backend that uses this computes the bias itself,
from keys relative to a centre of its choice, so that no large numbers cancel.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_float, as_int, as_softcap
from graphattn.graphs.token_graph import TokenGraph
from graphattn.ops.attention import reference
from graphattn.ops.attention.backends import BACKENDS, plan_to_keep
from graphattn.ops.attention.calls import (
    AttentionCall,
    Checked,
    as_bias,
    check_sink,
    kind_of_call,
    with_options,
)
from graphattn.ops.attention.logits.score import (
    DotProduct,
    GaussianKernel,
    Score,
    as_score,
    score_of,
)
from graphattn.ops.attention.structured.recompute import run
from graphattn.ops.backends import choose, is_known_finite
from graphattn.ops.dropout import draw_seed
from graphattn.ops.inputs import (
    Valid,
    ValidPair,
    check_graph,
    check_qkv,
    check_valid,
    full_precision,
)
from graphattn.ops.segments import share_beside_eps


@overload
def rbf_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    graph: TokenGraph | Tensor,
    sigma: float | Tensor,
    *,
    top_k: int | None = None,
    eps: float = 0.0,
    edge_bias: Tensor | None = None,
    valid: Valid = None,
    backend: str = "auto",
    return_lse: Literal[False] = False,
    sink: float | Tensor | None = None,
    dropout: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor: ...


@overload
def rbf_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    graph: TokenGraph | Tensor,
    sigma: float | Tensor,
    *,
    top_k: int | None = None,
    eps: float = 0.0,
    edge_bias: Tensor | None = None,
    valid: Valid = None,
    backend: str = "auto",
    return_lse: Literal[True],
    sink: float | Tensor | None = None,
    dropout: float = 0.0,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]: ...


def rbf_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    graph: TokenGraph | Tensor,
    sigma: float | Tensor,
    *,
    top_k: int | None = None,
    eps: float = 0.0,
    edge_bias: Tensor | None = None,
    valid: Valid = None,
    backend: str = "auto",
    return_lse: bool = False,
    sink: float | Tensor | None = None,
    dropout: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Attention by distance: every target averages the sources near its query.

    Tensors are [*, tokens, heads, features]. Those of ``scaled_dot_product_attention`` of torch are
    [*, heads, tokens, features]: pass ``x.transpose(1, 2)`` of each. With as many heads as tokens,
    a wrong layout raises no error, and the result is wrong.

    .. math::
        \ell_{ij} = -\frac{\lVert q_i - k_j \rVert^2}{2 \sigma_h^2}, \qquad
        y_i = \sum_{j \in S(i)} \frac{e^{\ell_{ij}}}
              {\varepsilon + e^{s_h} + \sum_{j' \in S(i)} e^{\ell_{ij'}}} \, v_j

    with S(i) the sources of i, or the `top_k` of them with the largest log-affinity (the nearest;
    of equally near ones the smaller index; `edge_bias` counts). Gaussian kernel attention
    (Projection-Free Transformers, Eq. 3-4, 7) and Krause attention (Krause Synchronization
    Transformers) are this operation. It works on logarithms, so tokens far from everything still
    get weights that sum to 1 (eps = 0), never 0 / 0, as long as ||q - k||^2 / sigma^2 itself is a
    number of the dtype. A target without edges gets exactly 0.

    Args:
        query: [*, N, H, D].
        key: [*, M, Hk, D]; Hk divides H, and query head h reads key head h // (H / Hk).
        value: [*, M, Hk, Dv].
        graph: N targets, M sources, shared by all leading dimensions `*`.
        sigma: bandwidth > 0 in units of the features; a float or a tensor broadcastable to [H].
        top_k: sources kept per target and head; all if None.
        eps: >= 0, added to the normaliser (Eq. 4).
        edge_bias: added to the log-affinity: [E, H] in the order of ``graph.edge_index``; [*, E, H]
            where every sample has its own (a batch size may be 1); or on a window, block or grid
            graph a table [offsets, H], one row per relative offset from the first source to the
            last (``graph.structure.num_offsets`` rows). :class:`~graphattn.nn.OffsetBias` makes
            tables, :class:`~graphattn.nn.DistanceBias` biases of edges in space.
        valid: bool [*, N] or [N], or a pair for (targets, sources); an edge that touches an
            invalid token is no edge, and what invalid tokens hold is never read.
        backend: "auto", "reference", "structured", "native", "triton" or "fused"
            (:func:`~graphattn.backends`).
        return_lse: also return the logarithm of the sum above (after top-k, without eps, sink and
            dropout), [*, N, H], -inf for a target without edges; float32 for half-precision inputs.
        sink: the logits s_h of one more term in the normaliser, an attention sink: a number or a
            tensor broadcastable to [H]; none if None, and where it is -inf. A learned eps per head:
            sink = log(eps). A target without edges still gets 0.
        dropout: share of the weights set to 0, in [0, 1), the others divided by 1 - dropout, after
            all of the above, as in torch's attention. Every call drops others; all backends drop
            the same for the same seed (``graphattn.ops.dropout`` says which). The value of a
            dropped edge is not read. "triton" has none.
        generator: from which the seed of the dropout is drawn, once a call; torch's default
            generator of the CPU if None (``torch.manual_seed``).

    Returns:
        [*, N, H, Dv] in the dtype of `query`; with `return_lse` a pair. Half-precision inputs are
        computed in float32; "triton" multiplies them as they are and sums up in float32.

    Raises:
        ValueError: names the argument, its value and what is allowed.

    Example:
        >>> import torch, graphattn as ga
        >>> x = torch.tensor([0.0, 1.0, 100.0]).view(3, 1, 1)
        >>> graph = ga.complete_graph(3)
        >>> ga.rbf_attention(x, x, x, graph, sigma=1.0).flatten()
        tensor([  0.3775,   0.6225, 100.0000])
        >>> ga.rbf_attention(x, x, x, graph, sigma=1.0, top_k=1).flatten()
        tensor([  0.,   1., 100.])
    """
    return _attend(
        query, key, value, graph, GaussianKernel(sigma), valid, return_lse,
        softcap=None, eps=eps, top_k=top_k, edge_bias=edge_bias, backend=backend, sink=sink,
        dropout=dropout, generator=generator,
    )  # fmt: skip


@overload
def dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    graph: TokenGraph | Tensor,
    *,
    scale: float | Tensor | None = None,
    top_k: int | None = None,
    edge_bias: Tensor | None = None,
    valid: Valid = None,
    backend: str = "auto",
    return_lse: Literal[False] = False,
    sink: float | Tensor | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor: ...


@overload
def dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    graph: TokenGraph | Tensor,
    *,
    scale: float | Tensor | None = None,
    top_k: int | None = None,
    edge_bias: Tensor | None = None,
    valid: Valid = None,
    backend: str = "auto",
    return_lse: Literal[True],
    sink: float | Tensor | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]: ...


def dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    graph: TokenGraph | Tensor,
    *,
    scale: float | Tensor | None = None,
    top_k: int | None = None,
    edge_bias: Tensor | None = None,
    valid: Valid = None,
    backend: str = "auto",
    return_lse: bool = False,
    sink: float | Tensor | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Softmax attention over the edges of a graph.

    Tensors are [*, tokens, heads, features]. Those of ``scaled_dot_product_attention`` of torch are
    [*, heads, tokens, features]: pass ``x.transpose(1, 2)`` of each. With as many heads as tokens,
    a wrong layout raises no error, and the result is wrong.

    .. math::
        \ell_{ij} = s \, q_i \cdot k_j, \qquad
        y_i = \sum_{j \in S(i)} \frac{e^{\ell_{ij}}}{\sum_{j' \in S(i)} e^{\ell_{ij'}}} \, v_j

    The same arguments, rules and results as :func:`rbf_attention`, which documents them; here
    `scale` s is a float or a tensor broadcastable to [H], 1 / sqrt(D) if None.
    On a complete graph this is Vaswani et al. (2017), on ``causal_graph`` the decoder's.

    `sink` is GPT-OSS's learned logit per head: :math:`e^{s_h}` joins the denominator. `softcap` c,
    a number > 0, is Gemma 2's: the logits are :math:`c \tanh(s \, q_i \cdot k_j / c)`, to which
    `edge_bias` is added and among which `top_k` chooses (far beyond the cap all are c to the last
    digit, and tie). "triton" has no softcap.

    Example:
        >>> import torch, graphattn as ga
        >>> q, k, v = torch.randn(3, 1, 8, 2, 4)  # [batch, tokens, heads, features]
        >>> y = ga.dot_product_attention(q, k, v, ga.causal_graph(8))
        >>> z = torch.nn.functional.scaled_dot_product_attention(
        ...     *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True
        ... ).transpose(1, 2)
        >>> torch.allclose(y, z, atol=1e-6)
        True
    """
    return _attend(
        query, key, value, graph, DotProduct(scale), valid, return_lse,
        softcap=softcap, eps=0.0, top_k=top_k, edge_bias=edge_bias, backend=backend, sink=sink,
        dropout=dropout, generator=generator,
    )  # fmt: skip


def score_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    graph: TokenGraph | Tensor,
    score: Score,
    *,
    top_k: int | None = None,
    eps: float = 0.0,
    edge_bias: Tensor | None = None,
    valid: Valid = None,
    backend: str = "auto",
    return_lse: bool = False,
    sink: float | Tensor | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Attention by a score: softmax attention over the edges of a graph, whatever a logit is.

    Tensors are [*, tokens, heads, features]. Those of ``scaled_dot_product_attention`` of torch are
    [*, heads, tokens, features]: pass ``x.transpose(1, 2)`` of each. With as many heads as tokens,
    a wrong layout raises no error, and the result is wrong.

    .. math::
        \ell_{ij} = \mathrm{score}(q_i, k_j), \qquad
        y_i = \sum_{j \in S(i)} \frac{e^{\ell_{ij}}}
              {\varepsilon + e^{s_h} + \sum_{j' \in S(i)} e^{\ell_{ij'}}} \, v_j

    :func:`dot_product_attention` and :func:`rbf_attention` are this operation with
    :class:`DotProduct` and :class:`GaussianKernel`, and document the arguments; `score` is one of
    these or a :class:`Score` of your own. `softcap` bounds any score. A score of your own runs on
    "reference" and "structured", where memory beside inputs and outputs is that of a few tiles.

    Raises:
        ValueError: names the argument, its value and what is allowed.

    Example:
        >>> import torch, graphattn as ga
        >>> class Cosine(ga.Score):
        ...     def edges(self, query, key):
        ...         return 10 * torch.nn.functional.cosine_similarity(query, key, dim=-1)
        >>> q, k, v = torch.randn(3, 100, 2, 4)  # [tokens, heads, features]
        >>> graph = ga.causal_window_graph(100, 8)
        >>> y = ga.score_attention(q, k, v, graph, Cosine())
        >>> q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
        >>> torch.allclose(y, ga.dot_product_attention(q, k, v, graph, scale=10.0), atol=1e-5)
        True
    """
    return _attend(
        query, key, value, graph, as_score(score), valid, return_lse,
        softcap=softcap, eps=eps, top_k=top_k, edge_bias=edge_bias, backend=backend, sink=sink,
        dropout=dropout, generator=generator,
    )  # fmt: skip


def attention_weights(
    query: Tensor,
    key: Tensor,
    graph: TokenGraph | Tensor,
    *,
    sigma: float | Tensor | None = None,
    scale: float | Tensor | None = None,
    score: Score | None = None,
    top_k: int | None = None,
    eps: float = 0.0,
    edge_bias: Tensor | None = None,
    valid: Valid = None,
    sink: float | Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Weights of attention, [*, E, H] in the order of ``graph.edge_index``, for study.

    Tensors are [*, tokens, heads, features]. Those of ``scaled_dot_product_attention`` of torch are
    [*, heads, tokens, features]: pass ``x.transpose(1, 2)`` of each. With as many heads as tokens,
    a wrong layout raises no error, and the result is wrong.

    With `sigma` they are the weights of :func:`rbf_attention`, with `score` those of
    :func:`score_attention`, otherwise those of :func:`dot_product_attention`. The other arguments
    are those of these operations. Edges that are not selected have weight 0. There is no dropout:
    a row sums to 1, or to less with `eps` or `sink`.

    Raises:
        ValueError: if more than one of `sigma`, `scale` and `score` is given, or `eps` without
            `sigma` or `score`, or `softcap` with `sigma`, or as in the operations.

    Example:
        >>> import torch, graphattn as ga
        >>> x = torch.tensor([0.0, 1.0, 3.0]).view(3, 1, 1)
        >>> graph = ga.window_path_graph(3, window=1)  # edges 1->0, 0->1, 2->1, 1->2
        >>> ga.attention_weights(x, x, graph, sigma=1.0).flatten()
        tensor([1.0000, 0.8176, 0.1824, 1.0000])
    """
    heads = check_qkv(query, key, key)
    if score is not None and (sigma is not None or scale is not None):
        name, got = ("sigma", sigma) if scale is None else ("scale", scale)
        raise ValueError(f"give score or {name}, not both: {score}, {got}")
    ready = (score_of(sigma, scale) if score is None else as_score(score)).ready(heads, query)
    eps = as_float("eps", eps, positive=False)
    if eps > 0 and sigma is None and score is None:
        raise ValueError(f"eps needs sigma (RBF attention), got eps = {eps} without")
    softcap = as_softcap(softcap)
    if softcap is not None and sigma is not None:
        raise ValueError(f"softcap is of dot products, got softcap = {softcap} with sigma")
    sink_logits = check_sink(sink, heads, query)
    graph = check_graph(graph, query, query.shape[-3], key.shape[-3], per_edge=True, source=key)
    sizes = graph.num_targets, graph.num_sources
    valid_pair = check_valid(valid, query.shape[:-3], query.device, *sizes)
    bias, per_offset = as_bias(edge_bias, graph, query)
    top_k = None if top_k is None else as_int("top_k", top_k, 1)
    call = AttentionCall(
        query, key, key, graph, ready, top_k, bias, per_offset, valid_pair, softcap
    ).widened()
    with full_precision(query.device):
        weights, _, _ = reference.edge_weights(call, eps, sink_logits)
    return weights.to(query.dtype)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    graph: TokenGraph,
    valid: ValidPair,
    score: Score,
    *,
    softcap: float | None,
    eps: float,
    top_k: int | None,
    edge_bias: Tensor | None,
    backend: str,
    sink: float | Tensor | None,
    dropout: float,
    generator: torch.Generator | None = None,
    needs_log_sums: bool = True,
) -> tuple[Tensor, Tensor]:
    """Check a call, choose its backend, run it, and apply eps and the sink to the result.

    Layers call it, too. The graph and the masks are those that `check_graph` and `check_valid`
    return.

    Backends compute the softmax over the edges alone. `eps` and the sink add to the denominator,
    so they scale the output of a row by one number, which follows from its log-sum.

    Args:
        query: [*, N, H, D].
        key, value: [*, M, Hk, D] and [*, M, Hk, Dv].
        graph: N targets, M sources, E edges.
        valid: bool [N] or [*, N], and [M] or [*, M]; None for either if all are valid.
        score: gives the logits [*, E, H].
        edge_bias: [E, H], [*, E, H] or [offsets, H].
        sink: a number, or a tensor broadcastable to [H].
        needs_log_sums: whether the caller reads them.

    Returns:
        The output [*, N, H, Dv] and the log-sums [*, N, H]. These are None from a backend without
        them ("fused"), which runs only if they are not needed.
    """
    bias, per_offset = as_bias(edge_bias, graph, query)
    needs_log_sums = needs_log_sums or sink is not None

    def check() -> Checked:
        call = AttentionCall(query, key, value, graph, score, None, bias, per_offset, valid)
        call = call._replace(needs_log_sums=needs_log_sums)
        return _check(call, backend, top_k, eps, softcap, dropout)

    facts = bias is not None, per_offset, valid != (None, None), needs_log_sums
    options = top_k, eps, softcap, dropout, *map(int, facts)
    kind = kind_of_call(query, key, value, score, backend, *options)
    checked = check() if kind is None else graph.derived(kind, check)
    ready = score.ready(query.shape[-2], query)
    sink_logits = check_sink(sink, query.shape[-2], query)
    has_extra_mass = checked.eps > 0 or sink_logits is not None  # in the denominator
    seed = draw_seed(generator, query.device, graph) if checked.dropout > 0 else None
    call = AttentionCall(
        query, key, value, graph, ready, checked.top_k, bias, per_offset, valid, checked.softcap,
        checked.dropout, seed, not has_extra_mass,
    )  # fmt: skip
    if checked.plan is not None:
        out, lse = run(checked.plan, call.inputs())
    else:
        with full_precision(query.device):
            out, lse = checked.backend(call)
    if has_extra_mass:
        out = _with_extra_mass(out, lse, checked.eps, sink_logits)
    return (out if out.dtype is query.dtype else out.to(query.dtype)), lse


def _check(
    call: AttentionCall, backend: str, top_k: Any, eps: Any, softcap: Any, dropout: Any
) -> Checked:
    """Check tensors and options of a call, and choose its backend and, if it may be kept, a plan.

    Raises:
        ValueError: names the argument, its value and what is allowed.
    """
    check_qkv(call.query, call.key, call.value)
    call = with_options(call, top_k, softcap, dropout)
    eps = as_float("eps", eps, positive=False)
    call = call._replace(needs_log_sums=call.needs_log_sums or eps > 0)
    chosen = choose(BACKENDS, call, backend)
    plan = plan_to_keep(call, chosen.name)
    return Checked(call.top_k, eps, call.softcap, call.dropout, chosen, plan)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    graph: TokenGraph | Tensor,
    score: Score,
    valid: Valid,
    return_lse: bool,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Check graph and masks of a public call, and return what it asks for."""
    check_qkv(query, key, value)
    N, M = query.shape[-3], key.shape[-3]
    by_edge = options["edge_bias"] is not None
    graph = check_graph(graph, query, N, M, per_edge=by_edge, source=key)
    masks = check_valid(valid, query.shape[:-3], query.device, N, M)
    out, lse = attend(query, key, value, graph, masks, score, needs_log_sums=return_lse, **options)
    return (out, lse) if return_lse else out


def _with_extra_mass(out: Tensor, lse: Tensor, eps: float, sink_logits: Tensor | None) -> Tensor:
    """Scale the output [*, N, H, Dv] by sum / (eps + exp(sink) + sum), from log-sums [*, N, H].

    A NaN in a row of the output gets the gradient 0, so that a NaN in a row that a loss does not
    use cannot spread.
    """
    share = share_beside_eps(lse.masked_fill(lse.isnan(), torch.inf), eps, sink_logits)[..., None]
    if is_known_finite(out):
        return out * share
    bad = ~out.isfinite()  # 0 * NaN is NaN
    return torch.where(bad, out * share.detach(), out.masked_fill(bad, 0) * share)
