"""Random problems: every option with every other. GRAPHATTN_SWEEP_CASES says how many (30)."""

import os
import random
from dataclasses import replace

import pytest
import torch
from cases_kernels import Case, check, check_half, exact, kernels, tiles

import graphattn as ga
from graphattn.kernels.shared import tuning

pytestmark = pytest.mark.usefixtures("device")

CASES = int(os.environ.get("GRAPHATTN_SWEEP_CASES", "30"))


def random_graph(draw: random.Random, parts: bool = True) -> ga.TokenGraph:
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
        return ga.batch([random_graph(draw, parts=False) for _ in range(draw.randint(1, 3))])
    return kinds[draw.choice(list(kinds))]()


def random_case(seed: int) -> Case:
    draw = random.Random(seed)
    graph = random_graph(draw)
    kv_heads = draw.choice([1, 1, 2])
    heads = kv_heads * draw.choice([1, 1, 2, 3])
    shared = graph.num_targets == graph.num_sources and draw.random() < 0.3
    structure = graph.structure
    assert structure is not None
    score = draw.choice(["rbf", "dot"])
    return Case(
        graph,
        score=score,
        batch=draw.choice([(), (1,), (2,), (1, 2)]),
        heads=heads,
        kv_heads=heads if shared else kv_heads,
        features=draw.choice([1, 3, 8, 16, 17, 40]),
        value_features=draw.choice([1, 3, 8, 16, 17, 40]),
        table=_has_table(graph) and draw.random() < 0.3,
        valid=draw.choice(["", "", "both", "targets", "sources"]),
        eps=draw.choice([0.0, 0.1]) if score == "rbf" else 0.0,
        shared=shared,
        offset=draw.choice([0.0, 0.0, 0.5]),
        seed=seed,
    )


def _has_table(graph: ga.TokenGraph) -> bool:
    """A table that cannot be taken for one value per edge."""
    assert graph.structure is not None
    rows = graph.structure.num_offsets
    return rows is not None and rows > 0 and rows != graph.num_edges


@pytest.mark.long
@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=[pytest.mark.nightly] * (seed >= 10)) for seed in range(CASES)],
)
def test_random_problems_are_solved(seed: int, device: str) -> None:
    case = random_case(seed)
    draw = random.Random(~seed)
    if device == "cpu":
        choices = tiles(*draw.choice([(16, 16), (16, 16), (32, 16), (16, 32)]))
    else:
        choices = {}
    with tuning.override(**choices):
        if draw.random() < 0.3:
            check_half(replace(case, offset=0.0), torch.bfloat16, device)
        else:
            # A lone token's gradients of query and key are 0: their rounding is measured beside 1.
            check(kernels(case, device), exact(case), 1e-5, floor=0.1)
