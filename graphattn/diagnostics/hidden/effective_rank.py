"""Effective rank, the number of directions in which the tokens of a layer vary."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from graphattn.diagnostics.arguments import as_model
from graphattn.diagnostics.hidden.blocks import BlockLayout, Layers, choose_layers, layouts
from graphattn.diagnostics.hidden.changes import without_weights
from graphattn.diagnostics.per_layer import PerLayer
from graphattn.graphs.arguments import as_choice
from graphattn.ops.inputs import compute_dtype

Method = Literal["participation", "entropy"]


def effective_rank(x: Tensor, *, method: Method = "participation") -> Tensor:
    r"""Compute the effective number of dimensions of tokens.

    It is computed from the eigenvalues :math:`\lambda_k` of the population covariance:

    - ``"participation"``: :math:`(\sum_k \lambda_k)^2 / \sum_k \lambda_k^2`, the participation
      ratio (Gao et al., *A theory of multineuronal dimensionality*, 2017).
    - ``"entropy"``: :math:`\exp(-\sum_k p_k \log p_k)` with :math:`p_k = \lambda_k / \sum_l
      \lambda_l` (Roy and Vetterli, *The effective rank*, 2007, who define it for singular values;
      the singular values of the covariance are its eigenvalues).

    Both are n if n eigenvalues are equal and the rest is 0, and at most min(N - 1, C). The
    participation ratio is the smaller one, because large eigenvalues count more.

    Args:
        x: tokens [*, N, C], floating-point.
        method: "participation" or "entropy".

    Returns:
        Effective ranks [*]; 0 if all tokens are equal (up to rounding), NaN if x is not finite.

    Raises:
        ValueError: if `x` has another shape or dtype, or `method` is unknown.

    Example:
        >>> import torch, graphattn as ga
        >>> x = torch.tensor([[1.0, 0, 0], [-1, 0, 0], [0, 1, 0], [0, -1, 0]])  # in a plane
        >>> ga.diagnostics.effective_rank(x)
        tensor(2.)
    """
    as_choice("method", method, ("participation", "entropy"))
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() < 2 or 0 in x.shape[-2:]:
        got = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(
            f"x must be a floating-point tensor [*, N, C] with N >= 1 and C >= 1, got {got}"
        )
    x = x.detach()
    x = x.to(compute_dtype(x.dtype))
    finite = x.isfinite().all(dim=-1).all(dim=-1)
    x = x.masked_fill(~finite[..., None, None], 0)
    centred = x - x.mean(dim=-2, keepdim=True)
    variance = torch.linalg.svdvals(centred).square()  # N times the covariance's eigenvalues
    total = variance.sum(dim=-1)
    # Equal tokens minus their rounded mean may differ from 0 by a few roundings.
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
    """Compute :func:`effective_rank` of every layer's output, with or without learned weights.

    With ``weights="disabled"``, the result is that of the architecture without learned parameters
    (Attention Clusters, Figures 12-15, compares spectra of hidden states with and without them).
    In the chosen layers, the query, key, value and output projections become the identity, norms
    get the scale 1 and the shift 0, bandwidths get their initial values, and the MLP adds 0. So a
    block computes X + A(norm(X)). Embeddings do not change. With ``normalization="disabled"``, too,
    the norms of the chosen layers return their inputs, so a block computes X + A(X). This is "all
    learned parameters and normalization disabled" in the paper (Figure 14; in Figure 12 the norms
    are enabled).

    Padding does not count if an argument of the call says which tokens are padding
    (``attention_mask``, `valid`, ``src_key_padding_mask``; for a decoder with an encoder
    ``decoder_attention_mask``, ``tgt_key_padding_mask``). For torch's layers, `batch_first` says
    how their states are laid out.

    The model runs in evaluation mode without gradients. It does not change, even if there is an
    exception.

    Args:
        model: any torch model.
        inputs, keywords: the arguments of the call.
        weights: "enabled" or "disabled".
        normalization: "enabled" or "disabled".
        layers: the layers whose outputs are used: names as in ``model.named_modules()``, types, or
            one type. With None, they are the blocks of :mod:`graphattn.models`, torch's transformer
            layers, or the modules with attention in a list. If an output is a tuple, its first
            tensor is used.
        projections: ends of the names of the attention's linear maps, such as ``("query", "key",
            "value", "attention.output.dense")``. They are needed for attention that is neither from
            :mod:`graphattn.nn` nor ``torch.nn.MultiheadAttention``. Common names in models of
            transformers are known. All other linear maps count as parts of the MLP.
        method: the argument of :func:`effective_rank`.

    Returns:
        (values [layers], names): means over the batch, in the order of the calls.

    Raises:
        ValueError: if no layer is found; with ``weights="disabled"``, if a layer has weights that
            cannot be disabled (such as a projection that is not square, or an edge network).

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
    laid_out = layouts(model, chosen, inputs, keywords)
    rows: list[tuple[str, Tensor]] = []
    with ExitStack() as stack:
        # These hooks read the outputs of layers before hooks of norms change them.
        for name, layer in chosen.items():
            hook = layer.register_forward_hook(_look(name, rows, method, laid_out[name]))
            stack.callback(hook.remove)
        changed = without_weights(model, chosen, weights, normalization, projections)
        functional_call(model, stack.enter_context(changed), inputs, keywords)
    if not rows:
        raise ValueError(
            "layers must run in this call of the model, but none of them did: choose other layers"
        )
    return PerLayer(torch.stack([rank for _, rank in rows]), tuple(name for name, _ in rows))


def _look(name: str, rows: list[tuple[str, Tensor]], method: Method, layout: BlockLayout) -> Any:
    """Make a forward hook that adds the mean effective rank of the output to `rows`."""

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
