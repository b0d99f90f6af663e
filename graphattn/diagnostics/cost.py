"""Costs of a model: operations, and the memory that waits for its backward pass."""

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
    r"""Operations of one forward pass, two per multiply-add, exact from the edges of the graphs.

    Counted are matrix products, convolutions and attention, as in torch's ``FlopCounterMode``,
    which this is made of; not what is done element by element (norms, GELU, softmax). With D
    features per head, attention over E edges costs :math:`2 E (D + D_v)` per head, whether it
    weighs products or distances; with `top_k` values are averaged over the kept edges alone. A
    consensus step costs :math:`2 E (\xi (r D + 2) + 2 r D)` per head behind the edge network's
    first layer (Stabilizing Transformer Training Through Consensus, Table 1, with constants).
    Linear attention costs :math:`2 (N + M) D (D_v + 1)` per head for N targets and M sources on
    complete and causal graphs and parts of such, numerator and denominator together, and
    :math:`2 E (D + D_v + 1)` on windows and all others (with ``rope=True``, 2 E D more). The
    numbers are those of the mathematics, the same on every backend; padding counts like a token.

    Under ``torch.utils.flop_counter.FlopCounterMode`` layers count themselves too, by module,
    forward and backward (but for ``backend="reference"``, which works element by element; here its
    layers run as "structured"). The backward pass of attention is 2.5 times its forward pass:
    logits are formed again.

    Args:
        model: any module; torch's own SDPA and FlexAttention are counted, on a CPU as well.
        inputs, kwargs: what the model is called with. A model and inputs on the device "meta" are
            counted without computing anything.

    Returns:
        The number of operations of that call, in the mode the model is in.

    Raises:
        ValueError: if `model` is no module.

    Warns:
        UserWarning: where a layer cannot be counted because it has its own ``message()``, or an
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
            f"not counted, since it works element by element: {', '.join(uncounted)}",
            stacklevel=2,
        )
    return counter.get_total_flops()


def activation_memory(model: nn.Module, *inputs: Any, **kwargs: Any) -> int:
    """Bytes that autograd keeps between a forward pass and its backward pass.

    Every tensor that some operation saves counts once, however many operations save it or a part of
    it; parameters, buffers and the inputs themselves, which are there anyway, do not. What lives
    only while a pass is running (the peak of a chunk, say) is not part of it. Activation
    checkpointing shows up as what it saves.

    Args:
        model: any module.
        inputs, kwargs: what the model is called with; gradients must be wanted of something, so
            leave ``requires_grad`` as in training. The device "meta" works too.

    Raises:
        ValueError: if `model` is no module.

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
            saved.setdefault(key, x)  # kept, so that no other storage gets its address
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
    """Layers that work element by element run as operators do, torch's encoder step by step."""
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
    """SDPA on a CPU, of which FlopCounterMode does not know."""
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def operations(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
        batch, heads, targets, features = query
        return 2 * batch * heads * targets * key[-2] * (features + value[-1])

    return {operator: operations}
