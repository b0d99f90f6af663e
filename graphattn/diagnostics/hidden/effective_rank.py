"""Effective rank: the number of directions in which the tokens of a layer vary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from graphattn.diagnostics.arguments import as_model
from graphattn.diagnostics.hidden.blocks import Layers, Layout, choose_layers, layouts
from graphattn.diagnostics.hidden.disabled import disabled_parameters, without_normalization
from graphattn.diagnostics.hidden.evaluating import evaluating
from graphattn.diagnostics.per_layer import PerLayer
from graphattn.graphs.arguments import as_choice
from graphattn.ops.inputs import compute_dtype

Method = Literal["participation", "entropy"]


def effective_rank(x: Tensor, *, method: Method = "participation") -> Tensor:
    r"""The effective number of dimensions that tokens fill.

    From the eigenvalues :math:`\lambda_k` of the population covariance of the tokens:

    - ``"participation"``: :math:`(\sum_k \lambda_k)^2 / \sum_k \lambda_k^2`, the participation
      ratio (Gao et al., *A theory of multineuronal dimensionality*, 2017).
    - ``"entropy"``: :math:`\exp(-\sum_k p_k \log p_k)` with :math:`p_k = \lambda_k / \sum_l
      \lambda_l` (Roy and Vetterli, *The effective rank*, 2007, there of singular values; those of
      the covariance are its eigenvalues).

    Both are n where n eigenvalues are equal and the rest 0, and at most min(N - 1, C); the
    participation ratio is the smaller one and weighs the leading eigenvalues more.

    Args:
        x: [*, N, C], floating point.
        method: "participation" or "entropy".

    Returns:
        [*]; 0 where all tokens are equal (up to rounding), NaN where x is not finite.

    Raises:
        ValueError: for another shape, dtype or method.

    Example:
        >>> import torch, graphattn as ga
        >>> x = torch.tensor([[1.0, 0, 0], [-1, 0, 0], [0, 1, 0], [0, -1, 0]])  # in a plane
        >>> ga.diagnostics.effective_rank(x)
        tensor(2.)
    """
    as_choice("method", method, ("participation", "entropy"))
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() < 2 or 0 in x.shape[-2:]:
        got = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"x must be a floating-point tensor [*, N, C], N and C >= 1, got {got}")
    x = x.detach()
    x = x.to(compute_dtype(x.dtype))
    finite = x.isfinite().all(dim=-1).all(dim=-1)
    x = x.masked_fill(~finite[..., None, None], 0)
    centred = x - x.mean(dim=-2, keepdim=True)
    variance = torch.linalg.svdvals(centred).square()  # N times the covariance's eigenvalues
    total = variance.sum(dim=-1)
    # What is left of equal tokens after subtracting their rounded mean.
    rounding = x.abs().amax(dim=(-2, -1)) * (16 * torch.finfo(x.dtype).eps)
    constant = total <= rounding.square() * (x.shape[-1] * x.shape[-2])
    share = variance / total.masked_fill(constant, 1)[..., None]
    if method == "participation":
        rank = 1 / share.square().sum(dim=-1)
    else:
        rank = (-torch.special.xlogy(share, share).sum(dim=-1)).exp()
    return rank.masked_fill(constant, 0).masked_fill(~finite, torch.nan)


def effective_rank_per_layer(
    model: nn.Module,
    *inputs: Any,
    weights: Literal["enabled", "disabled"] = "enabled",
    normalization: Literal["enabled", "disabled"] = "enabled",
    layers: Layers = None,
    projections: Sequence[str] = (),
    method: Method = "participation",
    **keywords: Any,
) -> PerLayer:
    """:func:`effective_rank` of what every layer of a model returns, with or without its weights.

    ``weights="disabled"`` asks what the architecture alone does (Attention Clusters, Figures 12-15:
    spectra of the hidden states with learned parameters disabled and active). In the chosen layers,
    query, key, value and output projections become the identity, the scales and shifts of norms 1
    and 0, bandwidths what they were at the start, and the perceptron adds nothing: X + A(norm(X)).
    Embeddings, the input of it all, stay. With ``normalization="disabled"`` as well the norms of
    the chosen layers pass their input on: X + A(X), the paper's "all learned parameters and
    normalization disabled" (Figure 14; Figure 12 keeps the normalisation).

    Padding counts for nothing where the call says what padding is (``attention_mask``, `valid`,
    ``src_key_padding_mask``; for a decoder beside an encoder ``decoder_attention_mask``,
    ``tgt_key_padding_mask``). States of torch's layers are read as their `batch_first` says.

    The model runs in evaluation mode and without gradients. It is left as it was, after an
    exception too: its parameters are never written.

    Args:
        model: any torch model.
        inputs, keywords: what the model is called with.
        weights: "enabled" or "disabled".
        normalization: "enabled" or "disabled".
        layers: whose outputs are looked at: names as in ``model.named_modules()``, types, or one
            type; if None, the blocks of :mod:`graphattn.models` and torch's transformer layers. An
            output that is a tuple counts by its first tensor.
        projections: how the names of the attention's linear maps end, for attention that is neither
            of :mod:`graphattn.nn` nor ``torch.nn.MultiheadAttention``, such as ``("query", "key",
            "value", "attention.output.dense")``. Of models of transformers the common names are
            known. Every other linear map counts as part of the perceptron.
        method: of :func:`effective_rank`.

    Returns:
        (values [layers], names): means over the batch, in order of the calls.

    Raises:
        ValueError: if no layer is found; with ``weights="disabled"`` if a layer holds weights that
            have no parameter-free form (a projection that is not square, an edge network).

    Example:
        >>> import torch, graphattn as ga
        >>> model = ga.models.SequenceEncoder(11, 16, depth=2, heads=4)
        >>> tokens = torch.randint(11, (3, 40))
        >>> for weights in ("enabled", "disabled"):
        ...     ranks, names = ga.diagnostics.effective_rank_per_layer(
        ...         model, tokens, weights=weights)
        >>> names
        ('blocks.0', 'blocks.1')
    """
    as_choice("weights", weights, ("enabled", "disabled"))
    as_choice("normalization", normalization, ("enabled", "disabled"))
    as_choice("method", method, ("participation", "entropy"))
    chosen = choose_layers(as_model(model), layers)
    parameters = {}
    if weights == "disabled":
        parameters = disabled_parameters(model, chosen, tuple(projections))
    laid_out = layouts(model, chosen, inputs, keywords)
    rows: list[tuple[str, Tensor]] = []
    handles = []
    try:
        for name, layer in chosen.items():
            handles.append(layer.register_forward_hook(_look(name, rows, method, laid_out[name])))
        if normalization == "disabled":
            handles += without_normalization(chosen)
        with evaluating(model):
            functional_call(model, parameters, inputs, keywords)
    finally:
        for handle in handles:
            handle.remove()
    if not rows:
        raise ValueError("layers must be reached by this call of the model, but none was")
    return PerLayer(torch.stack([rank for _, rank in rows]), tuple(name for name, _ in rows))


def _look(name: str, rows: list[tuple[str, Tensor]], method: Method, layout: Layout) -> Any:
    """A forward hook that adds the mean effective rank of the output to `rows`."""

    def hook(_: nn.Module, __: Any, output: Any) -> None:
        if isinstance(output, tuple | list):
            output = next((part for part in output if isinstance(part, Tensor)), output)
        if layout.real is not None and isinstance(output, Tensor) and output.dim() in (2, 3):
            sequences = layout.tokens_of(output)
            ranks = torch.stack([effective_rank(tokens, method=method) for tokens in sequences])
        else:
            output = layout.batch_first(output) if isinstance(output, Tensor) else output
            ranks = effective_rank(output, method=method)
        rows.append((name or "model", ranks.mean()))

    return hook
