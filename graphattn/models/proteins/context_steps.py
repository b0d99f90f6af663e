"""Steps among the other tracks of a protein: what else is known of its residues, and other chains.

A block's tokens look at them before they look at each other: by cross-consensus, or by
cross-attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from graphattn.graphs import TokenGraph
from graphattn.graphs.arguments import as_int
from graphattn.nn import CrossConsensus, DotProductAttention

SEQUENCE = "sequence"  # the width of a track that holds tokens of another chain
# Options of the model's mixers that its cross layers have, too.
OF_CONSENSUS = ("rank", "edge_hidden", "step_size", "edge_input", "trunk", "bias", "backend")
OF_ATTENTION = ("bias", "backend", "attention_dropout")


class Track(NamedTuple):
    """One track of a call, as a cross layer takes it."""

    features: Tensor  # [*, M, dim]
    graph: TokenGraph
    valid: tuple[Tensor | None, Tensor | None]
    positions: tuple[Tensor | None, Tensor | None]


class ContextSteps(nn.Module):
    r"""Every token takes one step by every track: ``x + sum_t cross_t(norm(x), graph_t, c_t)``.

    A track that is not given adds nothing.

    Args:
        names: of the tracks.
        dim, heads: of the model.
        mechanism: "consensus" (:class:`~graphattn.nn.CrossConsensus`) or "attention"
            (:class:`~graphattn.nn.DotProductAttention`).
        rope: rotary positions.
        options: further arguments of the layers; those that they do not have are left out.
        dropout: share of features zeroed, in training.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        dim: int,
        heads: int,
        *,
        mechanism: str,
        rope: Any,
        options: Mapping[str, Any],
        dropout: float,
    ) -> None:
        super().__init__()
        self.names = names
        self.norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)
        takes = OF_CONSENSUS if mechanism == "consensus" else OF_ATTENTION
        given = {name: value for name, value in options.items() if name in takes}
        layer: Any = CrossConsensus
        if mechanism == "attention":
            layer, rope = DotProductAttention, bool(rope)
        self.layers = nn.ModuleList(layer(dim, heads, rope=rope, **given) for _ in names)

    def reset_parameters(self) -> None:
        """Draw every parameter anew."""
        for part in (self.norm, *self.layers):
            part.reset_parameters()

    def forward(self, x: Tensor, tracks: Mapping[str, Track]) -> Tensor:
        """The tokens after their steps, [*, N, dim]."""
        y = self.norm(x)
        for name, layer in zip(self.names, self.layers, strict=True):
            if (track := tracks.get(name)) is not None:
                features = track.features.expand(*x.shape[:-2], *track.features.shape[-2:])
                step = layer(y, track.graph, features, valid=track.valid, positions=track.positions)
                x = x + self.dropout(step)
        return x


def checked_context(context: Any) -> dict[str, int | str]:
    """Names of tracks and how wide they are, as the model's constructor takes them."""
    if context is None:
        return {}
    if not isinstance(context, Mapping):
        raise ValueError(
            "context must be a dict of track names and widths (an integer, or "
            f"{SEQUENCE!r} for another chain), got {type(context).__name__}"
        )
    found: dict[str, int | str] = {}
    for name, width in context.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"context must name its tracks by words, got {name!r}")
        if width != SEQUENCE:
            width = as_int(f"context[{name!r}]", width, 1)
        found[name] = width
    return found


class TrackEmbeddings(nn.Module):
    """A linear map per track of features; tracks of tokens are looked up in the model's table."""

    def __init__(self, widths: Mapping[str, int | str], dim: int) -> None:
        super().__init__()
        mapped = {name: width for name, width in widths.items() if width != SEQUENCE}
        self.place = {name: place for place, name in enumerate(mapped)}
        self.maps = nn.ModuleList(nn.Linear(int(width), dim) for width in mapped.values())

    def reset_parameters(self) -> None:
        """Draw every parameter anew."""
        linear: Any
        for linear in self.maps:
            linear.reset_parameters()

    def embed(
        self, name: str, given: Any, tokens: nn.Embedding, batch: torch.Size
    ) -> tuple[Tensor, Tensor]:
        """Features [*, M, dim] of a track, and which rows are known.

        Integers below 0 and rows that are not finite are not known.
        """
        device, dtype = tokens.weight.device, tokens.weight.dtype
        if not isinstance(given, Tensor):
            raise ValueError(f"context[{name!r}] must be a tensor, got {type(given).__name__}")
        linear: Any = self.maps[self.place[name]] if name in self.place else None
        width = tokens.num_embeddings if linear is None else linear.in_features
        is_floating = given.is_floating_point()
        shape = f"integers [*, M] from 0 to {width - 1}"
        if linear is not None:
            shape = f"floating-point [*, M, {width}], or {shape}"
        if is_floating:
            fits = linear is not None and given.dim() >= 2 and given.shape[-1] == width
            rows = given.shape[:-1]
        else:
            fits, rows = given.dim() >= 1 and given.dtype in (torch.int32, torch.int64), given.shape
        if not fits or rows[:-1] not in (batch, torch.Size()):
            raise ValueError(
                f"context[{name!r}] must be {shape}, with the batch dimensions {list(batch)} of "
                f"the tokens or none, got {given.dtype} of shape {list(given.shape)}"
            )
        given = given.to(device)
        if is_floating:
            known = given.isfinite().all(-1)
            clean = given.masked_fill(~known[..., None], 0)
            return linear(clean.to(dtype)), known
        known = given >= 0
        index = given.masked_fill(~known, 0).long()
        if index.numel() and not torch.compiler.is_compiling() and int(index.max()) >= width:
            raise ValueError(f"context[{name!r}] must be {shape}, got {int(index.max())}")
        if linear is None:
            return tokens(index), known
        return nn.functional.embedding(index, linear.weight.T) + linear.bias, known
