"""edge_bias [*, E, H]: every sample of a batch has its own, on every backend that torch has."""

from __future__ import annotations

import itertools
from typing import Any

import oracle_ops as oracle
import pytest
import torch
from cases_ops import BACKENDS, GRAPHS, SIGMA, attend, qkv, random, valid_tokens
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import graphattn as ga

EXACT = {"rtol": 1e-10, "atol": 1e-10}
# Windows, tables, global tokens, lists with empty rows, two tracks, packed sequences.
NAMES = [
    "path",
    "causal",
    "complete",
    "grid with class token",
    "longformer",
    "isolated targets",
    "random rectangle",
    "nearest neighbours",
    "mixed batch",
]


def by_loops(
    op: str, q: Tensor, k: Tensor, v: Tensor, graph: ga.TokenGraph, bias: Tensor, **options: Any
) -> oracle.Attention:
    """Sample by sample, each with its own dense bias."""
    mask, batch = graph.to_mask(), q.shape[:-3]
    valid = options.pop("valid", None)
    found = []
    for place in itertools.product(*map(range, batch)):
        found.append(
            oracle.attention(
                q[place],
                k[place],
                v[place],
                mask,
                **SIGMA[op],
                bias=oracle.dense_bias(bias[place], mask),
                valid=None if valid is None else valid[place],
                **options,
            )
        )
    return oracle.Attention(
        *(torch.stack(x).view(*batch, *x[0].shape) for x in zip(*found, strict=True))
    )


@pytest.mark.parametrize("top_k", [None, 2])
@pytest.mark.parametrize("op", ["rbf", "dot"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_every_sample_has_its_own_biases(
    name: str, backend: str, op: str, top_k: int | None
) -> None:
    graph = GRAPHS[name]()
    q, k, v = qkv(graph, batch=(2, 2), kv_heads=1)
    bias = random(2, 2, graph.num_edges, 2, seed=4)
    expected = by_loops(op, q, k, v, graph, bias, top_k=top_k)
    out, lse = attend(
        op, q, k, v, graph, edge_bias=bias, top_k=top_k, backend=backend, return_lse=True
    )
    torch.testing.assert_close((out, lse), expected[:2], **EXACT)
    weights = ga.attention_weights(q, k, graph, edge_bias=bias, top_k=top_k, **SIGMA[op])
    per_edge = oracle.per_edge(expected.weights, graph.to_mask())
    torch.testing.assert_close(weights, per_edge, **EXACT)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["path", "complete", "isolated targets", "mixed batch"])
def test_and_eps_and_padding_as_well(name: str, backend: str) -> None:
    graph = GRAPHS[name]()
    q, k, v = qkv(graph, batch=(3,))
    bias, valid = random(3, graph.num_edges, 2, seed=4), valid_tokens(3, graph.num_targets, seed=1)
    expected = by_loops("rbf", q, k, v, graph, bias, valid=valid, eps=0.3)
    options = {"edge_bias": bias, "valid": valid, "eps": 0.3, "backend": backend}
    out = attend("rbf", q, k, v, graph, **options)
    torch.testing.assert_close(out, expected.out, **EXACT)


@pytest.mark.parametrize("backend", BACKENDS)
def test_on_a_complete_graph_they_are_the_additive_mask_of_sdpa(backend: str) -> None:
    graph = ga.complete_graph(7)
    q, k, v = qkv(graph, batch=(3,), heads=4)
    mask = random(3, 4, 7, 7, seed=5)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask
    ).transpose(1, 2)
    source, target = graph.edge_index
    bias = mask[:, :, target, source].transpose(1, 2)  # not contiguous
    out = ga.dot_product_attention(q, k, v, graph, edge_bias=bias, backend=backend)
    torch.testing.assert_close(out, expected, **EXACT)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", [(1, 3), (2, 1), (1, 1), (3,), (1,)], ids=str)
def test_a_size_of_one_stands_for_all_samples_and_sums_their_gradients(
    sizes: tuple[int, ...], backend: str
) -> None:
    graph = GRAPHS["isolated targets"]()
    q, k, v = qkv(graph, batch=(2, 3))
    small = random(*sizes, graph.num_edges, 2, seed=4).requires_grad_()
    large = small.detach().expand(2, 3, -1, -1).clone().requires_grad_()
    upstream = random(2, 3, 8, 2, 3, seed=9)
    outs = [
        ga.rbf_attention(q, k, v, graph, 1.0, edge_bias=bias, backend=backend)
        for bias in (small, large)
    ]
    torch.testing.assert_close(*outs, **EXACT)
    (of_small,) = torch.autograd.grad(outs[0], small, upstream)
    (of_large,) = torch.autograd.grad(outs[1], large, upstream)
    torch.testing.assert_close(of_small, of_large.sum_to_size(small.shape), **EXACT)


@pytest.mark.parametrize("option", ["plain", "top_k", "valid"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", ["rbf", "dot"])
@pytest.mark.parametrize("name", ["list", "complete"])
def test_all_gradients_are_those_of_differences(
    name: str, op: str, backend: str, option: str
) -> None:
    graph = ga.from_edge_index(torch.tensor([[0, 2, 1, 2, 0, 3], [0, 0, 1, 1, 3, 3]]), 4)
    graph = graph if name == "list" else ga.complete_graph(3)
    tensors = [x.requires_grad_() for x in qkv(graph, batch=(2,), kv_heads=1, features=2)]
    bias = random(2, graph.num_edges, 2, seed=4).requires_grad_()
    valid = torch.tensor([[True, True, True, True], [True, False, True, True]])
    valid = valid[:, : graph.num_targets]
    options: dict[str, Any] = {"plain": {}, "top_k": {"top_k": 1}, "valid": {"valid": valid}}[
        option
    ]

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attend(
            op, q, k, v, graph, edge_bias=bias, backend=backend, return_lse=True, **options
        )
        return out, lse.masked_fill(lse == -torch.inf, 0)

    assert torch.autograd.gradcheck(call, (*tensors, bias))
    assert torch.autograd.gradgradcheck(lambda *x: call(*x)[0], (*tensors, bias))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("top_k", [None, 2])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["path", "complete", "isolated targets", "mixed batch"])
def test_what_edges_of_padding_hold_reaches_nothing(
    name: str, backend: str, shared: bool, top_k: int | None, bad: float
) -> None:
    graph = GRAPHS[name]()
    valid = valid_tokens(2, graph.num_targets, seed=1)
    if shared:  # of one bias for all samples, an edge is padding only if it is in both
        valid[1] = valid[0]
    source, target = graph.edge_index
    padding = ~(valid[:, source] & valid[:, target])
    assert padding.any()
    bias = random(2, graph.num_edges, 2, seed=4)
    spoilt = bias.masked_fill(padding[..., None], bad)
    if shared:
        bias, spoilt = bias[0], spoilt[0]
    found = []
    for given in (bias, spoilt):
        leaves = [x.requires_grad_() for x in (*qkv(graph, batch=(2,)), given.clone())]
        out, lse = ga.rbf_attention(
            *leaves[:3],
            graph,
            1.0,
            edge_bias=leaves[3],
            valid=valid,
            top_k=top_k,
            backend=backend,
            return_lse=True,
        )
        loss = out.square().sum() + lse[lse.isfinite()].sum()
        found.append([out, lse, *torch.autograd.grad(loss, leaves)])
    for clean, other in zip(*found, strict=True):
        torch.testing.assert_close(other, clean, **EXACT)
    of_padding = found[1][-1][padding[0] if shared else padding]
    assert (of_padding == 0).all()


@pytest.mark.every_case  # mistakes show for one edge of one graph alone
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("edge", [0, 5])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["complete", "isolated targets"])
def test_a_nan_of_one_edge_spoils_its_own_row_alone(
    name: str, backend: str, edge: int, shared: bool
) -> None:
    """Edge 0 is what stands in for the edges that shorter rows do not have."""
    graph = GRAPHS[name]()
    q, k, v = qkv(graph, batch=(2,))
    bias = random(2, graph.num_edges, 2, seed=4)
    bias = bias[:1].clone() if shared else bias
    clean = ga.rbf_attention(q, k, v, graph, 1.0, edge_bias=bias, backend=backend)
    bias[0, edge, 1] = torch.nan
    out = ga.rbf_attention(q, k, v, graph, 1.0, edge_bias=bias, backend=backend)
    spoilt = torch.zeros(out.shape, dtype=torch.bool)
    spoilt[:, int(graph.edge_index[1, edge]), 1] = True
    if not shared:
        spoilt[1] = False
    assert torch.equal(out.isnan(), spoilt)
    torch.testing.assert_close(out[~spoilt], clean[~spoilt], **EXACT)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bias_of_minus_infinity_takes_an_edge_away_in_its_sample(backend: str) -> None:
    graph = ga.complete_graph(6)
    q, k, v = qkv(graph, batch=(2,))
    bias = torch.zeros(2, 36, 2, dtype=torch.float64)
    source, target = graph.edge_index
    cut = (target == 0) | (source == 4)
    bias[1, cut] = -torch.inf
    out = ga.rbf_attention(q, k, v, graph, 1.0, edge_bias=bias, backend=backend)
    fewer = ga.from_edge_index(graph.edge_index[:, ~cut], 6)
    torch.testing.assert_close(out[0], ga.rbf_attention(q, k, v, graph, 1.0)[0], **EXACT)
    torch.testing.assert_close(out[1], ga.rbf_attention(q, k, v, fewer, 1.0)[1], **EXACT)
    assert (out[1, 0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_adds_them_in_float32(backend: str, dtype: torch.dtype) -> None:
    """Biases whose difference half precision would round away still choose the nearest."""
    graph = GRAPHS["path"]()
    q, k, v = qkv(graph, batch=(2,), dtype=dtype)
    bias = (1000 + random(2, graph.num_edges, 2, seed=4)).float()
    wide = [x.double() for x in (q, k, v)]
    expected = ga.rbf_attention(*wide, graph, 1.0, edge_bias=bias.double(), backend="reference")
    out = ga.rbf_attention(q, k, v, graph, 1.0, edge_bias=bias, backend=backend)
    assert out.dtype == dtype
    limit = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize("offset", [0.0, 300.0, 1e5])
@pytest.mark.parametrize("samples", [1, 2])
def test_over_all_pairs_they_lose_no_digits_however_far_the_features_lie(
    samples: int, offset: float, top_k: int | None
) -> None:
    """Attention with biases per sample over all pairs loses no digits, however far features lie.

    Float32, also in several pieces of rows, is compared with float64 of the same numbers.
    """
    graph = ga.bipartite_complete_graph(150, 40)
    q, k, v = (x.float() for x in qkv(graph, batch=(2,), kv_heads=1))
    q, k = q + offset, k + offset
    q[1, 7] += 1e4  # a row of its own
    bias = random(samples, graph.num_edges, 2, seed=4).float()
    found = []
    for dtype, backend in ((torch.float64, "reference"), (torch.float32, "structured")):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v, bias)]
        out = ga.rbf_attention(
            *leaves[:3], graph, 1.3, edge_bias=leaves[3], top_k=top_k, backend=backend
        )
        upstream = random(*out.shape, seed=5).to(dtype)
        found.append([out, *torch.autograd.grad(out, leaves, upstream)])
    for exact, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("samples", [1, 2])
def test_over_all_pairs_equal_logits_keep_the_smaller_sources(samples: int) -> None:
    graph = ga.complete_graph(12)
    q = torch.ones(2, 12, 1, 3)
    v = torch.arange(12.0).view(12, 1, 1).expand(2, 12, 1, 1)
    bias = torch.zeros(samples, 144, 1)
    bias[-1, graph.edge_index[0] == 2] = -1.0
    out = ga.dot_product_attention(q, q, v, graph, edge_bias=bias, top_k=3, backend="structured")
    assert (out[1] == (0 + 1 + 3) / 3).all()
    assert (out[0] == ((0 + 1 + 2) / 3 if samples == 2 else (0 + 1 + 3) / 3)).all()


def refused(graph: Any, bias: Any) -> str:
    q, k, v = qkv(ga.window_path_graph(4, 1), batch=(2, 3))
    with pytest.raises(ValueError, match="edge_bias") as caught:
        ga.rbf_attention(q, k, v, graph, 1.0, edge_bias=bias)
    return str(caught.value)


def test_what_does_not_fit_is_refused_by_name() -> None:
    graph = ga.window_path_graph(4, 1)  # 6 edges, 3 offsets
    for shape in [(3, 2, 6, 2), (2, 6, 2), (5, 2, 3, 6, 2), (2, 3, 6, 1), (2, 3, 7, 2)]:
        said = refused(graph, random(*shape, seed=0))
        assert "[2, 3, 6, 2]" in said
        assert f"got {list(shape)}" in said
    assert "a table of offsets is one for all samples" in refused(graph, random(2, 3, 3, 2, seed=0))
    assert "floating-point" in refused(graph, torch.ones(6, 2, dtype=torch.bool))
    unsorted = graph.edge_index.flip(1)
    q, k, v = qkv(graph, batch=(2,))
    with pytest.raises(ValueError, match="edge_index must be sorted"):
        ga.rbf_attention(q, k, v, unsorted, 1.0, edge_bias=random(2, 6, 2, seed=0))


@pytest.mark.long
def test_the_operator_keeps_the_promises_of_torch_library() -> None:
    graph = GRAPHS["isolated targets"]()
    q, k, v = (x.requires_grad_() for x in qkv(graph, batch=(2, 2), kv_heads=1))
    scale = torch.tensor([0.5, 0.7], dtype=torch.float64, requires_grad=True)
    bias = random(2, 2, graph.num_edges, 2, seed=4).requires_grad_()
    torch.library.opcheck(
        torch.ops.graphattn.attention.default,
        (q, k, v, scale, bias, None, None, graph.code, graph.edge_index, None, "rbf", None, False,
         None, 0.0, 1, "structured", False),
    )  # fmt: skip


@pytest.mark.long
def test_two_compilations_serve_all_lengths() -> None:
    torch._dynamo.reset()

    def call(x: Tensor, bias: Tensor, graph: ga.TokenGraph) -> Tensor:
        return ga.rbf_attention(x, x, x, graph, 1.0, edge_bias=bias)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for n in (12, 17, 25, 40):
        graph = ga.window_path_graph(n, 2)
        x = random(2, n, 2, 3, seed=n).requires_grad_()
        bias = random(2, graph.num_edges, 2, seed=1).requires_grad_()
        mine, theirs = compiled(x, bias, graph), call(x, bias, graph)
        torch.testing.assert_close(mine, theirs, **EXACT)
        upstream = random(*mine.shape, seed=2)
        torch.testing.assert_close(
            torch.autograd.grad(mine, (x, bias), upstream),
            torch.autograd.grad(theirs, (x, bias), upstream),
            **EXACT,
        )
    assert counter.frame_count <= 2
    torch._dynamo.reset()
