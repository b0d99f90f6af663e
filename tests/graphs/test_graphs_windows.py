"""Windows along a sequence: each builder is its definition, pair by pair, at every small size."""

import sys

import networkx
import pytest
import torch

import graphattn as ga

SIZES = [0, 1, 2, 3, 4, 5, 8, 11]


def windows_around(num_tokens: int) -> list[int]:
    """Window sizes below, at and far above the number of tokens."""
    return sorted(
        {1, 2, 3, num_tokens // 2, num_tokens - 1, num_tokens, num_tokens + 3, 40} - {0, -1}
    )


# The builder, and whether target i sees source j, for N tokens and a window w.
WINDOWS = {
    "window path": (ga.window_path_graph, lambda i, j, N, w: 0 < abs(i - j) <= w),
    "window path with self-loops": (
        lambda N, w: ga.window_path_graph(N, w, self_loops=True),
        lambda i, j, N, w: abs(i - j) <= w,
    ),
    "cycle, whose two sides may meet": (
        ga.window_cycle_graph,
        lambda i, j, N, w: i != j and min((i - j) % N, (j - i) % N) <= w,
    ),
    "causal window": (ga.causal_window_graph, lambda i, j, N, w: i - w < j <= i),
    "bipartite window": (ga.bipartite_window_graph, lambda i, j, N, w: abs(i - j) <= w),
    **{
        f"dilation {d}, self-loops {loops}": (
            lambda N, w, d=d, loops=loops: ga.dilated_window_graph(N, w, d, self_loops=loops),
            lambda i, j, N, w, d=d, loops=loops: (
                abs(i - j) in range(0 if loops else d, w * d + 1, d)
            ),
        )
        for d in (1, 2, 3, 20)
        for loops in (True, False)
    },
}


@pytest.mark.parametrize("num_tokens", SIZES)
@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_is_its_definition(name, num_tokens, check_graph, mask_of):
    build, sees = WINDOWS[name]
    for window in windows_around(num_tokens):
        graph = build(num_tokens, window)
        assert graph.is_causal == (name == "causal window")
        check_graph(graph, mask_of(lambda i, j, w=window: sees(i, j, num_tokens, w), num_tokens))


@pytest.mark.parametrize("num_tokens", SIZES)
def test_causal_and_complete_graphs_are_their_definitions(num_tokens, check_graph, mask_of):
    for graph, sees in (
        (ga.causal_graph(num_tokens), lambda i, j: j <= i),
        (ga.complete_graph(num_tokens), lambda i, j: True),
        (ga.complete_graph(num_tokens, self_loops=False), lambda i, j: i != j),
    ):
        check_graph(graph, mask_of(sees, num_tokens))
    assert ga.causal_graph(num_tokens).is_causal


@pytest.mark.parametrize("num_tokens", SIZES)
@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 9, 40])
def test_blocks_see_each_other_only_where_no_border_lies_between(
    num_tokens, block_size, check_graph, mask_of
):
    for shift in {0, 1, block_size // 2, block_size - 1} & set(range(block_size)):
        borders = {shift + m * block_size for m in range(num_tokens + 1)}

        def sees(i, j, borders=borders):
            return not any(min(i, j) < border <= max(i, j) for border in borders)

        check_graph(
            ga.block_window_graph(num_tokens, block_size, shift=shift), mask_of(sees, num_tokens)
        )


@pytest.mark.parametrize("num_targets", [0, 1, 2, 5])
@pytest.mark.parametrize("num_sources", [0, 1, 2, 7])
def test_bipartite_complete_graph_shows_every_source_to_every_target(
    num_targets, num_sources, check_graph, mask_of
):
    check_graph(
        ga.bipartite_complete_graph(num_targets, num_sources),
        mask_of(lambda i, j: True, num_targets, num_sources),
        num_sources=num_sources,
    )


@pytest.mark.parametrize("num_tokens", [3, 7, 20])
@pytest.mark.parametrize("window", [1, 2, 5])
def test_window_graphs_are_the_powers_networkx_knows(num_tokens, window):
    path = networkx.path_graph(num_tokens)
    assert ga.window_path_graph(num_tokens, window) == ga.from_networkx(
        networkx.power(path, window)
    )
    cycle = networkx.circulant_graph(num_tokens, range(1, min(window, num_tokens - 1) + 1))
    assert ga.window_cycle_graph(num_tokens, window) == ga.from_networkx(cycle)


def test_degenerate_arguments_meet_the_simpler_builder():
    assert ga.causal_window_graph(9, 9) == ga.causal_graph(9)
    assert ga.dilated_window_graph(9, 3, 1) == ga.window_path_graph(9, 3, self_loops=True)
    assert ga.window_path_graph(9, 8) == ga.complete_graph(9, self_loops=False)
    assert ga.block_window_graph(9, 9) == ga.complete_graph(9)
    assert ga.bipartite_complete_graph(9, 9) == ga.complete_graph(9)
    assert ga.causal_window_graph(9, 1) == ga.block_window_graph(9, 1)


NO_LIMIT = {
    "window_path": lambda w: (ga.window_path_graph(6, w), ga.window_path_graph(6, 6)),
    "window_cycle": lambda w: (ga.window_cycle_graph(6, w), ga.window_cycle_graph(6, 6)),
    "causal_window": lambda w: (ga.causal_window_graph(6, w), ga.causal_graph(6)),
    "block": lambda w: (ga.block_window_graph(6, w), ga.complete_graph(6)),
    "shifted block": lambda w: (
        ga.block_window_graph(6, w, shift=2),
        ga.block_window_graph(6, 10, shift=2),
    ),
    "dilated": lambda w: (ga.dilated_window_graph(6, w, 2), ga.dilated_window_graph(6, 6, 2)),
    "dilation": lambda d: (ga.dilated_window_graph(6, 2, d), ga.dilated_window_graph(6, 2, 6)),
    "bipartite": lambda w: (ga.bipartite_window_graph(6, w), ga.complete_graph(6)),
    "grid": lambda r: (ga.grid_window_graph(2, 3, r), ga.complete_graph(6)),
    "longformer": lambda w: (ga.longformer_graph(6, w, [2]), ga.complete_graph(6)),
    "num_random": lambda r: (ga.bigbird_graph(6, 1, r, [], 0), ga.complete_graph(6)),
}


@pytest.mark.parametrize("limit", [10**6, sys.maxsize])
@pytest.mark.parametrize("name", NO_LIMIT)
def test_a_limit_far_beyond_the_sequence_is_no_limit(name, limit):
    if name == "num_random" and limit == 10**6:
        limit = 500  # time grows with num_random
    graph, expected = NO_LIMIT[name](limit)
    assert graph.num_edges == expected.num_edges
    assert torch.equal(graph.in_degree(), expected.in_degree())
    assert torch.equal(graph.edge_index, expected.edge_index)
    i = torch.arange(6)
    assert torch.equal(graph.structure.contains(i[:, None], i), expected.to_mask())
