"""Combinations of layer options: each is its equations in plain loops, on both backends.

The projections are those of nn_by_hand, the mechanisms those of oracle_ops; neither calls the
library. test_nn_equal_their_ops goes through the options one by one, this file through the product.
"""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from random import Random

import oracle_ops as oracle
import pytest
import torch
from nn_by_hand import (
    BASE_100,
    DIM,
    HEAD_DIM,
    HEADS,
    Case,
    hidden_of,
    into_heads,
    linear,
    rotate,
    run,
    second_layer,
    steps_of,
    tokens_of,
)
from torch import Tensor

import graphattn as ga

TIGHT = {"rtol": 1e-9, "atol": 1e-10}


def product(kind: str, context: int | None = None, **values: tuple) -> list[Case]:
    combinations = itertools.product(*values.values())
    return [Case(kind, dict(zip(values, each, strict=True)), context) for each in combinations]


def consensus_cases() -> list[Case]:
    shared: dict[str, tuple] = {
        "edge_hidden": (3,),
        "rank": (2,),
        "edge_input": ("head", "full"),
        "trunk": ("shared", "separate"),
        "step_size": (0.05, "learned", "auto"),
        "rope": (False, True, BASE_100, "isometric"),
    }
    cases = product("SelfConsensus", **shared, update=("energy", "target"))
    cases += product("SelfConsensus", **{**shared, "rope": (False, BASE_100)}, bias=(False,))
    for context in (DIM, 8):
        cases += product("CrossConsensus", context, **shared, context_dim=(context,))
    full = {**shared, "edge_input": ("full",), "rope": (False, "isometric")}
    literal = {**full, "edge_networks": ("per_head",)}  # Algorithms 5 and 6 to the letter
    cases += product("SelfConsensus", **literal, update=("energy", "target"))
    cases += product("CrossConsensus", 7, **literal, context_dim=(7,))
    cases += product("CrossConsensus", 7, **full, context_dim=(7,), bias=(False,))
    published = {**shared, "iterations": (2,), "step_size": (0.05,), "learned_beta": (False,)}
    published |= {"share_alpha": (False, True), "learned_step": (False, True)}
    cases += product("SelfConsensus", **published, update=("energy", "target"))
    cases += product("CrossConsensus", DIM, **published, context_dim=(DIM,))
    gradient_step = (False, "isometric")
    return [
        case
        for case in cases
        if (case.options["step_size"] != "auto" or case.options["rope"] in gradient_step)
        and not (case.options.get("share_alpha") and case.options["edge_input"] == "head")
    ]


def attention_cases() -> list[Case]:
    rope, cases = (False, True, BASE_100), []
    for context in (None, DIM, 10):
        width = {} if context is None else {"context_dim": (context,)}
        dot = {"kv_heads": (None, 1, 2), "top_k": (None, 2), **width}
        cases += product("DotProductAttention", context, **dot, rope=rope)
        cases += product("DotProductAttention", context, **dot, bias=(False,))
        cases += product("DotProductAttention", context, **dot, rope=rope, qk_norm=(True,))
        cases += product("DotProductAttention", context, **dot, rope=rope, scaling=("sq_inplace",))
    for context in (None, DIM):
        dot = {"value_projection": (False,), "top_k": (None, 2)}
        cases += product("DotProductAttention", context, **dot, rope=rope)
        cases += product("DotProductAttention", context, **dot, bias=(False,))
        cases += product("DotProductAttention", context, **dot, rope=rope, qk_norm=(True,))
        cases += product("DotProductAttention", context, **dot, rope=rope, scaling=("sq_inplace",))
    krause: dict[str, tuple] = {"kv_heads": (None, 1, 2), "top_k": (None, 2)}
    krause |= {"sigma_per_head": (True, False), "init_sigma": (0.8,)}
    cases += product("KrauseAttention", **krause, rope=rope)
    cases += product("KrauseAttention", **krause, bias=(False,))
    gaussian: dict[str, tuple] = {"normalize": (False, True), "eps": (0.0, 0.3)}
    gaussian |= {"init_sigma": (None, 0.8), "top_k": (None, 2)}
    cases += product("GaussianKernelAttention", **gaussian, rope=rope)
    cases += product("GaussianKernelAttention", **gaussian, bias=(False,))
    return cases


CASES = consensus_cases() + attention_cases()
EVERY_COMBINATION = pytest.mark.parametrize("case", CASES, ids=str)
# Other files take gradients and copies through the options one by one; a sample of the product
# is enough to see two options that do not bear each other.
SOME_COMBINATIONS = pytest.mark.parametrize("case", Random(0).sample(CASES, 80), ids=str)


def small_graph(case: Case) -> ga.TokenGraph:
    """Two sequences side by side; the first has a target that sees nobody."""
    if case.context_width is None:
        first = ga.from_edge_index(torch.tensor([[1, 2, 3, 0, 3], [0, 0, 1, 2, 2]]), 4)
        return ga.batch([first, ga.window_path_graph(3, 1, self_loops=True)])
    first = ga.from_edge_index(torch.tensor([[1, 0, 2, 1], [0, 1, 1, 3]]), 4, 3)
    return ga.batch([first, ga.bipartite_complete_graph(2, 2)])


def by_equations(
    case: Case, state: dict[str, Tensor], tokens: tuple[Tensor, ...], graph: ga.TokenGraph
) -> Tensor:
    """Compute the layer's correct output from its state_dict, in plain loops."""
    x, context, options = tokens[0], tokens[-1], case.options
    mask = graph.to_mask()

    def turn(t: Tensor, positions: Tensor, *, back: bool = False) -> Tensor:
        return rotate(t, positions, case.rope_base, back=back)

    if case.is_consensus:
        u = into_heads(linear(state, "source_proj", x))
        cross = case.kind == "CrossConsensus"
        v = into_heads(linear(state, "context_proj", context)) if cross else u
        isometric = options["rope"] == "isometric"
        for step in steps_of(case, state):
            compared = turn(u, graph.positions), turn(v, graph.source_positions)
            u = oracle.consensus(
                compared[0] if isometric else u,
                v,
                hidden_of(state, "target", x),
                hidden_of(state, "source", context),
                second_layer(state),
                mask,
                step,
                update=options.get("update", "target" if cross else "energy"),
                disagreement=compared,
                lengths=tuple(n for n, _ in graph.sizes),
            )
            u = turn(u, graph.positions, back=True) if isometric else u
            v = v if cross else u
        return linear(state, "output_proj", u.flatten(-2))

    if case.kind == "GaussianKernelAttention":
        query = turn(into_heads(x), graph.positions)
        if options.get("normalize"):
            query = unit_rms(query)
        key = value = query
    else:
        kv_heads = options.get("kv_heads") or HEADS
        if in_place := options.get("scaling") == "sq_inplace":
            x, context = x / HEAD_DIM**0.5, context / HEAD_DIM**0.5
        query = turn(into_heads(linear(state, "query_proj", x)), graph.positions)
        key = into_heads(linear(state, "key_proj", context), kv_heads)
        key = turn(key, graph.source_positions)
        if options.get("qk_norm"):
            query, key = unit_rms(query), unit_rms(key)  # after the rotation, as nanochat does
        if options.get("value_projection", True):
            context = linear(state, "value_proj", context)
        value = into_heads(context, kv_heads)
        if in_place:  # the oracle divides logits by sqrt(D)
            query = query * HEAD_DIM**0.5
    sigma = state["log_sigma"].exp() if "log_sigma" in state else None
    mixed = oracle.attention(
        query, key, value, mask, sigma=sigma, top_k=options.get("top_k"),
        eps=options.get("eps", 0.0),
    ).out  # fmt: skip
    return linear(state, "output_proj", mixed.flatten(-2))


def unit_rms(t: Tensor) -> Tensor:
    return t / t.square().mean(-1, keepdim=True).sqrt()


@EVERY_COMBINATION
def test_every_combination_is_its_equations_by_operation_and_by_messages(case):
    layer, graph = case.make(), small_graph(case)
    tokens = tokens_of(case, graph, ())
    expected = by_equations(case, layer.state_dict(), tokens, graph)
    torch.testing.assert_close(run(layer, tokens, graph), expected, **TIGHT)
    with ga.use_backend("reference"):
        torch.testing.assert_close(run(layer, tokens, graph), expected, **TIGHT)


@SOME_COMBINATIONS
def test_a_combination_has_one_gradient_by_operation_and_by_messages(case):
    layer, graph = case.make(), small_graph(case)
    tokens = tuple(t.requires_grad_() for t in tokens_of(case, graph, (2,)))
    valid = tuple(torch.rand(2, t.shape[-2]) < 0.8 for t in tokens)
    valid = valid if len(valid) == 2 else valid[0]
    wanted = (*layer.parameters(), *tokens)
    gradients = {}
    for backend in ("auto", "reference"):
        with ga.use_backend(backend):
            out = run(layer, tokens, graph, valid=valid)
        gradients[backend] = torch.autograd.grad(out.square().sum(), wanted)
    for fused, readable in zip(*gradients.values(), strict=True):
        torch.testing.assert_close(readable, fused, **TIGHT)


@SOME_COMBINATIONS
def test_a_combination_survives_copy_pickle_and_a_state_dict(case):
    layer, graph = case.make(seed=0), small_graph(case)
    tokens = tokens_of(case, graph, ())
    fresh = case.make(seed=1)
    before, other = run(layer, tokens, graph), run(fresh, tokens, graph)
    assert not torch.equal(other, before)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file, weights_only=True), strict=True)
    for twin in (fresh, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(run(twin, tokens, graph), before)
        assert repr(twin) == repr(layer)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
    assert torch.equal(run(layer, tokens, graph), before)  # none shares its parameters
