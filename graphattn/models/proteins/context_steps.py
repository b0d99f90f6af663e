"""Cross layers to other tracks of a protein: further inputs per residue, and other chains.

Before the mixer of a block, its tokens see these tracks by cross-consensus or cross-attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from graphattn.graphs import TokenGraph
from graphattn.graphs.arguments import as_int
from graphattn.nn import CrossConsensus, DotProductAttention

SEQUENCE = "sequence"  # given as the width of a track that contains tokens of another chain
# Options of the mixers that the cross layers also have.
OF_CONSENSUS = (
    "rank", "edge_hidden", "step_size", "edge_input", "edge_networks", "trunk", "iterations",
    "learned_step", "share_alpha", "learned_beta", "bias", "backend",
)  # fmt: skip
OF_ATTENTION = ("bias", "backend", "attention_dropout")


class Track(NamedTuple):
    """One track of a call, as input of a cross layer."""

    features: Tensor  # [*, M, dim]
    graph: TokenGraph
    valid: tuple[Tensor | None, Tensor | None]
    positions: tuple[Tensor | None, Tensor | None]


class ContextSteps(nn.Module):
    r"""Make one step of every token for every track: ``x + sum_t cross_t(norm(x), graph_t, c_t)``.

    A track that a call does not give adds nothing.

    Args:
        names: names of the tracks.
        dim, heads: width and heads of the model.
        mechanism: "consensus" (:class:`~graphattn.nn.CrossConsensus`) or "attention"
            (:class:`~graphattn.nn.DotProductAttention`).
        rope: whether the layers use rotary positions.
        options: further arguments of the layers; those that they do not have are ignored.
        dropout: share of the features that training sets to zero.
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
        """Initialise every parameter again."""
        for part in (self.norm, *self.layers):
            part.reset_parameters()

    def forward(self, x: Tensor, tracks: Mapping[str, Track]) -> Tensor:
        """Return the tokens after all steps, [*, N, dim]."""
        y = self.norm(x)
        for name, layer in zip(self.names, self.layers, strict=True):
            if (track := tracks.get(name)) is not None:
                features = track.features.expand(*x.shape[:-2], *track.features.shape[-2:])
                step = layer(y, track.graph, features, valid=track.valid, positions=track.positions)
                x = x + self.dropout(step)
        return x


def checked_context(context: Any) -> dict[str, int | str]:
    """Check the option `context`: names of tracks and their widths."""
    if context is None:
        return {}
    if not isinstance(context, Mapping):
        raise ValueError(
            "context must be a dict of track names and widths (an integer, or "
            f"{SEQUENCE!r} for another chain), got {type(context).__name__}"
        )
    checked: dict[str, int | str] = {}
    for name, width in context.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(
                "context must have names of tracks as keys that are valid Python identifiers, got "
                f"{name!r}"
            )
        if width != SEQUENCE:
            width = as_int(f"context[{name!r}]", width, 1)
        checked[name] = width
    return checked


class TrackEmbeddings(nn.Module):
    """Embeddings of tracks: a linear map per track of features, the model's table for tokens."""

    def __init__(self, widths: Mapping[str, int | str], dim: int) -> None:
        super().__init__()
        mapped = {name: width for name, width in widths.items() if width != SEQUENCE}
        self.place = {name: place for place, name in enumerate(mapped)}
        self.maps = nn.ModuleList(nn.Linear(int(width), dim) for width in mapped.values())

    def reset_parameters(self) -> None:
        """Initialise every parameter again."""
        linear: Any
        for linear in self.maps:
            linear.reset_parameters()

    def embed(
        self, name: str, given: Any, tokens: nn.Embedding, batch: torch.Size
    ) -> tuple[Tensor, Tensor]:
        """Embed a track: features [*, M, dim], and which rows are known.

        Integers below 0 and rows with NaN or infinity are unknown.
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
                f"the tokens or without batch dimensions, got {given.dtype} of shape "
                f"{list(given.shape)}"
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
