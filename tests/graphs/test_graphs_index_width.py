"""Lists of 32 bits inside, 64 bits outside: nobody sees which, and nothing is cut off."""

import copy
import pickle
import subprocess
import sys

import kinds_of_graphs
import numpy as np
import pytest
import torch

import graphattn as ga
from graphattn.graphs.edges import index_width
from graphattn.graphs.edges import lists as edge_lists
from graphattn.graphs.edges.lists import edges_of_structure
from graphattn.graphs.token_graph import decode

N = 40
BORDERS = torch.arange(N) // 8


def edges_of(num_targets: int = N, num_sources: int = N, seed: int = 0) -> torch.Tensor:
    """Every fifth pair, in random order, int64 [2, E]."""
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.rand(num_targets, num_sources, generator=generator) < 0.2
    target, source = pairs.nonzero().T
    order = torch.randperm(len(source), generator=generator)
    return torch.stack([source, target])[:, order]


def listed(num_targets: int = N, num_sources: int = N) -> ga.TokenGraph:
    return ga.from_edge_index(edges_of(num_targets, num_sources), num_targets, num_sources)


def table() -> ga.TokenGraph:
    return ga.knn_graph(torch.rand(N, 2, generator=torch.Generator().manual_seed(0)), 5)


def within_items() -> ga.TokenGraph:
    edges = edges_of()
    edges = edges[:, BORDERS[edges[0]] == BORDERS[edges[1]]]
    return ga.from_edge_index(edges, N, batch=BORDERS)


GRAPHS = kinds_of_graphs.GRAPHS | {
    "list": listed,
    "rectangular list": lambda: listed(30, 50),
    "list with borders": within_items,
    "radius": lambda: ga.radius_graph(torch.arange(9.0)[:, None], 2.0),
    "batch of lists": lambda: ga.batch([listed(), listed(30, 50), ga.causal_graph(4)]),
    "batch of tables": lambda: ga.batch([table(), GRAPHS["causal table"]()]),
    "union of lists": lambda: ga.union(listed(), ga.window_path_graph(N, 3)),
    "transpose": lambda: listed(30, 50).transpose(),
    "permuted": lambda: listed().permute(torch.arange(N).flip(0)),
    "rows of a table": lambda: table().targets(7, 23)[0],
    "reordered": lambda: listed().reorder()[0],
}


def held(graph: ga.TokenGraph) -> list[torch.Tensor]:
    """Everything with an entry per edge or token that the graph keeps."""
    lists = [graph.compact_edges, *graph.compact_csr(), graph._order_by_source()]
    return [x for x in (*lists, graph.compact_neighbors) if x is not None]


def seen(graph: ga.TokenGraph) -> dict[str, torch.Tensor]:
    """Lists of a graph as users see them, by name."""
    lists = {
        "edge_index": graph.edge_index,
        "rowptr": graph.rowptr,
        "csr": torch.cat(graph.csr()),
        "transpose": graph.transpose().edge_index,
        "transpose_permutation": graph.transpose_permutation(),
        "in_degree": graph.in_degree(),
        "positions": graph.positions,
        "batch": graph.batch,
    }
    return lists if graph.neighbors is None else lists | {"neighbors": graph.neighbors}


def same_lists(a: ga.TokenGraph, b: ga.TokenGraph) -> None:
    for (name, x), y in zip(seen(a).items(), seen(b).values(), strict=True):
        assert x.dtype == y.dtype == torch.int64, name
        assert torch.equal(x, y), name


@pytest.mark.parametrize("name", GRAPHS)
def test_lists_are_held_in_32_bits_and_seen_in_64(name, monkeypatch):
    narrow = GRAPHS[name]()
    assert {x.dtype for x in held(narrow)} == {torch.int32}
    monkeypatch.setattr(index_width, "MOST", -1)  # nothing fits
    wide = GRAPHS[name]()
    assert {x.dtype for x in held(wide)} == {torch.int64}
    same_lists(narrow, wide)
    assert narrow == wide
    assert wide == narrow
    assert hash(narrow) == hash(wide)
    assert repr(narrow) == repr(wide)
    assert torch.equal(narrow.to_mask(), wide.to_mask())
    assert (narrow.to_scipy() != wide.to_scipy()).nnz == 0
    assert torch.equal(narrow.to_pyg(), wide.to_pyg())


@pytest.mark.parametrize("name", GRAPHS)
def test_copies_files_and_operators_hand_on_what_they_get(name, monkeypatch):
    graph = GRAPHS[name]()
    with monkeypatch.context() as patch:
        patch.setattr(index_width, "MOST", -1)
        saved = pickle.dumps(GRAPHS[name]())  # as a version saved it that knew int64 alone
    old = pickle.loads(saved)
    assert {x.dtype for x in held(old)} == {torch.int32}
    graph.edge_index, graph.rowptr, graph.transpose_permutation()
    for twin in (old, copy.deepcopy(graph), copy.copy(graph), graph.to("cpu")):
        same_lists(twin, graph)
    if graph.structure is None:
        for given in (graph.listed, graph.listed.long()):
            again = decode(graph.code, given, graph.device)
            assert torch.equal(again.edge_index, graph.edge_index)
        assert decode(graph.code, graph.listed, graph.device).listed is graph.listed


@pytest.mark.parametrize("count", [8, 9, 10])
def test_the_largest_graph_of_32_bits_is_as_large_as_its_numbers(count, monkeypatch):
    """A graph has lists of 64 bits if its edges, targets or sources exceed the limit, here 9."""
    monkeypatch.setattr(index_width, "MOST", 9)
    k = torch.arange(count)
    dtype = torch.int32 if count <= 9 else torch.int64
    for graph in (
        ga.from_edge_index(torch.stack([k % 3, k // 3]), 4, 3),
        ga.from_edge_index(torch.tensor([[0], [count - 1]]), count, 1),
        ga.from_edge_index(torch.tensor([[count - 1], [0]]), 1, count),
    ):
        assert {x.dtype for x in held(graph)} == {dtype}
        assert max(graph.num_edges, graph.num_targets, graph.num_sources) == count
        assert len(set(zip(*graph.edge_index.tolist(), strict=True))) == graph.num_edges


def test_a_batch_is_as_wide_as_it_is_large(monkeypatch):
    """Lists and tables of 32 bits, and lists of both widths, join in batches wide enough."""
    parts = [listed(), listed(30, 50)]
    tables = [table(), GRAPHS["causal table"]()]
    expected = [ga.batch(graphs).edge_index for graphs in (parts, tables)]
    most = parts[0].num_edges + 1
    monkeypatch.setattr(index_width, "MOST", most)
    wide = ga.batch([listed(), listed()])
    assert wide.compact_edges.dtype == torch.int64
    for graphs, edges in zip(([*parts], tables), expected, strict=True):
        joined = ga.batch(graphs)
        assert torch.equal(joined.edge_index, edges)
    mixed = ga.batch([wide, *parts])
    monkeypatch.undo()
    again = ga.batch([wide, *parts])
    assert (mixed.compact_edges.dtype, again.compact_edges.dtype) == (torch.int64, torch.int32)
    same_lists(mixed, again)


def test_products_of_numbers_of_tokens_do_not_overflow():
    """Edge (target, source) has the number target * num_sources + source, here 8e9."""
    last = 90_000
    ends = torch.tensor([[last, 0, last, 7], [last, last, 0, 3]])
    graph = ga.from_edge_index(ends, last + 1)
    assert set(zip(*graph.edge_index.tolist(), strict=True)) == {
        (last, last), (0, last), (last, 0), (7, 3)
    }  # fmt: skip
    both = ga.union(graph, ga.from_edge_index(torch.tensor([[last], [1]]), last + 1))
    assert both.edge_index.tolist() == [[last, last, 7, 0, last], [0, 1, 3, last, last]]
    moved, edges = graph.permute(torch.arange(last + 1).flip(0), return_edge_permutation=True)
    assert moved.edge_index.tolist() == [[0, last, last - 7, 0], [0, 0, last - 3, last]]
    assert torch.equal(last - graph.edge_index[:, edges], moved.edge_index)


# What belongs to the user, and what to the graph.


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_a_list_is_neither_changed_nor_shared(dtype):
    given = edges_of().to(dtype)
    ascending = given[:, (given[1] * N + given[0]).argsort()].contiguous()
    for edge_index in (given, ascending):
        before = edge_index.clone()
        graph = ga.from_edge_index(edge_index, N)
        expected = graph.edge_index.clone()
        assert torch.equal(edge_index, before)
        edge_index.zero_()
        assert torch.equal(graph.edge_index, expected)
        assert torch.equal(pickle.loads(pickle.dumps(graph)).edge_index, expected)


def test_writing_into_what_was_asked_for_does_not_change_the_graph():
    for graph in (listed(), table(), GRAPHS["path"]()):
        for ask in (
            lambda g: g.edge_index,
            lambda g: g.rowptr,
            lambda g: g.transpose_permutation(),
            lambda g: g.neighbors,
        ):
            if (index := ask(graph)) is None:
                continue
            expected = index.clone()
            assert ask(graph) is index, "small lists are kept"
            index[..., 0] += 1
            assert torch.equal(ask(graph), expected)
    assert graph == GRAPHS["path"]()


def test_large_lists_are_not_kept_twice(monkeypatch):
    graph = listed()
    monkeypatch.setattr(index_width, "STORED_WIDE", graph.compact_edges.numel() - 1)
    assert graph.edge_index is not graph.edge_index
    assert torch.equal(graph.edge_index, graph.compact_edges.long())
    monkeypatch.setattr(index_width, "STORED_WIDE", graph.compact_edges.numel())
    assert graph.edge_index is graph.edge_index


def test_lists_on_other_devices_have_64_bits():
    for graph in (listed(), table()):
        _ = graph.edge_index, graph.rowptr
        moved = graph.to("meta")
        for x in (moved.listed, moved.compact_rowptr, moved.compact_edges, moved.edge_index):
            assert (x.dtype, x.device.type) == (torch.int64, "meta")


def test_what_was_derived_for_one_device_is_not_used_on_another():
    graph = listed()
    assert graph.derived("lists", lambda: graph.rowptr).device.type == "cpu"
    moved = graph.to("meta")
    assert moved.derived("lists", lambda: moved.rowptr).device.type == "meta"
    assert graph.derived("lists", lambda: graph.rowptr).device.type == "cpu"


# Who asks, and under what.


def test_lists_that_are_first_asked_for_in_inference_or_in_torch_func_serve_training():
    layer = ga.nn.KrauseAttention(8, heads=2, top_k=3, backend="reference")
    x = torch.randn(N, 8, requires_grad=True)
    for make in (listed, table):
        expected = torch.autograd.grad(layer(x, make()).square().sum(), x)[0]
        asked = []
        with torch.inference_mode():
            asked.append(make())
            asked.append(ga.from_edge_index(asked[0].edge_index, N))
            for graph in asked:
                layer(x, graph), graph.edge_index, graph.rowptr, graph.transpose_permutation()
        asked.append(make())
        torch.func.grad(lambda y, g=asked[-1]: layer(y, g).sum())(x.detach())
        asked.append(make())
        torch.func.vmap(lambda y, g=asked[-1]: layer(y, g))(x.detach().expand(2, N, 8))
        for graph in asked:
            gradient = torch.autograd.grad(layer(x, graph).square().sum(), x)[0]
            torch.testing.assert_close(gradient, expected)


def test_what_fake_tensors_ask_for_is_not_kept():
    graph = listed()
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        _ = graph.edge_index
    assert type(graph.edge_index) is torch.Tensor
    assert torch.equal(graph.edge_index, graph.compact_edges.long())


def test_a_compiled_function_is_compiled_once_for_all_graphs():
    """Graphs asked for their list before or not, copied or unpickled, share one compilation."""

    def average(x, graph):
        source, target = graph.edge_index
        return x.new_zeros(graph.num_targets, 4).index_add(0, target, x[source])

    torch.compiler.reset()
    compiled = torch.compile(average, backend="eager", fullgraph=True)
    x = torch.randn(N, 4)
    fresh, asked = listed(), listed()
    with torch.compiler.set_stance("default"):
        compiled(x, fresh)
    _ = asked.edge_index, fresh.edge_index
    with torch.compiler.set_stance("fail_on_recompile"):
        for graph in (fresh, asked, copy.deepcopy(asked), pickle.loads(pickle.dumps(fresh))):
            assert torch.equal(compiled(x, graph), average(x, graph))


# Sorting.


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
@pytest.mark.parametrize("shape", [(N, N), (7, 200), (200, 7), (1, 250), (250, 1)])
@pytest.mark.parametrize("layout", ["rows", "columns", "every second"])
@pytest.mark.parametrize("compiled", [True, False])
def test_edges_are_sorted_by_target_then_source(dtype, shape, layout, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(edge_lists, "has_edge_order", lambda edge_index: False)
    edges = edges_of(*shape).to(dtype)
    if layout == "columns":
        edges = edges.T.contiguous().T
    elif layout == "every second":
        edges = edges.repeat_interleave(2, dim=1)[:, ::2]
    expected = np.lexsort(edges.numpy())
    graph, order = ga.from_edge_index(edges, *shape, return_permutation=True)
    assert order.dtype == torch.int64
    assert order.tolist() == expected.tolist()
    assert torch.equal(graph.edge_index, edges[:, order].long())
    assert ga.from_edge_index(edges, *shape) == graph
    again, order = ga.from_edge_index(graph.edge_index, *shape, return_permutation=True)
    assert order.tolist() == list(range(graph.num_edges))
    assert torch.equal(again.compact_edges, graph.compact_edges)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_what_is_wrong_with_a_list_is_named_alike(compiled, dtype, monkeypatch):
    """The first edge out of range, sources before targets, and the first repeated in order."""
    if not compiled:
        monkeypatch.setattr(edge_lists, "has_edge_order", lambda edge_index: False)
    for edges, sizes, message in (
        ([[0, 5, 1], [9, 0, 0]], (3, 5), r"edge_index\[0, 1\] = 5 is not a source: .* 0 \.\. 4"),
        ([[0, -1], [0, 0]], (3, 5), r"edge_index\[0, 1\] = -1 is not a source: .* 0 \.\. 4"),
        ([[0, 4, 1], [0, 2, 3]], (3, 5), r"edge_index\[1, 2\] = 3 is not a target: .* 0 \.\. 2"),
        ([[0], [0]], (3, 0), "has edges, but there are no sources"),
        ([[0], [0]], (0, 3), "has edges, but there are no targets"),
        ([[4, 4, 1, 1], [2, 2, 1, 1]], (3, 5), r"\(source 1, target 1\) more than once"),
        ([[4, 0, 4, 1, 0], [2, 2, 2, 1, 2]], (3, 5), r"\(source 0, target 2\) more than once"),
        ([[3, 3], [2, 2]], (3, 5), r"\(source 3, target 2\) more than once"),
    ):
        given = torch.tensor(edges, dtype=dtype)
        for permutation in (True, False):
            with pytest.raises(ValueError, match=message):
                ga.from_edge_index(given, *sizes, return_permutation=permutation)
    huge = torch.tensor([[2**40], [0]])
    with pytest.raises(ValueError, match=f"= {2**40} is not a source"):
        ga.from_edge_index(huge, 3)


# Structures.


@pytest.mark.parametrize("name", kinds_of_graphs.STRUCTURED)
@pytest.mark.parametrize("at_once", [1, 10, 30])
def test_edges_listed_some_rows_at_a_time_are_those_that_the_structure_contains(
    name, at_once, monkeypatch
):
    structure = kinds_of_graphs.STRUCTURED[name]().structure
    monkeypatch.setattr(edge_lists, "AT_ONCE", at_once)
    edges = edges_of_structure(structure, torch.device("cpu"))
    target = torch.arange(structure.num_targets)[:, None]
    source = torch.arange(structure.num_sources)
    target, source = torch.broadcast_tensors(target, source)
    mask = structure.contains(target, source)
    assert torch.equal(edges.long(), torch.stack([source[mask], target[mask]]))


def test_large_structures_are_listed_in_32_bits():
    assert (
        edges_of_structure(
            ga.longformer_graph(20_000, 32, [0]).structure, torch.device("cpu")
        ).dtype
        == torch.int32
    )


# Memory.

PEAK = """
import resource, sys
import torch
import graphattn as ga

torch.set_num_threads(1)
N, E = 300_000, 3_000_000

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

small = ga.from_edge_index(torch.tensor([[0, 1], [1, 0]]), 2)
y = torch.ones(2, 1, 4, requires_grad=True)
ga.dot_product_attention(y, y, y, small, backend="auto").sum().backward()
target = torch.arange(E) % N
source = (target * 7919 + torch.arange(E) // N * 31) % N
edge_index = torch.stack([source, target])
del source, target
before = peak()
graph = ga.from_edge_index(edge_index, N)
print(peak() - before)
before = peak()
graph = ga.window_path_graph(N, 5)
graph.compact_edges
print(peak() - before)
"""


@pytest.mark.long
def test_a_large_list_takes_eight_bytes_an_edge():
    """Peak memory grows by 8 bytes per edge, 4 per token and less than 4 MiB.

    The numbers in int64 would be 8 bytes more per edge.
    """
    pytest.importorskip("resource")
    if not edge_lists.has_edge_order(torch.zeros(2, 0, dtype=torch.int64)):
        pytest.skip("without compiled code lists are sorted by a number per edge")
    run = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    of_list, of_windows = map(int, run.stdout.split())
    assert of_list < 8 * 3_000_000 + 4 * 300_000 + 2**22
    assert of_windows < 8 * 3_000_000 + 4 * 300_000 + 2**22
