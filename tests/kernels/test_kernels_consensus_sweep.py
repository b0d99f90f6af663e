"""Random consensus steps: every option with every other. GRAPHATTN_SWEEP_CASES: how many."""

import os
import random
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from cases_consensus import HALF, Case, check_half, errors, exact, kernels, plain
from cases_edges import some
from cases_kernels import random as random_numbers
from watched_memory import watched_memory

import graphattn as ga
from graphattn.kernels.shared import tuning

pytestmark = pytest.mark.usefixtures("device")

CASES = int(os.environ.get("GRAPHATTN_SWEEP_CASES", "200"))
SINGLE = 1e-5  # relative RMS of float32, beside twice torch's own, where a row of Lambda is short


def random_square(draw: random.Random, N: int) -> ga.TokenGraph:
    """A graph of N tokens."""
    w, seed, loops = draw.choice([1, 2, 3]), draw.randint(0, 999), draw.random() < 0.5
    points = random_numbers(N, 2, seed=seed)
    hubs = sorted(draw.sample(range(N), min(N, draw.choice([1, 2]))))
    kinds = {
        "path": lambda: ga.window_path_graph(N, w, self_loops=loops),
        "causal window": lambda: ga.causal_window_graph(N, w),
        "dilated": lambda: ga.dilated_window_graph(N, w, draw.choice([2, 5]), self_loops=loops),
        "blocks": lambda: ga.block_window_graph(N, draw.randint(2, 8), shift=draw.randint(0, 1)),
        "complete": lambda: ga.complete_graph(min(N, 6), self_loops=loops),
        "causal": lambda: ga.causal_graph(min(N, 6)),
        "cycle": lambda: ga.window_cycle_graph(N, min(w, 3)),
        "list": lambda: some(N, N, share=draw.choice([0.02, 0.2, 0.4]), seed=seed),
        "neighbours": lambda: ga.knn_graph(points, draw.randint(1, min(N, 4)), self_loops=True),
        "neighbours within": lambda: ga.knn_graph(
            points, min(N, 4), within=ga.causal_window_graph(N, w), self_loops=True
        ),
        "longformer": lambda: ga.longformer_graph(N, min(w, 3), hubs),
        "union": lambda: ga.union(ga.window_path_graph(N, 1), some(N, N, seed=seed)),
        "transposed": lambda: ga.longformer_graph(N, 1, hubs).transpose(),
    }
    return kinds[draw.choice(list(kinds))]()


def random_graph(draw: random.Random) -> ga.TokenGraph:
    choice, N = draw.random(), draw.randint(1, 12)
    if choice < 0.1:
        return some(N, draw.randint(1, 12), share=draw.choice([0.05, 0.3]), seed=N)
    if choice < 0.15:
        return ga.bipartite_complete_graph(min(N, 6), draw.randint(1, 6))
    if choice < 0.2:
        return ga.bipartite_window_graph(N, draw.choice([1, 3]))
    if choice < 0.25:
        M = draw.randint(1, 12)
        source = random_numbers(M, 2, seed=M)
        return ga.knn_graph(random_numbers(N, 2, seed=N), draw.randint(1, min(M, 4)), source=source)
    if choice < 0.3:
        class_token = draw.random() < 0.5
        return ga.grid_window_graph(
            draw.randint(1, 4), draw.randint(1, 5), 1, class_token=class_token
        )
    if choice < 0.45:  # windows of one kind
        lengths = [draw.randint(1, 7) for _ in range(draw.randint(2, 4))]
        build = draw.choice([ga.window_path_graph, ga.causal_window_graph])
        window = draw.choice([1, 2, 9])
        return ga.batch([build(n, window) for n in lengths])
    if choice < 0.6:  # of any kinds
        return ga.batch([random_square(draw, draw.randint(1, 7)) for _ in range(2)])
    return random_square(draw, N)


def random_case(seed: int) -> tuple[Case, torch.dtype]:
    draw = random.Random(seed)
    graph = random_graph(draw)
    N, batch, heads = (
        graph.num_targets,
        draw.choice([(), (), (1,), (2,)]),
        draw.choice([1, 1, 1, 2, 3]),
    )
    square = graph.num_sources == N
    can_be_energy = square and not graph.has_causal_part
    update = "energy" if can_be_energy and draw.random() < 0.7 else "target"
    dtype = draw.choice([torch.float32, torch.float32, *HALF])
    steps = [0.1, (), (heads,), (N, 1), (*batch, N, heads)]
    # Whose degree is the largest may change by rounding, and with it where gradients go.
    if dtype == torch.float32 or update == "target":
        steps += ["auto"] * 4
    case = Case(
        graph,
        update,
        batch=batch,
        heads=heads,
        features=draw.choice([1, 2, 3, 5, 8, 16, 17]),
        rank=draw.choice([1, 1, 1, 2, 3]),
        xi=draw.choice([3, 5, 8, 16, 17]),
        one_network=draw.random() < 0.3,
        other_states=draw.random() < 0.3,
        rotated=draw.choice(["", "", "two tensors", "one tensor" if square else ""]),
        step=draw.choice(steps),
        valid=draw.choice(["", "", "both", "targets", "sources"]),
        seed=seed,
    )
    return case, dtype


@pytest.fixture(autouse=True)
def tiles(request: pytest.FixtureRequest, device: str) -> Iterator[None]:
    """Use tiles of several sizes where kernels are interpreted, one size for each case.

    Large tiles make few programs, which the interpreter starts slowly.
    """
    seed = getattr(request.node, "callspec", None)
    rows, chunk = ((16, 16), (32, 64), (64, 32))[seed.params["seed"] % 3 if seed else 0]
    sizes = tuning.Choice(rows, chunk, 4, 1)
    chosen = {"consensus": sizes, "consensus_backward": sizes}
    with tuning.override(**(chosen if device == "cpu" else {})):
        yield


@pytest.mark.filterwarnings("ignore:all edges of this edge list point backward")
@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=[pytest.mark.nightly] * (seed >= 30)) for seed in range(CASES)],
)
def test_random_problems_are_solved(seed: int, device: str) -> None:
    case, dtype = random_case(seed)
    if dtype == torch.float32:
        with watched_memory(device) if seed % 4 == 0 else nullcontext():  # it takes its time
            results = kernels(case, device)
        expected = exact(case)
        of_torch = errors(plain(case, dtype), expected, case, floor=0.1)
        got = errors(results, expected, case, floor=0.1)
        assert all(got[n] <= SINGLE + 2 * of_torch[n] for n in got), (got, of_torch)
    else:
        check_half(case, dtype, device)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:all edges of this edge list point backward")
@pytest.mark.parametrize("seed", range(0, CASES, 40))
def test_two_runs_agree_bit_for_bit(seed: int, device: str) -> None:
    """Trivial where one program runs after another; on a GPU, what having no atomics buys."""
    case, dtype = random_case(seed)
    case = replace(case, batch=(2,), step="auto")
    one, other = (kernels(case, device, dtype) for _ in range(2))
    assert all(torch.equal(one[n], other[n]) for n in one)
