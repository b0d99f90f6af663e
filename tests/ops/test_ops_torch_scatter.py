"""torch-scatter as an independent oracle: its softmax and its segment sums, on random graphs."""

from __future__ import annotations

import pytest
import torch
from cases_ops import random
from hypothesis import given, settings
from strategies_ops import (
    AttentionCase,
    ConsensusCase,
    attention_cases,
    consensus_cases,
    seeds,
)
from torch import Tensor

import graphattn as ga

torch_scatter = pytest.importorskip(
    "torch_scatter", reason="torch-scatter is an optional extra: pip install 'graphattn[scatter]'"
)

pytestmark = pytest.mark.filterwarnings("ignore:all edges of this edge list point backward")

SWEEP = settings(max_examples=25, deadline=None, derandomize=True)
FULL = (torch.float64, torch.float32)
CLOSE = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-11},
    torch.float32: {"rtol": 2e-4, "atol": 2e-5},
}


def repeated(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[-2], dim=-2)


def by_torch_scatter(
    case: AttentionCase, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """Weights [*, E, H] and outputs [*, N, H, Dv] of a case without top_k."""
    heads, graph = case.query.shape[-2], case.graph
    rowptr, source = graph.csr()
    target = graph.edge_index[1]
    query_i, key_j = query[..., target, :, :], repeated(key, heads)[..., source, :, :]
    if "sigma" in case.arguments:
        sigma = case.arguments["sigma"].to(query.dtype)
        logits = -(query_i - key_j).square().sum(-1) / (2 * sigma**2)
    else:
        logits = (query_i * key_j).sum(-1) * case.arguments["scale"].to(query.dtype)
    weights = torch_scatter.composite.scatter_softmax(
        logits, target[:, None].expand_as(logits), dim=-2, dim_size=graph.num_targets
    )
    messages = weights[..., None] * repeated(value, heads)[..., source, :, :]
    batch = messages.shape[:-3]
    out = torch_scatter.segment_csr(messages, rowptr.expand(*batch, -1), reduce="sum")
    return weights, out


def assert_equal_with_gradients(ours, theirs, tensors: list[Tensor], seed: int) -> None:
    """Two functions of the same tensors: their values, and the gradients of a random projection."""
    results = []
    for function in (ours, theirs):
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = function(*leaves)
        weight = random(*out.shape, seed=seed, dtype=out.dtype)
        gradients = torch.autograd.grad((out * weight).sum(), leaves, materialize_grads=True)
        results.append((out, *gradients))
    for own, other in zip(*results, strict=True):
        torch.testing.assert_close(own, other, **CLOSE[own.dtype])


@SWEEP
@given(case=attention_cases(dtypes=FULL, sizes=(0.3, 1.0)), seed=seeds)
def test_attention_weights_are_the_softmax_of_torch_scatter(case: AttentionCase, seed: int):
    case.arguments["top_k"] = None
    assert_equal_with_gradients(
        lambda q, k: case.weights(query=q, key=k),
        lambda q, k: by_torch_scatter(case, q, k, case.value)[0],
        [case.query, case.key],
        seed,
    )


@SWEEP
@given(case=attention_cases(dtypes=FULL, sizes=(0.3, 1.0)), seed=seeds)
def test_attention_outputs_are_the_segment_sums_of_torch_scatter(case: AttentionCase, seed: int):
    """Rows without edges included: segment_csr gives 0 there as well."""
    case.arguments["top_k"] = None
    assert_equal_with_gradients(
        lambda q, k, v: case.output(query=q, key=k, value=v),
        lambda q, k, v: by_torch_scatter(case, q, k, v)[1],
        [case.query, case.key, case.value],
        seed,
    )


@SWEEP
@given(case=consensus_cases(steps=(0.05,), dtypes=FULL), seed=seeds)
def test_a_consensus_step_is_made_of_the_segment_sums_of_torch_scatter(
    case: ConsensusCase, seed: int
):
    """A consensus step moves tokens by the segment sums that torch_scatter computes.

    Tokens that move and their sums are compared; the matrices are the library's own, which are
    tested elsewhere.
    """
    graph, (u, v, a, b, network) = case.graph, case.inputs
    rowptr, source = graph.csr()
    target = graph.edge_index[1]
    R = ga.consensus_edge_matrices(a, b, network, graph)
    same = u is v

    def ours(u: Tensor, v: Tensor) -> Tensor:
        return case.output(inputs=(u, u if same else v, a, b, network))

    def theirs(u: Tensor, v: Tensor) -> Tensor:
        v = u if same else v
        message = torch.einsum(
            "...hcd,...hd->...hc", R, u[..., target, :, :] - v[..., source, :, :]
        )
        pull = torch_scatter.segment_csr(
            message, rowptr.expand(*message.shape[:-3], -1), reduce="sum"
        )
        if case.update == "energy":
            pull = pull - torch_scatter.scatter_sum(
                message, source, dim=-3, dim_size=graph.num_targets
            )
        return u - case.step_size * pull

    assert_equal_with_gradients(ours, theirs, [u, v], seed)
