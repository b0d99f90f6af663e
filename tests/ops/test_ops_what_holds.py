"""Guarantees of the operations, bit for bit, over random cases.

float32, float64 and bfloat16; contiguous or not; with a bias or not. GRAPHATTN_CASES sets how many
cases each statement gets (`pytest -m slow` takes 1,000).
"""

from __future__ import annotations

import os

import pytest
import torch
from cases_ops import FAST, consensus_inputs
from random_ops import LAYOUTS, Problem, draws, random_graph
from torch import Tensor

import graphattn as ga
from graphattn.ops.attention.structured import chunked

CASES = int(os.environ.get("GRAPHATTN_CASES", "100"))
MANY = max(CASES, 1000)
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
UNSEEN = (torch.nan, torch.inf, -torch.inf, 1e20, -1e30, 1e15, 1e12, 300.0, -2.0)

how_many = pytest.mark.parametrize(
    "seeds",
    [
        range(CASES // 5),
        pytest.param(range(CASES // 5, CASES), marks=pytest.mark.long),
        pytest.param(range(CASES, MANY), marks=pytest.mark.slow),
    ],
    ids=len,
)


def attention_case(seed: int) -> Problem:
    return Problem(seed, *DTYPES)


@pytest.fixture(params=FAST)
def backend(request):
    """Let "auto" take each of the fast backends.

    The fallback (structured) takes so few numbers at a time that most cases take several rounds.
    """
    with ga.use_backend(request.param), pytest.MonkeyPatch.context() as patch:
        if request.param == "structured":
            patch.setattr(chunked, "PAIRS", 512)
            patch.setattr(chunked, "FEATURES", 512)
        yield request.param


def spoilt(case: Problem, marked: Tensor) -> tuple[list[Tensor], bool]:
    """The tensors with something else in the sources of bool [*, M], and whether queries too."""
    query, key, value = case.tensors
    which = case.draw("all", "all", "key", "value")
    square = case.graph.num_targets == case.graph.num_sources
    results = []
    for name, x in zip(("query", "key", "value"), (query, key, value), strict=True):
        hit = (name == which or which == "all") and (name != "query" or square)
        content = torch.full((), case.draw(*UNSEEN), dtype=torch.float64).to(x.dtype)
        results.append(torch.where(marked[..., None, None], content, x) if hit else x)
    return results, which == "all" and square


@how_many
@pytest.mark.usefixtures("backend")
def test_what_a_row_does_not_see_changes_no_bit_of_it_or_its_gradients(seeds):
    """Tokens that a row does not see change no bit of the row, whatever they hold.

    Missing edges, the causal future or other sequences hide them. Gradients keep their bits as
    well, but not on the reference backend, where plain autograd meets 0 * NaN.
    """
    for seed in seeds:
        case = attention_case(seed)
        M = case.graph.num_sources
        places = torch.randint(M, (case.draw(1, 2),), generator=case.generator)
        marked = torch.zeros(M, dtype=torch.bool).index_fill_(0, places, True)
        tensors, of_query = spoilt(case, marked)
        blind = ~case.graph.to_mask()[:, marked].any(1)
        if of_query:
            blind &= ~marked
        blind = blind.expand(*case.tensors[0].shape[:-2])
        for backend in ("auto", "reference"):
            clean = case.run(backend, rows=blind)
            dirty = case.run(backend, tensors, rows=blind)
            keep = slice(None) if backend == "auto" else slice(2)  # 0 * NaN, in plain autograd
            for k, (before, after) in enumerate(list(zip(clean, dirty, strict=True))[keep]):
                assert torch.equal(before, after), (seed, backend, k)


@how_many
@pytest.mark.usefixtures("backend")
def test_what_valid_marks_as_padding_reaches_no_bit_and_no_gradient(seeds):
    for seed in seeds:
        case = attention_case(seed)
        if "valid" not in case.options:
            continue
        of_target, of_source = case.options["valid"]
        query, key, value = case.tensors
        content = torch.tensor([case.draw(*UNSEEN) for _ in range(3)], dtype=torch.float64)
        tensors = [
            torch.where(mask[..., None, None], x, c.to(x.dtype))
            for x, mask, c in zip(
                (query, key, value), (of_target, of_source, of_source), content, strict=True
            )
        ]
        for backend in ("auto", "reference"):
            clean = case.run(backend)
            dirty = case.run(backend, tensors)
            for k, (before, after) in enumerate(zip(clean, dirty, strict=True)):
                assert torch.equal(before, after), (seed, backend, k)
            assert all(gradient.isfinite().all() for gradient in dirty[2:]), seed
            for gradient, mask in zip(dirty[2:5], (of_target, of_source, of_source), strict=True):
                assert (gradient[~mask] == 0).all(), seed


@how_many
@pytest.mark.usefixtures("backend")
def test_without_edges_the_weighted_sum_is_exactly_zero(seeds):
    for seed in seeds:
        case = attention_case(seed)
        empty = ~case.edges.any(-1)
        out, lse, d_query, *_ = case.run()
        assert (out[empty] == 0).all(), seed
        assert (lse[empty] == -torch.inf).all(), seed
        assert (d_query[empty] == 0).all(), seed
        assert lse[~empty].isfinite().all(), seed


@how_many
@pytest.mark.usefixtures("backend")
def test_top_k_keeps_exactly_k_and_of_equal_ones_the_smaller_index(seeds):
    """Small whole numbers, whose scores are exact: a third of all cases tie. One-hot values show
    which sources a row keeps."""
    for seed in seeds:
        case = attention_case(seed)
        graph, generator = case.graph, case.generator
        N, M = graph.num_targets, graph.num_sources
        *batch, _, heads, features = case.tensors[0].shape
        dtype, kv_heads = case.tensors[0].dtype, case.tensors[1].shape[-2]
        query = torch.randint(-1, 2, (*batch, N, heads, features), generator=generator)
        key = torch.randint(-1, 2, (*batch, M, kv_heads, features), generator=generator)
        value = torch.eye(M)[:, None].expand(*batch, M, kv_heads, M)
        score = case.draw({"sigma": 4.0}, {"scale": 0.25})
        top_k = case.draw(1, 2, 5)
        operation = ga.rbf_attention if "sigma" in score else ga.dot_product_attention
        placed = [LAYOUTS[case.layout](x.to(dtype)) for x in (query, key, value)]
        valid = case.options.get("valid")
        out = operation(*placed, graph, top_k=top_k, valid=valid, **score)
        repeated = key.repeat_interleave(heads // kv_heads, dim=-2)
        q, k = (x.movedim(-2, -3) for x in (query, repeated))  # [*, H, N or M, D]
        if "sigma" in score:
            affinity = -(q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)
        else:
            affinity = (q[..., :, None, :] * k[..., None, :, :]).sum(-1)
        mask = case.edges[..., None, :, :].expand_as(affinity)
        lowest = torch.iinfo(affinity.dtype).min
        order = affinity.masked_fill(~mask, lowest).argsort(dim=-1, descending=True, stable=True)
        kept = torch.zeros_like(mask).scatter_(-1, order[..., :top_k], True) & mask
        assert torch.equal(out.movedim(-2, -3) > 0, kept), seed


def consensus_case(seed: int):
    """A graph, inputs, and what else `consensus_update` takes."""
    generator = torch.Generator().manual_seed(seed)
    draw = draws(generator)
    update = draw("energy", "target")
    graph = random_graph(draw, generator)
    while graph.num_targets != graph.num_sources or (
        update == "energy" and (graph.has_causal_part or not graph.num_edges)
    ):
        graph = random_graph(draw, generator)
    inputs = consensus_inputs(
        graph,
        batch=draw((), (2,)),
        heads=draw(1, 2),
        features=draw(1, 3, 8),
        shared_network=draw(False, True),
        separate_trunks=draw(False, True),
        dtype=draw(*DTYPES),
        seed=seed,
    )
    layout = LAYOUTS[draw(*LAYOUTS)]
    return graph, inputs, draw(0.1, "auto"), update, layout, draw, generator


@how_many
@pytest.mark.filterwarnings("ignore:.*backward")
def test_what_a_token_has_no_edge_to_changes_no_bit_of_its_consensus(seeds):
    """The automatic energy step is one number per sequence: there, of other sequences."""
    for seed in seeds:
        graph, inputs, step, update, layout, draw, generator = consensus_case(seed)
        N = graph.num_targets
        marked = torch.zeros(N, dtype=torch.bool)
        marked[torch.randint(N, (draw(1, 2),), generator=generator)] = True
        mask = graph.to_mask()
        if update == "energy" and step == "auto":
            of = torch.repeat_interleave(torch.tensor([n for n, _ in graph.sizes]))
            mask = of[:, None] == of
        blind = ~mask[:, marked].any(1) & ~marked
        if update == "energy":
            blind &= ~mask[marked].any(0)
        content = draw(*UNSEEN)

        def run(spoil: bool):
            x = [
                torch.where(marked[..., None, None], content, t) if spoil else t  # noqa: B023
                for t in (inputs.state, inputs.target_hidden, inputs.source_hidden)  # noqa: B023
            ]
            u, a, b = (layout(t.to(inputs.state.dtype)) for t in x)  # noqa: B023
            return ga.consensus_update(u, u, a, b, inputs.network, graph, step, update=update)  # noqa: B023

        assert torch.equal(run(False)[..., blind, :, :], run(True)[..., blind, :, :]), seed


@how_many
@pytest.mark.filterwarnings("ignore:.*backward")
def test_padding_reaches_no_bit_and_no_gradient_of_consensus(seeds):
    for seed in seeds:
        graph, inputs, step, update, layout, draw, generator = consensus_case(seed)
        batch = inputs.state.shape[:-3]
        valid = torch.rand((*batch, graph.num_targets), generator=generator) < draw(0.5, 0.8)
        content = draw(*UNSEEN)
        results = []
        for spoil in (False, True):
            leaves = [
                (torch.where(valid[..., None, None], x, content).to(x.dtype) if spoil else x)
                .detach()
                .clone()
                .requires_grad_()
                for x in (inputs.state, inputs.target_hidden, inputs.source_hidden)
            ]
            network = ga.EdgeNetworkParameters(
                *(x.clone().requires_grad_() for x in inputs.network)
            )
            u, a, b = (layout(x) for x in leaves)
            new = ga.consensus_update(u, u, a, b, network, graph, step, update=update, valid=valid)
            states = leaves[0].detach()[~valid]  # kept, but NaN and infinity are not handed on
            assert torch.equal(new[~valid], torch.where(states.isfinite(), states, 0)), seed
            loss = (new[valid].double() ** 2).sum()
            gradients = torch.autograd.grad(loss, [*leaves, *network], materialize_grads=True)
            assert all(x.isfinite().all() for x in gradients), seed
            assert all((x[~valid] == 0).all() for x in gradients[:3]), seed
            results.append((new[valid], *gradients))
        for k, (before, after) in enumerate(zip(*results, strict=True)):
            assert torch.equal(before, after), (seed, k)
