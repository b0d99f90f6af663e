"""Eigenvalues of the hidden states of a model, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from graphattn.diagnostics.arguments import as_model
from graphattn.diagnostics.attention.calls import refuse_compiled
from graphattn.diagnostics.hidden.blocks import BlockLayout, Layers, choose_layers, layouts
from graphattn.diagnostics.hidden.changes import (
    queries_scaled_in_place,
    without_attention,
    without_weights,
)
from graphattn.dynamics.scores import participation_ratio
from graphattn.dynamics.simulate import covariance_spectrum
from graphattn.graphs.arguments import as_choice

Switch = Literal["enabled", "disabled"]
INPUT = "input"


@dataclass(frozen=True, eq=False)
class HiddenSpectra:
    """Eigenvalues of the covariance of the hidden states, before and after every block.

    Attributes:
        spectra: the eigenvalues, largest first, float64 [L + 1, C]; means over the sequences.
        names: "input" (the states that the first block is given), then the names of the L blocks,
            in the order in which they are called.

    Example:
        >>> import torch, graphattn as ga
        >>> model = ga.models.SequenceEncoder(11, 16, depth=2, heads=4)
        >>> measured = ga.diagnostics.hidden_spectra(model, torch.randint(11, (3, 40)))
        >>> measured.spectra.shape, measured.names
        (torch.Size([3, 16]), ('input', 'blocks.0', 'blocks.1'))
    """

    spectra: Tensor
    names: tuple[str, ...]

    @property
    def leading_share(self) -> Tensor:
        """Share of the variance along the leading direction, [L + 1]; NaN if the variance is 0."""
        return self.spectra[:, 0] / self.spectra.sum(dim=1)

    @property
    def participation_ratio(self) -> Tensor:
        """Effective number of dimensions, [L + 1]; 0 if the variance is 0."""
        return participation_ratio(self.spectra)

    def __repr__(self) -> str:
        states, features = self.spectra.shape
        return f"HiddenSpectra(states={states}, features={features})"


def hidden_spectra(
    model: nn.Module,
    *inputs: Any,
    layers: Layers = None,
    attention_off: str | Sequence[str] = (),
    weights: Switch = "enabled",
    normalization: Switch = "enabled",
    scaling: Literal["sdp", "sq_inplace"] = "sdp",
    projections: Sequence[str] = (),
    **keywords: Any,
) -> HiddenSpectra:
    r"""Eigenvalue spectra of the hidden states of any model that is a list of blocks.

    These are the eigenvalues of the population covariance of a sequence's tokens, largest first,
    averaged over the sequences (Attention Clusters, Figures 9 and 12-15, where there is one
    sequence). Padding is left out if the call marks it: with ``attention_mask``, `valid` or
    ``src_key_padding_mask``; for a decoder next to an encoder with ``decoder_attention_mask`` or
    ``tgt_key_padding_mask``. The states of torch's layers are read as their `batch_first` says.

    `weights` and `normalization` mean the same as in :func:`effective_rank_per_layer`. `scaling`
    means the same as in :func:`graphattn.dynamics.simulate` and is for models whose weights are
    disabled: the paper's wide spectral gap comes from code that scales queries **in place**.
    Without projections, the queries, the keys and the values are one tensor, and so is the residual
    if the block adds its output to the tensor that it attends with. Scaling the queries in place
    then scales all of them. ``scaling="sq_inplace"`` reproduces this: projections return the same
    tensor that they are given, and this tensor is divided by sqrt(D) in place, where D is the width
    of a head. The logits are then x_i . x_j / D, and the values and the residual are x / sqrt(D).
    In a block that normalises before attention and does not change its input, the residual is not
    scaled; with ``normalization="disabled"`` it is.

    The model runs in evaluation mode and without gradients, and its state is restored afterwards.

    Args:
        model: any torch model that is not compiled.
        inputs, keywords: the arguments that the model is called with. Their tensors are never
            overwritten: with "sq_inplace", floating-point inputs are copied first.
        layers: the blocks, as in :func:`effective_rank_per_layer`.
        attention_off: names of blocks whose attention returns 0 for every token, also instead of
            the bias of its output projection; the rest of the block is unchanged.
        weights: "enabled" or "disabled".
        normalization: "enabled" or "disabled".
        scaling: "sdp" divides the products by sqrt(D), as the model does; or "sq_inplace".
        projections: as in :func:`effective_rank_per_layer`.

    Returns:
        :class:`HiddenSpectra`.

    Raises:
        ValueError: if no block is found or called; a name is unknown; no attention is found in a
            block whose attention is to be disabled; the model is compiled; or
            ``scaling="sq_inplace"`` is given without ``weights="disabled"`` (a projection makes the
            queries a separate tensor, so scaling them in place only scales the products).

    Example:
        >>> import torch, graphattn as ga
        >>> layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        >>> x = torch.randn(1, 50, 16)
        >>> whole = ga.diagnostics.hidden_spectra(model, x)
        >>> without = ga.diagnostics.hidden_spectra(model, x, attention_off="layers.0")
        >>> torch.equal(whole.spectra[0], without.spectra[0])
        True
        >>> bare = ga.diagnostics.hidden_spectra(
        ...     model, x, weights="disabled", normalization="disabled", scaling="sq_inplace")
        >>> bool((bare.leading_share[1:] > 0).all())
        True
    """
    as_choice("weights", weights, ("enabled", "disabled"))
    as_choice("normalization", normalization, ("enabled", "disabled"))
    as_choice("scaling", scaling, ("sdp", "sq_inplace"))
    if scaling == "sq_inplace" and weights == "enabled":
        raise ValueError(
            "scaling='sq_inplace' needs weights='disabled': a projection makes the queries a "
            "separate tensor, and scaling them in place then only scales the products, as "
            "scaling='sdp' does"
        )
    blocks = choose_layers(as_model(model), layers)
    for module in model.modules():
        refuse_compiled(module)
    off = [attention_off] if isinstance(attention_off, str) else list(attention_off)
    if unknown := [name for name in off if name not in blocks]:
        raise ValueError(f"attention_off must name some of {tuple(blocks)}, got {unknown[0]!r}")
    if scaling == "sq_inplace":
        inputs = tuple(map(_copied, inputs))
        keywords = {name: _copied(value) for name, value in keywords.items()}
    rows: list[tuple[str, Tensor]] = []
    laid_out = layouts(model, blocks, inputs, keywords)
    with ExitStack() as stack:
        # These hooks are registered first so that they read the inputs and outputs of a block
        # before the other hooks (normalization, scaling, attention) change them.
        for name, block in blocks.items():
            layout = laid_out[name]
            before = block.register_forward_pre_hook(_look_before(rows, layout), with_kwargs=True)
            after = block.register_forward_hook(_look_after(rows, layout))
            stack.callback(before.remove)
            stack.callback(after.remove)
        changed = without_weights(model, blocks, weights, normalization, projections)
        parameters = stack.enter_context(changed)
        if scaling == "sq_inplace":
            stack.enter_context(queries_scaled_in_place(model, blocks, tuple(projections)))
        if off:
            stack.enter_context(without_attention(model, {name: blocks[name] for name in off}))
        functional_call(model, parameters, inputs, keywords)
    if not rows:
        raise ValueError(
            "layers must be called in this call of the model, but none of them was: choose other "
            "blocks with layers"
        )
    return HiddenSpectra(_stacked(rows), tuple(name for name, _ in rows))


def spectra_without_attention(
    model: nn.Module, *inputs: Any, layers: Layers = None, **options: Any
) -> dict[str, HiddenSpectra]:
    """Compute :func:`hidden_spectra` with the attention of one block disabled at a time.

    Args:
        model: as in :func:`hidden_spectra`.
        inputs: the arguments that the model is called with.
        layers: the blocks.
        options: the other arguments of :func:`hidden_spectra`, and keywords of the model.

    Returns:
        A dict: "none" holds the spectra with all attention, and the name of each block the spectra
        without that block's attention. :func:`graphattn.plot.attention_ablation` draws it.

    Raises:
        ValueError: as :func:`hidden_spectra`, or if `attention_off` is given.

    Example:
        >>> import torch, graphattn as ga
        >>> model = ga.models.SequenceEncoder(11, 16, depth=2, heads=4)
        >>> by_block = ga.diagnostics.spectra_without_attention(model, torch.randint(11, (3, 9)))
        >>> list(by_block)
        ['none', 'blocks.0', 'blocks.1']
    """
    if "attention_off" in options:
        raise ValueError(
            "attention_off is an argument of hidden_spectra only: spectra_without_attention "
            "disables the attention of every block in turn"
        )
    by_block = {"none": hidden_spectra(model, *inputs, layers=layers, **options)}
    for name in choose_layers(model, layers):
        by_block[name] = hidden_spectra(
            model, *inputs, layers=layers, attention_off=name, **options
        )
    return by_block


def _copied(value: Any) -> Any:
    is_input = isinstance(value, Tensor) and value.is_floating_point()
    return value.clone() if is_input else value


def _look_before(rows: list[tuple[str, Tensor]], layout: BlockLayout) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if not rows:
            given = [*args, *keywords.values()]
            x = next((part for part in given if _is_states(part)), None)
            if x is not None:
                rows.append((INPUT, _spectrum(x, INPUT, layout)))

    return hook


def _look_after(rows: list[tuple[str, Tensor]], layout: BlockLayout) -> Any:
    name = layout.name

    def hook(_: nn.Module, __: Any, output: Any) -> None:
        if isinstance(output, tuple | list):
            output = next((part for part in output if isinstance(part, Tensor)), output)
        if not _is_states(output):
            got = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(
                f"layers must return states [B, N, C] or [N, C], but {name!r} returned {got}"
            )
        rows.append((name, _spectrum(output, name, layout)))

    return hook


def _is_states(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dim() in (2, 3)


def _spectrum(x: Tensor, name: str, layout: BlockLayout) -> Tensor:
    """[C], the mean over sequences of :func:`graphattn.dynamics.simulate.covariance_spectrum`."""
    sequences = layout.tokens_of(x, name)
    if not all(tokens.isfinite().all() for tokens in sequences):
        raise ValueError(f"hidden states must be finite, but those of {name!r} are not")
    return torch.stack([covariance_spectrum(tokens) for tokens in sequences]).mean(dim=0)


def _stacked(rows: list[tuple[str, Tensor]]) -> Tensor:
    widths = {len(row) for _, row in rows}
    if len(widths) > 1:
        raise ValueError(
            f"layers must all have states of the same width, got widths {sorted(widths)}: choose "
            f"blocks of one width by name"
        )
    return torch.stack([row for _, row in rows])
