"""Kernels read padded items with graphs of their own: rows without edges, NaN in padding."""

from __future__ import annotations

import pytest
import torch

import graphattn as ga

LENGTHS = (5, 19, 1)
GRAPHS = {
    "windows": lambda n: ga.window_path_graph(n, 2, self_loops=True),
    "lists": lambda n: ga.from_mask(torch.rand(n, n) < 0.4),
    "tables": lambda n: ga.knn_graph(torch.randn(n, 3), min(2, n), self_loops=True),
}
LAYERS = {
    "dot": lambda: ga.nn.DotProductAttention(16, 2, rope=True, kv_heads=1),
    "krause": lambda: ga.nn.KrauseAttention(16, 2, top_k=2),
    "gka": lambda: ga.nn.GaussianKernelAttention(16, 2),
    "consensus": lambda: ga.nn.SelfConsensus(16, 2, edge_hidden=16, step_size="auto"),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("name", LAYERS)
def test_padded_items_are_those_alone_and_so_are_gradients(name, kind, device):
    layer = LAYERS[name]().to(device)
    items = [{"x": torch.randn(n, 16), "graph": GRAPHS[kind](n)} for n in LENGTHS]
    batch = ga.collate(items, padding=True, padding_value=float("nan")).to(device)
    found = {}
    for backend in ("triton", "reference"):
        with ga.use_backend(backend):
            x = batch.x.clone().requires_grad_()
            y = layer(x, batch.graph, valid=batch.valid)
            assert y.isfinite().all()
            own = torch.cat(batch.unpack(y))
            grads = torch.autograd.grad(own.square().sum(), [x, *layer.parameters()])
            found[backend] = [own, *grads]
            if backend == "reference":
                alone = [layer(i["x"].to(device), i["graph"].to(device)) for i in items]
                torch.testing.assert_close(own, torch.cat(alone), rtol=1e-4, atol=1e-5)
    for a, b in zip(found["triton"], found["reference"], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("self_loops", [False, True])
def test_neighbours_in_items_are_one_search(self_loops, device):
    x = torch.randn(25, 3, device=device)
    sizes = [7, 0, 2, 16]
    batch = torch.arange(4).repeat_interleave(torch.tensor(sizes)).to(device)
    by_kernels = ga.knn_graph(x, 4, batch=batch, self_loops=self_loops, backend="triton")
    alone = ga.knn_graph(x, 4, batch=batch, self_loops=self_loops, backend="reference")
    assert by_kernels == alone
    assert by_kernels.sizes == tuple((n, n) for n in sizes)
