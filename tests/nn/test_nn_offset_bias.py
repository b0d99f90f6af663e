"""OffsetBias: Swin's tables, T5's buckets and ALiBi's slopes, against plain loops."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import graphattn as ga

EXACT: dict[str, Any] = {"rtol": 0, "atol": 0}
OffsetBias = ga.nn.OffsetBias


def t5_bucket_by_hand(offset: int, buckets: int, farthest: int, bidirectional: bool) -> int:
    """Raffel et al. (2020), Section 2.1, as their code counts; offset = source - target."""
    start = 0
    if bidirectional:
        buckets //= 2
        start = buckets if offset > 0 else 0
        distance = abs(offset)
    else:
        distance = max(-offset, 0)
    exact = buckets // 2
    if distance < exact:
        return start + distance
    share = math.log(distance / exact) / math.log(farthest / exact)
    return start + min(exact + int(share * (buckets - exact) + 1e-9), buckets - 1)


def dense(bias: Tensor, graph: ga.TokenGraph) -> Tensor:
    """[N, M, H] of what a module gave, NaN where there is no edge."""
    rows = None if graph.structure is None else graph.structure.num_offsets
    matrix = torch.full((*graph.to_mask().shape, bias.shape[-1]), torch.nan, dtype=bias.dtype)
    source, target = graph.edge_index
    if bias.dim() == 2 and len(bias) == rows:
        assert graph.structure is not None
        bias = bias[graph.structure.offset_index(target, source)]
    matrix[target, source] = bias.reshape(len(source), -1)
    return matrix


GRAPHS = {
    "path": lambda: ga.window_path_graph(40, 9, self_loops=True),
    "causal": lambda: ga.causal_graph(30),
    "causal window": lambda: ga.causal_window_graph(40, 12),
    "complete": lambda: ga.complete_graph(25),
    "dilated": lambda: ga.dilated_window_graph(40, 3, 4),
    "blocks": lambda: ga.block_window_graph(30, 7, shift=2),
    "longformer": lambda: ga.longformer_graph(30, 3, [0]),
    "list": lambda: ga.from_edge_index(ga.causal_graph(30).edge_index, 30),
    "cross": lambda: ga.bipartite_complete_graph(7, 31),
    "window across": lambda: ga.bipartite_window_graph(20, 3),
    "neighbours": lambda: ga.knn_graph(torch.arange(30.0)[:, None] ** 2, 4),
    "many edges as offsets": lambda: ga.causal_window_graph(4, 10),
}
KINDS = {
    "t5": lambda: OffsetBias.t5(3),
    "t5 decoder": lambda: OffsetBias.t5(3, num_buckets=10, max_distance=20, bidirectional=False),
    "alibi": lambda: OffsetBias.alibi(3),
    "learned": lambda: OffsetBias(3, max_offset=5),
}


def by_hand(kind: str, module: Any, offset: int) -> Tensor:
    if kind == "alibi":
        return -torch.tensor([2.0**-4, 2.0**-8, 2.0**-2]) * abs(offset)
    if kind == "learned":
        return module.table[min(max(offset, -5), 5) + 5]
    sizes = (32, 128, True) if kind == "t5" else (10, 20, False)
    return module.table[t5_bucket_by_hand(offset, *sizes)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", GRAPHS)
def test_the_bias_of_an_edge_is_that_of_its_offset(name: str, kind: str) -> None:
    graph, module = GRAPHS[name](), KINDS[kind]()
    matrix = dense(module(graph), graph)
    for i, j in graph.to_mask().nonzero().tolist():
        torch.testing.assert_close(matrix[i, j], by_hand(kind, module, j - i), **EXACT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["path", "causal", "complete", "dilated", "blocks"])
def test_graphs_with_offsets_get_a_table_however_many_edges(name: str, kind: str) -> None:
    graph, module = GRAPHS[name](), KINDS[kind]()
    assert module(graph).shape == (graph.structure.num_offsets, 3)


@pytest.mark.parametrize("buckets", [4, 7, 32, 33, 64])
@pytest.mark.parametrize("farthest", [40, 128, 500])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_are_t5_s_at_every_distance(
    buckets: int, farthest: int, bidirectional: bool
) -> None:
    module = OffsetBias.t5(
        1, num_buckets=buckets, max_distance=farthest, bidirectional=bidirectional
    )
    with torch.no_grad():
        module.table.copy_(torch.arange(float(buckets))[:, None])
    row = module(ga.complete_graph(700)).flatten().tolist()
    expected = [
        t5_bucket_by_hand(offset, buckets, farthest, bidirectional) for offset in range(-699, 700)
    ]
    assert row == expected


def test_buckets_at_the_distances_that_t5_names() -> None:
    """T5 gives distances 0 to 7 a bucket each; 8-11, 12-15, 16-22 and so on up to 128 share one.

    There are 32 buckets, 16 for each direction.
    """
    with torch.no_grad():
        module = OffsetBias.t5(1)
        module.table.copy_(torch.arange(32.0)[:, None])
        table = module(ga.complete_graph(200)).flatten()
    back = {0: 0, 7: 7, 8: 8, 11: 8, 12: 9, 15: 9, 16: 10, 22: 10, 23: 11, 31: 11, 32: 12,
            64: 14, 90: 14, 91: 15, 128: 15, 199: 15}  # fmt: skip
    for distance, bucket in back.items():
        assert table[199 - distance] == bucket
        if distance:
            assert table[199 + distance] == 16 + bucket


@pytest.mark.parametrize(
    ("heads", "exponents"),
    [
        (1, [8]),
        (2, [4, 8]),
        (8, [1, 2, 3, 4, 5, 6, 7, 8]),
        (6, [2, 4, 6, 8, 1, 3]),
        (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),
        (16, [(h + 1) / 2 for h in range(16)]),
    ],
)
def test_slopes_are_alibi_s(heads: int, exponents: list[float]) -> None:
    """Press et al. (2022), Section 3, and footnote 8 for numbers that are no power of two."""
    slopes = torch.tensor([2.0**-e for e in exponents])
    table = OffsetBias.alibi(heads)(ga.causal_window_graph(10, 4))
    torch.testing.assert_close(table, torch.arange(-3.0, 1.0)[:, None] * slopes)
    assert not list(OffsetBias.alibi(heads).parameters())


def test_alibi_in_a_layer_is_sdpa_with_its_mask() -> None:
    torch.manual_seed(0)
    layer, graph = ga.nn.DotProductAttention(16, 4), ga.causal_graph(20)
    x = torch.randn(2, 20, 16)
    q, k, v = (
        p(x).unflatten(-1, (4, 4)).transpose(1, 2)
        for p in (layer.query_proj, layer.key_proj, layer.value_proj)
    )
    gap = torch.arange(20)[:, None] - torch.arange(20)
    slope = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])[:, None, None]
    mask = (-slope * gap).masked_fill(gap < 0, -torch.inf)
    mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    expected = layer.output_proj(mixed.transpose(1, 2).flatten(-2))
    out = layer(x, graph, edge_bias=OffsetBias.alibi(4)(graph))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


# Grids.


@pytest.mark.parametrize("class_token", [False, True])
@pytest.mark.parametrize("most", [(2, 2), (1, 3)])
def test_over_a_grid_it_is_swin_s_table(most: tuple[int, int], class_token: bool) -> None:
    """B[dy + M - 1, dx + M - 1] (Liu et al., 2021, Eq. 4); a class token is nowhere."""
    module = OffsetBias(3, most)
    assert module.table.shape == ((2 * most[0] + 1) * (2 * most[1] + 1), 3)
    graph = ga.grid_window_graph(5, 4, 2, class_token=class_token)
    bias = module(graph)
    assert class_token or bias.shape == (25, 3)
    table = module.table.view(2 * most[0] + 1, 2 * most[1] + 1, 3)
    matrix, lead = dense(bias, graph), int(class_token)
    for i, j in graph.to_mask().nonzero().tolist():
        if class_token and 0 in (i, j):
            expected = torch.zeros(3)
        else:
            dy, dx = ((j - lead) // 4 - (i - lead) // 4), ((j - lead) % 4 - (i - lead) % 4)
            expected = table[
                max(-most[0], min(most[0], dy)) + most[0], max(-most[1], min(most[1], dx)) + most[1]
            ]
        torch.testing.assert_close(matrix[i, j], expected, **EXACT)


def test_images_side_by_side_have_one_table_and_unlike_ones_biases_of_edges() -> None:
    module = OffsetBias(3, (2, 2))
    alike = [ga.grid_window_graph(4, 5, 1), ga.grid_window_graph(3, 3, 1)]
    assert module(ga.batch(alike)).shape == (9, 3)
    unlike = [ga.grid_window_graph(4, 5, 1), ga.grid_window_graph(3, 3, 2, class_token=True)]
    matrix = dense(module(ga.batch(unlike)), ga.batch(unlike))
    torch.testing.assert_close(
        matrix[:20, :20], dense(module(unlike[0]), unlike[0]), equal_nan=True
    )
    torch.testing.assert_close(
        matrix[20:, 20:], dense(module(unlike[1]), unlike[1]), equal_nan=True
    )


def test_where_patches_stand_can_be_said() -> None:
    """Nearest neighbours among the patches of an image, which know no grid."""
    module, cells = OffsetBias(3, (2, 2)), torch.cartesian_prod(torch.arange(4), torch.arange(5))
    window = ga.grid_window_graph(4, 5, 1)
    listed = ga.from_edge_index(window.edge_index, 20)
    matrix = dense(module(listed, positions=cells), listed)
    torch.testing.assert_close(matrix, dense(module(window), window), equal_nan=True)
    with pytest.raises(ValueError, match=r"graph must be over a grid of 2 axes.*positions="):
        module(listed)


# Sequences side by side, two tracks, other positions.


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_count_from_their_own_beginnings(kind: str) -> None:
    module = KINDS[kind]()
    graphs = [ga.causal_graph(9), ga.complete_graph(6), ga.from_edge_index(torch.eye(2).long(), 2)]
    packed = ga.batch(graphs)
    matrix, start = dense(module(packed), packed), 0
    for graph in graphs:
        stop = start + graph.num_tokens
        expected = dense(module(graph), graph)
        torch.testing.assert_close(matrix[start:stop, start:stop], expected, equal_nan=True)
        start = stop
    alike = ga.batch([ga.causal_window_graph(n, 4) for n in (9, 5)])
    assert module(alike).shape == (4, 3)


def test_positions_of_samples_give_biases_of_samples() -> None:
    module, graph = OffsetBias.t5(3), ga.causal_graph(6)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 3, 5, 20, 21, 90]])
    bias = module(graph, positions=positions)
    source, target = graph.edge_index
    for b in range(2):
        for e, (j, i) in enumerate(zip(source.tolist(), target.tolist(), strict=True)):
            bucket = t5_bucket_by_hand(int(positions[b, j] - positions[b, i]), 32, 128, True)
            torch.testing.assert_close(bias[b, e], module.table[bucket], **EXACT)
    x = torch.randn(2, 6, 9)
    layer = ga.nn.DotProductAttention(9, 3)
    torch.testing.assert_close(
        layer(x, graph, edge_bias=bias)[0], layer(x[0], graph, edge_bias=module(graph))
    )


def test_two_tracks_may_have_positions_of_their_own() -> None:
    """The last 3 of 10 tokens look at all of them, as when a text goes on."""
    module, graph = OffsetBias.t5(3), ga.bipartite_complete_graph(3, 10)
    later = module(graph, positions=(torch.arange(7, 10), torch.arange(10)))
    whole = ga.complete_graph(10)
    torch.testing.assert_close(dense(later, graph), dense(module(whole), whole)[7:])


def test_as_many_edges_as_offsets_do_not_confuse_a_layer() -> None:
    graph = ga.causal_window_graph(4, 10)  # 10 edges, 10 offsets
    module, layer = OffsetBias.alibi(3), ga.nn.DotProductAttention(9, 3)
    for x in (torch.randn(4, 9), torch.randn(2, 4, 9)):
        plain = ga.from_edge_index(graph.edge_index, 4)
        torch.testing.assert_close(
            layer(x, graph, edge_bias=module(graph)), layer(x, plain, edge_bias=module(plain))
        )


# Modules.


@pytest.mark.parametrize("kind", KINDS)
def test_copies_pickles_and_files_are_the_same_module(kind: str, tmp_path: Any) -> None:
    module, graph = KINDS[kind](), ga.causal_window_graph(20, 6)
    ga.save(module, tmp_path)
    others = copy.deepcopy(module), pickle.loads(pickle.dumps(module)), ga.load(tmp_path)
    again = type(module)(**module.config)
    again.load_state_dict(module.state_dict())
    for other in (*others, again, eval(repr(module), {"OffsetBias": OffsetBias})):
        assert repr(other) == repr(module)
        if other in (*others, again):
            torch.testing.assert_close(other(graph), module(graph), **EXACT)


def test_weights_of_other_buckets_are_refused() -> None:
    ours, theirs = OffsetBias.t5(3), OffsetBias.t5(3, max_distance=64)
    with pytest.raises(RuntimeError, match="max_distance"):
        ours.load_state_dict(theirs.state_dict())
    ours.load_state_dict(OffsetBias(3, kind="t5").state_dict())


def test_reset_draws_small_numbers_that_do_not_decay() -> None:
    module = OffsetBias(64, 200)
    with torch.no_grad():
        module.table.fill_(7)
    module.reset_parameters()
    assert module.table.std().item() == pytest.approx(0.02, rel=0.05)
    decays, stays = ga.train.parameter_groups(module)
    assert not decays["params"]
    assert len(stays["params"]) == 1


@pytest.mark.parametrize("backend", ["reference", "structured"])
def test_gradients_reach_the_table_from_every_edge(backend: str) -> None:
    torch.manual_seed(0)
    module, layer = OffsetBias.t5(2).double(), ga.nn.KrauseAttention(4, 2, backend=backend).double()
    graph, x = ga.window_path_graph(6, 2, self_loops=True), torch.randn(6, 4).double()

    def call(table: Tensor) -> Tensor:
        bias = torch.func.functional_call(module, {"table": table}, (graph,))
        return layer(x, graph, edge_bias=bias)

    assert torch.autograd.gradcheck(call, module.table)
    module.zero_grad()
    call(module.table).square().sum().backward()
    used = {t5_bucket_by_hand(offset, 32, 128, True) for offset in range(-2, 3)}
    assert set(module.table.grad.abs().sum(1).nonzero().flatten().tolist()) == used


def test_a_table_for_a_graph_has_its_offsets() -> None:
    for build, size in [
        (lambda: ga.causal_window_graph(20, 6), 5),
        (lambda: ga.dilated_window_graph(20, 2, 3), 6),
        (lambda: ga.block_window_graph(20, 4), 3),
        (lambda: ga.grid_window_graph(8, 8, 3), (3, 3)),
    ]:
        assert repr(OffsetBias.for_graph(2, build())) == f"OffsetBias(2, max_offset={size})"
    with pytest.raises(ValueError, match="graph must have a table of offsets"):
        OffsetBias.for_graph(2, ga.window_cycle_graph(9, 2))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: OffsetBias(0, 3), "heads must be >= 1"),
        (lambda: OffsetBias(4), "max_offset must be an integer.*got None"),
        (lambda: OffsetBias(4, -1), "max_offset must be >= 0"),
        (
            lambda: OffsetBias(4, (1, 2, 3, 4)),
            "max_offset must be an integer >= 1, or two or three",
        ),
        (lambda: OffsetBias(4, 3, kind="alibi"), "max_offset must be None with kind='alibi'"),
        (lambda: OffsetBias(4, 3, num_buckets=3), "num_buckets must be None with kind='learned'"),
        (lambda: OffsetBias(4, kind="shaw"), "kind must be one of 'learned', 't5', 'alibi'"),
        (lambda: OffsetBias.t5(4, num_buckets=3), "num_buckets must be >= 4"),
        (lambda: OffsetBias.t5(4, max_distance=8), "max_distance must be >= 9"),
        (lambda: OffsetBias.t5(4, bidirectional="no"), "bidirectional must be True or False"),
        (lambda: OffsetBias.alibi(4)(torch.zeros(2, 0)), "graph must be a TokenGraph, got Tensor"),
        (
            lambda: OffsetBias.alibi(4)(ga.causal_graph(4), positions=torch.arange(3)),
            r"positions must be an integer tensor of shape \[\*, N\] with N = 4, got .* \[3\]",
        ),
        (
            lambda: OffsetBias.alibi(4)(ga.causal_graph(4), positions=torch.zeros(4)),
            "positions must be an integer tensor",
        ),
        (
            lambda: OffsetBias.alibi(4)(ga.bipartite_complete_graph(2, 3), positions=torch.ones(2)),
            "positions must be a pair",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(call: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()
