"""Attention over edges of every kind: lists, nearest neighbours, grids, global tokens."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend

import graphattn as ga
from graphattn.cli.bench import contenders as other
from graphattn.cli.bench import flex, ours, work
from graphattn.cli.bench import fused_attention as fused
from graphattn.cli.bench.attention_cases import (
    COMPILED,
    FLEX,
    FLEX_DOT,
    GATHER_SCATTER,
    HEADS,
    OUR_DOT,
    attention_over,
)
from graphattn.cli.bench.case import BOTH, FORWARD, Case
from graphattn.cli.bench.inputs import AttentionInputs, attention_inputs
from graphattn.cli.bench.record import OURS
from graphattn.cli.bench.targets import Target
from graphattn.cli.bench.work import Size


def near_in_space(size: Size, device: torch.device, dtype: torch.dtype) -> AttentionInputs:
    """The nearest of points in a cube, found on the device.

    Neighbours see nearly the same tokens, but points stand in no order: what is near in space is
    anywhere in memory.
    """
    points = torch.rand(size["tokens"], 3, generator=torch.Generator().manual_seed(0))
    graph = ga.knn_graph(points.to(device), size["k"])
    return attention_inputs(graph, size["heads"], size["features"], device, dtype)


def random_edges(size: Size) -> ga.TokenGraph:
    """A list of edges: every target sees one random source in each of `degree` equal ranges.

    They are different ones without any being drawn twice, up to a degree of all sources.
    """
    N, degree = size["tokens"], size["degree"]
    M = size.get("sources", N)
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(M // degree, (N, degree), generator=generator)
    source = places + M // degree * torch.arange(degree)
    target = torch.arange(N).repeat_interleave(degree)
    return ga.from_edge_index(torch.stack([source.flatten(), target]), N, M)


def image(size: Size) -> ga.TokenGraph:
    """Square windows on a square image, and a class token."""
    side = round((size["tokens"] - 1) ** 0.5)
    return ga.grid_window_graph(side, side, size["radius"], class_token=True)


def longformer(size: Size) -> ga.TokenGraph:
    """`window` tokens on each side; the first few tokens see everything, and everything them."""
    return ga.longformer_graph(size["tokens"], size["window"], range(size["global_tokens"]))


def knn_edges(size: Size) -> int:
    """Edges of a graph of nearest neighbours."""
    return size["tokens"] * size["k"]


def num_random_edges(size: Size) -> int:
    """Edges of a random graph."""
    return size["tokens"] * size["degree"]


def times_as_fast_and_small(
    rivals: tuple[str, ...], times: float, smaller: float
) -> tuple[Target, ...]:
    """So many times as fast as the fastest rival, in so much less memory, in both passes."""
    return tuple(
        target
        for passes in (FORWARD, BOTH)
        for target in (
            Target("time", rivals, at_least=times, passes=passes, device="cuda"),
            Target("memory", rivals, at_most=1 / smaller, passes=passes, device="cuda"),
        )
    )


OVER_EDGES = [
    Case(
        "knn-graph",
        "RBF attention over the nearest neighbours of points in space",
        {
            "small": {"tokens": 1024, "k": 16, **HEADS},
            "paper": {"tokens": 16384, "k": 16, **HEADS},
            "long": {"tokens": 65536, "k": 16, **HEADS},
        },
        near_in_space,
        {OURS: ours.rbf, **GATHER_SCATTER},
        targets=(
            *times_as_fast_and_small(("index_add", "torch-scatter"), 10, 10),
            *times_as_fast_and_small(COMPILED, 4, 10),
        ),
        work=work.attention(knn_edges, listed=True),
        cuda={"paper": {"tokens": 65536, "k": 16, **HEADS}},
    ),
    Case(
        "bipartite",
        "RBF cross-attention over random edges from other tokens",
        {
            "small": {"tokens": 512, "sources": 1024, "degree": 32, **HEADS},
            "paper": {"tokens": 4096, "sources": 8192, "degree": 32, **HEADS},
            "long": {"tokens": 32768, "sources": 65536, "degree": 32, **HEADS},
        },
        attention_over(random_edges),
        {OURS: ours.rbf, **GATHER_SCATTER, "masked dense": other.masked_dense},
        work=work.attention(num_random_edges, listed=True),
        cuda={"paper": {"tokens": 32768, "sources": 16384, "degree": 32, **HEADS}},
    ),
    Case(
        "grid",
        "Attention in windows on an image, with a class token",
        {
            "small": {"tokens": 1 + 24**2, "radius": 2, **HEADS},
            "paper": {"tokens": 1 + 64**2, "radius": 2, **HEADS},
            "long": {"tokens": 1 + 256**2, "radius": 2, **HEADS},
        },
        attention_over(image),
        {
            OURS: ours.rbf,
            FLEX: flex.flex_rbf,
            **GATHER_SCATTER,
            "masked dense": other.masked_dense,
        },
        work=work.attention(lambda size: image(size).num_edges),
        cuda={"paper": {"tokens": 1 + 128**2, "radius": 2, **HEADS}},
    ),
    Case(
        "longformer",
        "Attention in a window with global tokens",
        {
            "small": {"tokens": 1024, "window": 32, "global_tokens": 4, **HEADS},
            "paper": {"tokens": 4096, "window": 256, "global_tokens": 4, **HEADS},
            "long": {"tokens": 65536, "window": 256, "global_tokens": 4, **HEADS},
        },
        attention_over(longformer),
        {OURS: ours.rbf, FLEX: flex.flex_rbf, "masked dense": other.masked_dense},
        {OUR_DOT: ours.dot_product, FLEX_DOT: flex.flex_dot},
        work=work.attention(lambda size: longformer(size).num_edges),
        cuda={"paper": {"tokens": 65536, "window": 256, "global_tokens": 4, **HEADS}},
    ),
    Case(
        "crossover",
        "Dot-product attention over a list of random edges, by edges per target",
        {
            "small": {"tokens": 1024, "heads": 2, "features": 64},
            "paper": {"tokens": 4096, "heads": 2, "features": 64},
            "long": {"tokens": 8192, "heads": 2, "features": 64},
        },
        attention_over(random_edges),
        {},
        {
            OURS: ours.dot_product,
            FLEX: flex.flex_dot,
            "SDPA, masked": fused.masked_sdpa(SDPBackend.EFFICIENT_ATTENTION),
            "SDPA cuDNN, masked": fused.masked_sdpa(SDPBackend.CUDNN_ATTENTION),
        },
        degrees={
            "small": (4, 32, 256),
            "paper": (16, 64, 256, 1024, 4096),
            "long": (16, 64, 256, 1024, 8192),
        },
        work=work.attention(num_random_edges, listed=True),
        cuda={"paper": {"tokens": 4096, **HEADS}, "long": {"tokens": 8192, **HEADS}},
    ),
]
