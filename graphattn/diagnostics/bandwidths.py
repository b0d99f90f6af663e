"""The learned bandwidths of attention layers that use distances."""

from __future__ import annotations

from torch import Tensor, nn

from graphattn.diagnostics.arguments import as_model
from graphattn.diagnostics.per_layer import PerLayer, per_layer
from graphattn.ops.inputs import compute_dtype


def bandwidths(model: nn.Module) -> PerLayer:
    """Return the bandwidth sigma of every head, for all layers that learn one.

    sigma is in the units of the features whose distance it divides. A larger sigma means broader
    attention. Projection-Free Transformers, Section 7.3, shows such a table.

    Args:
        model: a module with :class:`~graphattn.nn.GaussianKernelAttention` or
            :class:`~graphattn.nn.KrauseAttention` layers.

    Returns:
        (values [layers, heads], names): sigma = exp(log_sigma). If the heads of a layer share a
        sigma, it is repeated. If a layer has fewer heads than others, the rest is NaN.

    Raises:
        ValueError: if no layer has bandwidths.

    Example:
        >>> import graphattn as ga
        >>> mixers = [ga.nn.GaussianKernelAttention(8, heads=2) for _ in range(3)]
        >>> model = ga.models.SequenceEncoder(11, 8, depth=3, heads=2, mixer=mixers)
        >>> sigma, names = ga.diagnostics.bandwidths(model)
        >>> sigma  # at the start, sqrt(8 / 2)
        tensor([[2., 2.],
                [2., 2.],
                [2., 2.]])
        >>> names[0]
        'blocks.0.mixer'
    """
    rows = []
    for name, layer in as_model(model).named_modules():
        log_sigma, heads = getattr(layer, "log_sigma", None), getattr(layer, "heads", None)
        if isinstance(log_sigma, Tensor) and isinstance(heads, int):
            log_sigma = log_sigma.detach()
            sigma = log_sigma.to(compute_dtype(log_sigma.dtype)).exp()
            rows.append((name or type(layer).__name__, sigma.expand(heads)))
    if not rows:
        raise ValueError(
            "model must have layers with a log_sigma (GaussianKernelAttention, KrauseAttention), "
            f"got a {type(model).__name__} without any"
        )
    return per_layer(rows)
