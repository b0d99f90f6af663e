"""Equal edges in any form, order, numbering or batch give equal numbers."""

from collections.abc import Callable

import pytest
import torch
from cases_ops import (
    ENERGY,
    GRAPHS,
    SQUARE,
    consensus_inputs,
    edge_network,
    isolated_mask,
    qkv,
    random,
    random_mask,
    shuffled,
    valid_tokens,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric import EdgeIndex

import graphattn as ga

EXACT = {"rtol": 1e-10, "atol": 1e-10}
SWEEP = settings(max_examples=30, deadline=None, derandomize=True)


def operations(graph: ga.TokenGraph, batch: tuple[int, ...] = ()) -> dict[str, Callable]:
    """Every operation as a function of the graph alone, on inputs made for `graph`."""
    q, k, v = qkv(graph, batch=batch)
    inputs = consensus_inputs(graph, batch=batch)
    return {
        "rbf": lambda g: ga.rbf_attention(q, k, v, g, 1.0, eps=0.1),
        "rbf top-k": lambda g: ga.rbf_attention(q, k, v, g, 1.0, top_k=2),
        "dot": lambda g: ga.dot_product_attention(q, k, v, g),
        "target": lambda g: ga.consensus_update(*inputs, g, 0.1, update="target"),
        "target auto": lambda g: ga.consensus_update(*inputs, g, "auto", update="target"),
        "energy": lambda g: ga.consensus_update(*inputs, g, 0.1),
        "energy auto": lambda g: ga.consensus_update(*inputs, g, "auto"),
    }


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("kind", ["rbf", "rbf top-k", "dot", "target", "target auto", "energy"])
def test_a_raw_edge_index_stands_for_its_graph_in_any_order(
    kind: str, batch: tuple[int, ...]
) -> None:
    mask = isolated_mask()
    graph = ga.from_mask(mask)
    run = operations(graph, batch)[kind]
    expected = run(graph)
    for edge_index in (
        graph.edge_index,
        shuffled(mask, seed=1),
        shuffled(mask, seed=2).int(),
        EdgeIndex(shuffled(mask, seed=3)),
        EdgeIndex(shuffled(mask, seed=4), sparse_size=(8, 8)),
        graph.to_pyg(),
    ):
        assert torch.equal(run(edge_index), expected)


@pytest.mark.parametrize("kind", ["rbf", "rbf top-k", "dot", "target", "target auto"])
def test_a_raw_edge_index_may_be_rectangular(kind: str) -> None:
    mask = random_mask(5, 8, 0.4, seed=2)
    graph = ga.from_mask(mask)
    run = operations(graph)[kind]
    assert torch.equal(run(shuffled(mask)), run(graph))


@pytest.mark.parametrize("name", SQUARE)
def test_a_structured_graph_is_its_edge_list(name: str) -> None:
    graph = GRAPHS[name]()
    plain = ga.from_mask(graph.to_mask())
    for kind, run in operations(graph).items():
        if "energy" not in kind or (kind == "energy" and name in ENERGY):
            torch.testing.assert_close(run(graph), run(plain), rtol=1e-12, atol=1e-12)
            with ga.use_backend("reference"):
                assert torch.equal(run(graph), run(plain)), kind


def test_per_edge_results_follow_the_sorted_order_whatever_the_callers() -> None:
    mask = isolated_mask()
    edge_index = shuffled(mask)
    graph, permutation = ga.from_edge_index(edge_index, 8, return_permutation=True)
    q, k, v = qkv(graph)
    of_caller = random(edge_index.shape[1], 2, seed=1)  # bias of edge_index[:, e]
    out = ga.rbf_attention(q, k, v, graph, 1.0, edge_bias=of_caller[permutation])
    logits = -(q[:, None] - k[None]).square().sum(-1) / 2
    for e, (j, i) in enumerate(edge_index.T.tolist()):
        logits[i, j] += of_caller[e]
    weight = logits.masked_fill(~mask[..., None], -torch.inf).softmax(dim=1).nan_to_num()
    torch.testing.assert_close(out, torch.einsum("ijh,jhd->ihd", weight, v), **EXACT)


@pytest.mark.parametrize("seed", range(3))
def test_renaming_the_tokens_renames_the_results(seed: int) -> None:
    mask = random_mask(9, 9, 0.4, seed=seed)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(seed))
    graph, renamed = ga.from_mask(mask), ga.from_mask(mask[order][:, order])
    q, k, v = qkv(graph, seed=seed)
    valid = valid_tokens(9, seed=seed)
    u, _, a, b, network = consensus_inputs(graph, seed=seed)
    for run in (
        lambda g, p: ga.rbf_attention(q[p], k[p], v[p], g, 1.0, top_k=2, eps=0.1),
        lambda g, p: ga.dot_product_attention(q[p], k[p], v[p], g, valid=valid[p]),
        lambda g, p: ga.consensus_update(u[p], u[p], a[p], b[p], network, g, "auto"),
        lambda g, p: ga.consensus_update(
            u[p], u[p], a[p], b[p], network, g, "auto", update="target", valid=valid[p]
        ),
    ):
        torch.testing.assert_close(run(renamed, order), run(graph, slice(None))[order], **EXACT)


PARTS = [
    lambda: ga.window_path_graph(5, 2),
    lambda: ga.from_mask(random_mask(6, 6, 0.4, seed=1)),
    lambda: ga.complete_graph(3),
    lambda: ga.window_path_graph(0, 1),
    lambda: ga.window_path_graph(1, 1),
]


@pytest.mark.parametrize("structured", [True, False])
def test_a_sequence_in_a_packed_batch_equals_the_sequence_alone(structured: bool) -> None:
    parts = [build() for build in PARTS]
    if structured:
        parts = [part for part in parts if part.structure is not None]
    packed = ga.batch(parts)
    assert (packed.structure is not None) == structured
    q, k, v = qkv(packed)
    inputs = consensus_inputs(packed)
    valid = valid_tokens(packed.num_targets)
    runs = [
        lambda g, s: ga.rbf_attention(q[s], k[s], v[s], g, 1.0, top_k=2, valid=valid[s]),
        lambda g, s: ga.dot_product_attention(q[s], k[s], v[s], g, return_lse=True)[1],
        lambda g, s: ga.consensus_update(
            *(x[s] for x in inputs[:4]), inputs.network, g, "auto", valid=valid[s]
        ),
        lambda g, s: ga.consensus_update(
            *(x[s] for x in inputs[:4]), inputs.network, g, "auto", update="target"
        ),
    ]
    for run in runs:
        together, start = run(packed, slice(None)), 0
        for part in parts:
            own = slice(start, start + part.num_targets)
            torch.testing.assert_close(together[own], run(part, own), **EXACT)
            start = own.stop


@pytest.mark.parametrize("name", ["path", "grid with class token", "isolated targets"])
def test_a_sequence_along_a_batch_dimension_equals_the_sequence_alone(name: str) -> None:
    graph = GRAPHS[name]()
    N = graph.num_targets
    q, k, v = qkv(graph, batch=(2, 3))
    inputs = consensus_inputs(graph, batch=(2, 3))
    valid = valid_tokens(2, 3, N)
    runs = [
        lambda i: ga.rbf_attention(q[i], k[i], v[i], graph, 1.0, top_k=2, valid=valid[i]),
        lambda i: ga.dot_product_attention(q[i], k[i], v[i], graph, valid=valid[i]),
        lambda i: ga.attention_weights(q[i], k[i], graph, sigma=1.0, valid=valid[i]),
        lambda i: ga.consensus_edge_matrices(*(x[i] for x in inputs[2:4]), inputs.network, graph),
        *(
            lambda i, update=update: ga.consensus_update(
                *(x[i] for x in inputs[:4]),
                inputs.network,
                graph,
                "auto",
                update=update,
                valid=valid[i],
            )
            for update in ("energy", "target")
        ),
    ]
    for run in runs:
        together = run(())
        for i in range(2):
            for j in range(3):
                torch.testing.assert_close(together[i, j], run((i, j)), **EXACT)


EMPTY = {
    "no tokens": lambda: ga.window_path_graph(0, 2),
    "no tokens, complete": lambda: ga.complete_graph(0),
    "no tokens, edge list": lambda: ga.from_edge_index(torch.zeros(2, 0, dtype=torch.long), 0),
    "no edges": lambda: ga.from_edge_index(torch.zeros(2, 0, dtype=torch.long), 4),
    "one token, no edges": lambda: ga.window_path_graph(1, 2),
    "no sources": lambda: ga.bipartite_complete_graph(3, 0),
    "no targets": lambda: ga.bipartite_complete_graph(0, 3),
    "batch of nothing": lambda: ga.batch([ga.window_path_graph(0, 1), ga.complete_graph(0)]),
}


@pytest.mark.parametrize("batch", [(), (2,), (0,)])
@pytest.mark.parametrize("name", EMPTY)
def test_no_edges_and_no_tokens_work(name: str, batch: tuple[int, ...]) -> None:
    graph = EMPTY[name]()
    N = graph.num_targets
    q, k, v = (x.requires_grad_() for x in qkv(graph, batch=batch, value_features=4))
    for out, lse in (
        ga.rbf_attention(q, k, v, graph, 1.0, top_k=2, eps=0.1, return_lse=True),
        ga.dot_product_attention(q, k, v, graph, return_lse=True),
        ga.dot_product_attention(q, k, v, graph, edge_bias=random(0, 2, seed=1), return_lse=True),
    ):
        assert torch.equal(out, torch.zeros(*batch, N, 2, 4, dtype=torch.float64))
        assert torch.equal(lse, torch.full((*batch, N, 2), -torch.inf, dtype=torch.float64))
        for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
            assert (gradient == 0).all()
    assert ga.attention_weights(q, k, graph, top_k=1).shape == (*batch, 0, 2)
    inputs = consensus_inputs(graph, batch=batch)
    assert ga.consensus_edge_matrices(*inputs[2:], graph).shape == (*batch, 0, 2, 3, 3)
    for update in ("energy", "target") if graph.num_sources == N else ("target",):
        for step in (0.1, "auto"):
            new = ga.consensus_update(*inputs, graph, step, update=update)
            assert torch.equal(new, inputs.state)


def test_an_empty_batch_works_on_a_graph_with_edges() -> None:
    graph = ga.window_path_graph(4, 1)
    q, k, v = qkv(graph, batch=(0,))
    inputs = consensus_inputs(graph, batch=(0,))
    assert ga.rbf_attention(q, k, v, graph, 1.0, top_k=1).shape == (0, 4, 2, 3)
    assert ga.dot_product_attention(q, k, v, graph).shape == (0, 4, 2, 3)
    for update in ("energy", "target"):
        new = ga.consensus_update(*inputs, graph, "auto", update=update)
        assert new.shape == (0, 4, 2, 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_a_graph_of_nearest_neighbours_of_the_features_themselves(dtype: torch.dtype) -> None:
    """Top-k over the complete graph without self loops is the k-nearest-neighbour graph."""
    x = random(9, 3, seed=3, dtype=dtype)
    graph = ga.knn_graph(x, 3)
    tokens = x[:, None]
    out = ga.rbf_attention(tokens, tokens, tokens, graph, 1.0)
    everyone = ga.complete_graph(9, self_loops=False)
    expected = ga.rbf_attention(tokens, tokens, tokens, everyone, 1.0, top_k=3)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_graph_of_a_radius_around_the_features_themselves(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, 1.0, 3.0], dtype=dtype).view(3, 1)
    graph = ga.radius_graph(x, 1.5, self_loops=True)
    tokens = x[:, None]
    out = ga.dot_product_attention(tokens, tokens, tokens, graph, scale=0.0)
    assert out.flatten().tolist() == [0.5, 0.5, 3.0]


# Invariances of RBF attention: only distances count.

seeds = st.integers(0, 2**31 - 1)


@SWEEP
@given(seed=seeds, shift=st.floats(-1e3, 1e3), top_k=st.sampled_from([None, 1, 3]))
def test_rbf_is_invariant_to_translation(seed: int, shift: float, top_k: int | None) -> None:
    graph = ga.from_mask(random_mask(6, 6, 0.6, seed))
    q, k, v = qkv(graph, seed=seed)
    direction = shift * random(2, 3, seed=seed)
    here = ga.rbf_attention(q, k, v, graph, 0.9, top_k=top_k, eps=0.1)
    there = ga.rbf_attention(q + direction, k + direction, v, graph, 0.9, top_k=top_k, eps=0.1)
    torch.testing.assert_close(there, here, rtol=1e-8, atol=1e-8)


@SWEEP
@given(seed=seeds, top_k=st.sampled_from([None, 1, 3]))
def test_rbf_is_invariant_to_rotation(seed: int, top_k: int | None) -> None:
    graph = ga.from_mask(random_mask(6, 6, 0.6, seed))
    q, k, v = qkv(graph, seed=seed)
    turn = torch.linalg.qr(random(3, 3, seed=seed)).Q
    here = ga.rbf_attention(q, k, v, graph, 0.9, top_k=top_k, eps=0.1)
    there = ga.rbf_attention(q @ turn, k @ turn, v, graph, 0.9, top_k=top_k, eps=0.1)
    torch.testing.assert_close(there, here, **EXACT)


@SWEEP
@given(seed=seeds, factor=st.floats(0.01, 100))
def test_rbf_depends_on_distance_over_sigma_only(seed: int, factor: float) -> None:
    graph = ga.from_mask(random_mask(6, 6, 0.6, seed))
    q, k, v = qkv(graph, seed=seed)
    here = ga.rbf_attention(q, k, v, graph, 0.9)
    there = ga.rbf_attention(q * factor, k * factor, v, graph, 0.9 * factor)
    torch.testing.assert_close(there, here, **EXACT)


@SWEEP
@given(
    seed=seeds,
    density=st.floats(0, 1),
    top_k=st.sampled_from([None, 1, 2, 9]),
    size=st.sampled_from([1e-3, 1.0, 1e2]),
    rbf=st.booleans(),
)
def test_an_output_is_inside_the_hull_of_what_it_sees(
    seed: int, density: float, top_k: int | None, size: float, rbf: bool
) -> None:
    """Weights >= 0 that sum to 1: each coordinate lies between those of the sources seen."""
    mask = random_mask(6, 7, density, seed)
    graph = ga.from_mask(mask)
    q, k, v = qkv(graph, seed=seed)
    if rbf:
        out = ga.rbf_attention(size * q, size * k, v, graph, 1.0, top_k=top_k)
    else:
        out = ga.dot_product_attention(size * q, size * k, v, graph, top_k=top_k)
    for i in range(6):
        seen = v[mask[i]]
        if len(seen) == 0:
            assert (out[i] == 0).all()
        else:
            assert (out[i] >= seen.amin(0) - 1e-12).all()
            assert (out[i] <= seen.amax(0) + 1e-12).all()


@SWEEP
@given(seed=seeds, density=st.floats(0, 1), step=st.sampled_from([0.3, "auto"]))
def test_consensus_commutes_with_translation(seed: int, density: float, step: float | str) -> None:
    """Adding c to all states adds c to all new states: only differences count.

    So constants are fixed points.
    """
    graph = ga.from_mask(random_mask(6, 6, density, seed))
    u, _, a, b, _ = consensus_inputs(graph, seed=seed % 1000)
    network, c = edge_network(seed=seed % 1000), random(2, 3, seed=seed)

    def run(x: Tensor, update: str) -> Tensor:
        return ga.consensus_update(x, x, a, b, network, graph, step, update=update)

    for update in ("target", "energy") if not graph.points_backward else ("target",):
        torch.testing.assert_close(run(u + c, update), run(u, update) + c, **EXACT)
