"""Guarantees of the operations, bit for bit, over random cases.

float32, float64 and bfloat16; contiguous or not; with a bias or not. GRAPHATTN_CASES sets how many
cases each statement gets (`pytest -m slow` takes 1,000).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from cases_ops import FAST, consensus_inputs
from random_ops import draws, random_graph
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


def numbers(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "heads first": lambda x: x.transpose(-2, -3).contiguous().transpose(-2, -3),
    "part of a wider tensor": lambda x: torch.cat([x, x], dim=-1)[..., : x.shape[-1]],
    "not aligned": lambda x: torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape),
    "every other token": lambda x: torch.stack([x, x], dim=-3).flatten(-4, -3)[..., ::2, :, :],
}


class Case(NamedTuple):
    graph: ga.TokenGraph
    tensors: tuple[Tensor, Tensor, Tensor]
    options: dict[str, Any]  # sigma or scale; edge_bias, valid, top_k, eps
    layout: str
    draw: Any
    generator: torch.Generator

    def run(
        self,
        *tensors: Tensor,
        rows: Tensor | None = None,
        backend: str = "auto",
    ) -> list[Tensor]:
        """Output and log-sums of `rows` [B, N], and all gradients if only those rows count."""
        options = dict(self.options)
        strength = "sigma" if "sigma" in options else "scale"
        leaves = [x.detach().clone().requires_grad_() for x in tensors]
        names = [name for name in (strength, "edge_bias") if name in options]
        for name in names:
            options[name] = options[name].detach().clone().requires_grad_()
        operation = ga.rbf_attention if strength == "sigma" else ga.dot_product_attention
        placed = [LAYOUTS[self.layout](x) for x in leaves]
        out, lse = operation(*placed, self.graph, return_lse=True, backend=backend, **options)
        if rows is not None:
            out, lse = out[rows], lse[rows]
        seeded = torch.Generator().manual_seed(0)
        heard = lse.isfinite()
        loss = (out * numbers(out.shape, seeded, out.dtype)).sum().to(lse.dtype)
        loss = loss + (lse[heard] * numbers(lse.shape, seeded, lse.dtype)[heard]).sum()
        found = torch.autograd.grad(loss, [*leaves, *(options[name] for name in names)])
        return [out, lse, *found]


def attention_case(seed: int) -> Case:
    """A graph, tensors in some layout, and options, all drawn from one seed."""
    generator = torch.Generator().manual_seed(seed)
    draw = draws(generator)
    graph, dtype = random_graph(draw, generator), draw(*DTYPES)
    batch, kv_heads = draw((), (2,), (2, 1)), draw(1, 2)
    heads, features = kv_heads * draw(1, 3), draw(1, 5, 8, 16)
    N, M = graph.num_targets, graph.num_sources
    options: dict[str, Any] = {"top_k": draw(None, None, 1, 3)}
    if draw(False, True):
        options["valid"] = tuple(
            torch.rand((*batch, n), generator=generator) < draw(0.5, 0.8) for n in (N, M)
        )
    table = None if graph.structure is None else graph.structure.num_offsets
    length = draw(None, None, graph.num_edges, table)
    if length is not None and graph.num_edges != table:
        options["edge_bias"] = numbers((length, heads), generator, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    strength = (0.5 + torch.rand(heads, generator=generator, dtype=torch.float64)).to(wide)
    if draw(True, False):
        options["sigma"], options["eps"] = strength * draw(0.3, 1.0) * features**0.5, draw(0, 0.1)
    else:
        options["scale"] = strength
    offset = draw(0, 0, 100)
    tensors = (
        numbers((*batch, N, heads, features), generator, dtype) + offset,
        numbers((*batch, M, kv_heads, features), generator, dtype) + offset,
        numbers((*batch, M, kv_heads, draw(1, 5, 10)), generator, dtype),
    )
    return Case(graph, tensors, options, draw(*LAYOUTS), draw, generator)


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


def spoilt(case: Case, marked: Tensor) -> tuple[list[Tensor], bool]:
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
            clean = case.run(*case.tensors, rows=blind, backend=backend)
            dirty = case.run(*tensors, rows=blind, backend=backend)
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
            clean = case.run(*case.tensors, backend=backend)
            dirty = case.run(*tensors, backend=backend)
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
        mask = case.graph.to_mask().expand(*case.tensors[0].shape[:-3], -1, -1)
        if "valid" in case.options:
            of_target, of_source = case.options["valid"]
            mask = mask & of_target[..., None] & of_source[..., None, :]
        empty = ~mask.any(-1)
        out, lse, d_query, *_ = case.run(*case.tensors)
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
        mask = graph.to_mask().expand(*batch, N, M)
        if valid is not None:
            mask = mask & valid[0][..., None] & valid[1][..., None, :]
        mask = mask[..., None, :, :].expand_as(affinity)
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
            own = leaves[0].detach()[~valid]  # kept, but NaN and infinity are not handed on
            assert torch.equal(new[~valid], torch.where(own.isfinite(), own, 0)), seed
            loss = (new[valid].double() ** 2).sum()
            found = torch.autograd.grad(loss, [*leaves, *network], materialize_grads=True)
            assert all(x.isfinite().all() for x in found), seed
            assert all((x[~valid] == 0).all() for x in found[:3]), seed
            results.append((new[valid], *found))
        for k, (before, after) in enumerate(zip(*results, strict=True)):
            assert torch.equal(before, after), (seed, k)
