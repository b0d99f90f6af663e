"""A layer over neighbours of its own features, found anew in every pass, never waits for a device.

Without a device, tensors on "meta" prove it: they hold nothing, so what reads one on the host
(`.item()`, a test of a tensor, `nonzero`, a mask as an index, a copy to the CPU) raises; copies
from the CPU are looked for. On a GPU PyTorch itself watches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch._library.custom_ops import OPDEFS
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import graphattn as ga
from graphattn.kernels.shared.launch import recording

DIM, K = 8, 4
SIZES = (9, 3, 12)  # points of three clouds; in the second one has fewer others than K


class PointCloudLayer(torch.nn.Module):
    """The nearest points of the same cloud, by features, and attention over them."""

    def __init__(self, mixer: torch.nn.Module, backend: str) -> None:
        super().__init__()
        self.mixer, self.backend = mixer, backend

    def forward(self, x: torch.Tensor, clouds: ga.TokenGraph) -> torch.Tensor:
        graph = ga.knn_graph(x, K, within=clouds, self_loops=True, backend=self.backend)
        return x + self.mixer(x, graph)


MIXERS: dict[str, Callable[[str], torch.nn.Module]] = {
    "dot product": lambda backend: ga.nn.DotProductAttention(DIM, 2, backend=backend),
    "rotary, shared heads": lambda backend: ga.nn.DotProductAttention(
        DIM, 2, kv_heads=1, rope=True, backend=backend
    ),
    "Krause": lambda backend: ga.nn.KrauseAttention(DIM, 2, backend=backend),
    "Krause, top 3": lambda backend: ga.nn.KrauseAttention(DIM, 2, top_k=3, backend=backend),
    "Gaussian kernel": lambda backend: ga.nn.GaussianKernelAttention(DIM, 2, backend=backend),
}


def layer_on(device: str, name: str, backend: str = "triton") -> PointCloudLayer:
    """Make a layer that has the same weights on every device and backend."""
    torch.manual_seed(0)
    return PointCloudLayer(MIXERS[name](backend), backend).to(device)


def clouds_on(device: str) -> ga.TokenGraph:
    return ga.batch([ga.complete_graph(n) for n in SIZES]).to(device)


def points() -> torch.Tensor:
    return torch.randn(sum(SIZES), DIM, generator=torch.Generator().manual_seed(1))


def step(layer: PointCloudLayer, x: torch.Tensor, clouds: ga.TokenGraph) -> list[torch.Tensor]:
    """Output, and gradients of a loss by the features and all weights."""
    y = layer(x, clouds)
    loss = (y * torch.linspace(-1, 1, DIM, device=y.device)).square().mean()
    return [y, *torch.autograd.grad(loss, [x, *layer.parameters()])]


class ImplementationsOnMeta(TorchDispatchMode):
    """Runs what our operators do; on meta PyTorch would only ask for shapes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operator = OPDEFS.get(getattr(func, "_schema", func).name)
        return (operator._init_fn if operator else func)(*args, **(kwargs or {}))


class NoCopiesFromTheCPU(TorchFunctionMode):
    """Raises where a tensor on meta is made of numbers on the CPU: a GPU would wait for them."""

    MAKERS = (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor)
    COPIES = (torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.copy_)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        from_cpu = func in self.COPIES and any(
            isinstance(x, torch.Tensor) and x.device.type == "cpu" for x in args
        )
        if (from_cpu or func in self.MAKERS) and result.device.type == "meta":
            raise RuntimeError("numbers are copied from the CPU")
        return result


@contextmanager
def nothing_waits(device: str) -> Iterator[list[str]]:
    """Raise wherever the block waits for the device.

    On "meta" kernels are only recorded: after the block the list holds their names.
    """
    if device == "meta":
        names: list[str] = []
        with ImplementationsOnMeta(), NoCopiesFromTheCPU(), recording() as launches:
            yield names
        names.extend(launch.kernel.fn.__name__ for launch in launches)
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield []
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.fixture
def watched(device: str) -> str:
    """Name the device on which waiting is seen: the GPU, or "meta" if there is none."""
    return "meta" if device == "cpu" else device


@pytest.mark.parametrize("name", MIXERS)
def test_a_layer_whose_graph_is_made_from_its_features_waits_for_nothing(
    name: str, watched: str
) -> None:
    layer, clouds = layer_on(watched, name), clouds_on(watched)
    x = points().to(watched).requires_grad_()
    with recording() if watched == "meta" else nullcontext():
        # What a search within these clouds needs is copied to the device once.
        ga.knn_graph(x, K, within=clouds, self_loops=True, backend="triton")
    if watched == "cuda":  # kernels are compiled
        step(layer, x, clouds)
    with nothing_waits(watched) as kernels:
        results = step(layer, x, clouds)
    assert [t.shape for t in results] == [x.shape, x.shape, *(p.shape for p in layer.parameters())]
    if watched == "meta":
        # The search, attention over the edges and its gradients by target and by source all ran.
        assert {"candidates_kernel", "order_kernel", "search_kernel"} <= set(kernels)
        assert {
            "edges_forward_kernel", "edges_d_query_kernel", "edges_d_source_kernel"
        } <= set(kernels)  # fmt: skip
        assert ("edges_select_kernel" in kernels) == ("top" in name)


WAITING: dict[str, Callable[[ga.TokenGraph], object]] = {
    "counting edges": lambda graph: graph.num_edges,
    "listing edges": lambda graph: graph.edge_index,
    "comparing": lambda graph: graph == ga.knn_graph(points(), K),
    "a mask": lambda graph: graph.to_mask(),
    "looking which way edges point": lambda graph: graph.points_backward,
    "numbers from the CPU": lambda graph: torch.tensor([1.0, 2.0], device=graph.device),
    "a copy from the CPU": lambda graph: points().to(graph.device),
}


@pytest.mark.parametrize("name", WAITING)
def test_what_counts_or_lists_edges_is_seen_to_wait(name: str, watched: str) -> None:
    x = points().to(watched)
    graph = ga.knn_graph(x, K, backend="triton") if watched == "cuda" else _graph_on_meta()
    with nothing_waits(watched), pytest.raises((RuntimeError, NotImplementedError)):
        WAITING[name](graph)


def _graph_on_meta() -> ga.TokenGraph:
    with recording():
        return ga.knn_graph(points().to("meta"), K, backend="triton")
