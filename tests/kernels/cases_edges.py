"""Graphs whose edges are gathered, and attention problems over them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from cases_kernels import Case, coins, random

import graphattn as ga
from graphattn.kernels.edges import schedule
from graphattn.kernels.shared import tuning
from graphattn.ops import edge_cache
from graphattn.ops.attention import triton


def gathering(rows: int, slots: int) -> dict[str, tuning.Choice]:
    """Return arguments of `tuning.override` that give these sizes to every edge kernel."""
    return {kernel: tuning.Choice(rows, slots, 4, 1) for kernel in tuning.OF_EDGES}


@contextmanager
def large_tiles(device: str) -> Iterator[None]:
    """The interpreter is slow to start a program: few of them, but some rows take several tiles."""
    choices = gathering(64, 16) | {"edges_select": tuning.Choice(64, 64, 4, 1)}
    with tuning.override(**(choices if device == "cpu" else {})):
        yield


@contextmanager
def cut_at(longest: int) -> Iterator[None]:
    """Cut rows with more than `longest` edges into segments, within the block.

    Tables that are kept between calls are made anew.
    """

    def forget() -> None:
        edge_cache._cache.clear()
        triton._tables_of_bands_and_others.cache_clear()

    with mock.patch.object(schedule, "LONGEST_SEGMENT", longest):
        forget()
        yield
        forget()


def some(targets: int, sources: int, share: float = 0.2, seed: int = 0) -> ga.TokenGraph:
    """A list of random edges."""
    return ga.from_mask(coins(targets, sources, seed=seed, share=share))


def nearest(tokens: int, k: int, **options: Any) -> ga.TokenGraph:
    """A table of neighbours, held as one."""
    graph = ga.knn_graph(random(tokens, 3, seed=1), k, **options)
    assert graph.neighbors is not None
    return graph


def hubs() -> ga.TokenGraph:
    """Tokens 3 and 30 see everybody, 7 and 31 are seen by everybody; 11 is alone, 20 only looks."""
    mask = coins(40, 40, seed=0, share=0.05)
    mask[[3, 30]] = mask[:, [7, 31]] = True
    mask[11] = mask[:, 11] = mask[:, 20] = False
    return ga.from_mask(mask)


def only(targets: int, sources: int, *edges: tuple[slice | int, slice | int]) -> ga.TokenGraph:
    mask = torch.zeros(targets, sources, dtype=torch.bool)
    for edge in edges:
        mask[edge] = True
    return ga.from_mask(mask)


EVERY = slice(None)
CASES = {
    "list": Case(some(40, 40), batch=(2,), kv_heads=1),
    "list of many edges": Case(some(40, 40, share=0.9), score="dot"),
    "more sources": Case(some(20, 50), score="dot", batch=(2,)),
    "more targets": Case(some(50, 20), kv_heads=1),
    "neighbours": Case(nearest(40, 5), kv_heads=1),
    "neighbours and oneself": Case(nearest(40, 5, self_loops=True), score="dot", batch=(2,)),
    "fewer neighbours than k": Case(nearest(40, 6, within=ga.causal_window_graph(40, 9))),
    "neighbours of other tokens": Case(
        nearest(30, 4, source=random(17, 3, seed=2)), score="dot", kv_heads=1
    ),
    "neighbours in every part of a batch": Case(
        nearest(30, 3, within=ga.batch([ga.complete_graph(n) for n in (17, 1, 12)]))
    ),
    "neighbours of equal points": Case(ga.knn_graph(torch.zeros(20, 3), 4)),
    "grid": Case(ga.grid_window_graph(5, 7, 1), score="dot"),
    "grid with a class token": Case(ga.grid_window_graph(6, 6, 2, class_token=True), kv_heads=1),
    "blocks of a grid": Case(ga.grid_block_graph(6, 5, 4, shift=2), kv_heads=1),
    "diamonds": Case(ga.grid_window_graph(6, 5, 2, metric="manhattan")),
    "neighborhoods": Case(ga.neighborhood_graph((6, 7), 3, dilation=(2, 1)), score="dot"),
    "neighborhoods, from the other side": Case(ga.neighborhood_graph((6, 7), 3).transpose()),
    "causal dilated grid with a class token": Case(
        ga.grid_window_graph(6, 5, 1, dilation=2, causal=(True, False), class_token=True)
    ),
    "volume": Case(ga.volume_window_graph(3, 3, 4, 1), kv_heads=1),
    "cycle": Case(ga.window_cycle_graph(33, 4)),
    "longformer": Case(ga.longformer_graph(40, 3, [0, 17]), kv_heads=1),
    "dilated longformer": Case(ga.longformer_graph(40, 2, [5], dilation=3), score="dot"),
    "bigbird": Case(ga.bigbird_graph(40, 2, 3, [0], seed=0)),
    "union of a window and a list": Case(
        ga.union(ga.causal_window_graph(40, 4), some(40, 40)), score="dot"
    ),
    "union of neighbours and a grid": Case(ga.union(nearest(36, 4), ga.grid_window_graph(6, 6, 1))),
    "hubs": Case(hubs(), kv_heads=1),
    "hubs, dot": Case(hubs(), score="dot"),
    "lists side by side": Case(ga.batch([some(20, 20), some(13, 13, seed=1)])),
    "many kinds side by side": Case(
        ga.batch([
            ga.causal_graph(11),
            some(20, 20),
            ga.complete_graph(1),
            ga.longformer_graph(15, 1, [2]),
            ga.knn_graph(random(9, 2, seed=0), 2),
        ]),
        score="dot",
    ),
    "all edges on one target": Case(only(40, 40, (5, EVERY))),
    "all edges from one source": Case(only(40, 40, (EVERY, 5)), score="dot"),
    "one edge": Case(only(20, 30, (19, 0))),
    "one token": Case(only(1, 1, (0, 0))),
    "bias of a list": Case(some(40, 40), per_edge=True, batch=(2,), kv_heads=1),
    "bias of every sample": Case(
        some(40, 40), per_edge=True, per_sample=True, batch=(2,), kv_heads=1
    ),
    "bias of every sample's neighbours": Case(
        nearest(40, 6, within=ga.causal_window_graph(40, 9)),
        per_edge=True, per_sample=True, batch=(2,), score="dot", valid="both",
    ),
    "bias of every sample's hubs": Case(
        hubs(), score="dot", per_edge=True, per_sample=True, batch=(2,)
    ),
    "bias of neighbours": Case(nearest(40, 5), per_edge=True, score="dot"),
    "bias of fewer neighbours than k": Case(
        nearest(40, 6, within=ga.causal_window_graph(40, 9)), per_edge=True
    ),
    "bias of hubs": Case(hubs(), score="dot", per_edge=True),
    "bias of a window, per edge": Case(ga.causal_window_graph(30, 7), per_edge=True),
    "bias of a complete graph, per edge": Case(
        ga.complete_graph(18), score="dot", per_edge=True, kv_heads=1
    ),
    "bias of a longformer": Case(ga.longformer_graph(40, 3, [0, 17]), per_edge=True),
    "bias of a grid": Case(ga.grid_window_graph(5, 7, 1, class_token=True), per_edge=True),
    "bias of a transposed list": Case(some(30, 20).transpose(), per_edge=True),
    "table of a grid": Case(ga.grid_window_graph(5, 7, 1), score="dot", table=True),
    "table of blocks": Case(ga.grid_block_graph(5, 7, 3, shift=1), score="dot", table=True),
    "table of neighborhoods": Case(
        ga.neighborhood_graph((5, 6), (3, 4), is_causal=(True, False)), table=True
    ),
    "table of a volume": Case(
        ga.volume_window_graph(3, 3, 4, 1, dilation=(1, 1, 2)), score="dot", table=True
    ),
    "padding": Case(some(40, 40), valid="both", batch=(2,)),
    "padding of neighbours": Case(nearest(40, 5), score="dot", valid="both", per_edge=True),
    "padding of hubs": Case(hubs(), valid="both", kv_heads=1),
    "padding of a longformer": Case(ga.longformer_graph(40, 3, [0, 17]), valid="both"),
    "masked targets": Case(some(50, 20), valid="targets"),
    "masked sources": Case(nearest(40, 5), score="dot", valid="sources"),
    "both masked, differently": Case(some(20, 50), valid="both"),
    "eps": Case(some(40, 40), eps=0.3, valid="both"),
    "eps of neighbours": Case(nearest(40, 5), eps=2.0),
    "negative scale": Case(some(33, 33), score="dot", strength=(-0.7, -0.1)),
    "scale 0": Case(nearest(33, 6), score="dot", strength=(0.0, 0.4)),
    "sigma per head": Case(hubs(), strength=(1.5, 9.0)),
    "one tensor": Case(nearest(40, 5), shared=True),
    "one tensor, dot": Case(hubs(), shared=True, score="dot"),
    "one tensor of a longformer": Case(ga.longformer_graph(40, 3, [0, 17]), shared=True),
}  # fmt: skip


def top(k: int, case: Case, **changes: Any) -> Case:
    return replace(case, options={"top_k": k}, **changes)


CASES |= {
    "top 3 of a list": top(3, CASES["list"]),
    "top 3 of many edges": top(3, CASES["list of many edges"]),
    "top 1": top(1, CASES["more targets"]),
    "top 2 of neighbours": top(2, CASES["fewer neighbours than k"]),
    "top 4 of a grid with a class token": top(4, CASES["grid with a class token"]),
    "top 3 of a longformer": top(3, CASES["longformer"]),
    "top 5 of a bigbird": top(5, CASES["bigbird"], score="dot"),
    "top 6 of hubs": top(6, CASES["hubs"]),
    "top 6 of hubs, dot": top(6, CASES["hubs, dot"]),
    "top 3 of a union": top(3, CASES["union of a window and a list"]),
    "top 3 of parts": top(3, CASES["many kinds side by side"]),
    "top 3 with a bias": top(3, CASES["bias of a list"]),
    "top 3 with a bias of neighbours": top(3, CASES["bias of fewer neighbours than k"]),
    "top 3 with a bias of every sample": top(3, CASES["bias of every sample's neighbours"]),
    "top 3 with a bias and padding": top(3, CASES["padding of neighbours"]),
    "top 2 with padding": top(2, CASES["padding"], eps=0.2),
    "top 4 of padded hubs": top(4, CASES["padding of hubs"]),
    "top 3 of one tensor": top(3, CASES["one tensor"]),
}
