"""Padded rows with graphs of their own give every item what it would get by itself."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from nn_by_hand import DIM, HEADS, Case
from torch.utils.checkpoint import checkpoint

import graphattn as ga

CASES = [
    Case("DotProductAttention", {"rope": True, "kv_heads": 2}),
    Case("DotProductAttention", {"top_k": 2}),
    Case("DotProductAttention", {"context_dim": 10, "rope": True}, 10),
    Case("KrauseAttention", {"top_k": 2, "rope": True}),
    Case("GaussianKernelAttention", {"eps": 0.1}),
    Case("SelfConsensus", {"edge_hidden": 6, "rope": "isometric", "step_size": "auto"}),
    Case("SelfConsensus", {"edge_hidden": 6, "update": "target", "rope": True}),
    Case("CrossConsensus", {"edge_hidden": 6, "context_dim": 10, "edge_input": "full"}, 10),
]
GRAPHS = {
    "windows": lambda n: ga.window_path_graph(n, 2, self_loops=True),
    "several": lambda n: [
        ga.complete_graph(n),
        ga.window_cycle_graph(n, 1),
        ga.longformer_graph(n, 1, [0]),
    ][n % 3],
    "tables": lambda n: ga.knn_graph(torch.randn(n, 3), 2),
    "lists": lambda n: ga.from_mask(torch.rand(n, n) < 0.4),
}
TRACKS = {  # of n targets and n + 2 sources
    "complete": lambda n: ga.bipartite_complete_graph(n, n + 2),
    "lists": lambda n: ga.from_mask(torch.rand(n, n + 2) < 0.4),
}
LENGTHS = (5, 3, 8, 1)


def items_for(case: Case, kind: str, dtype: torch.dtype = torch.float64) -> list[dict[str, Any]]:
    items = []
    for n in LENGTHS:
        item = {"x": torch.randn(n, DIM, dtype=dtype)}
        if case.context_width is None:
            item["graph"] = GRAPHS[kind](n) if n > 2 else ga.complete_graph(n)
        else:
            item["graph"] = TRACKS[kind](n)
            item["context"] = torch.randn(n + 2, case.context_width, dtype=dtype)
        items.append(item)
    return items


ALL = [
    (case, kind)
    for case in CASES
    for kind in (GRAPHS if case.context_width is None else TRACKS)
]  # fmt: skip


def alone(layer: Any, item: dict[str, Any]) -> torch.Tensor:
    tracks = (item["context"],) if "context" in item else ()
    return layer(item["x"], item["graph"], *tracks)


def together(layer: Any, batch: ga.TokenBatch, **options: Any) -> Any:
    tracks = (batch.context,) if "context" in batch else ()
    return layer(batch.x, batch.graph, *tracks, valid=batch.valid, **options)


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize(("case", "kind"), ALL, ids=str)
def test_rows_padded_with_nan_are_the_items_alone(case: Case, kind: str, backend: str) -> None:
    """Values, and gradients of inputs and parameters."""
    layer = case.make(backend=backend)
    items = items_for(case, kind)
    for item in items:
        item["x"].requires_grad_()
    batch = ga.collate(items, padding=True, padding_value=float("nan"))
    y = together(layer, batch)
    assert y.shape == (4, 8, DIM)
    assert y.isfinite().all()
    expected = [alone(layer, item) for item in items]
    for row, other in zip(batch.unpack(y), expected, strict=True):
        torch.testing.assert_close(row, other)
    weights = [torch.randn_like(row) for row in expected]
    leaves = [*(item["x"] for item in items), *layer.parameters()]
    mine, theirs = (
        torch.autograd.grad(
            sum((row * w).sum() for row, w in zip(outputs, weights, strict=True)),
            leaves,
            allow_unused=True,
        )
        for outputs in (batch.unpack(y), expected)
    )
    for a, b in zip(mine, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[5]], ids=str)
def test_every_backend_reads_padded_rows(case: Case) -> None:
    items = items_for(case, "windows", torch.float32)
    batch = ga.collate(items, padding=True, padding_value=float("nan"))
    layer = case.make(dtype=torch.float32)
    expected = together(layer, batch)
    for backend in ("reference", "structured"):  # triton: tests/kernels
        with ga.use_backend(backend):
            torch.testing.assert_close(together(layer, batch), expected, rtol=1e-4, atol=1e-5)


def test_weights_come_per_edge_of_all_items() -> None:
    layer = Case("KrauseAttention", {"top_k": 2}).make()
    items = items_for(CASES[3], "windows")
    batch = ga.collate(items, padding=True)
    y, weights = together(layer, batch, return_attention_weights=True)
    assert y.shape == (4, 8, DIM)
    for row, item in zip(batch.unpack(weights, per="edge"), items, strict=True):
        expected = layer(item["x"], item["graph"], return_attention_weights=True)[1]
        torch.testing.assert_close(row, expected)


def test_positions_and_masks_of_rows_are_read_by_row() -> None:
    layer = Case("DotProductAttention", {"rope": True}).make()
    batch = ga.collate(items_for(CASES[0], "windows"), padding=True)
    seen = torch.rand(4, 8) < 0.7
    positions = torch.randint(100, (4, 8))
    y = layer(batch.x, batch.graph, valid=batch.valid & seen, positions=positions)
    by_name = layer(
        x=batch.x, graph=batch.graph, valid=batch.valid & seen, positions=(positions, positions)
    )
    assert torch.equal(y, by_name)
    packed = layer(
        batch.x.flatten(0, 1),
        batch.graph,
        valid=(batch.valid & seen).flatten(),
        positions=positions.flatten(),
    )
    assert torch.equal(y, packed.view(4, 8, DIM))
    everybody = torch.arange(8) + 5  # [N] for all rows
    shared = layer(batch.x, batch.graph, positions=everybody)
    assert torch.equal(shared, layer(batch.x, batch.graph, positions=everybody.expand(4, 8)))
    with pytest.raises(ValueError, match="positions must have shape"):
        layer(batch.x, batch.graph, positions=positions[:, :5])
    with pytest.raises(ValueError, match=r"valid \(targets\) must have shape"):
        layer(batch.x, batch.graph, valid=seen[:, :5])


def test_rows_of_several_batch_dimensions_and_of_neighbours() -> None:
    layer = Case("DotProductAttention").make()
    x = torch.randn(2, 3, 7, DIM, dtype=torch.float64)
    graph = ga.knn_graph(x.flatten(0, 1), 3)
    assert graph.sizes == ((7, 7),) * 6
    y = layer(x, graph)
    for b in range(6):
        row = x.view(6, 7, DIM)[b]
        expected = layer(row, ga.knn_graph(row, 3))
        torch.testing.assert_close(y.view(6, 7, DIM)[b], expected)


def test_a_graph_whose_parts_do_not_end_with_the_rows_is_refused() -> None:
    layer = Case("DotProductAttention").make()
    x = torch.randn(2, 6, DIM, dtype=torch.float64)
    for sizes in ([12], [5, 7], [4, 8], [6, 5]):
        graph = ga.batch([ga.causal_graph(n) for n in sizes])
        with pytest.raises(ValueError, match=f"graph has {sum(sizes)} targets"):
            layer(x, graph)
    for sizes in ([6, 6], [2, 4, 6], [3, 3, 0, 6]):
        layer(x, ga.batch([ga.causal_graph(n) for n in sizes]))


@pytest.mark.parametrize("reentrant", [False, True])
def test_padded_rows_are_checkpointed(reentrant: bool) -> None:
    layer = CASES[3].make()
    batch = ga.collate(items_for(CASES[3], "windows"), padding=True)
    run = functools.partial(layer, valid=batch.valid)
    x = batch.x.requires_grad_()
    expected = torch.autograd.grad(run(x, batch.graph).square().sum(), x)[0]
    x.grad = None
    checkpoint(run, x, batch.graph, use_reentrant=reentrant).square().sum().backward()
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.long
def test_padded_rows_compile_at_three_lengths() -> None:
    torch._dynamo.reset()
    layer = CASES[3].make(dtype=torch.float32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for longest in (6, 9, 14):
        items = [
            {"x": torch.randn(n, DIM), "graph": ga.causal_window_graph(n, 3)}
            for n in (longest, longest - 2)
        ]
        batch = ga.collate(items, padding=True)
        torch.testing.assert_close(
            compiled(batch.x, batch.graph, valid=batch.valid),
            layer(batch.x, batch.graph, valid=batch.valid),
        )
    torch._dynamo.reset()


def test_autocast_and_bfloat16_read_padded_rows() -> None:
    batch = ga.collate(items_for(CASES[0], "windows", torch.float32), padding=True)
    layer = CASES[0].make(dtype=torch.float32)
    expected = together(layer, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = together(layer, batch)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), expected, rtol=5e-2, atol=5e-2)
    half = copy.deepcopy(layer).bfloat16()(batch.x.bfloat16(), batch.graph, valid=batch.valid)
    torch.testing.assert_close(half.float(), expected, rtol=5e-2, atol=5e-2)


def test_rows_that_are_not_contiguous_are_read_too() -> None:
    layer = CASES[0].make()
    batch = ga.collate(items_for(CASES[0], "windows"), padding=True)
    strided = batch.x.mT.contiguous().mT
    assert not strided.is_contiguous()
    assert torch.equal(together(layer, batch), layer(strided, batch.graph, valid=batch.valid))


def test_a_layer_of_somebody_else_gets_what_is_given_and_a_message_of_theirs_runs() -> None:
    seen = []

    class Mine(ga.nn.DotProductAttention):
        def forward(self, x: Any, graph: Any, **options: Any) -> Any:
            seen.append(x.shape)
            return super().forward(x, graph, **options)

    class Doubled(ga.nn.DotProductAttention):
        def log_affinity(self, query_i: Any, key_j: Any) -> Any:
            return 2 * super().log_affinity(query_i, key_j)

    items = items_for(CASES[0], "windows", torch.float32)
    batch = ga.collate(items, padding=True)
    mine = Mine(DIM, HEADS)
    y = mine(batch.x, batch.graph, valid=batch.valid)
    assert seen == [(4, 8, DIM)]
    doubled = Doubled(DIM, HEADS)
    doubled.load_state_dict(dict(mine.state_dict()))
    twice = doubled(batch.x, batch.graph, valid=batch.valid)
    assert not torch.allclose(twice, y)
    for k, item in enumerate(items):
        torch.testing.assert_close(batch.unpack(y)[k], mine(item["x"], item["graph"]))
        torch.testing.assert_close(batch.unpack(twice)[k], doubled(item["x"], item["graph"]))


def test_second_order_gradients_pass_through_padded_rows() -> None:
    layer = Case("GaussianKernelAttention").make(backend="reference")
    items = [
        {"x": torch.randn(n, DIM, dtype=torch.float64), "graph": ga.causal_graph(n)} for n in (2, 1)
    ]
    batch = ga.collate(items, padding=True)
    x = (0.5 * batch.x).requires_grad_()
    run = functools.partial(layer, graph=batch.graph, valid=batch.valid)
    assert torch.autograd.gradgradcheck(lambda x: run(x).sum(-1), x)


def test_an_offset_table_serves_padded_windows() -> None:
    """The operation reads rows end to end; padding leaves the table of the windows as it is."""
    items = items_for(CASES[0], "windows")
    for item, n in zip(items, LENGTHS, strict=True):
        item["graph"] = ga.window_path_graph(n, 2, self_loops=True)
    batch = ga.collate(items, padding=True)
    table = torch.randn(5, HEADS, dtype=torch.float64)

    def attend(x: torch.Tensor, graph: ga.TokenGraph) -> torch.Tensor:
        q = x.view(-1, HEADS, DIM // HEADS)
        return ga.dot_product_attention(q, q, q, graph, edge_bias=table)

    y = attend(batch.x.flatten(0, 1), batch.graph).view(4, 8, DIM)
    for row, item in zip(batch.unpack(y), items, strict=True):
        torch.testing.assert_close(row, attend(item["x"], item["graph"]).view(-1, DIM))
