"""Random problems: every option with every other. GRAPHATTN_SWEEP_CASES says how many (30)."""

import os
import random
from dataclasses import replace

import pytest
import torch
from cases_edges import cut_at, gathering, some
from cases_kernels import Case, check, check_half, exact, kernels, tiles
from cases_kernels import random as random_numbers

import graphattn as ga
from graphattn.graphs.structures.bands import has_bands
from graphattn.kernels.shared import tuning

pytestmark = pytest.mark.usefixtures("device")

CASES = int(os.environ.get("GRAPHATTN_SWEEP_CASES", "30"))
SEEDS = [pytest.param(seed, marks=[pytest.mark.nightly] * (seed >= 10)) for seed in range(CASES)]


def random_bands(draw: random.Random, parts: bool = True) -> ga.TokenGraph:
    N, w = draw.randint(1, 40), draw.choice([1, 2, 5, 17, 33])
    kinds = {
        "path": lambda: ga.window_path_graph(N, w, self_loops=draw.random() < 0.5),
        "causal window": lambda: ga.causal_window_graph(N, w),
        "causal": lambda: ga.causal_graph(N),
        "complete": lambda: ga.complete_graph(N, self_loops=draw.random() < 0.7),
        "blocks": lambda: ga.block_window_graph(N, w + 1, shift=draw.randint(0, w)),
        "dilated": lambda: ga.dilated_window_graph(
            N, w, draw.randint(1, 5), self_loops=draw.random() < 0.5
        ),
        "rectangle": lambda: ga.bipartite_complete_graph(N, draw.randint(1, 40)),
        "transposed": lambda: ga.causal_window_graph(N, w).transpose(),
    }
    if parts and draw.random() < 0.25:
        return ga.batch([random_bands(draw, parts=False) for _ in range(draw.randint(1, 3))])
    return kinds[draw.choice(list(kinds))]()


def random_square(draw: random.Random, N: int) -> ga.TokenGraph:
    """A graph of N tokens whose edges are gathered, or for biases per edge a window."""
    w, seed = draw.choice([1, 2, 5, 17]), draw.randint(0, 999)
    points = random_numbers(N, draw.choice([1, 3]), seed=seed)
    if draw.random() < 0.3:
        points = points.round()  # equal distances
    hubs = sorted(draw.sample(range(N), min(N, draw.choice([1, 1, 2]))))
    kinds = {
        "list": lambda: some(N, N, share=draw.choice([0.02, 0.2, 0.8]), seed=seed),
        "neighbours": lambda: ga.knn_graph(points, draw.randint(1, N), self_loops=True),
        "neighbours within": lambda: ga.knn_graph(
            points, draw.randint(1, N), within=ga.causal_window_graph(N, w), self_loops=True
        ),
        "cycle": lambda: ga.window_cycle_graph(N, w),
        "longformer": lambda: ga.longformer_graph(N, w, hubs, dilation=draw.choice([1, 1, 2])),
        "bigbird": lambda: ga.bigbird_graph(N, w, min(N - 1, 3), hubs, seed),
        "union": lambda: ga.union(ga.window_path_graph(N, w), some(N, N, seed=seed)),
        "transposed": lambda: ga.longformer_graph(N, w, hubs).transpose(),
        "window": lambda: ga.causal_window_graph(N, w),
    }
    return kinds[draw.choice(list(kinds))]()


def random_edges(draw: random.Random) -> ga.TokenGraph:
    choice, N, seed = draw.random(), draw.randint(1, 40), draw.randint(0, 999)
    if choice < 0.15:
        return some(N, draw.randint(1, 40), share=draw.choice([0.05, 0.3]), seed=seed)
    if choice < 0.25:
        M = draw.randint(1, 40)
        source = random_numbers(M, 2, seed=seed + 1)
        return ga.knn_graph(random_numbers(N, 2, seed=seed), draw.randint(1, M), source=source)
    if choice < 0.35:
        metric = draw.choice(["chebyshev", "manhattan"])
        size = draw.randint(1, 7), draw.randint(1, 7), draw.randint(1, 3)
        return ga.grid_window_graph(*size, metric=metric, class_token=draw.random() < 0.5)
    if choice < 0.5:
        lengths = (draw.randint(1, 20) for _ in range(draw.randint(1, 3)))
        return ga.batch([random_square(draw, length) for length in lengths])
    return random_square(draw, N)


def random_case(draw: random.Random, graph: ga.TokenGraph, seed: int) -> Case:
    """A problem over this graph; its table cannot be taken for one value per edge."""
    kv_heads = draw.choice([1, 1, 2])
    heads = kv_heads * draw.choice([1, 1, 2, 3])
    shared = graph.num_targets == graph.num_sources and draw.random() < 0.3
    score = draw.choice(["rbf", "dot"])
    offsets = None if graph.structure is None else graph.structure.num_offsets
    has_table = offsets is not None and offsets > 0 and offsets != graph.num_edges
    return Case(
        graph,
        score=score,
        batch=draw.choice([(), (1,), (2,), (1, 2)]),
        heads=heads,
        kv_heads=heads if shared else kv_heads,
        features=draw.choice([1, 3, 8, 16, 17, 40]),
        value_features=draw.choice([1, 3, 8, 16, 17, 40]),
        table=has_table and draw.random() < 0.3,
        valid=draw.choice(["", "", "both", "targets", "sources"]),
        eps=draw.choice([0.0, 0.1]) if score == "rbf" else 0.0,
        shared=shared,
        offset=draw.choice([0.0, 0.0, 0.5]),
        seed=seed,
    )


def case_over_bands(seed: int) -> Case:
    draw = random.Random(seed)
    return random_case(draw, random_bands(draw), seed)


def case_over_edges(seed: int) -> Case:
    draw = random.Random(seed)
    graph = random_edges(draw)
    case = random_case(draw, graph, seed)
    banded = graph.structure is not None and has_bands(graph.structure)
    per_edge = banded or draw.random() < 0.4
    top_k = None if banded or draw.random() < 0.6 else draw.choice([1, 2, 5, 40])
    table = case.table and not per_edge
    return replace(case, per_edge=per_edge, table=table, options={"top_k": top_k})


def check_random(case: Case, draw: random.Random, device: str) -> None:
    """Assert that the problem is solved, sometimes in half precision.

    Averages of few sources have small gradients, and a lone token's are 0: rounding is measured
    beside 0.1.
    """
    if draw.random() < 0.3:
        check_half(replace(case, offset=0.0), torch.bfloat16, device)
    else:
        check(kernels(case, device), exact(case), 1e-5, floor=0.1)


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
def test_random_problems_over_bands_are_solved(seed: int, device: str) -> None:
    draw = random.Random(~seed)
    size = draw.choice([(16, 16), (16, 16), (32, 16), (16, 32)])
    with tuning.override(**(tiles(*size) if device == "cpu" else {})):
        check_random(case_over_bands(seed), draw, device)


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
def test_random_problems_over_edges_are_solved(seed: int, device: str) -> None:
    draw = random.Random(~seed)
    size = draw.choice([(16, 16), (32, 4), (64, 16), (64, 8)])
    choices = gathering(*size) | {"edges_select": tuning.Choice(32, draw.choice([32, 64]), 4, 1)}
    longest = draw.choice([3, 16, 512])
    with cut_at(longest), tuning.override(**(choices if device == "cpu" else {})):
        check_random(case_over_edges(seed), draw, device)
