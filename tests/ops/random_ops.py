"""Random graphs of every kind, drawn from one torch.Generator, for sweeps over many seeds."""

from __future__ import annotations

import torch

import graphattn as ga


def draws(generator: torch.Generator):
    """A function that draws one of its arguments."""
    return lambda *options: options[int(torch.randint(len(options), (), generator=generator))]


def random_graph(draw, generator: torch.Generator) -> ga.TokenGraph:
    """Any kind of graph, of a few up to a hundred tokens."""
    window, loops, dilation = draw(1, 2, 3, 8, 40), draw(True, False), draw(2, 5)

    def edge_list(n: int) -> ga.TokenGraph:
        return ga.from_mask(torch.rand(n, n, generator=generator) < draw(0.05, 0.3))

    def nearest(n: int) -> ga.TokenGraph:
        return ga.knn_graph(torch.randn(n, 2, generator=generator), min(3, n - 1))

    def longformer(n: int) -> ga.TokenGraph:
        n = n if n < 40 else n + 100  # short ones go another way
        return ga.longformer_graph(n, window, (0, n // 2)[: draw(1, 2)], dilation=draw(1, 2))

    kinds = {
        "path": lambda n: ga.window_path_graph(n, window, self_loops=loops),
        "causal window": lambda n: ga.causal_window_graph(n, window),
        "dilated": lambda n: ga.dilated_window_graph(n, window, dilation, self_loops=loops),
        "bipartite window": lambda n: ga.bipartite_window_graph(n, window),
        "complete": lambda n: ga.complete_graph(n, self_loops=loops),
        "causal": ga.causal_graph,
        "blocks": lambda n: ga.block_window_graph(n, draw(2, 4, 16), shift=draw(0, 1)),
        "longformer": longformer,
        "edge list": edge_list,
        "nearest": nearest,
        "cycle": lambda n: ga.window_cycle_graph(n + 3, 2),
        "grid": lambda n: ga.grid_window_graph(3, n, draw(1, 2), class_token=loops),
        "grid blocks": lambda n: ga.grid_block_graph(3, n, draw(2, 5), shift=draw(0, 1)),
        "bipartite": lambda n: ga.bipartite_complete_graph(n, 7),
        "bigbird": lambda n: ga.bigbird_graph(n, 1, 2, (0,), seed=n),
    }
    lengths = draw((9,), (40,), (2,), (100,), (5, 17, 2), (30, 30))
    kind = draw(*kinds)
    parts = [kinds[draw(kind, kind, *kinds)](n) for n in lengths]
    if any(p.num_targets != p.num_sources for p in parts):
        parts = parts[:1]
    return parts[0] if len(parts) == 1 else ga.batch(parts)
