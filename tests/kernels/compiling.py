"""Layers under torch.compile beside eager ones, and the operators in their graphs."""

from __future__ import annotations

from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

import graphattn as ga

Call = tuple[Any, Any, Any]  # an operator, its arguments, and those that are named


class Calls(torch.fx.Interpreter):
    """Runs a traced graph and notes what our operators are called with."""

    def __init__(self, module: torch.fx.GraphModule, calls: list[Call]) -> None:
        super().__init__(module)
        self.calls = calls

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if "graphattn" in str(target):
            self.calls.append((target, args, kwargs))
        return super().call_function(target, args, kwargs)


def check_compiled(model: nn.Module, x: Tensor, graph: ga.TokenGraph, **options: Any) -> list[Any]:
    """A compiled layer gives what an eager one gives; returns the calls of each pass."""
    calls: list[list[Call]] = []

    def note(module: torch.fx.GraphModule, _: object) -> Any:
        calls.append([])
        return make_boxed_func(Calls(module, calls[-1]).run)

    backend = aot_autograd(fw_compiler=note, bw_compiler=note)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    d_y, leaves = torch.randn_like(x), [x.requires_grad_(), *model.parameters()]
    results = [layer(x, graph, **options) for layer in (compiled, model)]
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)
    gradients = [torch.autograd.grad(y, leaves, d_y) for y in results]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
    return calls


def check_compilations(model: nn.Module, dim: int, device: str) -> None:
    """Two compilations serve all lengths and windows."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for n in (12, 17, 21, 9):
        graph = ga.causal_window_graph(n, n // 4 + 1).to(device)
        x = torch.randn(1, n, dim, device=device, requires_grad=True)
        torch.testing.assert_close(compiled(x, graph), model(x, graph), rtol=1e-5, atol=1e-6)
    assert counter.frame_count <= 2
