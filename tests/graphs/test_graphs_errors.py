"""Bad input raises a ValueError that names the argument, its value and what is allowed."""

import math
import re

import networkx
import numpy as np
import pytest
import scipy.sparse
import torch
from torch_geometric import EdgeIndex
from torch_geometric.data import Data

import graphattn as ga

X = torch.zeros(4, 2)


def edges(*pairs, dtype=torch.int64):
    return torch.tensor(pairs, dtype=dtype).reshape(-1, 2).T


BUILDERS = [  # with good arguments
    (ga.window_path_graph, {"num_tokens": 5, "window": 2}),
    (ga.window_cycle_graph, {"num_tokens": 5, "window": 2}),
    (ga.causal_window_graph, {"num_tokens": 5, "window": 2}),
    (ga.bipartite_window_graph, {"num_tokens": 5, "window": 2}),
    (ga.complete_graph, {"num_tokens": 5}),
    (ga.causal_graph, {"num_tokens": 5}),
    (ga.block_window_graph, {"num_tokens": 5, "block_size": 3, "shift": 1}),
    (ga.dilated_window_graph, {"num_tokens": 5, "window": 2, "dilation": 2}),
    (ga.bipartite_complete_graph, {"num_targets": 5, "num_sources": 2}),
    (ga.grid_window_graph, {"height": 2, "width": 3, "radius": 1}),
    (ga.volume_window_graph, {"depth": 2, "height": 2, "width": 3, "radius": 1, "dilation": 2}),
    (ga.neighborhood_graph, {"shape": (9, 9), "kernel_size": 3, "stride": 2, "dilation": 2}),
    (ga.longformer_graph, {"num_tokens": 5, "window": 1, "global_tokens": [0], "dilation": 2}),
    (ga.causal_longformer_graph, {"num_tokens": 5, "window": 2, "num_global": 1}),
    (
        ga.bigbird_graph,
        {"num_tokens": 5, "window": 1, "num_random": 1, "global_tokens": [0], "seed": 3},
    ),
    (ga.from_edge_index, {"edge_index": edges((0, 1)), "num_targets": 2, "num_sources": 2}),
    (ga.knn, {"x": X, "k": 1}),
    (ga.knn_graph, {"x": X, "k": 1}),
    (ga.routing_graph, {"x": X, "clusters": 2}),
    (ga.scored_window_graph, {"scores": torch.zeros(4, 3), "k": 2}),
    (ga.radius_graph, {"positions": X, "radius": 1.0, "max_neighbors": 2}),
]
MAY_BE_0 = (
    "num_tokens",
    "num_targets",
    "num_sources",
    "num_random",
    "num_global",
    "shift",
    "seed",
)
WHOLE_NUMBERS = [
    pytest.param(build, good, name, int(name not in MAY_BE_0), id=f"{build.__name__}-{name}")
    for build, good in BUILDERS
    for name, value in good.items()
    if isinstance(value, int)
]


@pytest.mark.parametrize(("build", "good", "name", "least"), WHOLE_NUMBERS)
def test_a_whole_number_that_is_none_or_too_small_is_named(build, good, name, least):
    build(**good)
    bad = [least - 1, -7, 1.5, 2.0, math.nan, True, False, "3", [2], torch.tensor(1.5), 1j]
    if (build, name) not in {
        (ga.from_edge_index, "num_sources"),
        (ga.radius_graph, "max_neighbors"),
    }:
        bad.append(None)  # there None is a value
    for value in bad:
        with pytest.raises(ValueError, match="must be") as raised:
            build(**{**good, name: value})
        message = str(raised.value)
        assert message.startswith(f"{name} must be")
        assert f">= {least}" in message
        assert message.endswith((f"got {value!r}", f"got {value}"))


@pytest.mark.parametrize(("build", "good", "name", "least"), WHOLE_NUMBERS)
def test_whole_numbers_of_numpy_and_torch_are_whole_numbers(build, good, name, least):
    value = good[name]
    for same in (np.int64(value), np.uint8(value), torch.tensor(value)):
        a, b = build(**good), build(**{**good, name: same})
        if isinstance(a, ga.TokenGraph):
            assert a == b
            assert type(b.num_targets) is type(b.num_sources) is int


BAD_CALLS = [
    # windows and blocks
    (lambda: ga.block_window_graph(9, 3, shift=3), ["shift", "3", "< block"]),
    # grids
    (
        lambda: ga.grid_window_graph(2, 2, 1, metric="euclidean"),
        ["metric", "'euclidean'", "'chebyshev'", "'manhattan'"],
    ),
    # global tokens
    (lambda: ga.longformer_graph(5, 1, [0, 5]), ["global_tokens", "0 .. 4", "5"]),
    (lambda: ga.longformer_graph(5, 1, [-1]), ["global_tokens", "-1"]),
    (lambda: ga.longformer_graph(5, 1, [1.0]), ["global_tokens", "1.0"]),
    (lambda: ga.longformer_graph(5, 1, 2), ["global_tokens", "2"]),
    (lambda: ga.longformer_graph(5, 1, "0"), ["global_tokens", "'0'"]),
    (lambda: ga.longformer_graph(3, 1, np.array([True, False, False])), ["global_tokens", "True"]),
    (lambda: ga.causal_longformer_graph(5, 2, 6), ["num_global", "<= num_tokens = 5", "6"]),
    (lambda: ga.bigbird_graph(9, 1, 1, [], 2**64), ["seed", str(2**64)]),
    # edge lists
    (lambda: ga.from_edge_index([[0], [1]], 2), ["edge_index", "list", "[2, E]"]),
    (lambda: ga.from_edge_index(torch.zeros(5, 2).long(), 2), ["edge_index", "[5, 2]", "[2, E]"]),
    (lambda: ga.from_edge_index(torch.zeros(2, 1), 2), ["edge_index", "integers", "float32"]),
    (
        lambda: ga.from_edge_index(EdgeIndex([[1, 1], [0, 0]]), 2),
        ["edge_index", "source 1", "target 0", "more than once"],
    ),
    # masks
    (lambda: ga.from_mask(torch.zeros(2, 3)), ["mask", "float32", "[2, 3]", "bool"]),
    (lambda: ga.from_mask(torch.zeros(1, 2, 2).bool()), ["mask", "[1, 2, 2]", "[N, M]"]),
    (lambda: ga.from_mask(None), ["mask", "None", "bool"]),
    (lambda: ga.from_mask(torch.zeros(2, 2)), ["float32", "mask > -inf"]),
    (
        lambda: ga.from_mask(torch.ones(1, 1, 2, 2, dtype=torch.bool)),
        ["[1, 1, 2, 2]", "mask[0, 0]"],
    ),
    # the ecosystem's types
    (lambda: ga.from_scipy(np.eye(2)), ["matrix", "ndarray", "scipy.sparse"]),
    (lambda: ga.from_scipy(scipy.sparse.coo_array(np.ones(3))), ["matrix", "3"]),
    (lambda: ga.from_networkx(None), ["graph", "networkx", "None"]),
    (lambda: ga.from_pyg(None), ["data", "NoneType", "edge_index"]),
    (lambda: ga.from_pyg(Data(num_nodes=3)), ["data", "edge_index"]),
    (lambda: ga.from_pyg(Data(edge_index=edges((0, 1)))), ["data", "num_nodes"]),
    (lambda: ga.from_pyg(EdgeIndex([[0], [1]])), ["data", "sparse_size"]),
    # unions and batches
    (
        lambda: ga.union(ga.causal_graph(3), ga.causal_graph(4)),
        ["a and b", "3 targets", "3 sources", "4 and 4"],
    ),
    (
        lambda: ga.union(ga.causal_graph(3), ga.bipartite_complete_graph(3, 4)),
        ["a and b", "3 sources", "3 and 4"],
    ),
    (
        lambda: ga.union(ga.batch([ga.causal_graph(3), ga.causal_graph(4)]), ga.causal_graph(7)),
        ["a and b", "3", "4", "7"],
    ),
    (lambda: ga.union(edges((0, 1)), ga.causal_graph(2)), ["a must be", "Tensor"]),
    (lambda: ga.batch([]), ["graphs", "at least one"]),
    (lambda: ga.batch(None), ["graphs", "NoneType"]),
    (lambda: ga.batch(ga.causal_graph(2)), ["graphs", "TokenGraph"]),
    # nearest neighbours
    (lambda: ga.knn(X, 4), ["k must be <= 3", "got 4"]),
    (lambda: ga.knn(X, 5, self_loops=True), ["k must be <= 4", "got 5"]),
    (lambda: ga.knn(X, 3, source=X[:2]), ["k must be <= 2", "got 3"]),
    (lambda: ga.knn(X, 1, source=X[:0]), ["k must be <= 0", "got 1"]),
    (lambda: ga.knn(X, 4, within=ga.complete_graph(4)), ["k must be <= 3", "got 4"]),
    (lambda: ga.knn([[0.0]], 1), ["x must be", "list", "[N, C]"]),
    (lambda: ga.knn(X.long(), 1), ["x must be", "int64", "floating"]),
    (lambda: ga.knn(X[:, 0], 1), ["x must be", "[4]", "[N, C]"]),
    (lambda: ga.knn(X[None], 1), ["x must be", "[1, 4, 2]", "[N, C]"]),
    (lambda: ga.knn(X, 1, source=[[0.0, 1.0]]), ["source must be", "list"]),
    (lambda: ga.knn(X, 1, source=X[:, :1]), ["source", "(2)", "got 1"]),
    (lambda: ga.knn(X, 1, source=X.double()), ["source", "float32", "float64"]),
    (lambda: ga.knn(X, 1, source=X, self_loops=True), ["self_loops", "source"]),
    (lambda: ga.knn(X, 1, within=ga.causal_graph(5)), ["within", "5", "4"]),
    (
        lambda: ga.knn(X, 1, source=X[:3], within=ga.causal_graph(4)),
        ["within", "4 sources", "4 targets and 3 sources"],
    ),
    (lambda: ga.knn(X, 1, within="window"), ["within", "str"]),
    (lambda: ga.knn(X, 1, within=edges((0, 4))), ["edge_index[1, 0]", "4"]),
    # radius
    (lambda: ga.radius_graph(X, -1), ["radius must be", ">= 0", "-1"]),
    (lambda: ga.radius_graph(X, math.nan), ["radius must be", "finite", "nan"]),
    (lambda: ga.radius_graph(X, math.inf), ["radius must be", "finite", "inf"]),
    (lambda: ga.radius_graph(X, "near"), ["radius must be", "'near'"]),
    (lambda: ga.radius_graph(X, True), ["radius must be", "True"]),
    (lambda: ga.radius_graph(X, 1j), ["radius must be", "1j"]),
    (lambda: ga.radius_graph(X, torch.ones(4)), ["radius must be", "tensor"]),
    (lambda: ga.radius_graph([[0.0]], 1), ["positions must be", "list"]),
    # by hand
    (lambda: ga.TokenGraph(), ["TokenGraph", "builder"]),
]


@pytest.mark.parametrize(("call", "fragments"), BAD_CALLS)
def test_a_bad_call_raises_a_value_error_that_says_what_and_why(call, fragments):
    with pytest.raises(ValueError, match=re.escape(fragments[0])) as raised:
        call()
    message = str(raised.value)
    for fragment in fragments:
        assert fragment in message
    assert ".. -1" not in message, "a range that holds nothing says so in words"


def test_a_global_token_of_no_tokens_is_refused_in_words():
    with pytest.raises(ValueError, match="global_tokens") as raised:
        ga.longformer_graph(0, 1, [0])
    assert ".. -1" not in str(raised.value)


def test_a_multigraph_names_the_repeated_edge():
    with pytest.raises(ValueError, match=r"edge \('a', 'b'\) more than once"):
        ga.from_networkx(networkx.MultiDiGraph([("a", "b"), ("a", "b")]))


SWITCHES = {
    "window_path": lambda value: ga.window_path_graph(5, 1, self_loops=value),
    "complete": lambda value: ga.complete_graph(5, self_loops=value),
    "dilated": lambda value: ga.dilated_window_graph(5, 1, 2, self_loops=value),
    "grid": lambda value: ga.grid_window_graph(2, 2, 1, class_token=value),
    "causal grid": lambda value: ga.grid_window_graph(2, 2, 1, causal=value),
    "neighborhood": lambda value: ga.neighborhood_graph(4, 2, is_causal=value),
    "knn": lambda value: ga.knn_graph(X, 1, self_loops=value),
    "knn within": lambda value: ga.knn_graph(X, 1, within=ga.complete_graph(4), self_loops=value),
    "routing": lambda value: ga.routing_graph(X, 2, causal=value),
    "scored window": lambda value: ga.scored_window_graph(torch.zeros(4, 3), 2, causal=value),
    "radius": lambda value: ga.radius_graph(X, 1.0, self_loops=value),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_0_and_1_switch_as_false_and_true_do(name):
    for number, switch in ((0, False), (1, True), (np.False_, False), (np.True_, True)):
        assert SWITCHES[name](number) == SWITCHES[name](switch)
