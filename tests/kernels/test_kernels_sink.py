"""Sinks beside fused kernels: applied to what they give, by their log-sums."""

import pytest
import torch
from cases_kernels import kernels_and_exact

import graphattn as ga

pytestmark = pytest.mark.usefixtures("device")

GRAPHS = {
    "band": lambda: ga.causal_window_graph(20, 6),
    "edges": lambda: ga.from_edge_index(torch.tensor([[0, 3, 5, 1, 1], [0, 0, 2, 2, 7]]), 9),
    "band and edges": lambda: ga.longformer_graph(30, 4, (0,)),
}


@pytest.mark.parametrize("score", ["rbf", "dot"])
@pytest.mark.parametrize("name", GRAPHS)
def test_values_and_gradients_are_those_of_float64(name: str, score: str, device: str) -> None:
    graph = GRAPHS[name]()
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    n = graph.num_targets
    numbers = [draw(2, n, 2, 8), draw(2, n, 1, 8), draw(2, n, 1, 8)]
    numbers += [torch.tensor([0.5, -torch.inf]), draw(2, n, 2, 8), draw(2, n, 2)]
    both = []
    for backend, where, dtype in kernels_and_exact(device):
        q, k, v, sink, d_out, d_lse = (
            x.to(where, dtype).requires_grad_(i < 4) for i, x in enumerate(numbers)
        )
        options = {"sink": sink, "return_lse": True, "backend": backend}
        if score == "rbf":
            out, lse = ga.rbf_attention(q, k, v, graph.to(where), 2.0, eps=0.2, **options)
        else:
            out, lse = ga.dot_product_attention(q, k, v, graph.to(where), **options)
        loss = (out * d_out).sum() + (lse.masked_fill(lse == -torch.inf, 0) * d_lse).sum()
        both.append((out, lse, *torch.autograd.grad(loss, (q, k, v, sink))))
    close = {"check_device": False, "check_dtype": False, "rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(*both, **close)
    assert both[0][-1][1] == 0
