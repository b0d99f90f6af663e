"""Small calls of every compiled CPU kernel, for the sanitizers (`make native-check`).

A case only has to reach the lines of a kernel and the ends of its memory: sizes of 0 and 1, one
less and one more than a vector or a tile, several threads. Whether results are right is for the
tests. A new kernel adds a line to `CASES`: a name, a function, and the arguments of its calls.

    GRAPHATTN_NATIVE=... python tests/native/cases_native.py
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple
from unittest import mock

import native_entries
import torch

import graphattn as ga
from graphattn.graphs.edges import index_width
from graphattn.kernels.cpu import edge_order, library
from graphattn.ops import rotary
from graphattn.ops.attention.native import rows
from graphattn.ops.attention.part_gradients import part_gradients

THREADS = (1, 2, 3)
COUNTS = (0, 1, 3, 4, 5, 15, 16, 17, 63, 4096, 4097, 20_000)
F32 = torch.float32
DTYPES = (F32, torch.float64)
WIDTHS = (index_width.MOST, -1)  # of lists of edges: 32 bits, and 64 where nothing fits
HALVES = (torch.float16, torch.bfloat16)


class Cases(NamedTuple):
    """Calls of one function with each of some arguments."""

    name: str
    call: Callable[..., object]
    arguments: Iterable[tuple[object, ...]]


def exp(count: int, dtype: torch.dtype, threads: int) -> None:
    native_entries.exp(100 * torch.randn(count, dtype=dtype), threads)


def reduce(dtype: torch.dtype) -> None:
    native_entries.reduce(torch.randn(native_entries.lanes(dtype), dtype=dtype))


def fail_to_allocate(tasks: int, threads: int) -> None:
    try:
        native_entries.allocate(-1, tasks, threads)  # refused before the allocator is asked
    except MemoryError:
        return
    raise AssertionError("there is no such memory")


def attention_rows(tokens: int, width: int, dtype: torch.dtype, threads: int) -> None:
    """Every option that reads memory of its own, over rows of no, one and all sources."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(tokens, tokens + 1, generator=generator) < 0.4
    mask[:1], mask[1:2] = False, True
    graph = ga.from_mask(mask)
    query = torch.randn(2, tokens, 4, width, dtype=dtype, requires_grad=True)
    key, value = (torch.randn(2, tokens + 1, 2, width, dtype=dtype).requires_grad_() for _ in "kv")
    bias = torch.randn(2, graph.num_edges, 4, dtype=dtype, requires_grad=True)
    valid = torch.rand(2, tokens) < 0.9, torch.rand(2, tokens + 1) < 0.9
    for options in ({}, {"edge_bias": bias, "valid": valid, "top_k": 3, "dropout": 0.2}):
        for attend, strength in (
            (ga.rbf_attention, {"sigma": 1.0}),
            (ga.dot_product_attention, {}),
        ):
            out, lse = attend(
                query, key, value, graph, backend="native", return_lse=True, **strength, **options
            )
            (out.sum() + lse[lse.isfinite()].sum()).backward()
    if tokens > 100:
        return
    whole = torch.randn(2, tokens, 4, width, dtype=dtype), torch.zeros(2, tokens, 4, dtype=dtype)
    for score, given in ((ga.GaussianKernel(1.0), bias), (ga.DotProduct(1.0), None)):
        gradients = part_gradients(
            query, key, value, graph, score, whole=whole, d_whole=whole, backend="native",
            edge_bias=given, valid=valid,
        )  # fmt: skip
        assert gradients is not None


def neighbors(tokens: int, width: int, dtype: torch.dtype, threads: int) -> None:
    torch.set_num_threads(threads)
    x, source = torch.randn(tokens, width, dtype=dtype), torch.randn(65, width, dtype=dtype)
    if tokens > 5:
        ga.knn(x, 5)
    ga.knn(x, 20, source=source)
    ga.knn(torch.ones_like(x), 3, source=torch.ones_like(source).repeat(9, 1))  # no room for all
    for radius in (0.0, 1.0, 1e9):
        ga.radius_graph(x, radius, self_loops=True)
        ga.radius_graph(x, radius, max_neighbors=2)
        ga.radius_graph(x[1:], radius, source=x)


def order_of_visits(tokens: int, neighbors: int) -> None:
    """Points in random order: less than a cluster of them, one, and more; in both widths."""
    for most in WIDTHS:
        with mock.patch.object(index_width, "MOST", most):
            graph = ga.knn_graph(torch.rand(tokens, 2), min(neighbors, tokens - 1))
            rows.edges_of(graph).visits  # noqa: B018


def wide_rows(tokens: int, width: int, dtype: torch.dtype, threads: int) -> None:
    """Rows of lists of 64 bits."""
    with mock.patch.object(index_width, "MOST", WIDTHS[1]):
        attention_rows(tokens, width, dtype, threads)


def sort_edges(targets: int, sources: int, dtype: torch.dtype) -> None:
    """Lists in order and not, long rows, columns that lie apart, and all that is refused."""
    edges = (torch.rand(targets, sources) < 0.4).nonzero().flip(1)
    shuffled = edges[torch.randperm(len(edges))]
    for given in (edges.T, shuffled.T, shuffled.T.contiguous(), shuffled.repeat(1, 2)[:, :2].T):
        for permutation in (True, False):
            sizes = given.to(dtype), targets, sources
            assert not isinstance(
                edge_order.sorted_edges(*sizes, permutation=permutation), edge_order.Wrong
            )
    for bad in ([[sources], [0]], [[0], [targets]], [[-1], [0]], [[0, 0], [0, 0]]):
        given = torch.tensor(bad, dtype=dtype)
        result = edge_order.sorted_edges(given, targets, sources, permutation=True)
        assert isinstance(result, edge_order.Wrong)


def attention_bands(kind: str, tokens: int, width: int, dtype: torch.dtype, threads: int) -> None:
    """Every way through the tiles, and every reason why a row is computed by itself."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    graph = BANDS[kind](tokens)
    targets, sources = graph.num_targets, graph.num_sources

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    def some(count: int) -> torch.Tensor:
        return torch.rand(2, count, generator=generator) < 0.9

    query, value = leaf(2, targets, 4, width), leaf(2, sources, 2, width + 1)
    key = leaf(2, sources, 2, width)
    offsets = 0 if graph.structure is None else graph.structure.num_offsets or 0
    table = {}
    if offsets not in (0, graph.num_edges):
        entries = torch.randn(offsets, 4, generator=generator).to(torch.promote_types(dtype, F32))
        table = {"edge_bias": entries.requires_grad_()}
    holes = {"edge_bias": bad_entry(table["edge_bias"])} if table else {}
    valid = {"valid": (some(targets), some(sources))}
    equal = key.detach() * 0 + 1  # every row is a tie
    for score, keys, options in (
        ("dot", key, {"softcap": 2.0, **table}),
        ("dot", key, {"top_k": 3, **valid, **table}),
        ("rbf", key, {**table}),
        ("rbf", key, {"sigma": 0.05, **valid}),  # steep
        ("rbf", key, {"sigma": 0.05, "top_k": 2, **table}),
        ("rbf", equal, {"top_k": 3}),
        ("dot", equal, {"top_k": 40, "softcap": 1e-3}),
        ("dot", bad_token(key), {**table}),
        ("rbf", bad_token(key), {"top_k": 3, **valid}),
        ("dot", key, holes),
    ):
        attend = ga.dot_product_attention
        if score == "rbf":
            attend, options = ga.rbf_attention, {"sigma": 2.0 * (width + 1) ** 0.5, **options}
        out, lse = attend(query, keys, value, graph, backend="native", return_lse=True, **options)
        if score == "rbf":
            torch.autograd.backward([out, lse], [torch.ones_like(out), lse.isfinite().to(lse)])
        else:
            out.backward(torch.ones_like(out))


def steps_of_layers(kind: str, window: int, dtype: torch.dtype, threads: int) -> None:
    """Rings and buffers that grow, padding, turns, caches of another precision."""
    torch.set_num_threads(threads)
    layer = LAYERS[kind]().to(dtype)
    x = torch.randn(3, 70, 36, dtype=dtype)
    kept = (dtype,) if dtype == torch.float64 else (F32, *HALVES)
    for of_cache in kept:
        line = layer.init_cache(3, window or None, dtype=of_cache)
        caches = [line]
        if window:
            sizes = line.owner, line.fields, (3,), window
            caches.append(ga.nn.LayerCache(*sizes, dtype=of_cache, device=line.device, ring=True))
        for cache in caches:
            for t in range(70):
                valid = None if t < 40 else torch.rand(3) < 0.8
                layer.step(x[:, t], cache, valid=valid)


def steps_of_blocks(kind: str, dim: int, dtype: torch.dtype, threads: int) -> None:
    """Widths with rests of vectors, numbers of texts that fill no group, and none."""
    torch.set_num_threads(threads)
    plain = {"norm": "rms", "activation": "relu2", "bias": False, "mlp_ratio": 1.3}
    for texts, options in ((0, {}), (1, plain), (7, {}), (8, plain)):
        block = ga.nn.PreNormBlock(BLOCKS[kind](dim), **options).to(dtype)
        cache = block.init_cache(texts, 3)
        for _ in range(4):
            block.step(torch.randn(texts, dim, dtype=dtype), cache)


def decode(tokens: int, width: int, dtype: torch.dtype, threads: int) -> None:
    """Queries in front of a text, no text at all, whole caches, ties and NaN."""
    torch.set_num_threads(threads)
    query = torch.randn(4, tokens, 4, width, dtype=dtype)
    key = torch.randn(4, 300, 2, width, dtype=dtype)
    value = torch.randn(4, 300, 2, width + 1, dtype=dtype)
    apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (key, value)]
    sink, lengths = torch.randn(4).to(dtype), torch.tensor([0, 1, 129, 300])
    for keys, values in ((key, value), apart, (bad_token(key), value), (key * 0, value)):
        for strength in ({"sigma": 2.0}, {"scale": 0.3}):
            for options in ({}, {"window": 70, "top_k": 5}, {"top_k": 290, "sink": sink}):
                ga.decode_attention(
                    query, keys, values, lengths, return_lse=True, **strength, **options
                )


def consensus(kind: str, width: int, hidden: int, dtype: torch.dtype, threads: int) -> None:
    """Every option that reads memory of its own, over rows of no edges, loops, and a hub."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    graph = EDGES[kind]()
    tokens = graph.num_targets, graph.num_sources

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    for heads, groups, trunks, rank, batch in ((2, 2, 1, 1, 1), (3, 1, 3, 3, 2), (1, 1, 1, 2, 0)):
        network = ga.EdgeNetworkParameters(
            *(leaf(heads, hidden), leaf(heads)) * 2,
            leaf(heads, rank, width, hidden),
            leaf(heads, rank, width),
        )
        layers = [leaf(batch, count, groups, trunks * hidden) for count in tokens]
        states = [leaf(batch, count, heads, width) for count in tokens]
        masks = tuple(torch.rand(batch, count, generator=generator) < 0.8 for count in tokens)
        numbers = leaf(graph.num_edges, 1, 3)
        of_edges = ga.FirstLayer(numbers, leaf(groups, trunks * hidden, 3))
        formed = leaf(batch, graph.num_edges, groups, trunks * hidden)
        same = tokens[0] == tokens[1] and not graph.has_causal_part
        for update in ("target", "energy")[: 1 + same]:
            for options in (
                {"step_size": 0.1},
                {"step_size": "auto", "valid": masks},
                {"step_size": 0.1, "valid": masks, "edge_hidden": of_edges},
                {"step_size": 0.1, "edge_hidden": formed},
            ):
                given = (*states, *layers, network, graph)
                new = ga.consensus_update(*given, update=update, backend="native", **options)
                new.sum().backward()
                halves = [x.detach().to(torch.bfloat16) for x in (*states, *layers)]
                if dtype == F32 and "edge_hidden" not in options:
                    with torch.no_grad():
                        ga.consensus_update(
                            *halves, network, graph, update=update, backend="native", **options
                        )


def activations(count: int, dtype: torch.dtype) -> None:
    native_entries.activations(4 * torch.randn(count, dtype=dtype))


LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "dot": lambda: ga.nn.DotProductAttention(36, 6, kv_heads=2, rope=True, softcap=4.0),
    "krause": lambda: ga.nn.KrauseAttention(36, 2, top_k=5, sink=True),
    "gka": lambda: ga.nn.GaussianKernelAttention(36, 1, rope=True, eps=0.1),
    "consensus": lambda: ga.nn.SelfConsensus(36, 2, edge_hidden=19, rank=2, update="target"),
    "one network": lambda: ga.nn.SelfConsensus(
        36, 3, edge_hidden=5, update="target", trunk="separate", edge_input="full", step_size="auto"
    ),
}
BLOCKS: dict[str, Callable[[int], torch.nn.Module]] = {
    "dot": lambda dim: ga.nn.DotProductAttention(dim, 4, kv_heads=2),
    "krause": lambda dim: ga.nn.KrauseAttention(dim, 2, top_k=2, rope=True),
    "gka": lambda dim: ga.nn.GaussianKernelAttention(dim, 2),
    "linear": lambda dim: ga.nn.LinearAttention(dim, 2),
}


def bad_token(x: torch.Tensor) -> torch.Tensor:
    """x with NaN in the middle and an enormous number at the end."""
    x = x.detach().clone()
    x[:, x.shape[1] // 2 :][:, :1] = torch.nan
    x[:, -1:] = min(1e30, torch.finfo(x.dtype).max)
    return x


def bad_entry(table: torch.Tensor) -> torch.Tensor:
    """A table whose first entry is NaN, and whose last says that nobody is seen there."""
    table = table.detach().clone()
    table[-1], table[0] = -torch.inf, torch.nan
    return table


BANDS: dict[str, Callable[[int], ga.TokenGraph]] = {
    "causal window": lambda n: ga.causal_window_graph(n, 40),
    "past": lambda n: ga.causal_window_graph(n, 17, past=70),
    "path": lambda n: ga.window_path_graph(n, 9),
    "narrow": lambda n: ga.window_path_graph(n, 4),
    "dilated": lambda n: ga.dilated_window_graph(n, 20, 2),
    "blocks": lambda n: ga.block_window_graph(n, 16, shift=3),
    "batch": lambda n: ga.batch([ga.causal_graph(n), ga.causal_graph(3), ga.causal_graph(n)]),
    "complete": lambda n: ga.complete_graph(n, self_loops=False),
    "wide": lambda n: ga.window_path_graph(n, 300, self_loops=True),
}


def turn(tokens: int, width: int, dtype: torch.dtype, threads: int) -> None:
    """Queries alone where features lie apart, and queries and keys in one call."""
    torch.set_num_threads(threads)
    x = torch.randn(2, 3, tokens, width, dtype=torch.float64).to(dtype).transpose(1, 2)
    angle = torch.rand(2, tokens, 1, width // 2, dtype=torch.promote_types(dtype, F32))
    rotary.rotate(x, angle.cos(), angle.sin(), back=True)
    rotary.rotate_both(x, x[:, :, :1], angle[0].cos(), angle[0].sin())


EDGES: dict[str, Callable[[], ga.TokenGraph]] = {
    "windows": lambda: ga.batch([ga.window_path_graph(n, 3) for n in (40, 0, 2, 17)]),
    "causal": lambda: ga.causal_window_graph(33, 5),
    "rows": lambda: ga.causal_window_graph(9, 4, past=6),
    "hub": lambda: ga.longformer_graph(61, 2, (0, 30)),
    "none": lambda: ga.from_edge_index(torch.empty(2, 0, dtype=torch.int64), 3),
    "rectangle": lambda: ga.bipartite_complete_graph(5, 33),
}

CASES = [
    Cases("activations", activations, itertools.product((0, 1, 15, 16, 17), DTYPES)),
    Cases(
        "consensus",
        consensus,
        [
            *itertools.product(EDGES, (1, 17), (1, 19), DTYPES, (1,)),
            *itertools.product(EDGES, (33,), (16, 50), (F32,), (2, 3)),
        ],
    ),
    Cases("exp", exp, itertools.product(COUNTS, DTYPES, THREADS)),
    Cases("reduce", reduce, itertools.product(DTYPES)),
    Cases("workers", native_entries.workers, itertools.product((0, 1, 2, 50), THREADS)),
    Cases(
        "allocate", native_entries.allocate, itertools.product((0, 1, 100_000), (0, 1, 20), THREADS)
    ),
    Cases(
        "attention_rows",
        attention_rows,
        itertools.product((1, 2, 17, 600), (0, 1, 16, 19), DTYPES, THREADS),
    ),
    Cases("neighbors", neighbors, itertools.product((1, 17, 600), (1, 8, 9, 70), DTYPES, THREADS)),
    Cases(
        "steps_of_layers",
        steps_of_layers,
        itertools.product(LAYERS, (0, 1, 20), (F32, torch.float64, torch.bfloat16), (1, 3)),
    ),
    Cases(
        "steps_of_blocks",
        steps_of_blocks,
        itertools.product(BLOCKS, (20, 260), (*DTYPES, torch.bfloat16), (1, 3)),
    ),
    Cases(
        "decode",
        decode,
        itertools.product((0, 1, 3), (0, 1, 16, 19, 64), (*DTYPES, *HALVES), THREADS),
    ),
    Cases("wide_rows", wide_rows, itertools.product((1, 17, 100), (0, 16, 19), DTYPES, (1, 3))),
    Cases(
        "sort_edges",
        sort_edges,
        itertools.product((0, 1, 2, 40), (0, 1, 24, 25, 3000), edge_order.DTYPES),
    ),
    Cases(
        "turn",
        turn,
        itertools.product((0, 1, 65, 9000), (2, 6, 18, 64), (*DTYPES, *HALVES), THREADS),
    ),
    Cases("order_of_visits", order_of_visits, itertools.product((2, 127, 128, 1500), (1, 8, 63))),
    Cases(
        "attention_bands",
        attention_bands,
        [
            *itertools.product(BANDS, (0, 1, 9), (5,), (torch.float32,), (1,)),
            *itertools.product(BANDS, (65,), (17,), DTYPES, (1,)),
            *itertools.product(("path", "blocks"), (40,), (0, 80), (torch.float64,), (1,)),
            *itertools.product(("batch", "wide", "past"), (260,), (16,), (torch.float32,), (3,)),
            *itertools.product(("batch", "past", "dilated"), (65,), (17,), HALVES, (1,)),
            *itertools.product(("narrow",), (270,), (3, 64, 130), (torch.float32,), (2,)),
            *itertools.product(("narrow",), (34, 270), (17,), (torch.float64, *HALVES), (1,)),
            ("causal window", 1025, 3, torch.float32, 2),
            ("causal window", 260, 32, torch.bfloat16, 3),
        ],
    ),
    Cases("fail_to_allocate", fail_to_allocate, itertools.product((1, 20), THREADS)),
]


def main() -> None:
    torch.manual_seed(0)
    print(f"  {library.instruction_set()}: ", end="", flush=True)
    for name, call, arguments in CASES:
        count = 0
        for one in arguments:
            call(*one)
            count += 1
        print(f"{count} {name}", end=", ", flush=True)
    print("done", flush=True)


if __name__ == "__main__":
    native_entries.loaded()
    main()
