"""Costs of a model: operations, also of training, and the memory of activations."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from graphattn.diagnostics.arguments import as_model
from graphattn.graphs.arguments import as_int
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


class TrainingOperations(NamedTuple):
    """Operations per token of a forward and a backward pass, two per multiply-add.

    Attributes:
        by_formula: counted as if every window were full.
        exact: only the edges of the graphs are counted.

    Example:
        >>> import graphattn as ga
        >>> model = ga.models.CausalLM(50, dim=16, depth=2, heads=2, window=4)
        >>> counted = ga.diagnostics.training_operations(model, 100)
        >>> counted.by_formula > counted.exact  # the first tokens have fewer keys
        True
    """

    by_formula: float
    exact: float


def training_operations(model: Any, num_tokens: int) -> TrainingOperations:
    r"""Operations of training a language model, per token of texts with `num_tokens` tokens.

    The formula is nanochat's, which the GKA paper (Table 8) uses: six operations per weight of the
    linear maps, including the head but not the embedding, and
    :math:`12 \, \mathrm{dim} \sum_l W_l` for the windows W_l of all layers, as if every window were
    full. At the beginning of a text windows are not full, so the exact number is lower: it is three
    times the operations of a forward pass (:func:`graphattn.diagnostics.flops`), which counts the
    edges of the graphs.

    Args:
        model: a :class:`~graphattn.models.CausalLM`. On the device "meta" nothing is computed and
            no memory is used for its weights.
        num_tokens: N, the length of a text. A window that is longer than N, or None, counts as N
            keys.

    Raises:
        ValueError: if the model has consensus layers (the formula has no term for them), or if it
            is not a :class:`~graphattn.models.CausalLM`.

    Source:
        *Projection-Free Transformers via Gaussian Kernel Attention*, Table 8: 2.4143e9 for
        GKA and 3.0042e9 for the baseline.

    Example:
        >>> import torch, graphattn as ga
        >>> with torch.device("meta"):
        ...     model = ga.models.CausalLM.from_preset("gka-d20")
        >>> counted = ga.diagnostics.training_operations(model, 2048)
        >>> print(f"{counted.by_formula:.5e} {counted.exact:.3e}")
        2.41435e+09 2.277e+09
    """
    model = as_model(model)
    if not isinstance(getattr(model, "windows", None), list):
        raise ValueError(f"model must be a CausalLM, got {type(model).__name__}")
    if any(hasattr(part, "edge_net") for part in model.modules()):
        raise ValueError(
            "model must have no consensus layers: the formula has no term for them; use "
            "graphattn.diagnostics.flops to count a forward pass"
        )
    num_tokens = as_int("num_tokens", num_tokens, 1)
    device = model.embedding.weight.device
    weights = sum(part.weight.numel() for part in model.modules() if isinstance(part, nn.Linear))
    keys = sum(min(window or num_tokens, num_tokens) for window in model.windows)
    for block, window in zip(model.blocks, model.windows, strict=True):
        if hasattr(block.mixer, "krause_window"):  # a second branch in this window
            near = block.mixer.krause_window or num_tokens
            keys += min(near, window or num_tokens, num_tokens)
    tokens = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    return TrainingOperations(
        by_formula=float(6 * weights + 12 * model.embedding.embedding_dim * keys),
        exact=3 * flops(model, tokens) / num_tokens,
    )


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
