"""Token graphs of images: grids of patches after leading tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from graphattn.graphs import TokenGraph, batch, complete_graph, from_edge_index, grid_window_graph
from graphattn.models.mixers import Reach

Radius = int | Sequence[int] | None  # of both axes, or (down, right); None: see everything


def vision_graph(reach: Reach, grid: tuple[int, int], leading: int, radius: Radius) -> TokenGraph:
    """Make the graph of a layer over the patches of an image.

    Args:
        reach: "all": every token sees all; "window": patches see those within `radius`, and leading
            tokens see and are seen by all; "near": the same window, but only among patches.
        grid: number of patches (down, right).
        leading: number of tokens before the patches (class token, distillation token).
        radius: radius of windows; None means everything for "window", and 1 for "near".

    Example:
        >>> from graphattn.models.vision.image_graphs import vision_graph
        >>> vision_graph("window", (14, 14), leading=1, radius=2)
        TokenGraph(num_tokens=197, num_edges=4489, structure=Grid)
    """
    if reach == "all" or (reach == "window" and radius is None):
        return complete_graph(leading + math.prod(grid))
    window = grid_window_graph(*grid, 1 if radius is None else radius)
    if leading == 0:
        return window
    if (
        reach == "near"
    ):  # without edges of leading tokens, which would be connected to every patch: no safe step
        apart = batch([*[complete_graph(1, self_loops=False)] * leading, window])
        return TokenGraph(structure=apart.structure)  # drop_path then drops the whole image at once
    assert radius is not None
    if leading == 1:
        return grid_window_graph(*grid, radius, class_token=True)
    return _behind(window, leading)


def _behind(window: TokenGraph, leading: int) -> TokenGraph:
    """Add leading tokens, which see and are seen by all, before a window graph."""
    tokens = leading + window.num_tokens
    first, all_tokens = torch.arange(leading), torch.arange(tokens)
    seen_by_all = torch.cartesian_prod(first, all_tokens).T
    seeing_all = torch.cartesian_prod(all_tokens[leading:], first).T
    edges = torch.cat([seen_by_all, seeing_all, window.edge_index + leading], dim=1)
    return from_edge_index(edges, tokens)
