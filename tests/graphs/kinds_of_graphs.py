"""Small graphs of every kind of structure, and of every way in which edges are stored."""

import torch

import graphattn as ga


def some_mask(num_targets: int, num_sources: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num_targets, num_sources, generator=generator) < 0.3


def points(count: int, columns: int = 2) -> torch.Tensor:
    return torch.rand(count, columns, generator=torch.Generator().manual_seed(3))


STRUCTURED = {
    "path": lambda: ga.window_path_graph(11, 2),
    "path with self-loops": lambda: ga.window_path_graph(11, 2, self_loops=True),
    "path longer than the sequence": lambda: ga.window_path_graph(5, 9),
    "causal window": lambda: ga.causal_window_graph(11, 3),
    "causal window with a past": lambda: ga.causal_window_graph(7, 3, past=6),
    "causal": lambda: ga.causal_graph(8),
    "causal with a past": lambda: ga.causal_graph(6, past=4),
    "anticausal": lambda: ga.causal_window_graph(11, 3).transpose(),
    "past, transposed": lambda: ga.causal_window_graph(7, 3, past=6).transpose(),
    "dilated": lambda: ga.dilated_window_graph(19, 2, 3),
    "dilated without self-loops": lambda: ga.dilated_window_graph(19, 2, 4, self_loops=False),
    "dilation beyond the sequence": lambda: ga.dilated_window_graph(5, 2, 30, self_loops=False),
    "cycle": lambda: ga.window_cycle_graph(11, 2),
    "complete": lambda: ga.complete_graph(6),
    "complete without self-loops": lambda: ga.complete_graph(6, self_loops=False),
    "bipartite": lambda: ga.bipartite_complete_graph(5, 7),
    "blocks": lambda: ga.block_window_graph(14, 4, shift=1),
    "block longer than the sequence": lambda: ga.block_window_graph(5, 9, shift=3),
    "grid": lambda: ga.grid_window_graph(4, 5, 1),
    "wide grid": lambda: ga.grid_window_graph(3, 4, 7),
    "diamonds": lambda: ga.grid_window_graph(5, 4, 2, metric="manhattan"),
    "class token": lambda: ga.grid_window_graph(3, 4, 1, class_token=True),
    "shifted grid": lambda: ga.neighborhood_graph((3, 4), (2, 3)).transpose(),
    "volume": lambda: ga.volume_window_graph(2, 3, 2, 1, causal=(True, False, False)),
    "blocks of a grid": lambda: ga.grid_block_graph(3, 5, (2, 3), shift=(0, 1)),
    "longformer": lambda: ga.longformer_graph(13, 1, [2, 8]),
    "causal longformer": lambda: ga.causal_longformer_graph(13, 3, 2),
    "bigbird": lambda: ga.bigbird_graph(13, 1, 2, [0], seed=1),
    "union": lambda: ga.union(ga.window_path_graph(9, 1), ga.dilated_window_graph(9, 1, 4)),
    "union with a cycle": lambda: ga.union(
        ga.window_cycle_graph(15, 2), ga.causal_window_graph(15, 5)
    ),
    "batch": lambda: ga.batch(
        [ga.causal_window_graph(5, 2), ga.window_path_graph(0, 1), ga.complete_graph(3),
         ga.causal_graph(4, past=2), ga.grid_window_graph(2, 2, 1)]
    ),
    "batch with blind tokens": lambda: ga.batch(
        [ga.window_path_graph(1, 1), ga.causal_graph(3), ga.window_path_graph(1, 1)]
    ),
    "no tokens": lambda: ga.causal_graph(0),
}  # fmt: skip
LISTED = {
    "list": lambda: ga.from_mask(some_mask(9, 9)),
    "rectangular list": lambda: ga.from_mask(some_mask(6, 9, seed=1)),
    "blind list": lambda: ga.from_mask(torch.zeros(4, 4, dtype=torch.bool)),
    "table": lambda: ga.knn_graph(points(9), k=2),
    "causal table": lambda: ga.knn_graph(points(9), 3, within=ga.causal_window_graph(9, 4)),
    "routing": lambda: ga.routing_graph(points(9), 3),
    "causal routing": lambda: ga.routing_graph(points(9), 3, causal=True),
    "scored window": lambda: ga.scored_window_graph(points(9, 5), 2),
    "causal scored windows": lambda: ga.scored_window_graph(points(9, 3)[None], 2, causal=True),
    "permuted table": lambda: ga.knn_graph(points(6), 2).permute(torch.arange(6).flip(0)),
    "rows of a list": lambda: ga.from_mask(torch.eye(9).bool()).targets(2, 5)[0],
    "batch of lists": lambda: ga.batch([ga.from_mask(some_mask(4, 4)), ga.causal_graph(3)]),
}
GRAPHS = STRUCTURED | LISTED
