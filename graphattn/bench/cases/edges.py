"""Attention over edges of every kind: lists, nearest neighbours, grids, global tokens."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

import graphattn as ga
from graphattn.bench.cases import least_work as work
from graphattn.bench.cases.attention import (
    FLEX,
    FLEX_DOT,
    GATHER_SCATTER,
    HEADS,
    LISTED,
    MESSAGES,
    OUR_DOT,
    STRUCTURED,
    attention_over,
)
from graphattn.bench.cases.case import (
    BenchmarkCase,
    fast,
    fast_and_small,
    share_of_bound,
    sizes,
)
from graphattn.bench.cases.inputs import AttentionInputs, attention_inputs
from graphattn.bench.cases.least_work import Size
from graphattn.bench.contenders import flex, ours
from graphattn.bench.contenders import fused_attention as fused
from graphattn.bench.contenders import peers as other
from graphattn.bench.contenders.by_hand import gathered
from graphattn.bench.contenders.by_hand import sliding_chunks as chunks
from graphattn.bench.reporting.record import OURS

CHUNKS, CHUNKS_DOT = "chunks + SDPA", "chunks + SDPA (dot product)"


def near_in_space(size: Size, device: torch.device, dtype: torch.dtype) -> AttentionInputs:
    """The nearest of points in a cube; what is near in space is anywhere in memory."""
    graph = ga.knn_graph(points_in_a_cube(size).to(device), size["k"])
    return attention_inputs(graph, size["heads"], size["features"], device, dtype)


def points_in_a_cube(size: Size) -> Tensor:
    """Draw points in no order, [N, 3]."""
    return torch.rand(size["tokens"], 3, generator=torch.Generator().manual_seed(0))


def near_in_memory(size: Size, device: torch.device, dtype: torch.dtype) -> AttentionInputs:
    """Order the tokens of a graph by reverse Cuthill-McKee: neighbours have near numbers."""
    graph, _ = ga.knn_graph(points_in_a_cube(size), size["k"]).reorder()
    return attention_inputs(graph, size["heads"], size["features"], device, dtype)


def within_a_radius(size: Size) -> ga.TokenGraph:
    """Points in a cube near each other: `degree` on average around those far from its faces."""
    volume = size["degree"] / size["tokens"]
    return ga.radius_graph(points_in_a_cube(size), (volume / (4 / 3 * math.pi)) ** (1 / 3))


@cache
def num_within_a_radius(tokens: int, degree: int) -> int:
    """Found once: to search takes longer than to attend."""
    return within_a_radius({"tokens": tokens, "degree": degree}).num_edges


def random_edges(size: Size) -> ga.TokenGraph:
    """Every target sees one random source in each of `degree` equal ranges, never twice."""
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
    return size["tokens"] * size["k"]


def num_random_edges(size: Size) -> int:
    return size["tokens"] * size["degree"]


OVER_EDGES = [
    BenchmarkCase(
        "knn-graph",
        "RBF attention over the nearest neighbours of points in space",
        sizes(tokens=(1024, 16384, 65536), k=16, **HEADS),
        near_in_space,
        {OURS: ours.rbf, STRUCTURED: ours.rbf_structured, **GATHER_SCATTER, **LISTED},
        targets=(
            *fast(("compiled", *LISTED), 1.05, 1.2),
            *fast(("compiled",), 1.8, 2.5),
            *share_of_bound(0.05),
            *fast_and_small(MESSAGES, 10, 1 / 10, device="cuda"),
            *fast_and_small(("compiled",), 4, 1 / 10, device="cuda"),
        ),
        work=work.attention(knn_edges, listed=True),
        cuda={"paper": {"tokens": 65536, "k": 16, **HEADS}},
    ),
    BenchmarkCase(
        "knn-graph-reordered",
        "The same with tokens in reverse Cuthill-McKee order",
        sizes(tokens=(1024, 16384, 65536), k=16, **HEADS),
        near_in_memory,
        {OURS: ours.rbf, STRUCTURED: ours.rbf_structured, "compiled": gathered.compiled, **LISTED},
        targets=(
            *fast((STRUCTURED,), 8, 5),
            *fast(("compiled",), 2.5),
            *share_of_bound(0.15),
        ),
        work=work.attention(knn_edges, listed=True),
        devices=("cpu",),
    ),
    BenchmarkCase(
        "radius-graph",
        "RBF attention over points within a radius of each other",
        sizes(tokens=(1024, 16384, 65536), degree=16, **HEADS),
        attention_over(within_a_radius),
        {OURS: ours.rbf, STRUCTURED: ours.rbf_structured, "compiled": gathered.compiled, **LISTED},
        targets=(*fast(("compiled", *LISTED), 1.5), *share_of_bound(0.05)),
        work=work.attention(
            lambda size: num_within_a_radius(size["tokens"], size["degree"]), listed=True
        ),
        devices=("cpu",),
    ),
    BenchmarkCase(
        "bipartite",
        "RBF cross-attention over random edges from other tokens",
        sizes(tokens=(512, 4096, 32768), sources=(1024, 8192, 65536), degree=32, **HEADS),
        attention_over(random_edges),
        {
            OURS: ours.rbf,
            STRUCTURED: ours.rbf_structured,
            **GATHER_SCATTER,
            **LISTED,
            "masked dense": other.masked_dense,
        },
        targets=(*fast(("compiled", *LISTED), 1.5), *share_of_bound(0.05)),
        work=work.attention(num_random_edges, listed=True),
        cuda={"paper": {"tokens": 32768, "sources": 16384, "degree": 32, **HEADS}},
    ),
    BenchmarkCase(
        "grid",
        "Attention in windows on an image, with a class token",
        sizes(tokens=(1 + 24**2, 1 + 64**2, 1 + 256**2), radius=2, **HEADS),
        attention_over(image),
        {
            OURS: ours.rbf,
            STRUCTURED: ours.rbf_structured,
            FLEX: flex.flex_rbf,
            **GATHER_SCATTER,
            **LISTED,
            "masked dense": other.masked_dense,
        },
        targets=fast((FLEX, "compiled", *LISTED), 1.5),
        work=work.attention(lambda size: image(size).num_edges),
        cuda={"paper": {"tokens": 1 + 128**2, "radius": 2, **HEADS}},
    ),
    BenchmarkCase(
        "longformer",
        "Attention in a window with global tokens",
        sizes(tokens=(1024, 4096, 65536), window=(32, 256, 256), global_tokens=4, **HEADS),
        attention_over(longformer),
        {
            OURS: ours.rbf,
            STRUCTURED: ours.rbf_structured,
            CHUNKS: chunks.chunks_rbf,
            FLEX: flex.flex_rbf,
            "compiled": gathered.compiled,
            **LISTED,
            "masked dense": other.masked_dense,
        },
        {OUR_DOT: ours.dot_product, FLEX_DOT: flex.flex_dot, CHUNKS_DOT: chunks.chunks_dot},
        targets=fast((CHUNKS, FLEX, "compiled", *LISTED), 1.5),
        work=work.attention(lambda size: longformer(size).num_edges),
        cuda={"paper": {"tokens": 65536, "window": 256, "global_tokens": 4, **HEADS}},
    ),
    BenchmarkCase(
        "crossover",
        "Dot-product attention over a list of random edges, by edges per target",
        sizes(tokens=(1024, 4096, 8192), heads=2, features=64),
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
