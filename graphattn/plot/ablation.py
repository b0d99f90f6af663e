"""Figure of the contribution of each block's attention to a model's hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import torch

from graphattn.diagnostics import HiddenSpectra
from graphattn.graphs.arguments import as_choice
from graphattn.plot.drawing.style import axes_or_new, colour_bar, integer_ticks, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def attention_ablation(
    spectra: Mapping[str, HiddenSpectra],
    *,
    measure: Literal["participation_ratio", "leading_share"] = "participation_ratio",
    ax: Axes | None = None,
) -> Axes:
    """Draw how the hidden states change when the attention of one block is disabled.

    The heat map has one row per disabled block and one column per state. A cell shows the
    difference from the model with all its attention. On the left of the diagonal the difference is
    always 0, because a block cannot change the states before it.

    Args:
        spectra: the result of :func:`graphattn.diagnostics.spectra_without_attention`.
        measure: "participation_ratio" (the effective number of dimensions) or "leading_share".
        ax: where to draw; new axes if None. A colour bar is drawn next to them.

    Raises:
        ValueError: if `spectra` lacks "none" or a block, or the measure is unknown.

    Example:
        >>> import torch, graphattn as ga
        >>> model = ga.models.SequenceEncoder(11, 16, depth=3, heads=4)
        >>> tokens = torch.randint(11, (2, 20))
        >>> spectra = ga.diagnostics.spectra_without_attention(model, tokens)
        >>> ga.plot.attention_ablation(spectra).images[0].get_array().shape
        (3, 4)
    """
    as_choice("measure", measure, ("participation_ratio", "leading_share"))
    blocks = [name for name in spectra if name != "none"]
    if "none" not in spectra or not blocks:
        raise ValueError(
            f'spectra must have the key "none" and at least one block, got the keys {list(spectra)}'
        )
    whole = getattr(spectra["none"], measure)
    change = torch.stack([getattr(spectra[name], measure) - whole for name in blocks])
    ax = axes_or_new(ax, 1.8 + 0.4 * change.shape[1], 1.2 + 0.3 * len(blocks))
    limit = float(change.abs().nan_to_num().max()) or 1.0
    image = ax.imshow(
        change.numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto",
        interpolation="nearest",
    )  # fmt: skip
    label = "dimensions" if measure == "participation_ratio" else "leading share"
    colour_bar(image, f"change of {label}")
    ax.set_yticks(range(len(blocks)), [str(i + 1) for i in range(len(blocks))])
    integer_ticks(ax.xaxis)
    return styled(ax, "state after block (0: input)", "attention disabled in block", frame=True)
