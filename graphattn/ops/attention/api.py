"""Attention over a token graph: the front doors, their checks, and the choice of backend.

RBF and dot-product attention are one engine, `attend`, with two scores. (RBF attention is
dot-product attention with scale 1 / sigma^2 and a key bias -||k||^2 / (2 sigma^2), because
||q||^2 cancels in the normalisation; backends that use this form the bias themselves, around a
centre of their choice, so that it cannot cancel.)
"""

from __future__ import annotations

import math
from functools import lru_cache
from numbers import Real
from typing import Any, Literal, overload

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_float, as_int
from graphattn.graphs.token_graph import TokenGraph
from graphattn.kernels.shared.launch import is_looked_into
from graphattn.ops.attention import native, operators, reference, structured, triton
from graphattn.ops.attention.edge_bias import check_edge_bias, is_table, per_edge
from graphattn.ops.attention.reference import Score
from graphattn.ops.attention.softcap import as_softcap
from graphattn.ops.backends import check_backend, choose_backend
from graphattn.ops.counting import is_watched, note_uncounted
from graphattn.ops.dropout import as_share, draw_seed, dropout_of_call
from graphattn.ops.inputs import (
    Valid,
    check_graph,
    check_tensors,
    check_valid,
    compute_dtype,
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
        backend: "auto", "reference", "structured", "native" or "triton"
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
    heads = _check_qkv(query, key, value)
    strength = _rbf_scale(sigma, heads, query)
    eps = as_float("eps", eps, positive=False)
    logits = _sink(sink, heads, query)
    options = top_k, edge_bias, valid, backend, None, dropout, generator
    beside = eps > 0 or logits is not None
    out, lse = _attend(query, key, value, graph, "rbf", strength, *options, rounded=not beside)
    if beside:
        out = _beside_eps(out, lse, eps, logits)
    out = out.to(query.dtype)
    return (out, lse) if return_lse else out


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
    heads = _check_qkv(query, key, value)
    scale_h = _dot_scale(scale, heads, query)
    logits = _sink(sink, heads, query)
    options = top_k, edge_bias, valid, backend, as_softcap(softcap), dropout, generator
    rounded = logits is None
    out, lse = _attend(query, key, value, graph, "dot", scale_h, *options, rounded=rounded)
    if logits is not None:
        out = _beside_eps(out, lse, 0.0, logits)
    out = out.to(query.dtype)
    return (out, lse) if return_lse else out


def attention_weights(
    query: Tensor,
    key: Tensor,
    graph: TokenGraph | Tensor,
    *,
    sigma: float | Tensor | None = None,
    scale: float | Tensor | None = None,
    top_k: int | None = None,
    eps: float = 0.0,
    edge_bias: Tensor | None = None,
    valid: Valid = None,
    sink: float | Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The weights themselves, [*, E, H] in the order of ``graph.edge_index``, for study.

    With `sigma` those of :func:`rbf_attention`, otherwise those of :func:`dot_product_attention`,
    whose arguments the others are. Edges that are not kept have weight 0. There is no dropout: a
    row sums to 1, or with `eps` or `sink` to less.

    Raises:
        ValueError: if both `sigma` and `scale` are given, or `eps` without `sigma`, or `softcap`
            with it, or as in the two operations.

    Example:
        >>> import torch, graphattn as ga
        >>> x = torch.tensor([0.0, 1.0, 3.0]).view(3, 1, 1)
        >>> graph = ga.window_path_graph(3, window=1)  # edges 1->0, 0->1, 2->1, 1->2
        >>> ga.attention_weights(x, x, graph, sigma=1.0).flatten()
        tensor([1.0000, 0.8176, 0.1824, 1.0000])
    """
    heads = _check_qkv(query, key, key)
    if sigma is not None and scale is not None:
        raise ValueError(f"give sigma (RBF) or scale (dot product), not both: {sigma}, {scale}")
    score: Score = "dot" if sigma is None else "rbf"
    if sigma is None:
        strength = _dot_scale(scale, heads, query)
    else:
        strength = _rbf_scale(sigma, heads, query)
    eps = as_float("eps", eps, positive=False)
    if eps > 0 and sigma is None:
        raise ValueError(f"eps needs sigma (RBF attention), got eps = {eps} without")
    softcap = as_softcap(softcap)
    if softcap is not None and sigma is not None:
        raise ValueError(f"softcap is of dot products, got softcap = {softcap} with sigma")
    logits = _sink(sink, heads, query)
    graph = check_graph(graph, query, query.shape[-3], key.shape[-3], per_edge=True)
    pair = check_valid(valid, query.shape[:-3], query.device, graph.num_targets, graph.num_sources)
    dtype = compute_dtype(query.dtype)
    bias = check_edge_bias(edge_bias, graph, heads, dtype, query.device, batch=query.shape[:-3])
    with full_precision(query.device):
        weights, _, _ = reference.edge_weights(
            query.to(dtype),
            key.to(dtype),
            graph,
            score=score,
            scale=strength,
            eps=eps,
            edge_bias=per_edge(bias, graph),
            top_k=None if top_k is None else as_int("top_k", top_k, 1),
            valid=pair,
            softcap=softcap,
            sink=logits,
        )
    return weights.to(query.dtype)


def _beside_eps(out: Tensor, lse: Tensor, eps: float, sink: Tensor | None) -> Tensor:
    """out * sum / (eps + exp(sink) + sum); rows that nobody asks for send back 0."""
    share = share_beside_eps(lse.masked_fill(lse.isnan(), torch.inf), eps, sink)[..., None]
    # Elsewhere looking would wait for the device, or is not allowed.
    looks = out.device.type == "cpu" and not torch.compiler.is_compiling() and not is_looked_into()
    if looks and math.isfinite(out.detach().sum()):
        return out * share
    bad = ~out.isfinite()  # 0 * NaN is NaN
    return torch.where(bad, out * share.detach(), out.masked_fill(bad, 0) * share)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    graph: TokenGraph | Tensor,
    score: Score,
    scale: Tensor,
    top_k: int | None,
    edge_bias: Tensor | None,
    valid: Valid,
    backend: str,
    softcap: float | None,
    dropout: float,
    generator: torch.Generator | None,
    *,
    rounded: bool,
) -> tuple[Tensor, Tensor]:
    """Checks what both front doors share, then runs one backend.

    The output of half precision may be float32, which the caller rounds. With `rounded` a backend
    may round it: the caller computes nothing more with it.
    """
    check_backend(backend)
    dropout = as_share("dropout", dropout)
    biased = edge_bias is not None
    graph = check_graph(graph, query, query.shape[-3], key.shape[-3], per_edge=biased)
    top_k = None if top_k is None else as_int("top_k", top_k, 1)
    dtype = compute_dtype(query.dtype)
    heads, batch = query.shape[-2], query.shape[:-3]
    bias = check_edge_bias(edge_bias, graph, heads, dtype, query.device, batch)
    per_offset = is_table(bias, graph)
    able = support(query, value.shape[-1], softcap=softcap, dropout=dropout)
    chosen = choose_backend(backend, able, query.device)
    seed = draw_seed(generator, query.device) if dropout > 0 else None
    options: dict[str, Any] = {
        "score": score,
        "scale": scale,
        "top_k": top_k,
        "valid": check_valid(
            valid, query.shape[:-3], query.device, graph.num_targets, graph.num_sources
        ),
    }
    with full_precision(query.device):
        if chosen == "triton":  # half precision stays what it is: kernels sum up in float32
            options |= {"bias": bias, "per_offset": per_offset, "backend": chosen}
            return operators.attend(query, key, value, graph, **options)
        watched = is_watched(query)
        if chosen != "native" or watched or not rounded:
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        options["softcap"] = softcap
        if chosen in ("structured", "native"):
            options |= {"bias": bias, "per_offset": per_offset, "dropout": dropout, "seed": seed}
            if watched:
                return operators.attend(query, key, value, graph, backend=chosen, **options)
            attend = native.attend if chosen == "native" else structured.attend
            return attend(query, key, value, graph, **options)
        note_uncounted("rbf_attention or dot_product_attention with backend='reference'")
        if seed is not None:
            options["dropout"] = dropout_of_call(dropout, seed, query, graph)
        return reference.attend(
            query, key, value, graph, edge_bias=per_edge(bias, graph), **options
        )


def known_backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    graph: TokenGraph,
    *,
    score: Score,
    top_k: Any,
    softcap: Any,
    backend: str,
) -> tuple[str, int | None, float | None]:
    """The backend of all calls of this kind, and their top_k and softcap as numbers.

    Sizes and dtypes of tensors count, not what they hold. There are no masks, biases or dropout.

    Raises:
        ValueError: as in the operation itself.
    """
    _check_qkv(query, key, value)
    softcap = as_softcap(softcap) if score == "dot" else None
    check_backend(backend)
    check_graph(graph, query, query.shape[-3], key.shape[-3])
    top_k = None if top_k is None else as_int("top_k", top_k, 1)
    able = support(query, value.shape[-1], softcap=softcap)
    return choose_backend(backend, able, query.device), top_k, softcap


def support(
    query: Tensor,
    value_width: int | None = None,
    *,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> dict[str, str | None]:
    """Backend -> None where it can run attention, over whatever graph; otherwise the reason."""
    why_not = triton.why_not(query, value_width, softcap=softcap, dropout=dropout)
    return {
        "reference": None,
        "structured": None,
        "native": native.why_not(query),
        "triton": why_not,
    }


def _check_qkv(query: Any, key: Any, value: Any) -> int:
    check_tensors(query=query, key=key, value=value)
    heads, features = query.shape[-2:]
    if key.shape[-1] != features:
        raise ValueError(f"key must have {features} features like query, got {key.shape[-1]}")
    if value.shape[-3:-1] != key.shape[-3:-1]:
        raise ValueError(
            f"value must have the tokens and heads of key ({list(key.shape[-3:-1])}), "
            f"got {list(value.shape[-3:-1])}"
        )
    if key.shape[-2] == 0 or heads % key.shape[-2]:
        raise ValueError(f"key heads must divide query heads ({heads}), got {key.shape[-2]}")
    return heads


def _per_head(name: str, number: float | Tensor, heads: int, like: Tensor) -> Tensor:
    """`number` as a tensor [H] in the compute dtype and on the device of `like`."""
    dtype = compute_dtype(like.dtype)
    if not isinstance(number, Tensor):
        if isinstance(number, bool) or not isinstance(number, Real):
            raise ValueError(f"{name} must be a number or a tensor, got {number!r}")
        if like.device.type == "cpu" and not is_watched(like):
            return _constant(float(number), heads, dtype)
        return torch.full((heads,), float(number), dtype=dtype, device=like.device)
    if number.shape == (heads,) and number.dtype == dtype and number.device == like.device:
        return number
    try:
        return number.to(like.device, dtype).broadcast_to((heads,))
    except RuntimeError:
        raise ValueError(
            f"{name} must be a number or broadcastable to [{heads}] (heads), "
            f"got shape {list(number.shape)}"
        ) from None


@lru_cache(maxsize=256)
def _constant(number: float, heads: int, dtype: torch.dtype) -> Tensor:
    """Nobody writes into it: operations read what they are given."""
    with torch.inference_mode(False):
        return torch.full((heads,), number, dtype=dtype, device="cpu")


def _rbf_scale(sigma: float | Tensor, heads: int, query: Tensor) -> Tensor:
    """1 / sigma^2 per head. Tensors on other devices are not read: that would wait for them."""
    per_head = _per_head("sigma", sigma, heads, query)
    scale = per_head**-2
    if scale.device.type == "cpu" and not torch.compiler.is_compiling():
        sigmas, scales = per_head.tolist(), scale.tolist()
        # Of lists with NaN the least says nothing, but their sum is NaN.
        if sigmas and min(sigmas) > 0 and min(scales) > 0 and math.isfinite(sum(scales)):
            return scale
        if not (all(s > 0 for s in sigmas) and all(0 < s < math.inf for s in scales)):
            got = sigma.tolist() if isinstance(sigma, Tensor) else sigma
            raise ValueError(f"sigma must be > 0 and finite, like 1 / sigma^2, got {got}")
    return scale


def _dot_scale(scale: float | Tensor | None, heads: int, query: Tensor) -> Tensor:
    if scale is None:
        scale = 1 / math.sqrt(max(query.shape[-1], 1))
    if isinstance(scale, Real) and not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    return _per_head("scale", scale, heads, query)


def _sink(sink: float | Tensor | None, heads: int, query: Tensor) -> Tensor | None:
    """The sink's logits [H]. Tensors on other devices are not read: that would wait for them."""
    if sink is None:
        return None
    per_head = _per_head("sink", sink, heads, query)
    looks = per_head.device.type == "cpu" and not torch.compiler.is_compiling()
    if looks and not all(logit < math.inf for logit in per_head.tolist()):
        got = sink.tolist() if isinstance(sink, Tensor) else sink
        raise ValueError(f"sink must be finite, or -inf for none, got {got}")
    return per_head
