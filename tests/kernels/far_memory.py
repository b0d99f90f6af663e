"""Kernels on more than 2^31 numbers, in memory of which only a few tokens are ever touched.

`python far_memory.py NAME` runs a function of this file. A wrong offset may leave the memory, so
each has a process of its own, in which kernels are interpreted.
"""

from __future__ import annotations

import mmap
import resource
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import graphattn as ga
from graphattn.kernels.bands import backward as band_backward
from graphattn.kernels.bands import forward as band_forward
from graphattn.kernels.bands.inputs import BandInputs
from graphattn.kernels.bands.schedule import BandSchedule
from graphattn.kernels.edges import backward as edge_backward
from graphattn.kernels.edges import forward as edge_forward
from graphattn.kernels.edges import inputs as edge_inputs
from graphattn.kernels.edges import math as edge_math
from graphattn.kernels.edges.inputs import EdgeInputs
from graphattn.kernels.edges.schedule import Rows
from graphattn.kernels.generation.step import window_step
from graphattn.kernels.neighbors import candidates
from graphattn.kernels.shared import tuning

T, D = 20, 32  # tokens that are touched, and their features
STRIDE = 2**27  # between tokens that lie apart: the 17th begins at 2^31
HALF, SINGLE = torch.float16, torch.float32
SCALE = torch.tensor([0.5])


def mapped(*shape: int, dtype: torch.dtype) -> Tensor:
    """Zeros, of which only what is looked at takes memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    memory = mmap.mmap(-1, torch.Size(shape).numel() * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def last_of(near: Tensor, tokens: int, dim: int = 0) -> Tensor:
    """A tensor of so many tokens, the last of which are those that are given."""
    shape = [*near.shape[:dim], tokens, *near.shape[dim + 1 :]]
    whole = mapped(*shape, dtype=near.dtype)
    whole.narrow(dim, tokens - near.shape[dim], near.shape[dim]).copy_(near)
    return whole


def apart(*near: Tensor) -> list[Tensor]:
    """Return tokens [1, T, 1, D] in one memory, far from each other."""
    tokens = near[0].shape[1]
    whole = mapped(tokens * STRIDE, dtype=near[0].dtype)
    views = []
    for place, x in enumerate(near):
        stride = (tokens * STRIDE, STRIDE, x.shape[-1], 1)
        views.append(whole.as_strided(x.shape, stride, 1000 * place).copy_(x))
    return views


def attention(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, bias: Tensor | None = None):
    """Compute causal attention of 1 head and scale 0.5 in float64, and its gradients."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    logit = 0.5 * leaves[0] @ leaves[1].T
    if bias is not None:
        leaves.append(bias.double().requires_grad_())
        edges = tuple(torch.ones(T, T).tril().nonzero().T)
        logit = logit + torch.zeros_like(logit).index_put(edges, leaves[3])
    future = torch.ones_like(logit, dtype=torch.bool).triu(1)
    out = logit.masked_fill(future, -torch.inf).softmax(1) @ leaves[2]
    return out, *torch.autograd.grad(out, leaves, d_out.double())


def close(results: Any, expected: Any) -> None:
    for mine, exact in zip(results, expected, strict=True):
        assert mine.isfinite().all()
        assert (mine.double() - exact).norm() < 3e-3 * exact.norm()


def row_dots_of_last(a: Tensor, b: Tensor, factor: float = 1.0, subtracted: Any = None) -> Tensor:
    """Compute the products of the few tokens; a program for all would go over 2^26."""
    dots = torch.empty(1, 1, a.shape[1])
    dots[0, 0, -T:] = (a[0, -T:, 0].float() * b[0, -T:, 0].float()).sum(-1)
    return dots


class Tables:
    """Edges of a causal graph over the last tokens, from place `start` of the list on.

    Target N - T + i sees the last sources up to M - T + i. Other tokens have no rows.
    """

    def __init__(self, N: int, M: int, start: int = 0, others: Tensor | None = None) -> None:
        i, j = torch.ones(T, T).tril().nonzero().T
        place = torch.arange(len(i))
        self.num_targets, self.num_sources, self.num_edges = N, M, start + len(i)
        if others is None:
            others = torch.empty(start + len(i), dtype=torch.int32)
        others[start : start + len(i)] = M - T + j
        self.by_target = self.rows(N, i, others, None, start)
        order = j.argsort(stable=True)
        self.by_source = self.rows(M, j[order], (N - T + i[order]).int(), start + place[order], 0)

    def rows(self, tokens: int, of_rows: Tensor, others: Tensor, edges: Tensor | None, start: int):
        count = torch.bincount(of_rows, minlength=T)
        first = start + count.cumsum(0) - count
        whole = torch.stack([tokens - T + torch.arange(T), first, count, torch.full((T,), -1)], 1)
        return Rows(others, edges, whole, whole, whole[:0, :3], 0, 10.0)


def solved(x: Any, d_out: Tensor, size: int = 16) -> list[Tensor]:
    """Output, and gradients of query, key and value, by band kernels or by edge kernels."""
    forward, backward = band_forward, band_backward
    options: dict[str, Any] = {"scale_gradient": True}
    if isinstance(x, EdgeInputs):
        forward, backward, options["bias_gradient"] = edge_forward, edge_backward, False
    choices = dict.fromkeys((*tuning.KERNELS, *tuning.OF_EDGES), tuning.Choice(size, size, 4, 1))
    with tuning.override(**choices):
        out, _, saved = forward.forward(x)
        return [out, *backward.backward(x, out, saved, d_out, None, **options)[:3]]


def causal_band(first: int, tokens: int) -> BandSchedule:
    return BandSchedule(torch.tensor([[first, tokens, first, tokens, 1, tokens, 0, 1]]), "cpu")


def random(count: int = 4, tokens: int = T, features: int = D, dtype: torch.dtype = HALF):
    return [torch.randn(tokens, features).to(dtype) for _ in range(count)]


def far_tokens(kind: str) -> None:
    """The tokens are the last of 2^26: features, outputs and gradients lie beyond 2^31, too."""
    N, near = 2**26 + T, random()
    q, k, v, d_out = (last_of(x[None, :, None], N, 1) for x in near)
    assert q.numel() > 2**31
    band_backward.row_dots = edge_backward.row_dots = row_dots_of_last
    x: Any = EdgeInputs(q, k, v, SCALE, Tables(N, N), rbf=False)
    if kind == "bands":
        x = BandInputs(q, k, v, SCALE, causal_band(N - T, T), rbf=False)
    close((y[0, -T:, 0] for y in solved(x, d_out)), attention(*near))


def long_strides(kind: str, tokens: int, size: int = 16) -> None:
    """Few tokens, far from each other, so that a tile ends or begins beyond 2^31."""
    near = random(tokens=tokens)
    q, k, v, d_out = apart(*(x[None, :, None] for x in near))
    x: Any = EdgeInputs(q, k, v, SCALE, Tables(T, T), rbf=False) if kind == "edges" else None
    if kind == "bands":
        x = BandInputs(q, k, v, SCALE, causal_band(0, tokens), rbf=False)
    assert x.query.data_ptr() == q.data_ptr()  # no copy
    close((y[0, :, 0] for y in solved(x, d_out, size)), attention(*near))


def far_edges() -> None:
    """The edges are the last of 2^31 + 210, each with a bias and a mark that it is kept."""
    start, near = 2**31, random(dtype=SINGLE)
    E = start + 210
    bias, d_bias = last_of(torch.randn(210, 1), E), mapped(1, E, 1, dtype=SINGLE)
    kept = last_of(torch.ones(1, 210, 1, dtype=torch.uint8), E, 1)
    tables = Tables(T, T, start, mapped(E, dtype=torch.int32))
    *qkv, d_out = (x[None, :, None] for x in near)
    x = EdgeInputs(*qkv, SCALE, tables, rbf=False, bias=bias, kept=kept)
    assert x.bias.data_ptr() == bias.data_ptr()  # no copy
    launch_over = edge_backward.launch_over

    def with_d_bias(*arguments: Any, **named: Any) -> None:
        """The kernel's own gradient of biases, which nobody fills with zeros or sums up."""
        launch_over(*arguments, **named | ({"p_d_bias": d_bias} if "p_d_bias" in named else {}))

    edge_backward.launch_over = with_d_bias
    results = [y[0, :, 0] for y in solved(x, d_out)]
    close([*results, d_bias[0, start:, 0]], attention(*near, bias=bias[start:, 0]))


def far_segments() -> None:
    """The segments of 2^29 targets, four numbers each. Only the programs of the last are run."""
    N, near = 2**29 + T, random(features=1, dtype=SINGLE)
    q, d_out = (last_of(near[i][None, :, None], N, 1) for i in (0, 3))
    tables = Tables(N, T)
    segments = last_of(tables.by_target.segments, N)
    assert segments.numel() > 2**31
    tables.by_target = tables.by_target._replace(segments=segments)
    k, v = (x[None, :, None] for x in near[1:3])
    heads_first, launch = edge_math.heads_first, edge_inputs.launch

    def two_last(num_tiles, heads):
        i_b, i_h, i_tile = heads_first(num_tiles, heads)
        return i_b, i_h, i_tile + num_tiles - 2

    edge_math.heads_first = two_last
    edge_inputs.launch = lambda kernel, grid, **arguments: launch(kernel, (2,), **arguments)
    edge_backward.row_dots = row_dots_of_last
    results = solved(EdgeInputs(q, k, v, SCALE, tables, rbf=False), d_out)
    close((x[0, -T:, 0] for x in results), attention(*near))


def neighbors(far: str, proved: bool = True) -> None:
    """Targets or sources are the last of 2^26; rows that are not proved are searched again."""
    candidates.choose = lambda k, width: candidates.Sizes(16, 16, 4, 16)
    N, (near, other) = 2**26 + T, random(2, dtype=SINGLE)
    expected = torch.cdist(near.double(), other.double()).topk(3, largest=False).indices
    tokens = candidates.centred(near, other, "widened")
    band = [N - T, T, 0, T, 1, T, T, 1]
    if far == "targets":
        margin = tokens.margin if proved else tokens.margin - torch.inf
        tokens = tokens._replace(a=last_of(tokens.a, N), margin=last_of(margin, N))
        near = last_of(near, N)
    else:
        band = [0, T, N - T, T, 1, T, T, 1]
        tokens = tokens._replace(b=last_of(tokens.b, N), square=last_of(tokens.square, N))
        other, expected = last_of(other, N), expected + N - T
        # Searching again copies all sources: the kernels before it are looked at.
        candidates.search_again = lambda x, y, index, unsure, *_: 1 / 0 if unsure.any() else None
    candidates.centred = lambda x, y, precision: tokens
    schedule = BandSchedule(torch.tensor([band]), "cpu")
    index = candidates.nearest(near, other, schedule, 3, to_self=False, self_loops=False)
    assert torch.equal(index[-T:], expected)


def consensus(dtype: torch.dtype) -> None:
    """Few tokens, far from each other, over bands and over lists of edges."""
    near = [x[None, :, None] for x in random(5, features=16, dtype=dtype)]
    shapes = [(1, 16), (1,), (1, 16), (1,), (1, 2, 16, 16), (1, 2, 16)]
    network = ga.EdgeNetworkParameters(*(torch.randn(s) / 4 for s in shapes))

    def step(tensors: list[Tensor], graph: ga.TokenGraph, update: str) -> list[Tensor]:
        *given, d_new = tensors
        leaves = [x.requires_grad_() for x in (*given, *network)]
        new = ga.consensus_update(*given, network, graph, 0.1, update=update, backend="triton")
        return [new.detach(), *torch.autograd.grad(new, leaves, d_new)]

    for graph in (ga.window_path_graph(T, 2), ga.from_mask(torch.rand(T, T) < 0.2)):
        for update in ("energy", "target"):
            results, expected = (
                step(x, graph, update) for x in (apart(*near), [x.clone() for x in near])
            )
            assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def new_token() -> None:
    """One token of a tensor [heads, tokens, features]: its heads lie far apart."""
    near = [x[None, :, None] for x in random(3, features=16)]  # heads in the place of tokens
    keys, values = torch.randn(2, T, 5, 16).half()
    results = []
    for tokens in (near, apart(*near)):
        caches = keys.clone(), values.clone()
        token = [x[:, :, 0] for x in tokens]
        out = window_step(*token, *caches, first=3, held=4, window=4, log_sigma=None)
        results.append((out, *caches))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


PROGRAMS: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
    "bands: tokens": (far_tokens, ("bands",)),
    "bands: strides": (long_strides, ("bands", 40)),
    "bands: within a tile": (long_strides, ("bands", 40, 32)),
    "edges: tokens": (far_tokens, ("edges",)),
    "edges: strides": (long_strides, ("edges", T)),
    "edges: edges": (far_edges, ()),
    "edges: segments": (far_segments, ()),
    "neighbours: targets": (neighbors, ("targets",)),
    "neighbours: targets, searched again": (neighbors, ("targets", False)),
    "neighbours: sources": (neighbors, ("sources",)),
    "consensus: float32": (consensus, (SINGLE,)),
    "consensus: float16": (consensus, (HALF,)),
    "generation: heads": (new_token, ()),
}


def memory() -> float:
    """The most that this process has held so far, GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    torch.manual_seed(0)
    program, arguments = PROGRAMS[sys.argv[1]]
    before = memory()
    program(*arguments)
    assert memory() - before < 0.5, f"{memory() - before} GiB"
    print("right")
