"""Source tracks of a protein model beside the letters: codes per residue that it reads and guesses.

A source track has a vocabulary, an embedding that is added to that of the letters, and a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from graphattn.graphs.arguments import as_int
from graphattn.models.token_model import can_read_cheaply

LETTERS = "sequence"  # the source track that every model has


def checked_tracks(tracks: Any) -> dict[str, int]:
    """Check the option `tracks`: names of source tracks and the sizes of their vocabularies."""
    if tracks is None:
        return {}
    if not isinstance(tracks, Mapping):
        raise ValueError(
            "tracks must be a dict of names of source tracks and sizes of their vocabularies, "
            f"such as {{'structure': 512}}, got {type(tracks).__name__}"
        )
    for name in tracks:
        if not isinstance(name, str) or not name.isidentifier() or name == LETTERS:
            raise ValueError(
                "tracks must have names as keys that are valid Python identifiers, and not "
                f"{LETTERS!r}, the track of the letters, got {name!r}"
            )
    return {name: as_int(f"tracks[{name!r}]", size, 1) for name, size in tracks.items()}


class SourceTracks(nn.Module):
    """Embeddings and heads of the source tracks beside the letters.

    The mask token of a track is the number after its last code. Codes below 0 are unknown, and are
    read as the mask token.

    Args:
        sizes: names of the tracks, and how many codes each has.
        dim: width of the model.
    """

    def __init__(self, sizes: Mapping[str, int], dim: int) -> None:
        super().__init__()
        self.sizes = dict(sizes)
        self.embeddings = nn.ModuleList(nn.Embedding(size + 1, dim) for size in sizes.values())
        self.heads = nn.ModuleList(nn.Linear(dim, size) for size in sizes.values())
        self._draw_embeddings()

    def _draw_embeddings(self) -> None:
        embedding: Any
        for embedding in self.embeddings:
            nn.init.normal_(embedding.weight, std=0.02)

    def reset_parameters(self) -> None:
        """Initialise every parameter again."""
        self._draw_embeddings()
        head: Any
        for head in self.heads:
            head.reset_parameters()

    def readable(
        self, tracks: Any, shape: tuple[int, ...], valid: Tensor | None
    ) -> dict[str, Tensor]:
        """Check the codes of a call; unknown codes and those of padding become the mask token.

        Args:
            tracks: a dict of codes, integers of `shape` or [N]; tracks that are missing in it are
                masked.
            shape: [*, N], the shape of the letters.
            valid: bool, True where a residue is real, broadcastable to `shape`.

        Returns:
            A dict of codes, int64 [*, N], of the tracks that are given.
        """
        if tracks is None:
            return {}
        if not isinstance(tracks, Mapping) or not set(tracks) <= set(self.sizes):
            got = list(tracks) if isinstance(tracks, Mapping) else type(tracks).__name__
            raise ValueError(
                "tracks must be a dict of codes of the model's source tracks "
                f"({', '.join(self.sizes) or 'none'}; the letters are the tokens), got {got}"
            )
        return {name: self._readable(name, codes, shape, valid) for name, codes in tracks.items()}

    def _readable(
        self, name: str, codes: Any, shape: tuple[int, ...], valid: Tensor | None
    ) -> Tensor:
        size = self.sizes[name]
        is_tensor = isinstance(codes, Tensor)
        fits = is_tensor and codes.dtype in (torch.int32, torch.int64)
        if not fits or tuple(codes.shape) not in (shape, shape[-1:]):
            got = f"{codes.dtype} {list(codes.shape)}" if is_tensor else type(codes).__name__
            raise ValueError(
                f"tracks[{name!r}] must be integers of the shape of the tokens, {list(shape)}, or "
                f"[{shape[-1]}] for all sequences, got {got}"
            )
        codes = codes.to(self.embeddings[0].weight.device).long().expand(shape)
        if valid is not None:
            codes = codes.masked_fill(~valid, -1)
        if can_read_cheaply(codes) and int(codes.max()) > size:
            raise ValueError(
                f"tracks[{name!r}] must be 0 .. {size - 1}, or {size} (the mask token) or a number "
                f"below 0 where the code is unknown, got {int(codes.max())}"
            )
        return torch.where(codes < 0, size, codes)

    def add_to(self, x: Tensor, codes: Mapping[str, Tensor]) -> Tensor:
        """Add the embeddings of all tracks to those of the letters, [*, N, dim]."""
        embedding: Any
        for name, embedding in zip(self.sizes, self.embeddings, strict=True):
            given = codes.get(name)
            x = x + (embedding.weight[-1] if given is None else embedding(given))
        return x

    def logits(self, features: Tensor) -> dict[str, Tensor]:
        """Return the logits of the codes of every track, [*, N, size], by its name."""
        return {name: head(features) for name, head in zip(self.sizes, self.heads, strict=True)}
