"""Recording the attention weights of graphattn's layers while a model runs."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graphattn.diagnostics.arguments import as_model
from graphattn.diagnostics.attention.calls import in_backward
from graphattn.diagnostics.attention.statistics import sink_share
from graphattn.diagnostics.per_layer import PerLayer, per_layer
from graphattn.graphs import TokenGraph
from graphattn.graphs.token_graph import as_token_graph


@dataclass(frozen=True)
class AttentionRecord:
    """One call of one attention layer, from :func:`record_attention`."""

    name: str  #: the name of the layer, as in ``model.named_modules()``
    weights: Tensor  #: attention weights [*, E, heads], in the order of ``graph.edge_index``
    output: Tensor  #: the output of the layer, [*, N, dim]
    graph: TokenGraph  #: the graph of the call


@contextmanager
def record_attention(model: nn.Module) -> Iterator[list[AttentionRecord]]:
    """Record weights and outputs of graphattn's attention layers while a model runs in the block.

    These are the layers of :mod:`graphattn.nn` that have attention weights (consensus layers have
    none). The weights come from the call that the model makes, so nothing is computed twice, and
    the model's results are the same to the last bit. The recorded tensors are detached. There is
    one number per edge and head, so record short runs. Steps of generation are not recorded here;
    use :func:`record` for them.

    Args:
        model: a module with such layers, or a layer.

    Yields:
        A list that gets one :class:`AttentionRecord` per layer and call, in the order of the calls.

    Raises:
        ValueError: if `model` has no such layer; inside the block, if a layer is called with a
            tensor edge_index that is not sorted (because weights are in sorted order).

    Example:
        >>> import torch, graphattn as ga
        >>> model = ga.models.SequenceEncoder(11, 16, depth=2, heads=4)
        >>> with ga.diagnostics.record_attention(model) as layers:
        ...     logits = model(torch.randint(11, (10,)))
        >>> [(layer.name, tuple(layer.weights.shape)) for layer in layers]
        [('blocks.0.mixer', (100, 4)), ('blocks.1.mixer', (100, 4))]
        >>> weights, graphs = [r.weights for r in layers], [r.graph for r in layers]
        >>> ga.diagnostics.rollout(weights, graphs).shape
        torch.Size([10, 10])
    """
    records: list[AttentionRecord] = []

    def add(name: str, weights: Tensor, output: Tensor, graph: TokenGraph, _: Any) -> None:
        records.append(AttentionRecord(name, weights.detach(), output.detach(), graph))

    with listening(as_model(model), add) as num_layers:
        if not num_layers:
            raise ValueError(
                "model must have attention layers of graphattn.nn (DotProductAttention, "
                "KrauseAttention, GaussianKernelAttention), got a "
                f"{type(model).__name__} without any: record() also works for other models"
            )
        yield records


def is_attention_layer(module: nn.Module) -> bool:
    """Whether a layer returns weights [*, E, H] if called with return_attention_weights=True.

    PyG's own convolutions also have this argument, but return something else. Only graphattn's
    layers have `edge_weights`.
    """
    return (
        callable(getattr(module, "edge_weights", None))
        and "return_attention_weights" in inspect.signature(type(module).forward).parameters
    )


@contextmanager
def listening(
    model: nn.Module, add: Callable[[str, Tensor, Tensor, TokenGraph, Tensor | None], None]
) -> Iterator[int]:
    """Give every call of an attention layer to `add`: its name, weights, output, graph and `valid`.

    The context yields the number of these layers. Calls in other threads, and those that gradient
    checkpointing repeats, are not changed.
    """
    layers = [(name, part) for name, part in model.named_modules() if is_attention_layer(part)]
    with ExitStack() as stack:
        for name, layer in layers:
            _add_hooks(stack, name or type(layer).__name__, layer, add)
        yield len(layers)


def _add_hooks(stack: ExitStack, name: str, layer: nn.Module, add: Callable[..., None]) -> None:
    """Add hooks that request the weights of a layer, and remove them from its result."""
    # For every running call, whether the caller requests the weights, too.
    wants_weights: list[bool] = []
    thread = threading.get_ident()

    def is_observed() -> bool:
        return threading.get_ident() == thread and not in_backward()

    def request(_: nn.Module, args: Any, keywords: dict[str, Any]) -> Any:
        if not is_observed():
            return None
        requested = keywords.get("return_attention_weights", False)
        wants_weights.append(bool(requested))
        return args, {**keywords, "return_attention_weights": requested or "detached"}

    def remove(_: nn.Module, args: Any, keywords: dict[str, Any], result: Any) -> Any:
        if not is_observed():
            return None
        output, weights = result
        given = dict(zip(("x", "graph", "context"), args, strict=False)) | keywords
        x, context, valid = given["x"], given.get("context"), given.get("valid")
        num_sources = (x if context is None else context).shape[-2]
        graph = as_token_graph(given["graph"], x.shape[-2], num_sources)
        add(name, weights, output, graph, valid[1] if isinstance(valid, tuple | list) else valid)
        return result if wants_weights.pop() else output

    # The first hook runs last before the layer, and the second one runs first after it. So other
    # hooks see the same result as the model.
    stack.callback(layer.register_forward_pre_hook(request, with_kwargs=True).remove)
    hook = layer.register_forward_hook(remove, prepend=True, with_kwargs=True)
    stack.callback(hook.remove)


def sinks_per_layer(model: nn.Module, *inputs: Any, token: int = 0, **keywords: Any) -> PerLayer:
    """Compute :func:`sink_share` of every attention layer and head, for one call of a model.

    Args:
        model: a module with layers as in :func:`record_attention`. It runs without gradients, in
            its current mode (training or evaluation).
        inputs, keywords: the arguments of the call.
        token: the position of the sink token.

    Returns:
        (values [layers, heads], names): means over the batch, in the order of the calls. If a layer
        has fewer heads than others, the rest is NaN.

    Raises:
        ValueError: if `model` has no attention layer, or no sequence has this token.

    Example:
        >>> import torch, graphattn as ga
        >>> model = ga.models.SequenceEncoder(11, 16, depth=2, heads=4)
        >>> values, names = ga.diagnostics.sinks_per_layer(model, torch.randint(11, (3, 10)))
        >>> values.shape, names
        (torch.Size([2, 4]), ('blocks.0.mixer', 'blocks.1.mixer'))
    """
    with torch.no_grad(), record_attention(model) as records:
        model(*inputs, **keywords)
    if not records:
        raise ValueError(
            "model must call its attention layers, but this call has not reached any of them"
        )
    rows = []
    for record in records:
        share = sink_share(record.weights, record.graph, token)
        rows.append((record.name, share.reshape(-1, share.shape[-1]).nanmean(dim=0)))
    return per_layer(rows)
