"""Operators of backend="triton" work in whatever way their saved tensors are kept.

Saved tensors can be thrown away and computed again, kept elsewhere, or read only once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import graphattn as ga

pytestmark = pytest.mark.usefixtures("device")

LAYERS: dict[str, Callable[[], Any]] = {
    "krause": lambda: ga.nn.KrauseAttention(8, 2, top_k=2, backend="triton"),
    "gaussian": lambda: ga.nn.GaussianKernelAttention(8, 2, backend="triton"),
    "consensus": lambda: ga.nn.SelfConsensus(
        8, 2, rank=2, edge_hidden=4, step_size="auto", backend="triton"
    ),
    "consensus, target": lambda: ga.nn.SelfConsensus(
        8, 2, rank=2, edge_hidden=4, update="target", rope=True, backend="triton"
    ),
}


def gradients(run: Callable[[Tensor], Tensor], x: Tensor, layer: Any) -> list[Tensor]:
    out = run(x)
    return [out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])]


@pytest.mark.long
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_gives_the_same_bits_however_activations_are_kept(name: str, device: str) -> None:
    torch.manual_seed(0)
    layer, graph = LAYERS[name]().to(device), ga.window_path_graph(7, 1, self_loops=True).to(device)
    x = torch.randn(1, 7, 8, device=device, requires_grad=True)

    def call(x: Tensor) -> Tensor:
        return layer(x, graph)

    def twice(x: Tensor) -> Tensor:
        inner = lambda y: checkpoint(call, y, use_reentrant=False)  # noqa: E731
        return checkpoint(inner, x, use_reentrant=False)

    expected = gradients(call, x, layer)
    results = [gradients(twice, x, layer)]
    with save_on_cpu():
        results.append(gradients(call, x, layer))
    with saved_tensors_hooks(lambda saved: [saved], list.pop):  # a second reading fails
        results.append(gradients(call, x, layer))
    for mine in results:
        torch.testing.assert_close(mine, expected, rtol=0, atol=0)
