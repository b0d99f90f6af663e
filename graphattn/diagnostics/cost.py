"""Costs of a model: operations, and the memory of activations for the backward pass."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from graphattn.diagnostics.arguments import as_model
from graphattn.ops.backends import use_backend
from graphattn.ops.counting import uncounted_calls


def flops(model: nn.Module, *inputs: Any, **kwargs: Any) -> int:
    r"""Count the operations of one forward pass, two per multiply-add.

    The count is exact for the edges of the graphs. Matrix products, convolutions and attention
    count, as in torch's ``FlopCounterMode``, which is used here. Elementwise operations (norms,
    GELU, softmax) do not count. With D features per head:

    - Attention over E edges costs :math:`2 E (D + D_v)` per head, with products or distances. With
      `top_k`, values are averaged only over the selected edges.
    - A consensus step costs :math:`2 E (\xi (r D + 2) + 2 r D)` per head after the first layer of
      the edge network (Stabilizing Transformer Training Through Consensus, Table 1, with
      constants).
    - Linear attention costs :math:`2 (N + M) D (D_v + 1)` per head, for N targets and M sources, on
      complete and causal graphs and parts of them. This includes numerator and denominator. On
      windows and other graphs it costs :math:`2 E (D + D_v + 1)`, and with ``rope=True`` 2 E D
      more.

    The numbers are those of the formulas, and are the same for all backends. Padding counts like
    other tokens.

    Layers also count themselves under ``torch.utils.flop_counter.FlopCounterMode``, per module,
    forward and backward. The exception is ``backend="reference"``, which works elementwise; in this
    function, such layers run as "structured". The backward pass of attention costs 2.5 times its
    forward pass, because logits are computed again.

    Args:
        model: any module. torch's own SDPA and FlexAttention are counted, also on a CPU.
        inputs, kwargs: the arguments of the call. If the model and the inputs are on the device
            "meta", nothing is computed.

    Returns:
        The number of operations of this call, in the current mode of the model.

    Raises:
        ValueError: if `model` is not a module.

    Warns:
        UserWarning: if a layer cannot be counted because it has its own ``message()``, or an
            operation was called with ``backend="reference"``.

    Example:
        >>> import torch, graphattn as ga
        >>> layer = ga.nn.GaussianKernelAttention(64, heads=4)
        >>> x, graph = torch.randn(100, 64), ga.window_path_graph(100, window=2)
        >>> ga.diagnostics.flops(layer, x, graph)  # 2 * 100 * 64 * 64 + 4 * 394 * 64
        920064
    """
    from torch.utils.flop_counter import FlopCounterMode

    as_model(model)
    counter = FlopCounterMode(display=False, custom_mapping=_of_cpu_attention())
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices=[]),
        _countable(model),
        uncounted_calls() as uncounted,
        counter,
    ):
        model(*inputs, **kwargs)
    if uncounted:
        warnings.warn(
            "flops() has not counted these calls, because they work elementwise: "
            f"{', '.join(uncounted)}",
            stacklevel=2,
        )
    return counter.get_total_flops()


def activation_memory(model: nn.Module, *inputs: Any, **kwargs: Any) -> int:
    """Count the bytes that autograd saves between a forward pass and its backward pass.

    Every saved tensor counts once, even if several operations save it or a part of it. Parameters,
    buffers and the inputs do not count. Memory that is used only during a pass (such as the peak of
    a chunk) does not count. With activation checkpointing, the result is smaller.

    Args:
        model: any module.
        inputs, kwargs: the arguments of the call. Some tensor must require gradients, as in
            training. The device "meta" works, too.

    Raises:
        ValueError: if `model` is not a module.

    Example:
        >>> import torch, graphattn as ga
        >>> layer = ga.nn.DotProductAttention(64, heads=4)
        >>> x = torch.randn(8, 100, 64)
        >>> near = ga.diagnostics.activation_memory(layer, x, ga.window_path_graph(100, window=2))
        >>> every = ga.diagnostics.activation_memory(layer, x, ga.complete_graph(100))
        >>> least = 4 * x.numel() * x.element_size()  # queries, keys, values, outputs
        >>> least < near < 1.05 * least  # a number or two per token and head, nothing per edge
        True
        >>> least < every < 1.05 * least
        True
    """
    as_model(model)
    there = [*model.parameters(), *model.buffers(), *tree_leaves((inputs, kwargs))]
    known = {x.untyped_storage()._cdata for x in there if isinstance(x, Tensor)}
    saved: dict[int, Tensor] = {}

    def remember(x: Tensor) -> Tensor:
        key = x.untyped_storage()._cdata
        if key not in known:
            saved.setdefault(key, x)  # A reference, so that no other storage gets its address.
        return x

    with (
        torch.enable_grad(),
        torch.random.fork_rng(devices=[]),
        torch.autograd.graph.saved_tensors_hooks(remember, lambda x: x),
    ):
        output = model(*inputs, **kwargs)
    total = sum(x.untyped_storage().nbytes() for x in saved.values())
    del output
    return total


@contextmanager
def _countable(model: nn.Module) -> Iterator[None]:
    """Let layers with backend "reference" run with "auto", and disable torch's fused encoder."""
    layers: list[Any] = [m for m in model.modules() if getattr(m, "backend", None) == "reference"]
    layers = [layer for layer in layers if hasattr(layer, "uses_propagate")]
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        for layer in layers:
            layer.backend = "auto"
        torch.backends.mha.set_fastpath_enabled(False)
        with use_backend("auto"):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for layer in layers:
            layer.backend = "reference"


def _of_cpu_attention() -> dict[Any, Callable[..., int]]:
    """Return the formula for SDPA on a CPU, which FlopCounterMode does not have."""
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def operations(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
        batch, heads, targets, features = query
        return 2 * batch * heads * targets * key[-2] * (features + value[-1])

    return {operator: operations}
